"""Draws who holds and who computes what of documents that are dealt out: docs/mixed-lengths.png.

A colour is a document. On the left, the tokens of each rank; on the right, attention: the tokens of
each block's documents, and the heads that each rank computes of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import deepsp

LENGTHS = [110, 44, 9, 14, 5, 11, 7, 12, 4, 10, 16, 8]
RANKS = 4


def draw(file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    deal = deepsp.deal_documents(LENGTHS, RANKS, cost=(1.0, 0.02))
    colours = plt.get_cmap("tab20").colors
    figure, (holds, computes) = plt.subplots(1, 2, figsize=(11, 3.4), layout="constrained")

    def box(axes, x: float, y: float, width: float, height: float, document: int) -> None:
        look = {"facecolor": colours[document % 20], "edgecolor": "white", "linewidth": 0.8}
        axes.add_patch(Rectangle((x, y), width, height, **look))

    firsts = [sum(LENGTHS[:n]) for n in range(len(LENGTHS) + 1)]
    of_token = [n for n, length in enumerate(LENGTHS) for _ in range(length)]
    for rank in range(RANKS):
        at, tokens = 0, [of_token[i] for i in deal.tokens(rank).tolist()]
        while at < len(tokens):
            end = at
            while end < len(tokens) and tokens[end] == tokens[at]:
                end += 1
            box(holds, at, rank + 0.12, end - at, 0.76, tokens[at])
            at = end
    assert firsts[-1] == sum(deal.seq_lens)

    right = 0
    for level, width in enumerate(deal.widths):
        wide = 0
        for block in range(0, RANKS - width + 1, width):
            x = right
            for document, place in enumerate(deal.places):
                if place == (level, block):
                    for rank in range(block, block + width):
                        box(computes, x, rank + 0.12, LENGTHS[document], 0.76, document)
                    x += LENGTHS[document]
            wide = max(wide, x - right)
        if wide:
            text = "own documents, all heads" if width == 1 else f"1/{width} of the heads"
            computes.text(right, -0.12, text, size=8, va="bottom")
            right += wide + 3
    for axes, title, most in (
        (holds, "tokens that a rank holds", max(deal.seq_lens)),
        (computes, "tokens that it attends to", right),
    ):
        axes.set(xlim=(-1, most + 1), ylim=(RANKS, -0.6), xlabel=title)
        axes.set_yticks([r + 0.5 for r in range(RANKS)], [f"rank {r}" for r in range(RANKS)])
        axes.set_xticks([])
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(__file__).parent.parent / "docs" / "mixed-lengths.png"
    parser.add_argument("--file", type=Path, default=default)
    draw(parser.parse_args().file)


if __name__ == "__main__":
    main()
