"""The longest sequence that trains under a memory limit, lever by lever.

A small Llama whose sizes have the proportions of Llama 3 8B, float32, one row: forward, backward
and AdamW. A rank's memory is the most that its process takes, from before the model is made
(VmHWM - VmRSS), code aside; malloc is told to give freed tensors back to the system. Each lever is
added to those before it. The losses of all ways are compared on one sequence. The slope is a rank's
bytes for each token of the sequence more, from the shortest to the longest one that was tried.

The machine's memory is what plays the device, so offloading to it isn't among the levers.

    python benchmarks/longest.py              the table and the plot
    python benchmarks/longest.py --mlp        tiled MLPs alone: slope and time, next to DeepSpeed's
"""

import argparse
import ctypes
import gc
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tqdm import tqdm

HERE = Path(__file__).parent
MIB = 2**20

# Name: number of ranks, and what is on.
LEVERS = {
    "PyTorch, 1 process": (1, ""),
    "2 ranks": (2, "sp"),
    "+ checkpoints": (2, "sp checkpoint"),
    "+ loss without logits": (2, "sp checkpoint loss"),
    "+ tiled MLPs": (2, "sp checkpoint loss tile"),
    "+ keys in parts": (2, "sp checkpoint loss tile parts"),
    "all, on 4 ranks": (4, "sp checkpoint loss tile parts"),
}
# DeepSpeed's: attention on 2 ranks, and what its users put around it.
DEEPSPEED = {
    "DeepSpeed UlyssesSPAttentionHF, 2 ranks": (2, "ulysses"),
    "  + checkpoints, TiledMLP": (2, "ulysses checkpoint ds-tile"),
}


def status(name: str) -> int:
    """Bytes."""
    line = Path("/proc/self/status").read_text().split(f"{name}:")[1]
    return int(line.split()[0]) * 1024


def config_of(args: argparse.Namespace, attention: str):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=32 * args.hidden,
        hidden_size=args.hidden,
        intermediate_size=7 * args.hidden // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2**20,
        attn_implementation=attention,
        use_cache=False,
    )


