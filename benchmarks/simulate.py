"""Simulates a training step on up to a thousand GPUs: the time of each part, and how much of the
communication the step waits for. Nothing is measured; no GPU and no torch are needed.

The step: one sequence on P ranks, a dense transformer, causal attention, bfloat16, weights sharded
over the same P ranks, a checkpoint around each layer. Its parts:

  products      matrix products, also those that checkpoints repeat
  attention     flash attention
  elementwise   norms, activations, the loss, and copies into and out of buffers
  exchange      tokens for heads and back, as far as the step waits for it
  weights       gathers of weights and sums of their gradients, as far as the step waits for them
  rest          the optimizer, offloaded checkpoints

Bytes follow deepsp's split of tokens, heads and queries. A time is bytes or FLOPs over a rate, plus
a cost for each launch and peer. Exchanges run in order on one stream, attention on another, in the
best of 1, 2, 4, ... --chunks; a rank with one head, or parts of heads, has one chunk. Weights
travel while nothing else does. Levers:

  keep attention   checkpoints keep attention's output: backward repeats the exchange of q, k and v,
                   but not attention
  two-level sums   gradients are summed within each machine, then between machines
  kv once          a kv head is sent to each machine once and passed on there, if that is faster
  query chunks     where a rank has fewer heads than chunks, each chunk has the same part of every
                   rank's queries

Not in the model: other traffic on the network, slow ranks, time of the host, memory.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
import tomllib
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import bench

BYTES = 2  # of an element


class Model(NamedTuple):
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def layer_params(self) -> int:
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.hidden * (attention + 3 * self.ffn)

    @property
    def params(self) -> int:
        return self.layers * self.layer_params + 2 * self.hidden * self.vocab


MODELS = {
    "8b": Model(32, 4096, 14336, 32, 8, 128, 128256),
    "70b": Model(80, 8192, 28672, 64, 8, 128, 128256),
    "llama2-7b": Model(32, 4096, 11008, 32, 32, 128, 32000),
    "qwen3-8b": Model(36, 4096, 12288, 32, 8, 128, 151936),
    "qwen3-4b": Model(36, 2560, 9728, 32, 8, 128, 151936),
}


@dataclass(frozen=True)
class Machines:
    """What a GPU reaches, as machines.toml says: FLOPs and bytes a second (in each direction),
    seconds."""

    peak: float
    products: float
    attend: float
    attend_backward: float
    memory: float
    near: float
    far: float
    host: float
    size: int
    launch: float
    near_peer: float
    far_peer: float


def read_machines(file: Path, base: dict[str, Machines] | None = None) -> dict[str, Machines]:
    """The tables of a file. A table is ``like`` one before it, or of ``base``, else like h100."""
    machines = dict(base or {})
    for name, table in tomllib.loads(file.read_text()).items():
        like = machines.get(table.pop("like", "h100"))
        machines[name] = Machines(**table) if like is None else replace(like, **table)
    return machines


MACHINES = read_machines(Path(__file__).with_name("machines.toml"))


@dataclass(frozen=True)
class Levers:
    keep_attention: bool = False
    two_level_sums: bool = False
    kv_once: bool = False
    query_chunks: bool = False
    chunks: int = 4  # at most
    offload: bool = False  # of checkpoints to the host; the step waits for the copies


PARTS = ("products", "attention", "elementwise", "exchange", "weights", "rest")
NAMES = ("keep_attention", "two_level_sums", "kv_once", "query_chunks")
TODAY, ALL = Levers(), Levers(**dict.fromkeys(NAMES, True))


def split(total: int, parts: int, index: int) -> range:
    """The range of ``index`` if ``total`` is split like torch.tensor_split."""
    each, more = divmod(total, parts)
    begin = index * each + min(index, more)
    return range(begin, begin + each + (index < more))


def cells(heads: int, tokens: int, ranks: int, rank: int) -> list[tuple[range, list[range]]]:
    """The query heads that a rank attends with, and the ranges of tokens of their queries.

    Whole heads if the ranks divide them. Otherwise each head's queries are cut into ``ranks``
    parts: a range of tokens and its mirror image.
    """
    if heads % ranks == 0:
        return [(split(heads, ranks, rank), [range(tokens)])]
    parts, at, end = [], rank * heads, (rank + 1) * heads
    while at < end:
        head, first = divmod(at, ranks)
        last = min(ranks, first + end - at)
        begin, stop = (n * tokens // (2 * ranks) for n in (first, last))
        mirror = range(stop if last == ranks else tokens - stop, tokens - begin)
        parts.append((range(head, head + 1), [range(begin, stop), mirror]))
        at += last - first
    return parts


class Layout:
    """Who sends how many bytes to whom, in one layer's forward."""

    def __init__(self, model: Model, tokens: int, ranks: int):
        self.head_bytes, self.ranks = model.head_dim * BYTES, range(ranks)
        self.shards = [split(tokens, ranks, rank) for rank in self.ranks]
        self.cells = [cells(model.heads, tokens, ranks, rank) for rank in self.ranks]
        group = model.heads // model.kv_heads
        heads = [(of[0][0].start, of[-1][0].stop) for of in self.cells]
        self.kv_heads = [range(first // group, -(-end // group)) for first, end in heads]

    def _query_bytes(self, source: int, target: int) -> int:
        mine, count = self.shards[source], 0
        for heads, parts in self.cells[target] if source != target else ():
            common = (min(x.stop, mine.stop) - max(x.start, mine.start) for x in parts)
            count += len(heads) * sum(max(0, x) for x in common)
        return count * self.head_bytes

    @lru_cache(maxsize=8)  # noqa: B019
    def query_flows(self, rank: int) -> tuple[list[int], list[int]]:
        """Bytes of q to and from each rank; the output takes the opposite way."""
        to = [self._query_bytes(rank, peer) for peer in self.ranks]
        return to, [self._query_bytes(peer, rank) for peer in self.ranks]

    def _kv_bytes(self, source: int, heads: int) -> int:
        return 2 * len(self.shards[source]) * heads * self.head_bytes

    @lru_cache(maxsize=8)  # noqa: B019
    def kv_flows(self, rank: int, size: int = 1, once=False) -> tuple[list[int], list[int], int]:
        """Bytes of k and v to and from each rank, and of those that the rank passes on.

        once: to each other machine (of ``size`` ranks), k and v go once: to the rank there that has
        the sender's number.
        """
        kv, machine = self.kv_heads, rank // size
        read = [len({*itertools.chain(*kv[m : m + size])}) for m in self.ranks[::size]]
        mates = sum(len(x) for x in kv[machine * size : (machine + 1) * size]) - len(kv[rank])
        to, received, passed_on = [0 for _ in kv], [0 for _ in kv], 0
        for p in (peer for peer in self.ranks if peer != rank):
            if not once or p // size == machine:
                to[p] = self._kv_bytes(rank, len(kv[p]))
                received[p] = self._kv_bytes(p, len(kv[rank]))
            elif p % size == rank % size:
                to[p] = self._kv_bytes(rank, read[p // size])
                received[p] = self._kv_bytes(p, read[machine])
                passed_on += self._kv_bytes(p, mates)
        return to, received, passed_on

    def sent(self, rank: int) -> tuple[int, int]:
        """Bytes of q, k and v that a rank sends, and bytes of the output."""
        to, received = self.query_flows(rank)
        return sum(to) + sum(self.kv_flows(rank)[0]), sum(received)


layout_of = lru_cache(maxsize=64)(Layout)


def exchange_seconds(machines: Machines, sizes: list[float], rank: int, passed_on=0.0) -> float:
    """Of one exchange in which a rank sends (or receives) these bytes to each other rank."""
    first = rank // machines.size * machines.size
    near = [x for x in sizes[first : first + machines.size] if x]
    far = [x for x in (*sizes[:first], *sizes[first + machines.size :]) if x]
    if not near and not far:
        return 0.0
    seconds = machines.launch + max(
        sum(near) / machines.near + len(near) * machines.near_peer,
        sum(far) / machines.far + len(far) * machines.far_peer,
    )
    if passed_on:
        seconds += machines.launch + (machines.size - 1) * machines.near_peer
    return seconds + passed_on / machines.near


@lru_cache(maxsize=4096)
def exchanges(model: Model, tokens: int, ranks: int, machines: Machines, chunks: int, once: bool):
    """Seconds of each chunk's exchange of q, k and v, and of its output, on the slowest rank.

    A chunk has an equal part of the queries. k and v travel with the first chunk that needs them.
    """
    layout, there, back, flows = layout_of(model, tokens, ranks), [], [], []
    for rank in {0, ranks // 2}:
        *kv, passed_on = layout.kv_flows(rank, machines.size, once)
        pairs = zip(layout.query_flows(rank), kv, strict=True)
        flows += [(rank, q, k, passed_on) for q, k in pairs]
    bringing = max(1, model.kv_heads // ranks) if model.heads % ranks == 0 else 1
    bringing = min(chunks, bringing)  # chunks that bring k and v
    for chunk in range(chunks):
        share, seconds = (chunk < bringing) / bringing, ([], [])
        for rank, q, k, passed_on in flows:
            both = [x / chunks + y * share for x, y in zip(q, k, strict=True)]
            seconds[0].append(exchange_seconds(machines, both, rank, passed_on * share))
            seconds[1].append(exchange_seconds(machines, [x / chunks for x in q], rank))
        there.append(max(seconds[0]))
        back.append(max(seconds[1]))
    return there, back


def waited(arriving: list[float], work: float, leaving: list[float]) -> float:
    """What exchanges, in order on one stream, add to work on another: equal parts of it."""
    link, done = sum(arriving), 0.0
    for arrived, left in zip(itertools.accumulate(arriving), leaving, strict=True):
        done = max(done, arrived) + work / len(arriving)
        link = max(link, done) + left
    return max(0.0, link - work)


def gather_seconds(machines: Machines, size: float, ranks: int) -> float:
    """Of an all-gather to ``size`` bytes."""
    near, count = min(ranks, machines.size), -(-ranks // machines.size)
    if count == 1:
        wire = size * (near - 1) / near / machines.near
        return (ranks > 1) * (machines.launch + 2e-6 * ranks + wire)
    across = size * (count - 1) / count / (machines.far * machines.size)
    return machines.launch + 4e-6 * count + max(across, size / machines.near)


def sum_seconds(machines: Machines, size: float, ranks: int, two_level: bool) -> float:
    """Of a sum of ``size`` bytes, of which each rank receives its shard."""

    def among(peers: int) -> float:
        return exchange_seconds(machines, [0] + [size / peers] * (peers - 1), 0)

    near, count = min(ranks, machines.size), -(-ranks // machines.size)
    if not two_level or count == 1:
        return among(ranks)
    far = size / near * (count - 1) / count / machines.far + (count - 1) * machines.far_peer
    return among(near) + machines.launch + far


def compute(model: Model, tokens: int, ranks: int, machines: Machines) -> dict[str, float]:
    """Seconds of a layer's forward, of attention's backward, and of the head and the loss."""
    rows, heads = -(-tokens // ranks), model.heads / ranks
    attend = 2 * tokens**2 * model.head_dim * heads
    head = 6 * model.hidden * model.vocab * rows / machines.products
    return {
        "products": 2 * model.layer_params * rows / machines.products,
        "attend": attend / machines.attend,
        "attend_backward": 2.5 * attend / machines.attend_backward,
        "elementwise": rows * BYTES * (14 * model.hidden + 4 * model.ffn) / machines.memory,
        "head": head + rows * model.vocab * 12 / machines.memory,
    }


def flops(model: Model, tokens: int, causal: bool = True) -> float:
    """Of a step, without what is computed twice."""
    products = 6 * (model.layers * model.layer_params + model.hidden * model.vocab) * tokens
    attention = 12 * model.layers * model.heads * model.head_dim * tokens**2
    return products + (attention / 2 if causal else attention)


class Step(NamedTuple):
    parts: dict[str, float]  # seconds; their sum is the step
    hidden: dict[str, float]  # seconds of "exchange" and "weights" behind other parts
    mfu: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def simulate(
    model: Model,
    tokens: int,
    ranks: int,
    machines: Machines = MACHINES["h100"],
    levers: Levers = TODAY,
) -> Step:
    """The fastest step over the numbers of chunks, and over kv once or not."""
    if ranks > machines.size and ranks % machines.size:
        raise ValueError(f"expected ranks that fill all machines of {machines.size}, got {ranks}")
    most = 1 if model.heads % ranks else model.heads // ranks
    most = levers.chunks if levers.query_chunks else min(levers.chunks, most)
    case = model, tokens, ranks, machines, levers
    ways = itertools.product({False, levers.kv_once}, range(most.bit_length()))
    return min((_step(*case, once, 2**n) for once, n in ways), key=lambda step: step.seconds)


def _step(model, tokens, ranks, machines, levers, once, chunks) -> Step:
    t = compute(model, tokens, ranks, machines)
    there, back = exchanges(model, tokens, ranks, machines, chunks, once)
    exchange = sum(there) + sum(back)  # of forward, and of backward
    exposed = waited(there, t["attend"], back)
    # In backward the output's gradients come, and those of the first chunk's k and v leave last.
    exposed_back = waited(back[::-1], t["attend_backward"], there[::-1])
    (one,) = exchanges(model, tokens, ranks, machines, 1, once)[0]
    repeated = (0.0, one, one) if levers.keep_attention else (t["attend"], exchange, exposed)
    attend_again, again, exposed_again = repeated  # by the checkpoint
    layout = layout_of(model, tokens, ranks)
    copies = 2 * sum(layout.sent(0)) / machines.memory  # one for each exchange
    forward = t["products"] + t["attend"] + t["elementwise"] + copies
    parts = {
        "products": 4 * t["products"],
        "attention": t["attend"] + t["attend_backward"] + attend_again,
        "elementwise": 4 * t["elementwise"] + 3 * copies,
    }
    # The time in which a layer computes and exchanges nothing.
    free = forward - (exchange - exposed)
    free_back = sum(parts.values()) - forward - (exchange - exposed_back) - (again - exposed_again)
    size = model.layer_params * BYTES
    gather = gather_seconds(machines, size, ranks)
    sums = sum_seconds(machines, size, ranks, levers.two_level_sums)
    parts["exchange"] = exposed + exposed_back + exposed_again
    parts["weights"] = max(0.0, gather - free) + max(0.0, gather + sums - free_back)
    checkpoint = len(layout.shards[0]) * model.hidden * BYTES
    parts["rest"] = levers.offload * 2 * checkpoint / machines.host
    parts = {name: model.layers * seconds for name, seconds in parts.items()}
    hidden = {
        "exchange": model.layers * (2 * exchange + again) - parts["exchange"],
        "weights": model.layers * (2 * gather + sums) - parts["weights"],
    }
    parts["products"] += t["head"]
    parts["rest"] += 28 * model.params / ranks / machines.memory  # AdamW in float32
    mfu = flops(model, tokens) / ranks / sum(parts.values()) / machines.peak
    return Step(parts, hidden, mfu)


def machines_of(args: argparse.Namespace) -> Machines:
    if args.rates is None:
        return MACHINES[args.machines]
    return list(read_machines(args.rates, MACHINES).values())[-1]


def tables(args: argparse.Namespace) -> dict[str, list[list[str]]]:
    """Rows by title, headers first."""
    start, names = ["model", "tokens", "P", "step, s"], [x.replace("_", " ") for x in NAMES]
    parts, ratios = [[*start, *PARTS, "MFU"]], [[*start, *names, "all"]]
    base = replace(TODAY, chunks=args.chunks, offload=args.offload)
    base = replace(base, **dict.fromkeys(args.levers, True))
    ways = [replace(base, **dict.fromkeys(x, True)) for x in (*([name] for name in NAMES), NAMES)]
    for name, tokens, ranks in itertools.product(args.model, args.tokens, args.ranks):
        case = MODELS[name], tokens, ranks, machines_of(args)
        step = simulate(*case, base)
        shares = {part: f"{x / step.seconds:.0%}" for part, x in step.parts.items()}
        for part, hidden in step.hidden.items():
            shares[part] += f" ({abs(hidden) / step.seconds:.0%})"
        seconds = f"{step.seconds:.{0 if step.seconds >= 100 else 2}f}"
        first = [name, f"{tokens >> 10}k", str(ranks), seconds]
        parts.append([*first, *(shares[x] for x in PARTS), f"{step.mfu:.2f}"])
        shorter = [simulate(*case, levers).seconds / step.seconds for levers in ways]
        ratios.append([*first, *(f"{x:.2f}" for x in shorter)])
    return {
        "Parts of the step; in brackets, what is hidden behind other parts": parts,
        "The step with one more lever, and with all, divided by the step above": ratios,
    }


def draw(args: argparse.Namespace, file: Path) -> None:
    machines, shape = machines_of(args), (2, len(args.model))
    with bench.picture(file, *shape, figsize=(9, 6), sharex=True, squeeze=False) as (figure, axes):
        figure.suptitle("A training step, simulated (not measured)")
        ways = itertools.product(enumerate(args.model), enumerate(args.tokens), (TODAY, ALL))
        for (column, name), (color, tokens), levers in ways:
            above, below = axes[:, column]
            steps = [simulate(MODELS[name], tokens, p, machines, levers) for p in args.ranks]
            look = {"color": f"C{color}", "linestyle": "--" if levers is ALL else "-"}
            label = f"{tokens >> 10}k tokens" + ", all levers" * (levers is ALL)
            above.loglog(args.ranks, [x.seconds for x in steps], **look)
            waits = [100 * (x.parts["exchange"] + x.parts["weights"]) / x.seconds for x in steps]
            below.semilogx(args.ranks, waits, label=label, **look)
            above.set(title=name, ylabel="step, s")
            below.set(xlabel="P", ylabel="waiting for communication, %", ylim=(0, 100))
            below.set_xticks(args.ranks, args.ranks)
            below.minorticks_off()
        axes[1][0].legend()


def main() -> None:
    parser = bench.parser_of(
        __doc__,
        model=(["8b", "70b"], "what is trained", MODELS),
        tokens=([2**17, 2**20], "of a sequence"),
        ranks=([2**i for i in range(3, 11)], "that share a sequence"),
        machines=("h100", "what it runs on", MACHINES),
        rates=(Path, "file with a table as in machines.toml, instead of --machines"),
        chunks=(4, "at most"),
        levers=([], "of the first table", NAMES),
        offload=(False, "checkpoints go to the host, which isn't hidden"),
        results=(Path, "folder for simulate.md"),
        figure=(Path, "file for step time and waiting time over P"),
    )
    args = parser.parse_args()

    import published_steps

    try:
        made = tables(args) | {"Published steps": published_steps.table()}
    except ValueError as error:
        parser.error(str(error))
    bench.show([bench.Table(title, header, rows) for title, (header, *rows) in made.items()])
    if args.results:
        lines = ["# A simulated training step", "", f"`{shlex.join(['python', *sys.argv])}`", ""]
        lines += ["Nothing here is measured. What is simulated: `--help`."]
        lines += [f"GPUs: {args.rates or args.machines}."]
        for title, (header, *rows) in made.items():
            lines += ["", f"{title}:", "", *bench.in_markdown(header, rows)]
        lines += ["", published_steps.SOURCES]
        (args.results / "simulate.md").write_text("\n".join(lines) + "\n")
    if args.figure:
        draw(args, args.figure)


if __name__ == "__main__":
    main()
