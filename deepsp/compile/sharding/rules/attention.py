"""Attention: the op in which tokens meet."""

from __future__ import annotations

import operator

import torch
from torch import fx

from deepsp.compile.sharding import joined
from deepsp.compile.sharding.redistribute import movable
from deepsp.compile.sharding.rules import OUTERMOST, Call, by_rows, overloads, rule
from deepsp.compile.sharding.rules.reductions import log_softmax
from deepsp.compile.sharding.tokens import JOINED, Tokens, same
from deepsp.sequence.attention import parts

aten, ours = torch.ops.aten, torch.ops.deepsp

_CAUSAL = "is_causal is ambiguous for a query and a key of different lengths; pass attn_mask"


@rule(aten.scaled_dot_product_attention.default)
def attention(call: Call) -> Tokens:
    q, k, v = (call[name] for name in ("query", "key", "value"))
    ndim = len(call.shape(q))
    of_q, of_k, of_v = (t and t.plain for t in map(call.tokens, (q, k, v)))
    call.graph.attended |= {k, v}
    if of_k and of_v and movable(of_k, of_v):
        of_v = of_k
    if of_q and of_k and movable(of_q, of_k):
        of_k = of_v = of_q
    if of_k != of_v and call.is_fixed(k):
        call.refuse("key and value are sharded along different dimensions or sequences")
    if (of_q is not None and of_q.dim < ndim - 2) or not (of_q or of_k or of_v):
        return by_rows(call)
    of_k = of_k or of_v
    for tokens, x in ((of_q, q), (of_k, k)):
        if tokens is not None and (tokens.dim != len(call.shape(x)) - 2 or not tokens.is_whole):
            call.refuse(
                f"expected {x.name} of shape [batch, heads, tokens, head_dim], got its tokens in "
                f"dimension {tokens.dim}, alone or merged with another{OUTERMOST}"
            )
    if of_q is None:
        return _of_full(call, q, k, v, of_k)
    if of_k is None:
        return _to_full(call, q, k, v)
    if ndim not in (3, 4):
        call.refuse(
            f"expected the query to have 4 dimensions [batch, heads, tokens, head_dim], got {ndim}"
        )
    mask = call["attn_mask"]
    if mask is not None and call.is_fixed(mask):
        shape, of_mask = call.shape(mask), call.tokens(mask).plain
        if not movable(of_mask.at(0), of_k.at(0)) or of_mask.dim != len(shape) - 1:
            return _by_keys(call, q, k, v, of_q)
        call.gather(mask)  # a bias for each key, which keys make
    elif mask is not None:
        call.want(mask, None)
    if of_q.sequence != of_k.sequence and call["is_causal"]:
        call.refuse(_CAUSAL)
    if of_q.order == JOINED and call["is_causal"]:
        call.refuse(
            "its tokens are of several sequences that were concatenated, of which each rank has "
            "some, so causal attention is ambiguous; pass attn_mask"
        )
    pair = _distributed if of_q.sequence == of_k.sequence else _cross
    heads = call.shape(q)[-3]
    if pair is _cross and isinstance(heads, int) and heads < call.graph.size:
        return _by_keys(call, q, k, v, of_q)
    call.lower = lambda: pair(call, q, k, v, mask, of_q, of_k)
    call.decision = "distributed attention"
    return of_q.at(ndim - 2)


def _to_full(call: Call, q, k, v) -> Tokens:
    """Local queries, with keys and values that every rank has in full: no exchange."""
    if call["is_causal"]:
        call.refuse(_CAUSAL)
    call.want(k, None)
    call.want(v, None)
    mask, tokens = call["attn_mask"], call.tokens(q)
    if mask is not None:
        shape = call.shape(mask)
        dim = len(shape) - 2
        one = dim < 0 or (isinstance(shape[dim], int) and shape[dim] == 1)
        call.want(mask, None if one else tokens.at(dim))
    return tokens