class Way:
    """A model and its training step, with what is on."""

    def __init__(self, args: argparse.Namespace, on: set[str]):
        import transformers

        import deepsp
        from deepsp.integrations.transformers import register

        self.on, self.deepsp = on, deepsp
        torch.manual_seed(0)
        attention = "deepsp" if "sp" in on else "sdpa"
        if "sp" in on:
            register(kv_chunk=args.kv_chunk if "parts" in on else None)
        config = config_of(args, attention)
        if "ulysses" in on:
            self._register_ulysses(config)
        self.model = transformers.LlamaForCausalLM(config)
        if "checkpoint" in on:
            self.model.activation_checkpointing_enable({"use_reentrant": False})
        if "tile" in on:
            deepsp.tile_(self.model, "*.mlp")
        if "ds-tile" in on:
            _tile_as_deepspeed(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def _register_ulysses(self, config) -> None:
        import deepspeed
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        deepspeed.init_distributed(dist_backend="gloo")
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            UlyssesSPAttentionHF.register_with_transformers(
                model_name_or_path=folder,
                core_attn_implementation="sdpa",
                sequence_parallel_size=dist.get_world_size(),
                micro_batch_size=1,
                seq_length_is_variable=True,
            )

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        deepsp = self.deepsp
        if not self.on & {"sp", "ulysses"}:
            return self.model(input_ids=ids, labels=ids).loss
        batch, _ = deepsp.shard_batch({"input_ids": ids, "labels": ids})
        if "loss" in self.on:
            return deepsp.causal_lm_loss(self.model, batch)
        if "sp" in self.on:
            return self.model(**batch).loss
        labels = batch.pop("shift_labels")
        return deepsp.cross_entropy(self.model(**batch).logits, labels)

    def step(self, length: int) -> float:
        ids = torch.randint(
            self.model.config.vocab_size,
            (1, length),
            generator=torch.Generator().manual_seed(length),
        )
        loss = self.loss(ids)
        loss.backward()
        if self.on & {"sp", "ulysses"}:
            self.deepsp.sync_gradients(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def _tile_as_deepspeed(model) -> None:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    def tiled(mlp, x):
        inner = type(mlp).forward
        parameters = [p for p in mlp.parameters()]
        shards = -(-x.size(1) // mlp.hidden_size)  # as in its documentation
        return TiledMLP.apply(inner, mlp, x, shards, parameters)

    for layer in model.model.layers:
        layer.mlp.forward = tiled.__get__(layer.mlp)


def tidy() -> None:
    """Gives the system back what steps have left."""
    import deepsp

    deepsp.ranks.buffers.clear()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def taken_by_libraries(args: argparse.Namespace, on: set[str]) -> int:
    """Bytes of this process once a model has been trained and dropped: code, and what libraries
    keep."""
    if "ulysses" in on:  # which can be registered once only
        import deepspeed.runtime.sequence_parallel.ulysses_sp  # noqa: F401
    small = argparse.Namespace(**vars(args) | {"hidden": 64, "layers": 1})
    Way(small, on - {"ulysses"}).step(64)
    tidy()
    return status("VmRSS")


def serve(rank: int, ranks: int, store: str, args, on: str, asked, answers) -> None:
    """Answers lengths with the memory, time and loss of a step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    import transformers
    from transformers import LlamaForCausalLM  # noqa: F401  (before memory is counted)

    import deepsp  # noqa: F401  (before memory is counted)

    transformers.logging.set_verbosity_error()
    before = taken_by_libraries(args, set(on.split()))
    way = Way(args, set(on.split()))
    way.step(64)
    while (length := asked[rank].get()) is not None:
        tidy()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        began = time.perf_counter()
        torch.manual_seed(0)
        loss = way.step(length)
        seconds = time.perf_counter() - began
        peak = torch.tensor(status("VmHWM") - before)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        if rank == 0:
            answers.put((peak.item(), seconds, loss))
    dist.barrier()
    dist.destroy_process_group()


class Ranks:
    """Processes that hold one way."""

    def __init__(self, args: argparse.Namespace, ranks: int, on: str):
        context = mp.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.asked = [context.SimpleQueue() for _ in range(ranks)]
        self.answers = context.SimpleQueue()
        given = (ranks, f"{self.folder.name}/store", args, on, self.asked, self.answers)
        self.processes = mp.spawn(serve, given, ranks, join=False)

    def step(self, length: int) -> tuple[int, float, float]:
        length -= length % 4  # DeepSpeed wants ranks to have as many tokens
        for queue in self.asked:
            queue.put(length)
        while self.answers.empty():
            if self.processes.join(timeout=0.02):
                raise RuntimeError("the ranks have ended")
        return self.answers.get()

    def stop(self) -> None:
        for queue in self.asked:
            queue.put(None)
        while not self.processes.join():
            pass


def longest(ranks: Ranks, limit: int, first: int, precision: float, say) -> dict:
    """The most tokens whose step stays under the limit, to within ``precision``: lengths are tried
    where a line through the nearest ones says that the limit is, then beside them."""
    tried: dict[int, tuple[int, float]] = {}
    fits, above, length = 0, None, first
    while above is None or above > max(64, fits * (1 + precision)):
        memory, seconds, _ = ranks.step(length)
        tried[length] = memory, seconds
        say(f"{length} tokens: {memory / MIB:.0f} MiB, {seconds:.1f} s")
        if memory <= limit:
            fits = length
        else:
            above = length
        if len(tried) == 1 or not fits:
            length = above // 2 if above else 2 * first
            continue
        low, high = (fits, above) if above else sorted(tried)[-2:]
        slope = (tried[high][0] - tried[low][0]) / (high - low)
        guess = low + (limit - tried[low][0]) / max(slope, 1)
        near = 1 + 0.9 * precision
        bounds = fits * near, above / near if above else 8 * fits
        length = int(
            min(max(guess, bounds[0]), max(bounds)) if bounds[0] < bounds[1] else sum(bounds) / 2
        )
    least = min(tried)
    slope = (tried[fits][0] - tried[least][0]) / (fits - least)
    return {"tokens": fits, "seconds": tried[fits][1], "slope": slope}


def table(args: argparse.Namespace) -> None:
    ways = LEVERS | (DEEPSPEED if args.peers else {})
    found = {}
    bar = tqdm(ways.items(), desc="ways")
    for name, (count, on) in bar:
        ranks = Ranks(args, count, on)
        loss = ranks.step(args.compare)[2]  # the same weights for all: after one step
        try:
            result = longest(
                ranks,
                args.limit * MIB,
                args.compare,
                args.precision,
                lambda text, name=name: bar.set_postfix_str(f"{name}, {text}"),
            )
        finally:
            ranks.stop()
        found[name] = {"ranks": count, "loss": loss} | result
    plain = found["PyTorch, 1 process"]
    lines = [
        f"Limit {args.limit} MiB a rank; hidden {args.hidden}, {args.layers} layers.",
        "",
        "| | tokens | times | bytes a token | times lower | step, s | loss off |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, x in found.items():
        off = abs(x["loss"] - plain["loss"]) / plain["loss"]
        lines.append(
            f"| {name} | {x['tokens']} | {x['tokens'] / plain['tokens']:.1f} | {x['slope']:.0f} | "
            f"{plain['slope'] / x['slope']:.2f} | {x['seconds']:.1f} | {off:.1e} |"
        )
    text = "\n".join(lines)
    print(text)
    (HERE / "results/longest.md").write_text(f"# The longest sequence\n\n{text}\n")
    (HERE / "results/longest.json").write_text(json.dumps(found, indent=1) + "\n")
    plot(found)


def plot(found: dict) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.5 + 0.45 * len(found)))
    names = list(found)[::-1]
    tokens = [found[name]["tokens"] for name in names]
    others = {*DEEPSPEED, names[-1]}
    bars = axes.barh(names, tokens, color=["#999999" if n in others else "#33658a" for n in names])
    base = found["PyTorch, 1 process"]["tokens"]
    axes.bar_label(bars, [f"{n:,}  ({n / base:.1f} x)" for n in tokens], padding=3)
    axes.set_xlabel("longest sequence that trains under the limit, tokens")
    axes.set_xlim(0, 1.35 * max(tokens))  # room for the labels
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(HERE / "results/longest.png", dpi=120)


def slopes(args: argparse.Namespace) -> None:
    """Bytes a token on 1, 2 and 4 ranks, with nothing else on."""
    known = {}
    for count in tqdm((1, 2, 4), desc="ranks"):
        ranks = Ranks(args, count, "sp" if count > 1 else "")
        try:
            low, high = (ranks.step(n * args.compare)[0] for n in (8, 24))
        finally:
            ranks.stop()
        known[count] = (high - low) / (16 * args.compare)
    for count, slope in known.items():
        print(f"{count} ranks: {slope:.0f} bytes a token, {known[1] / slope:.2f} times fewer")


def mlp(args: argparse.Namespace) -> None:
    """What tiles add to checkpoints and a loss without logits: slope and time, in turns."""
    ways = {
        "checkpoints": "sp checkpoint loss",
        "tiled": "sp checkpoint loss tile",
        "DeepSpeed's TiledMLP": "sp checkpoint loss ds-tile",
    }
    all_ranks = {name: Ranks(args, 1, on) for name, on in ways.items()}
    low, high = 16 * args.compare, 48 * args.compare  # from where the loss takes all that it may
    times = {name: [] for name in ways}
    memory = {name: {} for name in ways}
    losses = {}
    try:
        rounds = itertools.product(tqdm(range(args.rounds), desc="rounds"), ways, (low, high))
        for _, name, length in rounds:
            peak, seconds, loss = all_ranks[name].step(length)
            memory[name][length] = max(peak, memory[name].get(length, 0))
            if length == high:
                times[name].append(seconds)
                losses[name] = loss
    finally:
        for ranks in all_ranks.values():
            ranks.stop()
    first = None
    for name in ways:
        slope = (memory[name][high] - memory[name][low]) / (high - low)
        least, middle = min(times[name]), statistics.median(times[name])
        first = first or (slope, least, middle)
        print(
            f"{name:22}{slope:8.0f} bytes a token ({first[0] / slope:.2f} times fewer) "
            f"{least:7.2f} s min, {middle:7.2f} s median ({least / first[1]:.2f}, "
            f"{middle / first[2]:.2f} times) loss {losses[name]:.6f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--limit", type=int, default=128, help="MiB a rank (default: 128)")
    add("--hidden", type=int, default=128, help="features of a token (default: 128)")
    add("--layers", type=int, default=4, help="(default: 4)")
    add("--kv-chunk", type=int, default=2048, help="tokens whose keys come at a time")
    add("--compare", type=int, default=256, help="tokens on which losses are compared")
    add("--precision", type=float, default=0.03, help="of the longest length (default: 0.03)")
    add("--rounds", type=int, default=5, help="of --mlp (default: 5)")
    add("--peers", action="store_true", help="DeepSpeed's attention and tiles, too")
    add("--slopes", action="store_true", help="bytes a token on 1, 2 and 4 ranks alone")
    add("--mlp", action="store_true", help="tiled MLPs alone: slope and time")
    args = parser.parse_args()
    os.environ |= {f"MALLOC_{name}_THRESHOLD_": str(2**16) for name in ("MMAP", "TRIM")}  # of ranks
    if args.mlp:
        mlp(args)
    elif args.slopes:
        slopes(args)
    else:
        table(args)


if __name__ == "__main__":
    main()
