"""FlexAttention: attention whose scores and mask are functions of positions. A rank has all tokens
of some heads, so positions stay those of the full sequence, and only head numbers are shifted.
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
from deepsp.sequence.attention import parts

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
    query_parts = _query_parts(call, of_q, of_kv)
    for node in _tensors((block_mask, scores_read, mask_reads)):
        if call.graph.values[node].full is None:
            call.refuse(
                "expected its block_mask and what its score_mod and mask_mod read to be computed "
                f"from replicated inputs, got {node.name}, which is sharded"
            )
    call.lower = lambda: (
        _distributed(call, of_q, of_kv) if query_parts == 1 else _of_cells(call, of_q, query_parts)
    )
    call.decision = "distributed FlexAttention"
    return [of_q.at(2) for _ in call.node.meta["val"]]


def _tensors(args) -> list[fx.Node]:
    nodes = [n for n in tree_leaves(args) if isinstance(n, fx.Node)]
    return [n for n in nodes if has_tensor(n.meta.get("val"))]


def _query_parts(call: Call, of_q: Tokens, of_kv: Tokens | None) -> int:
    """``query_parts`` for the ops. Heads stay whole if possible: a block mask is for full rows."""
    graph, heads = call.graph, call.shape(call.node.args[0])[1]
    if graph.query_parts in ("auto", 1) and heads >= graph.size:
        return 1
    query_parts = parts.resolve(graph.query_parts, heads, graph.size)
    together = of_kv is not None and of_q.sequence == of_kv.sequence
    if not together or not same(call.shape(call.node.args[0])[0], call.shape(call.node.args[1])[0]):
        call.refuse(
            f"expected query and key of the same sequence where ranks share heads ({heads} query "
            f"heads on {graph.size} ranks), got others; use fewer ranks"
        )
    if any(not isinstance(n, int) for n in graph.lens(of_q)):
        call.refuse(
            f"expected lengths known when it is compiled where ranks share heads ({heads} query "
            f"heads on {graph.size} ranks), got symbolic ones; pass dynamic=False to torch.compile"
        )
    return query_parts


def _of_cells(call: Call, of_q: Tokens, query_parts: int) -> fx.Node:
    """If a head's queries are split: one FlexAttention for each range of queries of each cell."""
    graph = call.graph
    q, k, v, score_mod, block_mask, scale, options, *read = call.node.args
    lens, (rank, size, name) = graph.lens(of_q), (graph.rank, graph.size, graph.name)
    shapes = [call.shape(x) for x in (q, k, v)]
    heads, dims = [[shape[d] for shape in shapes] for d in (1, 3)]
    how = {"query_parts": query_parts}
    local = [graph.call(aten.transpose.int, graph.part(x, of_q), 1, 2) for x in (q, k, v)]
    arriving = graph.call(ours.seq_to_heads_start.default, local, lens, 1, False, rank, name, **how)
    buffer = graph.call(operator.getitem, arriving, 0)
    arrived = graph.call(
        ours.seq_to_heads_wait.default,
        buffer,
        heads,
        dims,
        shapes[0][0],
        lens,
        0,
        1,
        rank,
        name,
        **how,
    )
    cells = parts.cells_of(heads[0], sum(lens), query_parts, size, rank)
    kv = [graph.call(operator.getitem, arrived, len(cells) + i) for i in range(2)]
    seen = _Blocks(call, block_mask)
    by_cell = []
    for i, cell in enumerate(cells):
        where = (*heads[:2], size, rank, 0, 1, query_parts, i)
        of_cell = [
            graph.call(aten.transpose.int, x, 1, 2)
            for x in (
                graph.call(operator.getitem, arrived, i),
                *(graph.call(ours._kv_of_cell.default, [x], *where) for x in kv),
            )
        ]
        results_of_ranges, row = [], 0
        for begin, end in [r for r in cell.queries if r[0] < r[1]] or cell.queries[:1]:
            queries = graph.call(aten.narrow.default, of_cell[0], 2, row, end - begin)
            row += end - begin
            of_range = (queries, *of_cell[1:])
            if begin == end:
                results_of_ranges.append(_of_none(call, *of_range))
                continue
            out = graph.call(
                op,
                *of_range,
                _shifted(call, score_mod, {2: cell.heads[0], 3: begin}),
                (
                    *seen.of(cell.heads, begin, end),
                    _shifted(call, block_mask[-1], {1: cell.heads[0], 2: begin}),
                ),
                *graph.mapped((scale, options), graph.full),
                *graph.mapped(tuple(read), graph.for_part),
            )
            results = range(len(call.node.meta["val"]))
            results_of_ranges.append([graph.call(operator.getitem, out, n) for n in results])
        by_cell.append(
            [
                one[0] if len(one) == 1 else graph.call(aten.cat.default, list(one), 2)
                for one in zip(*results_of_ranges, strict=True)
            ]
        )
    results = [
        _back(call, of_cells, of_q, heads[0], query_parts)
        for of_cells in zip(*by_cell, strict=True)
    ]
    return graph.call(tuple, results)