def _by_keys(call: Call, q, k, v, of_q: Tokens) -> Tokens:
    """Queries stay, and keys and values are gathered: of a mask, each rank has the rows of its
    queries, whose keys an indexer chose, or there are fewer heads than ranks."""
    mask = call["attn_mask"]
    if mask is not None:
        shape, dim = call.shape(mask), len(call.shape(mask)) - 2
        of_mask = None if dim < 0 or same(shape[dim], 1) else of_q.at(dim)
        if call.is_fixed(mask) and not (of_mask and movable(call.tokens(mask), of_mask)):
            call.refuse(
                f"expected its mask, {mask.name}, to be computed from replicated inputs, or to "
                "have the tokens of the query in its second last dimension, got one computed from "
                "other sharded tokens"
            )
        call.want(mask, of_mask)
    if call["dropout_p"]:
        call.refuse("each rank has its queries' weights, and all would drop the same ones")
    for x in (k, v):
        call.gather(x) if call.is_fixed(x) else call.want(x, None)
    call.decision = "keys and values of all ranks, for this rank's queries"
    return of_q


def _of_full(call: Call, q, k, v, tokens: Tokens) -> None:
    """A query that every rank has in full, such as one token or latents, over local keys. Each rank
    attends to its own tokens, and the ranks' weighted values are summed."""
    if call["is_causal"]:
        call.refuse(_CAUSAL)
    if call["dropout_p"]:
        call.refuse("its query is replicated, and every rank would drop different weights")
    graph, mask, scale = call.graph, call["attn_mask"], call["scale"]

    def heads(x):
        """Repeats kv heads to as many as the query has."""
        x = graph.part(x, tokens)
        shape, times = graph.env[x].shape, 1
        if call["enable_gqa"]:
            times = call.shape(q)[-3] // shape[-3]
        return x if times == 1 else graph.call(aten.repeat_interleave.self_int, x, times, -3)

    def lower():
        dtype = call.node.meta["val"].dtype
        factor = call.shape(q)[-1] ** -0.5 if scale is None else scale
        keys = graph.call(aten.transpose.int, heads(k), -2, -1)
        scaled = graph.call(aten.mul.Scalar, graph.for_part(q), factor)
        scores = graph.call(aten.matmul.default, scaled, keys)
        if mask is not None:
            ndim = len(call.shape(mask))
            one = same(call.shape(mask)[-1], 1)
            seen = graph.for_part(mask) if one else graph.part(mask, tokens.at(ndim - 1))
            if graph.env[seen].dtype == torch.bool:
                hidden = graph.call(aten.logical_not.default, seen)
                scores = graph.call(aten.masked_fill.Scalar, scores, hidden, float("-inf"))
            else:
                scores = graph.call(aten.add.Tensor, scores, seen)
        # A query that sees nothing gets zeros.
        logs = log_softmax(graph, scores, graph.env[scores].dim() - 1, unseen=0)
        weights = graph.call(aten.exp.default, logs)
        weights = graph.call(aten.to.dtype, weights, dtype)
        return graph.all_reduce(graph.call(aten.matmul.default, weights, heads(v)))

    call.lower, call.decision = lower, "over the tokens of all ranks"
    return None


def _once(node: fx.Node, values, rebound) -> tuple[fx.Node, int]:
    """The tensor before its heads were repeated, and how often; else the node itself and 1."""

    def behind(n, *targets):
        while n.target in (aten.clone.default, aten.contiguous.default, aten.slice.Tensor) and (
            n.meta["val"].shape == n.args[0].meta["val"].shape
        ):
            n = n.args[0]
        return n if n.target in targets else None

    shape = node.meta["val"].shape
    if len(shape) != 4:
        return node, 1
    merged = behind(node, aten.reshape.default, aten.view.default, aten._unsafe_view.default)
    wide = merged and behind(merged.args[0], aten.expand.default)
    one = wide and behind(wide.args[0], aten.unsqueeze.default)
    if not one or one.args[1] not in (2, -3) or rebound & {node, merged, wide, one, one.args[0]}:
        return node, 1
    x, times = one.args[0], wide.meta["val"].shape[2]
    old = x.meta["val"].shape
    if len(old) != 4:
        return node, 1
    fits = (old[0], old[2], old[3]) == (shape[0], shape[2], shape[3])
    if not fits or not isinstance(times, int) or old[1] * times != shape[1]:
        return node, 1
    return (x, times) if values[x].local is not None else (node, 1)


