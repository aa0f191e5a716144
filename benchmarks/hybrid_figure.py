"""Draws what recurrences exchange by heads and by state: docs/hybrid.png.

A grid of tokens and heads; a colour is a rank. An arrow is a run of the recurrence, from the first
token that a rank has of a head to the last one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ownership import COLOURS

TOKENS, HEADS, RANKS = 9, 6, 3


def grid(axes, x: float, by_heads: bool, title: str) -> None:
    """Whose cells these are, and the runs over them."""
    from matplotlib.patches import Rectangle

    for token in range(TOKENS):
        for head in range(HEADS):
            rank = head * RANKS // HEADS if by_heads else token * RANKS // TOKENS
            cell = Rectangle((x + head, token), 1, 1, facecolor=COLOURS[rank], edgecolor="white")
            axes.add_patch(cell)
    axes.text(x + HEADS / 2, -0.5, title, ha="center", va="bottom", size=9)


def runs(axes, x: float, begin: float, end: float) -> None:
    for head in range(HEADS):
        look = {"arrowstyle": "-|>", "color": "white", "linewidth": 1.6}
        ends = (x + head + 0.5, end - 0.15), (x + head + 0.5, begin + 0.15)
        axes.annotate("", *ends, arrowprops=look)


def exchange(axes, x: float, text: str) -> None:
    look = {"arrowstyle": "-|>", "color": "#333333", "linewidth": 1.6}
    axes.annotate("", (x + 2.4, TOKENS / 2), (x + 0.2, TOKENS / 2), arrowprops=look)
    axes.text(x + 1.3, TOKENS / 2 - 0.4, text, ha="center", va="bottom", size=8, color="#333333")


def draw(file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    figure, axes = plt.subplots(figsize=(11, 3.6), layout="constrained")
    step = HEADS + 2.6
    for place, all_tokens in enumerate((False, True, False)):
        title = "all tokens, my heads" if all_tokens else "my tokens, all heads"
        grid(axes, place * step, all_tokens, title)
    runs(axes, step, 0, TOKENS)
    exchange(axes, HEADS, "inputs")
    exchange(axes, step + HEADS, "output")
    for rank in range(RANKS):
        y = (rank + 0.5) * TOKENS / RANKS
        look = {"ha": "right", "va": "center", "weight": "bold", "color": COLOURS[rank]}
        axes.text(-0.3, y, f"rank {rank}", **look)

    x = 3 * step + 1.5
    grid(axes, x, False, "my tokens, all heads")
    for rank in range(RANKS):
        end = (rank + 1) * TOKENS / RANKS
        runs(axes, x, rank * TOKENS / RANKS, end)
        if rank + 1 == RANKS:
            continue
        middle = x + HEADS + 2.6 - rank  # of the box, and of the line that leaves it
        axes.add_patch(Rectangle((middle - 0.4, end - 1.1), 0.8, 0.8, facecolor=COLOURS[rank]))
        for other in range(rank + 1, RANKS):
            y = (other + 0.3 + 0.4 * rank) * TOKENS / RANKS
            look = {"color": COLOURS[rank], "linewidth": 1.6}
            axes.plot([middle, middle], [end - 0.3, y], **look)
            axes.annotate("", (x + HEADS + 0.1, y), (middle + 0.05, y),
                          arrowprops={"arrowstyle": "-|>", **look})  # fmt: skip
    note = "what a rank's tokens\ndo to the state"
    axes.text(x + HEADS + 0.4, 1.4, note, size=8, color="#333333", va="bottom")
    for title, middle in (("by heads", step + HEADS / 2), ("by state", x + HEADS / 2)):
        axes.text(middle, -1.7, title, ha="center", va="bottom", weight="bold", size=12)
    axes.set(xlim=(-2.6, x + HEADS + 5.5), ylim=(TOKENS + 0.2, -2.8), aspect="equal")
    axes.axis("off")
    figure.savefig(file, dpi=110, facecolor="white")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parents[1] / "docs" / "hybrid.png"
    parser.add_argument("--output", type=Path, metavar="FILE", default=default,
                        help="the picture (default: docs/hybrid.png)")  # fmt: skip
    draw(parser.parse_args().output)


if __name__ == "__main__":
    main()
