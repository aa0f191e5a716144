"""Ops in which every token depends on all others, feature by feature: scans, sorts, medians. Each
rank computes all tokens of some features, between two exchanges."""

from __future__ import annotations

import torch
from torch import fx

from deepsp.compile.sharding.rules import Call, along_tokens
from deepsp.compile.sharding.tokens import Tokens, product, same

aten, ours = torch.ops.aten, torch.ops.deepsp


@along_tokens(
    "cumprod cummax cummin logcumsumexp argsort median nanmedian kthvalue mode prod aminmax"
)
def of_all(call: Call, tokens: Tokens):
    """If there are fewer features than ranks, each rank has all of them, and computes in full."""
    x, graph, out = call.node.args[0], call.graph, call.node.meta["val"]
    shape, dim = call.shape(x), tokens.dim
    # [rows, tokens, features]
    others = [d for d in range(len(shape)) if d not in (0, dim)]
    features = product(shape[d] for d in others)
    if not isinstance(features, int) or features < graph.size:
        others = [d for d in range(len(shape)) if d != dim]
        features = product(shape[d] for d in others)
    rows = [d for d in range(len(shape)) if d not in (*others, dim)]
    several = isinstance(out, (tuple, list))
    call.decision = "all tokens of some features on each rank"
    apart = isinstance(features, int) and features >= graph.size
    if not (apart and isinstance(call["dim"], int) and tokens.plain.alone):
        call.lower = lambda: call.replaced(self=graph.all_gather(call.operand(x), shape, tokens))
        call.decision = "all tokens on each rank"
        return None
    order = [*rows, dim, *others]
    back = [order.index(d) for d in range(len(shape))]
    lens, where = graph.lens(tokens.plain), (graph.rank, graph.name)
    first = (out[0] if several else out).shape
    kept = len(first) == len(shape) and same(first[dim], shape[dim])
    sizes = [shape[d] for d in rows] or [1]

    def lower():
        x_ = graph.call(aten.permute.default, call.operand(x), order)
        mine = [*sizes, tokens.plain.sequence.lens[graph.rank], features, 1]
        x_ = graph.call(aten.reshape.default, x_, graph.shape(mine))
        x_ = graph.item(graph.call(ours.seq_to_heads.default, [x_], lens, *where), 0)
        named = {"self": x_, "dim": 1} | ({"keepdim": True} if "keepdim" in call.named else {})
        result = call.replaced(**named)
        results = [graph.item(result, i) for i in range(len(out))] if several else [result]
        results = [finished(y) for y in results]
        return graph.call(tuple, results) if several else results[0]

    def finished(y: fx.Node) -> fx.Node:
        if kept:
            y = graph.item(graph.call(ours.heads_to_seq.default, [y], [features], lens, *where), 0)
            count = tokens.plain.sequence.lens[graph.rank]
        else:
            counts = []
            for rank in range(graph.size):
                begin, end, _, _ = ours.head_split(features, features, graph.size, rank)
                counts.append(end - begin)
            y = graph.call(ours.all_gather.default, y, 2, counts, "replicated", *where)
            count = 1
        y = graph.call(
            aten.reshape.default,
            y,
            graph.shape([*(shape[d] if d != dim else count for d in order)]),
        )
        y = graph.call(aten.permute.default, y, back)
        return y if kept or call["keepdim"] else graph.call(aten.squeeze.dim, y, dim)

    call.lower = lower
    place = tokens.plain if kept else None
    return [place for _ in out] if several and kept else place