def _of_none(call: Call, q: fx.Node, k: fx.Node, v: fx.Node) -> list[fx.Node]:
    """Empty results that depend on k and v, because other ranks wait for their gradients."""
    graph = call.graph
    times = graph.env[q].shape[1] // graph.env[k].shape[1]
    k, v = (graph.call(aten.repeat_interleave.self_int, x, times, 1) for x in (k, v))
    scores = graph.call(aten.matmul.default, q, graph.call(aten.transpose.int, k, -2, -1))
    sums = graph.call(aten.sum.dim_IntList, scores, [-1])
    return [graph.call(aten.matmul.default, scores, v), sums, sums][: len(call.node.meta["val"])]


class _Blocks:
    """The blocks of keys that queries see, for some heads and a range of queries."""

    def __init__(self, call: Call, block_mask: tuple):
        self.call = call
        names = ("keys", "counts", "indices", "full_counts", "full_indices")
        self.lists = dict(zip(names, block_mask[1:6], strict=True))
        *_, self.q_size, self.kv_size, mask_mod = block_mask
        self.others = block_mask[10:-3]
        function = call.graph.env[call.graph.values[mask_mod].full].graph
        of_key = function.find_nodes(op="placeholder")[3]
        if not of_key.users and call.shape(self.lists["counts"])[-1] > 1:
            call.refuse(
                "expected a block_mask whose mask_mod says which keys are seen where ranks share "
                "heads, since a rank's queries may lie across two blocks, got blocks alone; make "
                "it by create_block_mask, or use at most as many ranks as query heads"
            )

    def of(self, heads: tuple[int, int], begin: int, end: int) -> tuple:
        """The entries of a block mask, without mask_mod."""
        graph = self.call.graph
        seen = self._seen("counts", "indices", heads)
        if self.lists["full_counts"] is not None:
            full = self._seen("full_counts", "full_indices", heads)
            seen = graph.call(aten.logical_or.default, seen, full)
        first, last = begin // self.q_size, -(-end // self.q_size)
        count = -(-(end - begin) // self.q_size)
        rows = graph.call(aten.narrow.default, seen, 2, first, last - first)
        if begin % self.q_size:  # each new block straddles two old ones
            below = graph.call(aten.narrow.default, rows, 2, 1, last - first - 1)
            below = graph.call(aten.constant_pad_nd.default, below, [0, 0, 0, 1])
            rows = graph.call(aten.logical_or.default, rows, below)
            rows = graph.call(aten.narrow.default, rows, 2, 0, count)
        other = graph.call(aten.transpose.int, rows, 2, 3)
        lists = (*self._listed(rows), None, None, *self._listed(other), None, None)
        none = [None] * len(self.others)
        return (end - begin, self.lists["keys"], *lists, *none, self.q_size, self.kv_size)

    def _seen(self, counts: str, indices: str, heads: tuple[int, int]) -> fx.Node:
        """[B, H, blocks of queries, blocks of keys]: whether a key block is listed."""
        call, graph = self.call, self.call.graph
        total = call.shape(call.node.args[0])[1]
        counts, indices = (_blocks(call, self.lists[x], total, *heads) for x in (counts, indices))
        blocks = graph.env[indices].shape[-1]
        device = graph.env[indices].device
        numbers = graph.call(aten.arange.default, blocks, device=device)
        listed = graph.call(aten.lt.Tensor, numbers, graph.call(aten.unsqueeze.default, counts, -1))
        none = graph.call(aten.zeros_like.default, listed)
        index = graph.call(aten.to.dtype, indices, torch.int64)
        added = graph.call(
            aten.scatter_add.default,
            graph.call(aten.to.dtype, none, torch.int32),
            -1,
            index,
            graph.call(aten.to.dtype, listed, torch.int32),
        )
        return graph.call(aten.gt.Scalar, added, 0)

    def _listed(self, seen: fx.Node) -> list[fx.Node]:
        """The number of blocks that each row sees, and their indices before all others."""
        graph = self.call.graph
        numbers = graph.call(aten.to.dtype, seen, torch.int32)
        counts = graph.call(aten.sum.dim_IntList, numbers, [-1], dtype=torch.int32)
        order = graph.call(aten.argsort.stable, numbers, stable=True, dim=-1, descending=True)
        order = graph.call(aten.to.dtype, order, torch.int32)
        return [counts, graph.call(aten.contiguous.default, order)]


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
        _shifted(call, score_mod, {2: begin}),
        (
            *(_blocks(call, x, heads, begin, end) for x in sizes_and_blocks),
            _shifted(call, mask_mod, {1: begin}),
        ),
        *graph.mapped((scale, options), graph.full),
        *graph.mapped(tuple(read), graph.for_part),
    )
    # The output, and softmax's sum and maximum. Unused ones are dropped.
    results = [
        _back(call, [graph.call(operator.getitem, out, i)], of_q, heads)
        for i in range(len(call.node.meta["val"]))
    ]
    return graph.call(tuple, results)