def _by_tokens(call: Call, node, tokens: Tokens) -> fx.Node:
    """[B, H, S_r, D] or [H, S_r, D] -> [B, S_r, H, D]."""
    graph = call.graph
    x = graph.part(node, tokens)
    if len(call.shape(node)) == 3:
        x = graph.call(aten.unsqueeze.default, x, 0)
    return graph.call(aten.transpose.int, x, 1, 2)


def _back(call: Call, out: fx.Node) -> fx.Node:
    graph = call.graph
    out = graph.call(aten.transpose.int, out, 1, 2)
    return graph.call(aten.squeeze.dim, out, 0) if len(call.out) == 3 else out


def _mask(call: Call, mask, of_q: Tokens, of_k: Tokens):
    """The full mask, in the order of the ranks' tokens."""
    if mask is None:
        return None
    x, shape = call.operand(mask), call.shape(mask)
    for tokens, dim in ((of_q, len(shape) - 2), (of_k, len(shape) - 1)):
        if tokens.sequence.joined and dim >= 0 and not same(shape[dim], 1):
            x = joined.by_rank(call.graph, x, dim, tokens.sequence)
    if len(call.out) == 3 and len(call.shape(mask)) == 3:
        x = call.graph.call(aten.unsqueeze.default, x, 0)
    return x


def _distributed(call: Call, q, k, v, mask, of_q: Tokens, of_k: Tokens) -> fx.Node:
    graph, gqa = call.graph, call["enable_gqa"]
    (k1, times), (v1, again) = (_once(x, graph.values, graph.rebound) for x in (k, v))
    if times == again and times > 1 and not gqa:
        # Send each kv head once.
        k, v, gqa = k1, v1, True
    if same(call.shape(k)[-3], 1) and same(call.shape(v)[-3], 1):
        gqa = True  # a head that broadcasts
    # Softmax works on each head alone.
    heads = call.shape(q)[-3]
    if not isinstance(heads, int):
        call.refuse(f"expected a constant number of query heads, got {heads}")
    qkv = [_by_tokens(call, x, of_q) for x in (q, k, v)]
    slow = parts.by_tiles(graph.env[qkv[0]].device, graph.env[qkv[0]].dtype)
    out = graph.call(
        ours.distributed_attention.default,
        *qkv,
        _mask(call, mask, of_q, of_k),
        call["dropout_p"] or 0.0,
        bool(call["is_causal"]),
        call["scale"],
        bool(gqa),
        graph.chunks,
        graph.lens(of_q),
        graph.rank,
        graph.name,
        query_parts=parts.resolve(graph.query_parts, heads, graph.size, slow),
    )
    return _back(call, out)


