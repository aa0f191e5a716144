"""The longest sequence that trains on 8, 16 and 64 H100s, forecast by deepsp.plan_memory.

A forecast: nothing ran on H100s. Each GPU may use 72 of its 80 GB. The other 8 GB are a reserve for
what the plan doesn't count: NCCL, idle blocks of the allocator, workspaces of kernels, and weights
that FSDP gathers ahead. The model computes in bfloat16. Weights, gradients and the states of AdamW
are float32 (16 bytes a parameter), sharded over all GPUs. The sequence group has P ranks, as many
as there are GPUs, but at most one for each query head; the other GPUs train other sequences.
Every setting has sharded weights, a loss without logits, and checkpoints around layers.
"""

from __future__ import annotations

import math
import multiprocessing
from pathlib import Path

import bench
import torch
from tqdm import tqdm

LIMIT = 72_000_000_000  # bytes of a GPU
HOST = 240  # GB of a host's memory for each GPU, as in a machine of 8 GPUs and 2 TB
GPUS = (8, 16, 64)
FEWEST = 512  # tokens of a rank; where they don't fit, the model doesn't
TILES = (1, 4, 16)  # of hidden_size tokens on each rank, in further plans
SETTINGS = ({}, {"tiled": True}, {"tiled": True, "offload": True})
LLAMA, QWEN = ({"vocab_size": n, "head_dim": 128} for n in (128256, 151936))
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8}
MODELS = {  # transformers' type, hidden size, layers, heads, kv heads, and more
    "Llama 3.1 8B": ("llama", 4096, 32, 32, 8, LLAMA | {"intermediate_size": 14336}),
    "Qwen3 32B": ("qwen3", 5120, 64, 64, 8, QWEN | {"intermediate_size": 25600}),
    "Llama 3.1 70B": ("llama", 8192, 80, 64, 8, LLAMA | {"intermediate_size": 28672}),
    "Qwen3-30B-A3B": (
        *("qwen3_moe", 2048, 48, 32, 4),
        QWEN | EXPERTS | {"moe_intermediate_size": 768},
    ),
    "Qwen3-235B-A22B": (
        *("qwen3_moe", 4096, 94, 64, 4),
        QWEN | EXPERTS | {"moe_intermediate_size": 1536},
    ),
}


def config_of(name: str):
    from transformers import AutoConfig

    kind, hidden, layers, heads, kv_heads, more = MODELS[name]
    return AutoConfig.for_model(
        kind,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=False,
        **more,
    )


def parameters_of(config) -> int:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())


def rounded_down(tokens: int) -> int:
    """Return the tokens with two digits, or three that end with 5."""
    unit = max(1000, 5 * 10 ** (len(str(tokens)) - 3))
    return tokens // unit * unit


def readable(tokens: int) -> str:
    if tokens >= 1_000_000:
        return f"{tokens / 1e6:g}M"
    return f"{tokens // 1000}k" if tokens else "doesn't fit"


def longest(config, ranks: int, world: int, **levers: bool) -> int:
    """Return the longest sequence in tokens, or 0.

    Bytes grow on a line with many tokens, and more slowly with few: the length is interpolated
    between plans.
    """
    from deepsp import plan_memory

    how = {"dtype": torch.bfloat16, "shard_dtype": torch.float32, "world": world}
    how |= {"without_logits": True, "sharded": True, "checkpoint": True}
    plans = []  # tokens, bytes

    def plan(tokens: int) -> int:
        plans.append((tokens, plan_memory(config, tokens, ranks, **how, **levers).total))
        return plans[-1][1]

    def between() -> int:
        (below, less), (above, more) = plans[-2:]
        return int(below + (LIMIT - less) * (above - below) / (more - less))

    if plan(FEWEST * ranks) > LIMIT:
        return 0
    for tiles in TILES:
        if plan(tiles * config.hidden_size * ranks) > LIMIT:
            plan(between())
            plans[-2:] = plans[:-3:-1]  # in ascending order
            return rounded_down(between())
    plan(between())  # further than the plans so far
    return rounded_down(between())


def row_of(case: tuple[str, int]) -> dict:
    name, world = case
    config = config_of(name)
    ranks = math.gcd(world, config.num_attention_heads)
    states = 16 * parameters_of(config) / world
    lengths = [0] * len(SETTINGS)
    if states < LIMIT:
        lengths = [longest(config, ranks, world, **levers) for levers in SETTINGS]
    inputs = config.num_hidden_layers * config.hidden_size * 2 * max(lengths) / ranks
    return {
        "model": name,
        "gpus": world,
        "ranks": ranks,
        "states_gb": states / 1e9,
        "lengths": lengths,
        "host_gb": inputs / 1e9,
    }


def cells(row: dict) -> list[str]:
    lengths = row["lengths"]
    best, host = lengths.index(max(lengths)), "–"
    if best == len(lengths) - 1:
        host = f"{row['host_gb']:.0f}" + " (!)" * (row["host_gb"] > HOST)
    shown = [*map(readable, lengths)]
    if lengths[best]:
        shown[best] = f"**{shown[best]}**"
    where = [row["model"], row["gpus"], f"{row['ranks']} × {row['gpus'] // row['ranks']}"]
    return [*where, f"{row['states_gb']:.1f}", *shown, host]


def main() -> None:
    parser = bench.parser_of(
        __doc__,
        models=(list(MODELS), "to plan", MODELS),
        gpus=(list(GPUS), "H100s of 80 GB"),
        results=(Path, "folder for forecast.md and .json"),
    )
    args = parser.parse_args()
    cases = [(name, world) for name in args.models for world in args.gpus]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        rows = [*tqdm(pool.imap(row_of, cases), "forecast", len(cases), unit="row")]
    columns = ["model", "H100s", "P × data", "weights and states, GB a GPU"]
    columns += ["checkpoints", "and tiles", "and offload", "host, GB a GPU"]
    table = bench.Table("Forecast: the longest sequence, in tokens", columns, [*map(cells, rows)])
    paragraphs = [
        *__doc__.strip().split("\n\n")[1:],
        'Bold is the longest sequence, by the fewest of these levers. "doesn\'t fit": not even '
        f"{FEWEST} tokens on each rank. Host memory is that of the layers' inputs, which `offload` "
        f"keeps there, for the longest sequence of the row; (!) is more than {HOST} GB for each "
        "GPU. A dash: offloading doesn't make the sequence longer.",
    ]
    title = "Forecast: how long a sequence fits on H100s"
    bench.report(args, "forecast", title, paragraphs, [table], {"limit": LIMIT, "rows": rows})


if __name__ == "__main__":
    main()
