"""FlexAttention: attention whose scores and mask are functions of positions. A rank has all tokens
of some heads, so that positions stay those of the full sequence and only the heads' numbers change.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._higher_order_ops.flex_attention import flex_attention as op
from torch.utils._pytree import tree_leaves

from deepsp.compile.sharding.nodes import copy_of, has_tensor
from deepsp.compile.sharding.rules import OUTERMOST, Call, rule
from deepsp.compile.sharding.tokens import Tokens, same

aten, ours = torch.ops.aten, torch.ops.deepsp


@rule(op)
def flex_attention(call: Call) -> list[Tokens] | None:
    q, k, v, _, block_mask, *_, scores_read, mask_reads = call.node.args
    of_q, of_k, of_v = (call.tokens(x) for x in (q, k, v))
    if not (of_q or of_k or of_v):
        for node in call.operands:
            call.want(node, None)
        return None
    if of_q is None:
        call.refuse("the query is replicated, but the key is sharded")
    if of_k and of_v and of_k != of_v:
        call.refuse("key and value are sharded along different dimensions or sequences")
    of_kv = of_k or of_v
    for tokens, x in ((of_q, q), (of_kv, k)):
        if tokens and (tokens.dim != 2 or not tokens.alone):
            call.refuse(
                f"expected {x.name} of shape [batch, heads, tokens, head_dim], got its tokens in "
                f"dimension {tokens.dim}, alone or merged with another{OUTERMOST}"
            )
    if call.shape(q)[1] < call.graph.size:
        call.refuse(
            f"expected at least as many query heads as ranks ({call.graph.size}), since a block "
            f"mask is for all queries of a head, got {call.shape(q)[1]}; use fewer ranks, or "
            "scaled_dot_product_attention"
        )
    for node in _tensors((block_mask, scores_read, mask_reads)):
        if call.graph.values[node].full is None:
            call.refuse(
                "expected its block_mask and what its score_mod and mask_mod read to be computed "
                f"from replicated inputs, got {node.name}, which is sharded"
            )
    call.lower = lambda: _distributed(call, of_q, of_kv)
    call.said = "distributed FlexAttention"
    return [of_q.at(2) for _ in call.node.meta["val"]]


def _tensors(args) -> list[fx.Node]:
    nodes = [n for n in tree_leaves(args) if isinstance(n, fx.Node)]
    return [n for n in nodes if has_tensor(n.meta.get("val"))]


def _distributed(call: Call, of_q: Tokens, of_kv: Tokens | None) -> fx.Node:
    graph = call.graph
    q, k, _, score_mod, block_mask, scale, options, *read = call.node.args
    by_heads = _exchanged(call, of_q, of_kv)
    heads, kv_heads = call.shape(q)[1], call.shape(k)[1]
    begin, end, _, _ = ours.head_split(heads, kv_heads, graph.size, graph.rank)
    *sizes_and_blocks, mask_mod = block_mask
    out = graph.call(
        op,
        *by_heads,
        _of_heads(call, score_mod, 2, begin),
        (
            *(_blocks(call, x, heads, begin, end) for x in sizes_and_blocks),
            _of_heads(call, mask_mod, 1, begin),
        ),
        *graph.mapped((scale, options), graph.full),
        *graph.mapped(tuple(read), graph.for_part),
    )
    # The output, and what softmax summed and saw at most: dropped where nobody asks for it.
    results = [
        _back(call, graph.call(operator.getitem, out, i), of_q, heads)
        for i in range(len(call.node.meta["val"]))
    ]
    return graph.call(tuple, results)


def _exchanged(call: Call, of_q: Tokens, of_kv: Tokens | None) -> list[fx.Node]:
    """All tokens of this rank's heads of q, k and v, [B, h, S, D]: where a rank's query heads don't
    read its kv heads evenly, those are repeated."""
    graph = call.graph
    q, k, v = call.node.args[:3]
    heads, kv_heads = call.shape(q)[1], call.shape(k)[1]

    def to_heads(nodes, tokens):
        parts = [graph.call(aten.transpose.int, graph.part(x, tokens), 1, 2) for x in nodes]
        lens = graph.lens(tokens)
        all_ = graph.call(ours.seq_to_heads.default, parts, lens, graph.rank, graph.name)
        return [graph.call(operator.getitem, all_, i) for i in range(len(nodes))]

    together = of_kv and of_q.sequence == of_kv.sequence
    if together and same(call.shape(q)[0], call.shape(k)[0]):
        q_all, *kv = to_heads((q, k, v), of_q)
    elif of_kv:
        # What one exchange would know of both: which heads of the key these queries read.
        q_all = to_heads((q,), of_q)[0]
        ranks = range(graph.size)
        if kv_heads < graph.size or any(
            list(ours.head_split(heads, kv_heads, graph.size, r))[2:]
            != list(ours.head_split(kv_heads, kv_heads, graph.size, r))[:2]
            for r in ranks
        ):
            call.refuse(
                "query and key belong to different sequences, and a rank's query heads read other "
                "kv heads than that rank would get; repeat the heads of key and value"
            )
        kv = to_heads((k, v), of_kv)
    else:
        q_all = to_heads((q,), of_q)[0]
        _, _, begin, end = ours.head_split(heads, kv_heads, graph.size, graph.rank)
        full = [graph.call(aten.transpose.int, graph.for_part(x), 1, 2) for x in (k, v)]
        kv = [graph.call(aten.narrow.default, x, 2, begin, end - begin) for x in full]
    split = (heads, kv_heads, 0, 1, graph.rank, graph.size)
    kv = [graph.call(ours.kv_of_chunk.default, [x], *split) for x in kv]
    return [graph.call(aten.transpose.int, x, 1, 2) for x in (q_all, *kv)]


def _back(call: Call, x: fx.Node, tokens: Tokens, heads: int) -> fx.Node:
    """[B, h, S(, D)] -> [B, H, S_r(, D)]."""
    graph = call.graph
    flat = graph.env[x].dim() == 3
    if flat:
        x = graph.call(aten.unsqueeze.default, x, -1)
    x = graph.call(aten.transpose.int, x, 1, 2)
    lens = graph.lens(tokens)
    x = graph.call(ours.heads_to_seq.default, [x], [heads], lens, graph.rank, graph.name)
    x = graph.call(aten.transpose.int, graph.call(operator.getitem, x, 0), 1, 2)
    return graph.call(aten.squeeze.dim, x, -1) if flat else x


def _blocks(call: Call, x, heads: int, begin: int, end: int):
    """What a block mask holds, for this rank's heads where it differs from head to head."""
    if not isinstance(x, fx.Node) or not has_tensor(x.meta.get("val")):
        return call.graph.mapped(x, call.graph.full)
    shape = call.shape(x)
    full = call.graph.for_part(x)
    if len(shape) < 3 or same(shape[1], 1):
        return full
    if not same(shape[1], heads):
        call.refuse(f"expected its block_mask to be for 1 or {heads} heads, got {shape[1]}")
    return call.graph.call(aten.narrow.default, full, 1, begin, end - begin)


def _of_heads(call: Call, node: fx.Node, argument: int, begin: int) -> fx.Node:
    """A score_mod or mask_mod whose head, its ``argument``, is counted from the first of all."""
    graph = call.graph
    full = graph.values[node].full
    module = copy_of(graph.env[full])
    copied = module.graph
    head = copied.find_nodes(op="placeholder")[argument]
    users = list(head.users)
    if not begin or not users:
        return full
    with copied.inserting_before(next(n for n in copied.nodes if n.op != "placeholder")):
        shifted = copied.call_function(operator.add, (head, begin))
    shifted.meta = dict(head.meta)
    for user in users:
        user.replace_input_with(head, shifted)
    module.recompile()
    return graph.module(module, node.name)
