"""Tables, targets and the picture of benchmarks/gather_cast.py: on the console and as files."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gather_contenders import FIRST
from gather_step import AHEAD, FSDP

MIXED = "100 mixed"
# The share of gather-then-cast's time and bytes, of one by one, of FSDP2's step.
AIMS = {"time": 0.55, "bytes": 0.5, "coalesced": 0.3, "step": 1.0}
ROUNDING = 2**-8  # of bfloat16
STYLES = {"ours": {"color": "crimson"}, "floor": {"color": "black", "linestyle": ":"}}

ABOUT = """`{command}`

ms, min / median, of the slowest rank, contenders interleaved; gloo, one thread a rank, {cpus}
cores, load {load:.2f} at the start, torch {torch}; {minutes:.1f} minutes in all. What the
contenders are, and what is counted: `--help`.
"""


@dataclass
class Sheet:
    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def rich(self):
        from rich.table import Table

        table = Table(*self.columns, title=self.title, title_justify="left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join([f"## {self.title}", "", *(f"| {' | '.join(x)} |" for x in lines), ""])


def both(ms: list[float], base: list[float] | None = None) -> str:
    """Min and median, as they are or as a share of another's."""
    if base is not None:
        return f"{min(ms) / min(base):.2f} / {share(ms, base):.2f}"
    digits = 2 if min(ms) < 10 else 1 if min(ms) < 100 else 0
    return f"{min(ms):.{digits}f} / {statistics.median(ms):.{digits}f}"


def share(ms: list[float], base: list[float]) -> float:
    return statistics.median(ms) / statistics.median(base)


def mib(count: int) -> str:
    return f"{count / 2**20:.{2 if count < 10 << 20 else 1}f}"


def wire(of: dict) -> str:
    return mib(of["wire"]) if of["wire"] else "–"  # loopback: a rank has no interface of its own


def groups(found: dict, *keys: str) -> Iterator[tuple[tuple, list[dict]]]:
    """The measured cases of gather and reduce (or step) with these keys in common."""
    cases = sorted(found["measured"], key=lambda case: case["part"])  # stable
    for key, group in itertools.groupby(cases, lambda case: tuple(case[k] for k in keys)):
        yield key, list(group)


def grid(title: str, cases: list[dict], cell) -> Sheet:
    """A row for each contender, a column for each case."""
    names = dict.fromkeys(name for case in cases for name in case["contenders"])
    sheet = Sheet(title, ["", *(case["case"] for case in cases)])
    for name in sorted(names, key=lambda name: name == "floor"):  # which is last
        sheet.rows.append([name])
        for case in cases:
            of = case["contenders"].get(name)
            sheet.rows[-1].append("" if of is None else cell(of, case["contenders"]))
    return sheet


def step_sheet(title: str, contenders: dict) -> Sheet:
    base = contenders[FSDP]
    sheet = Sheet(
        title,
        [
            "",
            "ms",
            f"× {FSDP}",
            "MiB on the wire",
            "peak MiB",
            f"loss, largest difference to {FSDP}",
        ],
    )
    for name, of in contenders.items():
        # compute doesn't train: only its first loss is that of the others.
        pairs = list(zip(of["losses"], base["losses"], strict=True))[
            : 1 if name == "compute" else None
        ]
        difference = max(abs(a - b) / abs(b) for a, b in pairs)
        row = [name, both(of["ms"]), both(of["ms"], base["ms"]), wire(of), mib(of["peak"])]
        sheet.rows.append([*row, f"{difference:.1e}"])
    return sheet


def sheets(found: dict) -> list[Sheet]:
    made = []
    for (part, ranks, link), cases in groups(found, "part", "ranks", "link"):
        where = f"P {ranks}, {link}"
        if part == "step":
            made += [step_sheet(f"training step, {where}", case["contenders"]) for case in cases]
            continue
        first = FIRST[part]
        made.append(grid(f"{part}, {where}: ms", cases, lambda of, _: both(of["ms"])))
        title = f"{part}, {where}: share of {first}'s time"
        made.append(grid(title, cases, lambda of, all, f=first: both(of["ms"], all[f]["ms"])))
    for (part, ranks), cases in groups(found, "part", "ranks"):
        if part != "step":
            # Neither depends on the link.
            cases = [case for case in cases if case["link"] == cases[0]["link"]]
            title = f"{part}, P {ranks}: MiB on the wire, peak MiB"
            made.append(grid(title, cases, lambda of, _: f"{wire(of)}, {mib(of['peak'])}"))
    return made