def _exchanged(call: Call, of_q: Tokens, of_kv: Tokens | None) -> list[fx.Node]:
    """All tokens of this rank's heads of q, k and v, [B, h, S, D]. If the query heads don't read
    the kv heads evenly, kv heads are repeated."""
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
        # Two exchanges don't know which kv heads the queries read, so these must agree.
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
    kv = [
        graph.call(ours._kv_of_cell.default, [x], heads, kv_heads, graph.size, graph.rank)
        for x in kv
    ]
    return [graph.call(aten.transpose.int, x, 1, 2) for x in (q_all, *kv)]


def _back(call: Call, outs, tokens: Tokens, heads: int, query_parts: int = 1) -> fx.Node:
    """Exchanges the cells' results, [B, h, n(, D)] -> [B, H, S_r(, D)]."""
    graph = call.graph
    flat = graph.env[outs[0]].dim() == 3
    if flat:
        outs = [graph.call(aten.unsqueeze.default, x, -1) for x in outs]
    outs = [graph.call(aten.transpose.int, x, 1, 2) for x in outs]
    batch, dim = graph.env[outs[0]].shape[0], graph.env[outs[0]].shape[3]
    where = (graph.lens(tokens), graph.rank, graph.name)
    if query_parts == 1:
        x = graph.call(ours.heads_to_seq.default, outs, [heads], *where)
    else:
        lens, rank, name = where
        leaving = graph.call(
            ours.heads_to_seq_start.default,
            outs,
            [heads],
            lens,
            0,
            1,
            rank,
            name,
            query_parts=query_parts,
        )
        x = graph.call(
            ours.heads_to_seq_wait.default,
            [leaving],
            [heads],
            [dim],
            batch,
            *where,
            query_parts=query_parts,
        )
    x = graph.call(aten.transpose.int, graph.call(operator.getitem, x, 0), 1, 2)
    return graph.call(aten.squeeze.dim, x, -1) if flat else x


def _blocks(call: Call, x, heads: int, begin: int, end: int):
    """An entry of a block mask, narrowed to this rank's heads if it differs by head."""
    if not isinstance(x, fx.Node) or not has_tensor(x.meta.get("val")):
        return call.graph.mapped(x, call.graph.full)
    shape = call.shape(x)
    full = call.graph.for_part(x)
    if len(shape) < 3 or same(shape[1], 1):
        return full
    if not same(shape[1], heads):
        call.refuse(f"expected its block_mask to be for 1 or {heads} heads, got {shape[1]}")
    return call.graph.call(aten.narrow.default, full, 1, begin, end - begin)


def _shifted(call: Call, node: fx.Node, shifts: dict[int, int]) -> fx.Node:
    """A score_mod or mask_mod with a number added to some of its arguments (head, query index)."""
    graph = call.graph
    full = graph.values[node].full
    module = copy_of(graph.env[full])
    copied = module.graph
    placeholders = copied.find_nodes(op="placeholder")
    shifts = {placeholders[i]: n for i, n in shifts.items() if n and placeholders[i].users}
    if not shifts:
        return full
    for argument, shift in shifts.items():
        users = list(argument.users)
        with copied.inserting_before(next(n for n in copied.nodes if n.op != "placeholder")):
            shifted = copied.call_function(operator.add, (argument, shift))
        shifted.meta = dict(argument.meta)
        for user in users:
            user.replace_input_with(argument, shifted)
    module.recompile()
    return graph.attribute(module, node.name)
