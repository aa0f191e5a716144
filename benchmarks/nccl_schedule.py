"""What the attention layer launches where blocks travel in collectives, as on NCCL: products,
copies and exchanges of one rank, counted, and the bytes that they read and write.

No GPU is needed. The layer runs over gloo with DEEPSP_TEST_COLLECTIVES=1, forward and backward, on
two short lengths; what grows with the length is extrapolated to the length asked for. The order of
what is launched says which exchanges something hides: E is an exchange, m a product, A attention,
and W where what arrives is waited for.

From the order, the products' operations and the exchanges' bytes follows how long the GPU would
wait: a model with one queue for compute and one for exchanges, and rates that are arguments.
Nothing of it is measured on a GPU.

    python benchmarks/nccl_schedule.py
"""

import argparse
import itertools
import os
from collections import Counter
from typing import NamedTuple

import bench
import torch

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 4096, 32, 8, 128
LENGTHS = (32, 64)
PRODUCTS = {"aten::mm": "m", "aten::bmm": "m", "aten::addmm": "m", "aten::addmm_": "m"}
WAITS = (
    "seq_to_heads_wait",
    "heads_to_seq_wait",
    "_heads_to_output_wait",
    "_project_to_heads_backward",
)
AMOUNTS = [  # what is counted, its elements or bytes, and the bytes that each moves
    ("products", "product elements", 2),
    ("copies", "copied bytes", 2),
    ("elementwise", "elementwise elements", 2),
]
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


class Step(NamedTuple):
    """What is launched: of a product and attention operations, of an exchange bytes; of a wait, how
    many exchanges it waits for, 0: all."""

    what: str
    amount: float


def sizes_of(event) -> list[int]:
    sizes = []
    for shape in event.input_shapes or []:
        if shape and all(isinstance(n, int) for n in shape):
            sizes.append(torch.Size(shape).numel())
    return sizes


def operations(event) -> float:
    """Return the operations of a product of two matrices, or of batches of them."""
    a, b = [shape for shape in event.input_shapes if len(shape) > 1][:2]
    return 2.0 * torch.Size(a).numel() * b[-1]


def attention_operations(event) -> float:
    """Return the operations of causal attention: forward has two products, backward five."""
    batch, heads, tokens, dim = next(s for s in event.input_shapes if len(s) == 4)
    forward = 2.0 * batch * heads * tokens**2 * dim
    return forward * (2.5 if "backward" in event.name else 1)


def counted(events, tokens: float) -> tuple[Counter, list[Step]]:
    """Return the numbers of one forward or backward, and its order, with the amounts of `tokens`
    times as long a sequence."""
    counts, order = Counter(), []
    last = 0
    events = sorted(events, key=lambda e: e.time_range.start)
    sent = iter([e for e in events if e.name == "gloo:all_to_all"])
    for event in events:
        name = event.name
        if event.time_range.start < last:
            continue  # inside of a product
        if name in PRODUCTS:
            order.append(Step("m", operations(event) * tokens))
            counts["products"] += 1
            a, b = sizes_of(event)[:2]
            counts["product elements"] += a + b
            last = event.time_range.end
        elif name.startswith(ATTENTION):
            order.append(Step("A", attention_operations(event) * tokens**2))
            last = event.time_range.end
        elif name == "deepsp::exchange":
            order.append(Step("E", sum(sizes_of(next(sent))) * tokens))
            counts["exchanges"] += 1
        elif name == "deepsp::copy":
            counts["copies"] += 1
            counts["copied bytes"] += event.concrete_inputs[0] if event.concrete_inputs else 0
        elif name in ("aten::add_", "aten::copy_", "aten::cat", "aten::sum", "aten::mul"):
            counts["elementwise"] += 1
            counts["elementwise elements"] += sum(sizes_of(event))
            last = event.time_range.end
        elif name.removeprefix("deepsp::") in WAITS:
            order.append(Step("W", int(name.removeprefix("deepsp::") == "seq_to_heads_wait")))
    return counts, order


