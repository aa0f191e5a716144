"""Weights sharded in float32 and gathered in bfloat16: what casting before gathering saves.

Contenders, interleaved in one run, one thread a rank, over gloo, on a link of a set speed
(benchmarks/netlink.py: needs root and iproute2) and on this machine's loopback. Sizes are those of
the whole tensor in float32; "100 mixed" are 70 biases of 64 to 4096 and 30 small matrices, every
fifth of them gathered as float32.

gather:
  gather, then cast    all_gather_into_tensor in float32, then .to(bfloat16)
  cast, then gather    the shard .to(bfloat16), then all_gather_into_tensor
  FSDP2 unshard        fully_shard with MixedPrecisionPolicy(param_dtype=bfloat16); reshard untimed
  ours                 deepsp::gather_cast; for "100 mixed" one by one and coalesced
  cast and copy alone  the cast, and a copy for every other rank, without any of them: what memory
                       takes where ranks share it
  floor                bare irecv and isend of the same bfloat16 bytes, on warm buffers

reduce: gradients in bfloat16 to float32 sums of the rank's rows:
  upcast, then reduce-scatter    .to(float32), then reduce_scatter_tensor (gloo's is an all-reduce:
                                 twice the bytes)
  all-to-all, then sum           all_to_all_single in bfloat16, then a sum in float32
  ours, floor                    deepsp::reduce_scatter_cast; as above

step: one training step (AdamW) of a pre-norm causal transformer with all weights sharded; weights
are gathered for a layer's forward and again for its backward:
  compute              the same forward and backward with weights that are there; no optimizer
  unfused              torch alone: gather, then cast; upcast, then reduce-scatter
  FSDP2                fully_shard by block, param_dtype=bfloat16, reduce_dtype=float32
  FSDP2, ahead         the same with asynchronous unshards and forward prefetch by one block
  fused                deepsp.shard_parameters(prefetch_bytes=0)
  fused, prefetch      deepsp.shard_parameters()

A time is that of the slowest rank; where little is sent over a link, the mean of several calls in a
row (after a pause a link lets 256 KiB pass at once). Bytes on the wire are what a rank's interface
sent, headers included (the largest over the ranks). Peak memory is by how much the resident memory
grew at most during one call, its result included and with nothing idle kept from before.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import bench
from gather_contenders import FIRST, MIXED_PARAMETERS, measure, single
from gather_step import COMPUTE, FSDP, measure_step
from tqdm import tqdm

PARTS = ["single", "mixed", "step"]
MIXED = "100 mixed"
STYLES = {"ours": {"color": "crimson"}, "floor": {"color": "black", "linestyle": ":"}}


def tasks_of(args: argparse.Namespace, size: int) -> list[tuple[dict, tuple]]:
    """Return what to note of each task of so many ranks, and the task without its interface."""
    cases = []
    if "single" in args.parts:
        sizes = [s for s in args.sizes if s * (size - 1) / size <= args.most]
        cases += [(f"{s:g} MiB", single(s)) for s in sizes]
    if "mixed" in args.parts:
        cases.append((MIXED, MIXED_PARAMETERS))
    tasks, repeats = [], (args.at_least, args.repeats)
    for name, parameters in cases:
        for direction in ("gather", "reduce"):
            note = {"part": direction, "case": name}
            tasks.append((note, (measure, direction, parameters, args.seconds, repeats)))
    if "step" in args.parts and size in args.step_ranks:
        names = ("dim", "layers", "heads", "vocab", "batch", "seq", "lr")
        shape = {name: getattr(args, name) for name in names}
        tasks.append(({"part": "step"}, (measure_step, shape, args.step_repeats)))
    return tasks


def run(args: argparse.Namespace) -> list[dict]:
    cases = []
    for size, rate in itertools.product(args.ranks, args.rates):
        with bench.ranks_on(rate, size) as ranks:
            interface = ranks.link and ranks.link.interface
            for note, (function, *task) in tqdm(tasks_of(args, size), desc=f"P {size}, {rate}"):
                contenders = ranks(function, interface, *task)
                cases.append({"ranks": size, "link": rate} | note | {"contenders": contenders})
    return cases


# ------------------------------------------------------------------------------------- tables


def milliseconds(ms: list[float]) -> str:
    digits = 2 if min(ms) < 10 else 1 if min(ms) < 100 else 0
    return bench.min_median(ms, f".{digits}f")


def mib(count: int) -> str:
    return f"{count / 2**20:.{2 if count < 10 << 20 else 1}f}"


def wire(of: dict) -> str:
    return mib(of["wire"]) if of["wire"] else "–"  # loopback: a rank has no interface of its own


def groups(cases: list[dict], *keys: str) -> Iterator[tuple[tuple, list[dict]]]:
    """Give the cases of gather and reduce (or step) with these keys in common."""
    ordered = sorted(cases, key=lambda case: case["part"])  # stable
    for key, group in itertools.groupby(ordered, lambda case: tuple(case[k] for k in keys)):
        yield key, list(group)


def grid(title: str, cases: list[dict], cell: Callable[[dict, dict], str]) -> bench.Table:
    """Return a row for each contender, a column for each case."""
    names = dict.fromkeys(name for case in cases for name in case["contenders"])
    rows = []
    for name in sorted(names, key=lambda name: name == "floor"):  # which is last
        each = [(case["contenders"].get(name), case["contenders"]) for case in cases]
        rows.append([name, *("" if of is None else cell(of, every) for of, every in each)])
    return bench.Table(title, ["", *(case["case"] for case in cases)], rows)


def step_table(title: str, contenders: dict) -> bench.Table:
    base, rows = contenders[FSDP], []
    for name, of in contenders.items():
        # It doesn't train: only its first loss is that of the others.
        trained = 1 if name == COMPUTE else None
        difference = bench.relative(of["losses"][:trained], base["losses"][:trained])
        times = [milliseconds(of["ms"]), bench.ratio(of["ms"], base["ms"])]
        rows.append([name, *times, wire(of), mib(of["peak"]), f"{difference:.1e}"])
    columns = ["", "ms", f"× {FSDP}", "MiB on the wire", "peak MiB"]
    return bench.Table(title, [*columns, f"loss, largest difference to {FSDP}"], rows)


def tables(cases: list[dict]) -> list[bench.Table]:
    made = []
    for (part, size, link), group in groups(cases, "part", "ranks", "link"):
        where = f"P {size}, {link}"
        if part == "step":
            made += [step_table(f"training step, {where}", case["contenders"]) for case in group]
            continue
        first = FIRST[part]
        made.append(grid(f"{part}, {where}: ms", group, lambda of, _: milliseconds(of["ms"])))
        title = f"{part}, {where}: share of {first}'s time"

        def share(of: dict, every: dict, first: str = first) -> str:
            return bench.ratio(of["ms"], every[first]["ms"])

        made.append(grid(title, group, share))
    for (part, size), group in groups(cases, "part", "ranks"):
        if part != "step":
            # Neither depends on the link.
            group = [case for case in group if case["link"] == group[0]["link"]]
            title = f"{part}, P {size}: MiB on the wire, peak MiB"
            made.append(grid(title, group, lambda of, _: f"{wire(of)}, {mib(of['peak'])}"))
    return made


def draw(cases: list[dict], file: Path) -> None:
    """Draw times as shares of the first contender's, over the size of single tensors."""
    singles = [case for case in cases if case["part"] != "step" and case["case"] != MIXED]
    panels = list(groups(singles, "part", "ranks", "link"))
    links = list(dict.fromkeys(key[1:] for key, _ in panels))
    shape = {"figsize": (4 * len(links), 7), "sharex": True, "squeeze": False}
    with bench.picture(file, 2, len(links), **shape) as (_, axes):
        for (part, size, link), group in panels:
            axis = axes[list(FIRST).index(part)][links.index((size, link))]
            sizes = [float(case["case"].split()[0]) for case in group]
            for name in group[0]["contenders"]:
                medians = [
                    [statistics.median(case["contenders"][n]["ms"]) for n in (name, FIRST[part])]
                    for case in group
                ]
                shares = [median / first for median, first in medians]
                axis.plot(sizes, shares, marker=".", label=name, **STYLES.get(name, {}))
            axis.set_xscale("log", base=2)
            axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
            axis.set_ylim(0, 1.6)
            axis.set_title(f"{part}, P {size}, {link}", fontsize=10)
            axis.set_ylabel("share of the first's median time")
            axis.set_xlabel("MiB of the whole tensor in float32")
            axis.legend(fontsize=7)