def _cross(call: Call, q, k, v, mask, of_q: Tokens, of_k: Tokens) -> fx.Node:
    """Query and key of different sequences: each is exchanged with its own lengths."""
    graph = call.graph
    where = (graph.rank, graph.name)
    heads, kv_heads = call.shape(q)[-3], call.shape(k)[-3]
    if not isinstance(heads, int) or not same(heads, kv_heads):
        call.refuse(
            "query and key belong to different sequences and have different numbers of heads; "
            "repeat the heads of key and value"
        )
    q_all = graph.call(
        ours.seq_to_heads.default, [_by_tokens(call, q, of_q)], graph.lens(of_q), *where
    )
    kv_all = graph.call(
        ours.seq_to_heads.default,
        [_by_tokens(call, x, of_k) for x in (k, v)],
        graph.lens(of_k),
        *where,
    )
    take = [graph.call(operator.getitem, x, i) for x, i in ((q_all, 0), (kv_all, 0), (kv_all, 1))]
    by_heads = [graph.call(aten.transpose.int, x, 1, 2) for x in take]
    mask = _mask(call, mask, of_q, of_k)
    shape = [] if mask is None else graph.env[mask].shape
    if len(shape) > 2 and shape[-3] != 1:  # take this rank's heads
        begin, end, _, _ = ours.head_split(heads, heads, graph.size, graph.rank)
        mask = graph.call(aten.narrow.default, mask, -3, begin, end - begin)
    dropout = call["dropout_p"] or 0.0
    args = (*by_heads, mask, dropout, False)
    out = graph.call(aten.scaled_dot_product_attention.default, *args, scale=call["scale"])
    out = graph.call(aten.transpose.int, out, 1, 2)
    out = graph.call(ours.heads_to_seq.default, [out], [heads], graph.lens(of_q), *where)
    return _back(call, graph.call(operator.getitem, out, 0))


@rule(*overloads("_varlen_attn", "torch_attn"))
def varlen(call: Call) -> list[Tokens | None]:
    """``torch.nn.attention.varlen``: [rows * tokens, heads, head_dim], in documents whose borders
    every rank has: each rank computes all tokens of some heads."""
    graph, node = call.graph, call.node
    q, k, v = (call[name] for name in ("query", "key", "value"))
    tokens = call.tokens(q)
    if tokens is None or tokens.dim or tokens.order or not same(tokens.inner, 1):
        call.refuse("expected tokens in the first dimension of its query, in their order")
    if any(not call.is_fixed(x) or call.tokens(x) != tokens for x in (k, v)):
        call.refuse("its query, key and value are of different sequences")
    for name in ("cu_seq_q", "cu_seq_k", "seqused_k", "block_table"):
        if call[name] is not None and call.is_fixed(call[name]):
            call.refuse(f"expected {name} to be computed from inputs, got one of sharded tokens")
    if any(user.args[1] and user.users for user in node.users):
        call.refuse("it returns the logarithms of its sums; leave return_aux out")
    heads, kv_heads = (call.shape(x)[1] for x in (q, k))
    where = (graph.rank, graph.name)
    lens, rows = graph.lens(tokens), tokens.outer

    def lower():
        sizes = [[rows, tokens.sequence.lens[graph.rank], *call.shape(x)[1:]] for x in (q, k, v)]
        local = [
            graph.call(aten.reshape.default, call.operand(x), graph.shape(size))
            for x, size in zip((q, k, v), sizes, strict=True)
        ]
        every = graph.call(ours.seq_to_heads.default, local, lens, *where)
        q_, k_, v_ = (graph.item(every, i) for i in range(3))
        of_cell = heads, kv_heads, graph.size, graph.rank
        k_, v_ = (graph.call(ours._kv_of_cell.default, [x], *of_cell) for x in (k_, v_))
        flat = [graph.call(aten.flatten.using_ints, x, 0, 1) for x in (q_, k_, v_)]
        out = call.replaced(**dict(zip(("query", "key", "value"), flat, strict=True)))
        begin, end, _, _ = ours.head_split(*of_cell)
        size = [rows, tokens.length, end - begin, call.shape(q)[2]]
        out = graph.call(aten.reshape.default, graph.item(out, 0), graph.shape(size))
        out = graph.item(graph.call(ours.heads_to_seq.default, [out], [heads], lens, *where), 0)
        out = graph.call(aten.flatten.using_ints, out, 0, 1)
        unread = [
            graph.call(aten.empty.memory_format, graph.shape(x.shape), dtype=x.dtype)
            for x in node.meta["val"][1:]
        ]
        return graph.call(tuple, [out, *unread])

    call.lower, call.decision = lower, "distributed attention within documents"
    return [tokens, None, None]