def written(order: list[Step]) -> str:
    return " ".join(
        f"{n}{what}" if (n := len(list(group))) > 1 else what
        for what, group in itertools.groupby(step.what for step in order)
    )


class Rates(NamedTuple):
    """Operations and bytes per second, and seconds that a launch takes."""

    products: float
    attention: float
    link: float
    latency: float = 20e-6


def exposed(order: list[Step], rates: Rates, ranks: int) -> tuple[float, float]:
    """Return the seconds in all, and those in which the GPU waits for exchanges."""
    clock = busy = free = 0.0  # of compute, how much of it computes, when the link is free
    flying = []
    for step in order:
        if step.what == "E":
            free = max(clock, free) + rates.latency
            free += step.amount * (ranks - 1) / ranks / rates.link
            flying.append(free)
        elif step.what == "W":
            count = int(step.amount) or len(flying)
            clock = max([clock, *flying[:count]])
            flying = flying[count:]
        else:
            took = step.amount / (rates.products if step.what == "m" else rates.attention)
            clock, busy = clock + took, busy + took
    clock = max([clock, *flying])
    return clock, clock - busy


def by_tensor(forward: list[Step], backward: list[Step]) -> tuple[list[Step], list[Step]]:
    """Return the order if q, k and v were sent one by one, in one chunk: q while k and v are
    computed; backward, dW of each as it arrives, and dX of all."""
    qkv, there, *rest = forward
    shares = [n / (HEADS + 2 * KV_HEADS) for n in (HEADS, KV_HEADS, KV_HEADS)]
    start = [
        step
        for share in shares
        for step in (Step("m", qkv.amount * share), Step("E", there.amount * share))
    ]
    at = next(n for n, step in enumerate(rest) if step.what == "W")
    rest[at] = Step("W", 0)
    last = max(n for n, step in enumerate(backward) if step.what == "E")
    *before, back = backward[: last + 1]
    of_x, *of_weights = [step for step in backward[last:] if step.what == "m"]
    small_first = [2, 1, 0]
    arriving = [Step("E", back.amount * shares[i]) for i in small_first]
    products = [x for i in small_first for x in (Step("W", 1), of_weights[i])]
    return [*start, *rest], [*before, *arriving, *products, of_x]


