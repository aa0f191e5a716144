"""Tokens sorted by the expert that they go to, as in mixtures of experts.

Each rank sorts its own tokens. The order, and each expert's number of tokens, differ by rank. Such
values (:class:`RankValue`) may only be used to sort tokens, to multiply the sorted ones, and to
undo the sort. Any other use is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from deepsp.compile.sharding.rules import Call, overloads, rule, rule_of_rank_values
from deepsp.compile.sharding.rules.all_tokens import of_all
from deepsp.compile.sharding.tokens import Tokens, quotient, same

aten = torch.ops.aten
ORDER, INVERSE, COUNTS, BLANK = "order", "inverse", "counts", "blank"
_SAME = {aten.to.dtype, aten._to_copy.default, aten.clone.default, aten.detach.default}
_DIVIDE = {aten.floor_divide.default, aten.floor_divide.Scalar}
_DIVIDE |= {aten.div.Tensor_mode, aten.div.Scalar_mode}
_BLANK = {aten.empty_like.default, aten.zeros_like.default}
_ARGSORT = {aten.argsort.default, aten.argsort.stable}


@dataclass(frozen=True)
class RankValue:
    """A value that differs by rank, since it is for the rank's own tokens; ``tokens``: where they
    are once sorted. An order counts groups of ``group`` neighbours."""

    kind: str
    tokens: Tokens | None = None
    group: int = 1


@rule(aten.sort.default, aten.sort.stable)
def sort(call: Call) -> list[Tokens]:
    x, tokens = call.node.args[0], call.one_of()
    if call["dim"] % len(call.shape(x)) != tokens.dim:
        return [tokens, tokens]
    if len(call.shape(x)) != 1:
        return of_all(call, tokens)
    if tokens.order is not None:
        call.refuse("it sorts tokens that were sorted")
    ordered = replace(tokens, order=call.node.name)
    call.graph.rank_values[call.node, 1] = RankValue(ORDER, ordered)
    return [ordered, ordered]


@rule(*overloads("histc bincount"))
def count(call: Call) -> None:
    call.one_of()
    if call.target._opname == "bincount" and not call["minlength"]:
        call.refuse("its number of bins depends on the values of all tokens; pass minlength")
    call.graph.rank_values[call.node] = RankValue(COUNTS)
    call.decision = "local tokens"
    return None


@rule_of_rank_values
def follow(call: Call) -> Tokens | None:
    """The rule for ops with an :class:`RankValue` operand."""
    graph, target = call.graph, call.target
    args = call.node.args
    sorted_by = {n: graph.rank_values[n] for n in call.operands if n in graph.rank_values}
    first = sorted_by.get(args[0]) if isinstance(args[0], fx.Node) else None

    def becomes(new: RankValue, lower=None) -> None:
        graph.rank_values[call.node] = new
        call.lower = lower or call.same_op

    kind = first.kind if first else None
    if kind and target in _SAME:
        return becomes(first)
    if kind and target in _BLANK:
        return becomes(RankValue(BLANK, first.tokens))
    if kind == COUNTS and target is aten.cumsum.default:
        return becomes(first)
    mode = call["rounding_mode"] is not None or target._opname == "floor_divide"
    if kind == ORDER and target in _DIVIDE and isinstance(args[1], int) and mode:
        return becomes(replace(first, group=first.group * args[1]))
    if kind == ORDER and target in _ARGSORT and first.group == 1:
        return becomes(RankValue(INVERSE, first.tokens))
    if kind == BLANK and target is aten.index_put.default and _is_inverse(call, sorted_by, first):
        return becomes(RankValue(INVERSE, first.tokens), lambda: _place(call, first.tokens))
    if target is aten.index.Tensor and len(args[1]) == 1:
        return _moved(call, sorted_by)
    if "grouped_mm" in target._opname and args[0] not in sorted_by:
        tokens = call.tokens(args[0])
        counts = [n for n, x in sorted_by.items() if x.kind == COUNTS]
        if tokens is not None and tokens.order is not None and len(sorted_by) == len(counts) == 1:
            return tokens
    call.refuse("it depends on how each rank has sorted its own tokens")


def _is_inverse(call: Call, sorted_by: dict, blank: RankValue) -> bool:
    """``blank[order] = arange(n)``."""
    _, indices, values = call.node.args[:3]
    order = sorted_by.get(indices[0]) if len(indices) == 1 else None
    counted = values.target is aten.arange.default and same(
        call.shape(values)[0], blank.tokens.full
    )
    if order is None or order.kind != ORDER or order.group != 1 or order.tokens != blank.tokens:
        return False
    return counted and not call["accumulate"]


def _place(call: Call, tokens: Tokens) -> fx.Node:
    graph = call.graph
    blank, (order,) = call.node.args[:2]
    like = graph.env[graph.values[blank].local]
    count = graph.int_(tokens.local(graph.rank))
    numbers = graph.call(aten.arange.default, count, dtype=like.dtype, device=like.device)
    local = [graph.values[n].local for n in (blank, order)]
    return graph.call(aten.index_put.default, local[0], [local[1]], numbers)


def _moved(call: Call, sorted_by: dict) -> Tokens:
    """Sorts tokens, or undoes the sort."""
    x, (index,) = call.node.args[:2]
    how, tokens = sorted_by.get(index), call.tokens(x)
    if how is not None and x not in sorted_by and tokens is not None and tokens.dim == 0:
        before = replace(how.tokens, order=None)
        inner = quotient(how.tokens.inner, how.group)
        if how.kind == ORDER and inner is not None and tokens == replace(before, inner=inner):
            return how.tokens
        if how.kind == INVERSE and tokens == how.tokens:
            return before
    call.refuse("it depends on how each rank has sorted its own tokens")
