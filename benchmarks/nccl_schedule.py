"""What the attention layer launches where blocks travel in collectives, as on NCCL: products,
copies and exchanges of one rank, counted, and the bytes that they read and write.

No GPU is needed. The layer runs over gloo with DEEPSP_TEST_COLLECTIVES=1, forward and backward, on
two short lengths; what grows with the length is extrapolated to the length asked for. The order of
what is launched says which exchanges something hides: E is an exchange, m a product, A attention,
and W where what arrives is waited for.

    python benchmarks/nccl_schedule.py
"""

import argparse
import itertools
import os
import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HERE = Path(__file__).parent
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 4096, 32, 8, 128
LENGTHS = (32, 64)
PRODUCTS = {"aten::mm": "m", "aten::bmm": "m", "aten::addmm": "m", "aten::addmm_": "m"}
WAITS = ("seq_to_heads_wait", "heads_to_seq_wait", "heads_to_output_wait",
         "project_to_heads_backward")  # fmt: skip
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


def sizes_of(event) -> list[int]:
    sizes = []
    for shape in event.input_shapes or []:
        if shape and all(isinstance(n, int) for n in shape):
            sizes.append(torch.Size(shape).numel())
    return sizes


def counted(events) -> tuple[Counter, str]:
    """Numbers of one forward or backward, and its order."""
    found, order = Counter(), []
    last = 0
    for event in sorted(events, key=lambda e: e.time_range.start):
        name = event.name
        if event.time_range.start < last:
            continue  # inside of a product
        if name in PRODUCTS:
            order.append("m")
            found["products"] += 1
            a, b = sizes_of(event)[:2]
            found["product elements"] += a + b
            last = event.time_range.end
        elif name.startswith(ATTENTION):
            order.append("A")
            last = event.time_range.end
        elif name == "deepsp::exchange":
            order.append("E")
            found["exchanges"] += 1
        elif name == "deepsp::copy":
            found["copies"] += 1
            found["copied bytes"] += event.concrete_inputs[0] if event.concrete_inputs else 0
        elif name in ("aten::add_", "aten::copy_", "aten::cat", "aten::sum", "aten::mul"):
            found["elementwise"] += 1
            found["elementwise elements"] += sum(sizes_of(event))
            last = event.time_range.end
        elif name.removeprefix("deepsp::") in WAITS:
            order.append("W")
    return found, " ".join(
        f"{n}{what}" if (n := len(list(group))) > 1 else what
        for what, group in itertools.groupby(order)
    )


def profiled(call) -> tuple[Counter, str]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        call()
    return counted(profile.events())


def work(rank: int, ranks: int, store: str, chunks_of: list[int], results) -> None:
    import deepsp

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found = {}
    for overlap, chunks in [(False, 1), *((True, n) for n in chunks_of)]:
        layer = deepsp.SequenceParallelAttention(
            HIDDEN, HEADS, KV_HEADS, chunks=chunks, overlap=overlap, dtype=torch.bfloat16
        )
        for length in LENGTHS:
            x = torch.randn(1, length, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
            out = {}

            def forward(layer=layer, x=x, out=out):
                out["y"] = layer(x, is_causal=True)

            def backward(out=out):
                out["y"].backward(torch.ones_like(out["y"]))

            forward()
            backward()
            found[overlap, chunks, length] = profiled(forward), profiled(backward)
            dist.barrier()
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def at_length(numbers: list[Counter], what: str, length: int) -> float:
    """What grows by as much with each token."""
    first, second = (n[what] for n in numbers)
    return first + (second - first) * (length - LENGTHS[0]) / (LENGTHS[1] - LENGTHS[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8, help="(default: 8)")
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank (default: 8192)")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4], help="(default: 1 2 4)")
    args = parser.parse_args()
    os.environ["DEEPSP_TEST_COLLECTIVES"] = "1"
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (args.ranks, f"{folder}/store", args.chunks, results), args.ranks)
    found = results.get()
    lines = [
        "# What the attention layer launches on NCCL", "",
        f"One rank of {args.ranks}, {args.tokens} tokens, hidden size {HIDDEN}, {HEADS} and "
        f"{KV_HEADS} heads, bfloat16. GiB are the inputs of products (in a batch as often as they "
        "are read), what is copied, and what is read and written element by element (sums of "
        "products, casts). Copies are calls on the CPU, where a merge is one for each rank; on a "
        "GPU it is one.", "",
        "| overlap, chunks | | products | GiB | copies | GiB | elementwise | GiB | exchanges |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    orders = []
    for overlap, chunks in dict.fromkeys((o, c) for o, c, _ in found):
        for n, way in enumerate(("forward", "backward")):
            numbers = [found[overlap, chunks, length][n][0] for length in LENGTHS]

            def count(what, numbers=numbers):
                return round(at_length(numbers, what, args.tokens))

            def gib(what, item, numbers=numbers):
                return f"{at_length(numbers, what, args.tokens) * item / 2**30:.2f}"

            name = f"{overlap}, {chunks}"
            lines.append(
                f"| {name} | {way} | {count('products')} | {gib('product elements', 2)} | "
                f"{count('copies')} | {gib('copied bytes', 2)} | {count('elementwise')} | "
                f"{gib('elementwise elements', 2)} | {count('exchanges')} |"
            )
            orders.append(f"| {name} | {way} | `{found[overlap, chunks, LENGTHS[0]][n][1]}` |")
    lines += ["", "The order: E an exchange, m a product, A attention, W a wait.", ""]
    lines += ["| overlap, chunks | | order |", "|---|---|---|", *orders]
    text = "\n".join(lines) + "\n"
    print(text)
    (HERE / "results/nccl_schedule.md").write_text(text)


if __name__ == "__main__":
    main()
