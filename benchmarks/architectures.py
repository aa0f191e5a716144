"""Which of transformers' architectures train through the compile pass and through ``register()``.

Each tiny model makes a training step on 2 and on 3 ranks, which is compared with one process: the
loss and every gradient. Writes a table: equal, or why it is refused. Ends with an error if one is
accepted and wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

import bench
from tqdm import tqdm

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "lib"))

from architectures import ARCHITECTURES, through_compile_pass, through_register  # noqa: E402
from harness import Workers  # noqa: E402

HEAD = """# transformers' architectures

Made by `{command}` (`make zoo` takes 2 and 3
ranks). Each model is tiny, in float64 (Mixtral in float32), and makes one training step with
padding and labels, on {ranks} ranks, whose parts are uneven. "Equal": the loss and every
gradient are those of one process. Otherwise: why it is refused.

| model | `torch.compile(backend="deepsp")` | `register()` |
|---|---|---|
"""


def outcome(workers: Workers, function, name: str, length: int, *args) -> str:
    answers = workers.call(function, name, length, *args)
    broken = [text for fine, text in answers if not fine]
    if broken:
        last = broken[0].strip().splitlines()[-1]
        raise SystemExit(f"{name}: accepted and wrong, or broken: {last}\n{broken[0]}")
    return answers[0][1] or "equal"


def cell(outcomes: dict[int, str]) -> str:
    """Return what all numbers of ranks have in common, in a line."""
    texts = dict.fromkeys(outcomes.values())
    return " / ".join("equal" if t == "equal" else f"refused: {t}" for t in texts).replace("|", "/")


def main() -> None:
    args = bench.parser_of(
        __doc__,
        ranks=([2, 3], "group sizes"),
        inner=("aot_eager", "the compiler behind deepsp's pass"),
        only=([], "names of models; without any: all"),
        write=(Path, "file for the table"),
    ).parse_args()
    names = args.only or list(ARCHITECTURES)
    doors = {"compile": (through_compile_pass, None, args.inner), "register": (through_register,)}
    outcomes = {name: {door: {} for door in doors} for name in names}
    bar = tqdm(total=len(names) * len(args.ranks) * len(doors), unit="step")
    for ranks in args.ranks:
        workers = Workers(ranks, timeout=600)
        for name in names:
            for door, (function, *more) in doors.items():
                bar.set_description(f"{ranks} ranks, {name}, {door}")
                outcomes[name][door][ranks] = outcome(workers, function, name, 11 + ranks, *more)
                bar.update()
        workers.stop()
    bar.close()
    rows = [f"| {n} | {cell(x['compile'])} | {cell(x['register'])} |" for n, x in outcomes.items()]
    table = HEAD.format(
        command=f"benchmarks/architectures.py --inner {args.inner} "
        f"--ranks {' '.join(map(str, args.ranks))}",
        ranks=" and ".join(map(str, args.ranks)),
    )
    text = table + "\n".join(rows) + "\n"
    print(text)
    for door in doors:
        equal = sum(set(x[door].values()) == {"equal"} for x in outcomes.values())
        print(f"{door}: {equal} of {len(names)} equal")
    if args.write:
        args.write.write_text(text)


if __name__ == "__main__":
    main()