def targets(found: dict) -> Sheet:
    """What was aimed at, next to what was reached."""
    sheet = Sheet("targets", ["", "case", "aim", "min / median", "reached"])

    def add(what: str, where: str, aim: float, value: str, reached: float) -> None:
        sheet.rows.append(
            [what, where, f"≤ {aim}", value, "yes" if round(reached, 2) <= aim else "no"]
        )

    for case in found["measured"]:
        of, where = case["contenders"], f"P {case['ranks']}, {case['link']}"
        if case["part"] == "step":
            for name, other in itertools.product(("fused", "fused, prefetch"), (FSDP, AHEAD)):
                if name in of:
                    ms, base = of[name]["ms"], of[other]["ms"]
                    what = f"step, ({name}) / ({other})"
                    add(what, where, AIMS["step"], both(ms, base), share(ms, base))
            continue
        where = f"{where}, {case['case']}"
        first = of[FIRST[case["part"]]]
        slow = case["link"] != "loopback"
        if "ours" in of and slow and case["part"] == "gather":
            ms, base = of["ours"]["ms"], first["ms"]
            add(
                "gather, time of gather-then-cast's",
                where,
                AIMS["time"],
                both(ms, base),
                share(ms, base),
            )
            bytes_ = of["ours"]["wire"] / first["wire"]
            add(
                "gather, bytes of gather-then-cast's", where, AIMS["bytes"], f"{bytes_:.3f}", bytes_
            )
        if "ours, coalesced" in of and "ours, one by one" in of:
            ms, base = of["ours, coalesced"]["ms"], of["ours, one by one"]["ms"]
            what = f"{case['part']}, coalesced / one by one"
            add(what, where, AIMS["coalesced"], both(ms, base), share(ms, base))
    return sheet


def notes(found: dict) -> list[str]:
    said = []
    if found["missing"]:
        said.append(f"Not in this build, and left out: {', '.join(found['missing'])}.")
    for case in found["measured"]:
        if case["part"] == "step":
            losses = [of["losses"] for name, of in case["contenders"].items() if name != "compute"]
            largest = max((max(x) - min(x)) / min(x) for x in zip(*losses, strict=True))
            agree = "within" if largest <= ROUNDING else "NOT within"
            said.append(
                f"Training step, P {case['ranks']}, {case['link']}: losses of all contenders in "
                f"{len(losses[0])} steps differ by at most {largest:.1e} of their size, {agree} "
                f"bfloat16's rounding ({ROUNDING:.1e})."
            )
    return said


def show(console, found: dict) -> None:
    for sheet in [*sheets(found), targets(found)]:
        if sheet.rows:
            console.print(sheet.rich())
    for line in notes(found):
        console.print(line)
    console.print(f"{found['minutes']:.1f} minutes, load {found['machine']['load'][0]:.2f} before")


def draw(file: Path, found: dict) -> bool:
    """Times as shares of the first contender's, over the size; False: no single tensors."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [
        (key, single)
        for key, cases in groups(found, "part", "ranks", "link")
        if key[0] != "step" and (single := [c for c in cases if c["case"] != MIXED])
    ]
    if not panels:
        return False
    links = list(dict.fromkeys(key[1:] for key, _ in panels))
    figure, axes = plt.subplots(
        2, len(links), figsize=(4 * len(links), 7), sharex=True, squeeze=False, layout="constrained"
    )
    for (part, ranks, link), cases in panels:
        axis = axes[list(FIRST).index(part)][links.index((ranks, link))]
        sizes = [float(case["case"].split()[0]) for case in cases]
        for name in cases[0]["contenders"]:
            shares = [
                share(c["contenders"][name]["ms"], c["contenders"][FIRST[part]]["ms"])
                for c in cases
            ]
            axis.plot(sizes, shares, marker=".", label=name, **STYLES.get(name, {}))
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axis.set_ylim(0, 1.6)
        axis.set_title(f"{part}, P {ranks}, {link}", fontsize=10)
        axis.legend(fontsize=7)
    for row in axes:
        row[0].set_ylabel("share of the first's median time")
    for axis in axes[-1]:
        axis.set_xlabel("MiB of the whole tensor in float32")
    figure.savefig(file, dpi=110)
    return True


def write(folder: Path, found: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gather_cast.json").write_text(json.dumps(found, indent=1, default=str) + "\n")
    machine = found["machine"] | {"load": found["machine"]["load"][0]}
    parts = ["# Cast, then gather\n", ABOUT.format(**found | machine)]
    parts += [f"{line}\n" for line in notes(found)]
    parts.append(targets(found).markdown())
    if draw(folder / "gather_cast.png", found):
        parts.append("![shares of the first contender's time](gather_cast.png)\n")
    parts += [sheet.markdown() for sheet in sheets(found)]
    (folder / "gather_cast.md").write_text("\n".join(parts))
