"""Linear layers that sum over tokens. Other products have rows only."""

from __future__ import annotations

import torch

from deepsp import placement
from deepsp.compile.sharding.rules import Call, by_rows, refused, rule
from deepsp.compile.sharding.tokens import Tokens
from deepsp.placement import SUM, Row

aten = torch.ops.aten

refused("lstm gru rnn_tanh rnn_relu", "its recurrence goes from token to token")
refused("cov corrcoef", "it sums over tokens, and there is no rule for that")


@rule(aten.einsum.default)
def einsum(call: Call) -> Tokens | None:
    for letters in call["equation"].partition("->")[0].split(","):
        if any(letters.count(letter) > 1 for letter in letters if letter.isalpha()):
            call.refuse(
                f"expected each letter once in each operand, got {letters.strip()!r}; take the "
                "diagonal before, torch.diagonal(x, dim1=..., dim2=...)"
            )
    return by_rows(call)


@rule(aten.linear.default)
def linear(call: Call) -> Tokens | None:
    """Adds the bias once, after the sum over the ranks."""
    bias, graph = call["bias"], call.graph
    rows = placement.find(call.target).rows(call)
    for i, row in enumerate(rows):
        if row.outputs == SUM:
            rows[i] = Row(tuple(x for x in row.inputs if x[0] is not bias), SUM)
    tokens = by_rows(call, rows)

    def lower():
        total = graph.all_reduce(call.replaced(bias=None))
        return graph.call(aten.add.Tensor, total, graph.full(bias))

    if tokens is None and bias is not None:
        call.lower = lower
    return tokens
