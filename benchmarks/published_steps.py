"""Training steps that others have published, next to what simulate.py says of them."""

from __future__ import annotations

from typing import NamedTuple

from simulate import BYTES, MACHINES, MODELS, Levers, compute, exchanges, flops, simulate

ALST, USP, NEMO, BLOG = "ALST", "USP", "NeMo 24.03", "HF blog"
SOURCES = """\
Sources: ALST: [arXiv 2506.13996](https://arxiv.org/abs/2506.13996), tables 1, 2 and 4. USP:
[arXiv 2405.07719](https://arxiv.org/abs/2405.07719), tables 5 and 6. NeMo 24.03:
[long sequences](https://github.com/NVIDIA/NeMo/blob/0aa267117ae5f1ff9f8d8308ed3d1ba1ce939f82/docs/source/performance/performance_long_sequence.md);
its row of 8k tokens, which a pipeline runs, isn't here. HF blog:
[Ulysses](https://huggingface.co/blog/ulysses-sp).

"fitted" rows gave the simulator one number, the seconds of an optimizer on the CPU. "refused" rows
can't be causal attention to the full sequence: with the optimizer, it alone takes longer than the
step. All others test the simulator."""
SECONDS, TFLOPS, TFLOPS_FULL = "s", "TFLOP/s a GPU", "TFLOP/s a GPU, S² in full"
COUNTED, FITTED, REFUSED = "counted", "fitted", "refused"
MLP, OFFLOAD, BOTH = "tiled MLP", "offload", "tiled MLP, offload"


class Published(NamedTuple):
    source: str
    model: str
    machines: str
    tokens: int
    measured: float
    unit: str
    use: str = COUNTED
    ulysses: int = 1  # ranks that exchange tokens for heads
    ring: int = 1  # ranks that pass k and v on; with ulysses, groups of ranks
    tensor: int = 1
    batch: int = 1
    optimizer: float = 0.0  # seconds
    extras: str = ""


def _alst(tokens, measured, ulysses, optimizer=9.5, extras="", use=COUNTED) -> Published:
    return Published(
        ALST,
        "8b",
        "h100-fa2",
        tokens,
        measured,
        SECONDS,
        use,
        ulysses,
        optimizer=optimizer,
        extras=extras,
    )


def _nemo(thousands, ring, tensor, measured) -> Published:
    return Published(
        NEMO,
        "llama2-7b",
        "h100-fp8",
        1024 * thousands,
        measured,
        TFLOPS_FULL,
        ring=ring,
        tensor=tensor,
    )


def _blog(tokens, tokens_per_second, use) -> Published:
    return Published(
        BLOG,
        "qwen3-4b",
        "h100-fa2",
        tokens,
        tokens / tokens_per_second,
        SECONDS,
        use,
        ulysses=4,
        optimizer=3.32,
    )


ROWS = [
    # 8 GPUs, but for the last two rows: 1 and 32. Their optimizers' seconds are those of the
    # same table's rows with 32k tokens on as many GPUs.
    _alst(32768, 17, 1, use=FITTED),
    _alst(160_000, 123, 1),
    _alst(1_100_000, 564, 8),
    _alst(1_200_000, 703, 8, extras=MLP),
    _alst(2_400_000, 2610, 8, extras=OFFLOAD),
    _alst(3_700_000, 6455, 8, extras=BOTH),
    _alst(500_000, 1010, 1, 18, BOTH),
    _alst(15_000_000, 26709, 32, 4.5, BOTH),
    Published(USP, "llama2-7b", "a800", 30720, 163.42, TFLOPS, ulysses=8, batch=16),
    Published(USP, "8b", "a800", 65536, 136.31, TFLOPS, ulysses=8, ring=2),
    Published(USP, "8b", "a800", 81920, 147.46, TFLOPS, ulysses=8, ring=2),
    _nemo(4, 1, 1, 768),
    _nemo(16, 1, 2, 660),
    _nemo(32, 2, 2, 610),
    _nemo(64, 2, 4, 574),
    _nemo(128, 4, 4, 555),
    _nemo(256, 8, 4, 549),
    _nemo(512, 16, 8, 549),
    _nemo(1024, 32, 8, 536),
    _blog(8192, 2315, FITTED),
    _blog(32768, 7872, REFUSED),
    _blog(65536, 13396, REFUSED),
]


def predicted(row: Published) -> float:
    """What the simulator says instead of ``row.measured``."""
    model, machines = MODELS[row.model], MACHINES[row.machines]
    if row.unit == SECONDS:
        levers = Levers(chunks=1, two_level_sums=True, offload=OFFLOAD in row.extras)
        seconds = simulate(model, row.tokens, row.ulysses, machines, levers).seconds
        mlp = 6 * model.layers * model.hidden * model.ffn * row.tokens / row.ulysses
        return seconds + row.optimizer + (MLP in row.extras) * mlp / machines.products
    seconds = row.batch * _seconds_of_others(row, model, machines)
    ranks = row.ulysses * row.ring * row.tensor
    if row.source == USP:  # ZeRO 1: the optimizer's sums and gathers, which nothing hides
        link = machines.near
        if ranks > machines.size:
            link = min(link, machines.size * machines.far)
        seconds += 8 * model.params / link + 16 * model.params / ranks / machines.memory
    work = row.batch * flops(model, row.tokens, causal=row.unit == TFLOPS)
    return work / ranks / seconds / 1e12


def _seconds_of_others(row, model, machines) -> float:
    """Of one sequence, without checkpoints, with rings and tensor parallelism."""
    ranks = row.ulysses * row.ring * row.tensor
    t = compute(model, row.tokens, ranks, machines)
    attention = t["attend"] + t["attend_backward"]
    there, back = exchanges(model, row.tokens // row.ring, row.ulysses, machines, 1, False)
    layer = 3 * (t["products"] + t["elementwise"]) + attention + 2 * (there[0] + back[0])
    # k and v in forward, and with their gradients in backward; behind attention.
    hops = 3 * (row.ring - 1) * row.tokens / ranks * model.kv_heads * model.head_dim * 2 * BYTES
    hops /= machines.near if ranks <= machines.size else machines.far
    # Eight gathers and sums of activations, of which products hide a half.
    activations = 8 * row.tokens / row.ring * model.hidden * BYTES / machines.near
    activations *= (row.tensor - 1) / row.tensor / 2
    return model.layers * (layer + max(0, hops - attention) + activations) + t["head"]


def table() -> list[list[str]]:
    """Rows of text, the header first."""
    rows = [["source", "model", "tokens", "how", "measured", "simulated", "error", ""]]
    for row in ROWS:
        value, digits = predicted(row), 0 if row.measured >= 100 else 1
        how = [
            f"{x} {getattr(row, x)}" for x in ("ulysses", "ring", "tensor") if getattr(row, x) > 1
        ]
        rows.append(
            [
                row.source,
                row.model,
                f"{row.tokens}" + (f" × {row.batch}" if row.batch > 1 else ""),
                ", ".join([*how, *([row.extras] if row.extras else [])]),
                f"{row.measured:.{digits}f} {row.unit}",
                f"{value:.{digits}f}",
                f"{value / row.measured - 1:+.1%}",
                "" if row.use == COUNTED else row.use,
            ]
        )
    return rows