def measure(chunks_of: list[int], length_of: int) -> dict:
    """Return what forward and backward launch, by overlap, chunks and length."""
    import deepsp

    launches = {}
    for overlap, chunks in [(False, 1), *((True, n) for n in chunks_of)]:
        layer = deepsp.SequenceParallelAttention(
            HIDDEN, HEADS, KV_HEADS, chunks=chunks, overlap=overlap, dtype=torch.bfloat16
        )
        for length in LENGTHS:
            x = torch.randn(1, length, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
            outputs = []

            def forward(layer=layer, x=x, outputs=outputs):
                outputs.append(layer(x, is_causal=True))

            def backward(outputs=outputs):
                y = outputs.pop()
                y.backward(torch.ones_like(y))

            forward()
            backward()
            launches[overlap, chunks, length] = [
                counted(bench.profiled(call), length_of / length) for call in (forward, backward)
            ]
    return launches


def at_length(numbers: list[Counter], what: str, length: int) -> float:
    """Return what grows by as much with each token."""
    first, second = (n[what] for n in numbers)
    return first + (second - first) * (length - LENGTHS[0]) / (LENGTHS[1] - LENGTHS[0])


def waits(launches: dict, args: argparse.Namespace) -> list[str]:
    """Return a table of how long the GPU waits, by the model."""
    schedules = {}
    for overlap, chunks in dict.fromkeys((o, c) for o, c, _ in launches):
        orders = [order for _, order in launches[overlap, chunks, LENGTHS[0]]]
        if not overlap:
            orders = [waiting_at_once(order) for order in orders]
        schedules[f"{overlap}, {chunks}"] = orders
        if overlap and chunks == 1:
            schedules["(q, k and v one by one, 1)"] = by_tensor(*orders)
    lines = [
        "How long the GPU would wait for exchanges, and in brackets the whole, in milliseconds, "
        f"forward + backward: a model, with products at {args.products:g} TFLOP/s, attention at "
        f"{args.attention:g} TFLOP/s and 20 us a launch; nothing is measured. The schedule in "
        "brackets isn't built.",
        "",
    ]
    rows = []
    for name, orders in schedules.items():
        rows.append([name])
        for link in args.links:
            rates = Rates(args.products * 1e12, args.attention * 1e12, link * 1e9)
            both = [exposed(order, rates, args.ranks) for order in orders]
            whole, waited = (1e3 * sum(part) for part in zip(*both, strict=True))
            rows[-1].append(f"{waited:.2f} ({whole:.2f})")
    columns = ["overlap, chunks", *(f"{link:g} GB/s" for link in args.links)]
    return lines + bench.in_markdown(columns, rows)


def waiting_at_once(order: list[Step]) -> list[Step]:
    """Return the order with a wait after each exchange, and no others."""
    steps = []
    for step in order:
        if step.what != "W":
            steps += [step, Step("W", 0)] if step.what == "E" else [step]
    return steps


def main() -> None:
    args = bench.parser_of(
        __doc__,
        ranks=(8, "group size"),
        tokens=(8192, "of a rank"),
        chunks=([1, 2, 4], "of heads"),
        products=(600.0, "TFLOP/s"),
        attention=(400.0, "TFLOP/s"),
        links=([350.0, 45.0], "GB/s out of a GPU in an all-to-all: NVLink; 400 Gbit/s network"),
    ).parse_args()
    os.environ["DEEPSP_TEST_COLLECTIVES"] = "1"
    with bench.ranks_on(bench.LOOPBACK, args.ranks) as ranks:
        launches = ranks(measure, args.chunks, args.tokens)
    lines = [
        "# What the attention layer launches on NCCL",
        "",
        f"One rank of {args.ranks}, {args.tokens} tokens, hidden size {HIDDEN}, {HEADS} and "
        f"{KV_HEADS} heads, bfloat16. GiB are the inputs of products (in a batch as often as they "
        "are read), what is copied, and what is read and written element by element (sums of "
        "products, casts). Copies are calls on the CPU, where a merge is one for each rank; on a "
        "GPU it is one.",
        "",
    ]
    rows, orders = [], []
    for overlap, chunks in dict.fromkeys((o, c) for o, c, _ in launches):
        for n, way in enumerate(("forward", "backward")):
            numbers = [launches[overlap, chunks, length][n][0] for length in LENGTHS]
            name, row = f"{overlap}, {chunks}", []
            for what, elements, item in AMOUNTS:
                row.append(round(at_length(numbers, what, args.tokens)))
                gib = at_length(numbers, elements, args.tokens) * item / 2**30
                row.append(f"{gib:.2f}")
            exchanges = round(at_length(numbers, "exchanges", args.tokens))
            rows.append([name, way, *row, exchanges])
            order = written(launches[overlap, chunks, LENGTHS[0]][n][1])
            orders.append([name, way, f"`{order}`"])
    columns = ["overlap, chunks", ""]
    for what, _, _ in AMOUNTS:
        columns += [what, "GiB"]
    lines += bench.in_markdown([*columns, "exchanges"], rows)
    lines += ["", "The order: E an exchange, m a product, A attention, W a wait.", ""]
    lines += [*bench.in_markdown(["overlap, chunks", "", "order"], orders), ""]
    lines += waits(launches, args)
    text = "\n".join(lines) + "\n"
    print(text)
    (bench.RESULTS / "nccl_schedule.md").write_text(text)


if __name__ == "__main__":
    main()
