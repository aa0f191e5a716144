"""Which models train through the compile pass, and transformers' also through ``register()``.

Each tiny model of the corpus makes a training step on 2 and on 3 ranks, which is compared with one
process: the loss and every gradient. Writes a table: equal, or why it is refused. Goes through all
models, and ends with an error if one of them is accepted and wrong, or fails in another way.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import bench
from tqdm import tqdm

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "lib"))

from architectures import ARCHITECTURES, through_register  # noqa: E402
from corpus import entries, through_compile_pass  # noqa: E402
from harness import Workers, error_of  # noqa: E402

HEAD = """# Architectures

Look up here which models the [compile pass](compile.md) trains, and why it refuses the others.

Made by `{command}`
(`make zoo` takes 2 and 3 ranks). An entry is a tiny model, in float64 (a few are in float32: they
know no other dtype), which makes one training step on {ranks} ranks, whose parts are uneven.
Language models have padding and labels. "Equal": the loss and every gradient are those of one
process with the whole sequence. Otherwise: the op that is refused, and why.

| | models | equal by `torch.compile(backend="deepsp")` |
|---|---|---|
{summary}
"""
LONGEST = 170
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "LOGURU_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}


def outcome(workers: Workers, function, *args) -> tuple[str, str]:
    """Return what happened ("equal", "refused", "fault") and why."""
    answers = workers.call(function, *args)
    broken = [text for fine, text in answers if not fine]
    if broken:
        return "fault", broken[0]
    texts = sorted({text or "" for _, text in answers})
    if len(texts) > 1:
        return "fault", f"the ranks differ: {texts}"
    return ("refused", texts[0]) if texts[0] else ("equal", "")


def cell(outcomes: dict[int, tuple[str, str]]) -> str:
    """Return what all numbers of ranks have in common, in a line."""
    texts = [t if t == "equal" else f"{t}: {shortened(why)}" for t, why in outcomes.values()]
    return " / ".join(dict.fromkeys(texts)).replace("|", "/") or "-"


def shortened(why: str) -> str:
    why = why.strip().splitlines()[-1].removeprefix("deepsp can't shard ")
    why = why.replace(" over the sequence:", ":").split("; or let every rank")[0]
    return why if len(why) <= LONGEST else why[:LONGEST].rsplit(" ", 1)[0] + " …"


def document(groups: dict[str, str], outcomes: dict, ranks: list[int], options: str) -> str:
    """Return the page: how many are equal by group, and a table for each group."""
    equal = {n for n, x in outcomes.items() if {t for t, _ in x["pass"].values()} == {"equal"}}
    summary, tables = [], []
    for group in dict.fromkeys(groups.values()):
        names = [n for n in groups if groups[n] == group]
        summary.append(f"| {group} | {len(names)} | {len(equal.intersection(names))} |")
        register = any(outcomes[n]["register"] for n in names)
        head = ["model", "the compile pass", *(["`register()`"] if register else [])]
        rows = [[n, cell(outcomes[n]["pass"]), cell(outcomes[n]["register"])] for n in names]
        rows = [head, ["---"] * len(head), *(row[: len(head)] for row in rows)]
        tables.append("\n".join([f"## {group}", "", *(f"| {' | '.join(row)} |" for row in rows)]))
    percent = f"{100 * len(equal) / len(groups):.0f} %"
    summary.append(f"| all | {len(groups)} | {len(equal)} ({percent}) |")
    head = HEAD.format(
        command=f"benchmarks/architectures.py --ranks {' '.join(map(str, ranks))} {options}",
        ranks=" and on ".join(map(str, ranks)),
        summary="\n".join(summary),
    )
    return "\n\n".join([head.rstrip(), *tables]) + "\n"


def main() -> None:
    args = bench.parser_of(
        __doc__,
        ranks=([2, 3], "group sizes"),
        inner=(["aot_eager", "eager"], "the compiler behind deepsp's pass, for each group size"),
        symbols=(False, "lengths are symbols, as in a user's call: four times as long"),
        only=([], "words that are in the models' names; without any: all"),
        write=(Path, "file for the table"),
    ).parse_args()
    os.environ.update(QUIET)
    corpus = {
        name: entry
        for name, entry in entries().items()
        if not args.only or any(word in name for word in args.only)
    }
    outcomes = {name: {"pass": {}, "register": {}} for name in corpus}
    faults = []
    steps = sum(1 + (name in ARCHITECTURES) for name in corpus) * len(args.ranks)
    bar = tqdm(total=steps, unit="step")
    for ranks, inner in zip(args.ranks, args.inner, strict=True):
        workers = Workers(ranks, timeout=600)
        for name in corpus:
            length = 11 + ranks
            calls = {"pass": (through_compile_pass, name, length, inner, not args.symbols)}
            if name in ARCHITECTURES:
                calls["register"] = (through_register, name, length)
            for door, call in calls.items():
                bar.set_description(f"{ranks} ranks, {name}, {door}")
                what, why = outcomes[name][door][ranks] = outcome(workers, *call)
                if what != "equal" and door == "pass":
                    line = error_of(why) if what == "fault" else why
                    bar.write(f"{ranks} ranks, {name}: {what}: {shortened(line)}")
                if what == "fault":
                    faults.append(f"{name}, {ranks} ranks, {door}: {why}")
                    workers.stop()
                    workers = Workers(ranks, timeout=600)
                bar.update()
        workers.stop()
    bar.close()
    text = document(
        {name: entry.group for name, entry in corpus.items()},
        outcomes,
        args.ranks,
        f"--inner {' '.join(args.inner)}{' --symbols' * args.symbols}",
    )
    print(text)
    if faults:
        raise SystemExit("\n\n".join(["Accepted and wrong, or broken:", *faults]))
    if args.write:
        args.write.write_text(text)


if __name__ == "__main__":
    main()