def main() -> None:
    parser = bench.parser_of(
        __doc__,
        parts=(PARTS, "what to measure", PARTS),
        sizes=([1.0, 4.0, 16.0, 64.0, 256.0], "MiB of the single tensors"),
        most=(128.0, "MiB that a rank receives in float32: leaves out larger single tensors"),
        rates=(["500mbit", bench.LOOPBACK], "of the links, as tc writes it, or loopback"),
        ranks=([2, 4], "group sizes"),
        repeats=(20, "of each contender, at most"),
        at_least=(3, "repeats, whatever they take"),
        seconds=(4.0, "for each case, if that is enough"),
        step_repeats=(6, "of the training step"),
        step_ranks=([2], "of --ranks, with a training step"),
        dim=(512, "the transformer's features"),
        layers=(4, "its blocks"),
        heads=(8, "its heads"),
        vocab=(1024, "its vocabulary"),
        batch=(1, "sequences of a rank"),
        seq=(512, "tokens of a sequence"),
        lr=(1e-3, "of AdamW"),
        results=(Path, "folder for gather_cast.md, .json and .png"),
    )
    args = parser.parse_args()
    for size in args.ranks:
        if any(rows % size for mib in args.sizes for (rows, _), _ in single(mib)) or 16 % size:
            parser.error(
                f"--ranks {size}: torch alone gathers shards of one size only; take ranks "
                "that divide 16 and the sizes' rows of 4 KiB"
            )
    cases = run(args)
    paragraphs = [
        "ms, min / median, of the slowest rank, contenders interleaved; gloo, one thread a rank. "
        "What the contenders are, and what is counted: `--help`."
    ]
    pictures = ("gather_cast.png",) if args.results and "single" in args.parts else ()
    title, made = "Cast, then gather", tables(cases)
    bench.report(args, "gather_cast", title, paragraphs, made, {"measured": cases}, pictures)
    for name in pictures:
        draw(cases, args.results / name)


if __name__ == "__main__":
    main()
