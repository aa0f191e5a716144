"""Draws who owns which tokens and heads before and after the exchange.

A grid of tokens and heads, once for the query heads, once for the kv heads; a colour is a rank. On
the left each rank has some tokens of all heads, on the right all tokens of some heads. What is
drawn is what the layout ops say, which all of deepsp uses: torch.ops.deepsp.token_split and
head_split. A kv head that several ranks' query heads read has stripes of all their colours: a copy
of it goes to each of them. Dark lines are the borders of the blocks that travel.

With --tree: who sees whom among completions of one prompt, in rows and folded.
With --documents: who holds and who computes what of documents that are dealt out.
With --keys: who computes which scores where keys travel instead, and which keys an indexer chose.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import bench
import torch

import deepsp

COLOURS = ["#4c78a8", "#f2a93b", "#59a76a", "#c9566b", "#8f6bb3", "#4fb3bf", "#9c755f", "#b5bd4c"]
GAP = 1  # columns between query heads and kv heads
DOCUMENTS = [110, 70, 9, 14, 5, 11, 7, 12, 4, 10, 16, 8]  # tokens of each


@dataclass
class Layout:
    tokens: list[int]  # of each rank
    heads: list[range]  # the query heads of each rank
    kv_heads: list[range]

    @classmethod
    def of(cls, tokens: int, heads: int, kv_heads: int, ranks: int) -> Layout:
        lens = torch.ops.deepsp.token_split(tokens, ranks)
        split = [torch.ops.deepsp.head_split(heads, kv_heads, ranks, r) for r in range(ranks)]
        return cls(
            list(lens),
            [range(begin, end) for begin, end, _, _ in split],
            [range(begin, end) for _, _, begin, end in split],
        )

    def sizes(self) -> tuple[int, int, int]:
        """Tokens, query heads, kv heads."""
        return sum(self.tokens), self.heads[-1].stop, self.kv_heads[-1].stop

    def first_token(self, rank: int) -> int:
        return sum(self.tokens[:rank])

    def readers(self, kv_head: int) -> list[int]:
        return [rank for rank, heads in enumerate(self.kv_heads) if kv_head in heads]


def striped(axes, x: float, y: float, width: float, height: float, ranks: list[int]) -> None:
    """A rectangle in the colours of all these ranks: diagonal stripes, where there are several."""
    from matplotlib.patches import Polygon, Rectangle

    frame = Rectangle((x, y), width, height, facecolor=COLOURS[ranks[0]], edgecolor="none")
    axes.add_patch(frame)
    if len(ranks) == 1:
        return
    stripe, stripes = 0.5, int((height + width) / 0.5) + 1
    for i in range(stripes):
        low = y - width + i * stripe
        corners = [(x, low), (x + width, low + width)]
        corners += [(a, b + stripe) for a, b in reversed(corners)]
        patch = Polygon(corners, facecolor=COLOURS[ranks[i % len(ranks)]], edgecolor="none")
        axes.add_patch(patch)
        patch.set_clip_path(frame)


def grid(axes, layout: Layout, title: str) -> None:
    """What both sides share: the cells, the borders of the blocks, the numbers, the names."""
    tokens, heads, kv_heads = layout.sizes()
    kv_at = heads + GAP
    for start, count, name in ((0, heads, "query heads"), (kv_at, kv_heads, "kv heads")):
        end = start + count
        axes.vlines(range(start, end + 1), 0, tokens, color="white", linewidth=0.6)
        axes.hlines(range(tokens + 1), start, end, color="white", linewidth=0.6)
        borders = [layout.first_token(rank) for rank in range(1, len(layout.tokens))]
        axes.hlines(borders, start, end, color="#333333", linewidth=1.4)
        axes.text((start + end) / 2, tokens + 1.5, name, ha="center", va="center")
    borders = [mine.start for mine in layout.heads[1:]]
    axes.vlines(borders, 0, tokens, color="#333333", linewidth=1.4)
    axes.set(xlim=(-0.1, kv_at + kv_heads + 0.1), ylim=(tokens + 0.1, -0.1), aspect="equal")
    at = [x + 0.5 for x in (*range(heads), *range(kv_at, kv_at + kv_heads))]
    axes.set_xticks(at, [*range(heads), *range(kv_heads)])
    axes.set_yticks([y + 0.5 for y in range(tokens)], range(tokens))
    axes.tick_params(length=0, labelsize=8, colors="#555555")
    axes.text(-0.2, -0.3, "tokens", ha="right", size=8, color="#555555")
    axes.spines[:].set_visible(False)
    axes.set_title(title, pad=24, weight="bold")


def draw(layout: Layout, file: Path) -> None:
    tokens, heads, kv_heads = layout.sizes()
    columns = heads + GAP + kv_heads
    cell, middle = 0.3, 5  # inches; columns
    shape = {
        "figsize": ((2 * columns + middle) * cell + 1.9, tokens * cell + 1.5),
        "width_ratios": (columns, middle, columns),
    }
    with bench.picture(file, 1, 3, dpi=130, **shape) as (_, (before, between, after)):
        draw_sides(layout, before, after)
        between.set(xlim=(0, 1), ylim=(0, 1))
        between.axis("off")
        for y, ends, name, what in (
            (0.65, (0, 1), "seq_to_heads", "q, k, v"),
            (0.35, (1, 0), "heads_to_seq", "attention's output"),
        ):
            arrow = {"arrowstyle": "-|>", "color": "#333333", "linewidth": 1.6}
            start, end = ((x, y) for x in ends)
            between.annotate("", xy=end, xytext=start, arrowprops=arrow | {"mutation_scale": 16})
            look = {"ha": "center", "size": 8.5}
            between.text(0.5, y + 0.02, name, va="bottom", family="monospace", **look)
            between.text(0.5, y - 0.03, what, va="top", **look)


def draw_sides(layout: Layout, before, after) -> None:
    tokens, heads, kv_heads = layout.sizes()
    kv_at = heads + GAP
    for rank, height in enumerate(layout.tokens):
        y = layout.first_token(rank)
        if height == 0:
            continue
        striped(before, 0, y, heads, height, [rank])
        striped(before, kv_at, y, kv_heads, height, [rank])
        look = {"va": "center", "color": COLOURS[rank], "weight": "bold"}
        before.text(-1.2, y + height / 2, f"rank {rank}", ha="right", **look)
    for rank, mine in enumerate(layout.heads):
        striped(after, mine.start, 0, len(mine), tokens, [rank])
        name = f"rank {rank}" if len(mine) > 1 else str(rank)
        look = {"va": "bottom", "color": COLOURS[rank], "weight": "bold"}
        after.text((mine.start + mine.stop) / 2, -0.25, name, ha="center", **look)
    for head in range(kv_heads):
        readers = layout.readers(head)
        striped(after, kv_at + head, 0, 1, tokens, readers)
        for i, rank in enumerate(readers):
            x = kv_at + head + (i + 0.5) / len(readers)
            look = {"va": "bottom", "color": COLOURS[rank], "weight": "bold"}
            after.text(x, -0.25, str(rank), ha="center", **look)
    grid(before, layout, "before: my tokens, all heads")
    grid(after, layout, "after: all tokens, my heads")


def draw_keys(tokens: int, ranks: int, chosen: int, file: Path) -> None:
    """Scores by query and key: a row has the colour of its rank, a chosen key a darker one."""
    lens = torch.ops.deepsp.token_split(tokens, ranks)
    owner = [rank for rank, n in enumerate(lens) for _ in range(n)]
    scores = torch.rand(tokens, tokens, generator=torch.Generator().manual_seed(3))
    with bench.picture(file, 1, 1, dpi=130, figsize=(5.4, 4.9)) as (_, axes):
        for query in range(tokens):
            best = scores[query, : query + 1].topk(min(chosen, query + 1)).indices.tolist()
            for key in range(query + 1):
                alpha = 1.0 if key in best else 0.18
                axes.fill_between(
                    (key, key + 0.92),
                    query,
                    query + 0.92,
                    color=COLOURS[owner[query]],
                    alpha=alpha,
                    lw=0,
                )
        for rank, count in enumerate(lens):
            first = sum(lens[:rank])
            look = {"color": COLOURS[rank], "weight": "bold"}
            axes.text(-0.6, first + count / 2, f"rank {rank}", ha="right", va="center", **look)
            axes.text(first + count / 2, -0.6, f"rank {rank}", ha="center", va="bottom", **look)
            if first:
                axes.hlines(first - 0.04, 0, tokens, color="#333333", linewidth=1)
                axes.vlines(first - 0.04, 0, tokens, color="#333333", linewidth=1)
        axes.set(xlim=(-0.1, tokens), ylim=(tokens, -0.1), aspect="equal")
        axes.set_xlabel("keys: gathered from all ranks")
        axes.set_ylabel("queries: each on its rank", labelpad=64)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
        axes.text(
            tokens * 0.98, tokens * 0.42, "later tokens:\nnot seen", ha="right", color="#777777"
        )


def draw_tree(file: Path) -> None:
    """A prompt with three completions: who sees whom in rows, and in the folded row."""
    prompt, completions = 6, (3, 2, 4)
    tree = deepsp.Segments([prompt, *completions], [-1, 0, 0, 0])
    alone = [n for c in completions for n in (prompt, c)]
    rows = deepsp.Segments(alone, [n - 1 if n % 2 else -1 for n in range(len(alone))])
    sizes = [sum(x.lengths) for x in (rows, tree)]
    with bench.picture(file, 1, 2, dpi=130, figsize=(10.5, 6), width_ratios=sizes) as (_, sides):
        for axes, shown, title in zip(
            sides, (rows, tree), ("rows: the prompt three times", "folded: once"), strict=True
        ):
            borders = shown.documents.tolist()
            for n, (begin, end, parent) in enumerate(borders):
                completion = n // 2 if shown is rows else n - 1
                colour = "#9a9a9a" if parent < 0 else COLOURS[completion]
                for query in range(begin, end):
                    seen = [(begin, query + 1), *([borders[parent][:2]] if parent >= 0 else [])]
                    for a, b in seen:
                        axes.fill_between((a, b - 0.06), query, query + 0.94, color=colour, lw=0)
                name = "prompt" if parent < 0 else f"completion {completion + 1}"
                look = {"color": colour, "weight": "bold", "size": 8.5, "va": "center"}
                axes.text(-0.5, (begin + end) / 2, name, ha="right", **look)
            total = sum(shown.lengths)
            axes.set(xlim=(0, total), ylim=(total, 0), aspect="equal", xticks=[], yticks=[])
            axes.set_title(f"{title}, {total} tokens", weight="bold")
            axes.set_xlabel("keys")
            axes.spines[:].set_visible(False)


def draw_documents(ranks: int, file: Path) -> None:
    """Draws the tokens that each rank holds, and the tokens and heads that it attends to."""
    from itertools import groupby

    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    deal = deepsp.deal_documents(DOCUMENTS, ranks, cost=(1.0, 0.02))
    document_of = [n for n, length in enumerate(DOCUMENTS) for _ in range(length)]

    def box(axes, x: float, rank: int, tokens: int, document: int) -> None:
        colour = colormaps["tab20"].colors[document % 20]
        look = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.8}
        axes.add_patch(Rectangle((x, rank + 0.12), tokens, 0.76, **look))

    with bench.picture(file, 1, 2, dpi=150, figsize=(11, 3.4)) as (_, (holds, computes)):
        for rank in range(ranks):
            x = 0
            for document, same in groupby(document_of[i] for i in deal.tokens(rank).tolist()):
                tokens = len(list(same))
                box(holds, x, rank, tokens, document)
                x += tokens
        left = 0
        for level, width in enumerate(deal.widths):
            ends = dict.fromkeys(range(0, ranks, width), left)  # by the block's first rank
            for document, (its_level, block) in enumerate(deal.places):
                if its_level == level:
                    for rank in range(block, block + width):
                        box(computes, ends[block], rank, DOCUMENTS[document], document)
                    ends[block] += DOCUMENTS[document]
            right = max(ends.values())
            if right > left:
                own = "own documents,\nall heads"
                text = own if width == 1 else f"1/{width} of\nthe heads"
                computes.text(left, 0, text, size=8, va="bottom")
                left = max(right, left + 38) + 5  # the caption is some 36 tokens wide
        for axes, title, most in (
            (holds, "tokens that a rank holds", max(deal.seq_lens)),
            (computes, "tokens that it attends to", left - 5),
        ):
            axes.set(xlim=(-1, most + 1), ylim=(ranks, -0.6), xlabel=title, xticks=[])
            axes.set_yticks([r + 0.5 for r in range(ranks)], [f"rank {r}" for r in range(ranks)])
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)


def main() -> None:
    parser = bench.parser_of(
        __doc__,
        tokens=(11, "of the whole sequence"),
        heads=(6, "query heads"),
        kv_heads=(2, "key and value heads"),
        ranks=(3, "that share the sequence"),
        output=(Path(__file__).parents[1] / "docs" / "ownership.png", "the picture"),
        keys=(0, "draw scores by query and key, of which as many are chosen for each query"),
        documents=(False, "draw documents of different lengths, dealt out over the ranks"),
        tree=(False, "draw completions of one prompt, and what they see"),
    )
    args = parser.parse_args()
    if not 1 <= args.ranks <= len(COLOURS):
        parser.error(f"--ranks {args.ranks}: 1 to {len(COLOURS)} have a colour")
    try:
        layout = Layout.of(args.tokens, args.heads, args.kv_heads, args.ranks)
    except ValueError as error:
        parser.error(str(error))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    if args.documents:
        draw_documents(args.ranks, args.output)
        return
    if args.tree:
        draw_tree(args.output)
        return
    if args.keys:
        draw_keys(args.tokens, args.ranks, args.keys, args.output)
        return
    draw(layout, args.output)
    print(f"tokens of each rank: {layout.tokens}")
    for rank, (q, kv) in enumerate(zip(layout.heads, layout.kv_heads, strict=True)):
        print(f"rank {rank}: query heads {list(q)}, kv heads {list(kv)}")
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
