"""Reductions over tokens by the compile pass, where a rank's part of a row is empty, masked, all
equal or infinite: values and gradients are those of one process."""

import copy
from math import inf, nan

import pytest
import torch
import torch.nn.functional as F
from lockstep import lockstep
from torch import nn

import deepsp

S, RANKS = 13, 3  # parts of 5, 4 and 4 tokens


def _weights(x):
    return torch.linspace(0.5, 1.5, x.size(1), dtype=x.dtype)[None, :, None].expand_as(x)


def _pooled(x):
    """One query, of a learned vector, say, over tokens with a mask that is added."""
    query = x.new_ones(x.size(0), 1, 1, 3)
    keys, mask = _weights(x)[:, None], x[..., 0].clamp(max=5)[:, None, None]
    return F.scaled_dot_product_attention(query, keys, x.nan_to_num(0, 0, 0)[:, None], mask)


REDUCTIONS = {
    "softmax": lambda x: x.softmax(1) * _weights(x),
    "log_softmax": lambda x: x.log_softmax(1).masked_fill(x.isinf(), 0) * _weights(x),
    "logsumexp": lambda x: x.logsumexp(1),
    "attention": _pooled,
    "amax": lambda x: x.amax(1),
    "amin of all": lambda x: x.amin((1, 2)),
    "max": lambda x: x.max(),
    "max and place": lambda x: x.max(1).values * x.max(1).indices,
    "min and place": lambda x: x.min(1).values,
    "argmax": lambda x: x.argmax(1) * x.mean(1),
    "topk": lambda x: x.topk(2, 1).values,
    "mean": lambda x: x.mean(1),
    "sum of rows, too": lambda x: x.sum((0, 1)),
    "norm": lambda x: x.norm(dim=1),
    "norm of order 1": lambda x: x.norm(1, dim=1),
    "norm of order 3": lambda x: torch.linalg.vector_norm(x, 3, dim=1),
    "largest": lambda x: torch.linalg.vector_norm(x, inf, dim=1),
    "smallest": lambda x: torch.linalg.vector_norm(x, -inf, dim=1),
    "normalize": lambda x: F.normalize(x, dim=1) * _weights(x),
    "var": lambda x: x.var(1),
    "std": lambda x: x.std(1),
    "std without correction": lambda x: x.std(1, correction=0),
    "prod": lambda x: x.prod(1),
    "nansum": lambda x: x.nansum(1),
    "nanmean": lambda x: x.nanmean(1),
    "mean of some": lambda x: (x * (x > 0)).sum(1).div((x > 0).sum(1)),
    "cumsum": lambda x: x.cumsum(1) * _weights(x),
    "logcumsumexp": lambda x: x.logcumsumexp(1) * _weights(x),
    "cummax": lambda x: x.cummax(1).values * _weights(x),
    "median": lambda x: x.median(1).values,
    "count": lambda x: x.count_nonzero(1) * x.mean(1),
    "any": lambda x: (x > 0).any(1) * x.mean(1),
    "all": lambda x: (x > 0).all(1) * x.mean(1),
}
# At an infinite element itself, a gradient is NaN in one process, too; other elements' may be here.
UNLIKE = {("infinite", n) for n in ("logsumexp", "log_softmax")}


class Reduced(nn.Module):
    """Each reduction of tokens of its own."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens = tokens
        self.embeds = nn.ModuleList(nn.Embedding(40, 3) for _ in REDUCTIONS)

    def forward(self, ids, put):
        results = []
        for embed, reduce in zip(self.embeds, REDUCTIONS.values(), strict=True):
            x = torch.where(put[..., None] == 0, embed(ids), put[..., None])[:, : self.tokens]
            results.append(reduce(x).sum())
        return torch.stack(results)


def _put(*places):
    put = torch.zeros(2, S, dtype=torch.float64)
    for row, begin, end, value in places:
        put[row, begin:end] = value
    return put


PARTS = {
    "plain": _put(),
    "a part masked": _put((0, 5, S, -inf)),
    "other parts masked": _put((0, 0, 5, -inf), (1, 9, S, -inf)),
    "a row masked": _put((0, 0, S, -inf)),
    "equal": _put((0, 0, S, 1.5), (1, 0, S, -1.5)),
    "infinite": _put((0, 3, 4, inf)),
    "not a number": _put((0, 3, 4, nan)),
    "huge": _put((0, 3, 4, 1e200), (1, 5, 9, -1e200)),
}


@pytest.mark.parametrize("tokens", [S, 5])  # those of one rank only: the others have none
def test_parts(tokens):
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = Reduced(tokens).double()
    model = copy.deepcopy(reference)
    compiled = lockstep(model, RANKS)
    ids = torch.randint(0, 40, (2, S))
    for part, put in PARTS.items():
        expected = reference(ids, put)
        expected.sum().backward()
        values = compiled(**deepsp.prepare_inputs({"ids": ids, "put": put}))
        values.sum().backward()
        for n, name in enumerate(REDUCTIONS):
            if (part, name) in UNLIKE:
                continue
            gradients = (m.embeds[n].weight.grad for m in (model, reference))
            pairs = [(values[n], expected[n]), tuple(gradients)]
            for x, y in pairs[: 1 if expected[n].isnan() else 2]:
                torch.testing.assert_close(
                    x,
                    y,
                    rtol=1e-9,
                    atol=1e-12,
                    equal_nan=True,
                    msg=lambda m, at=(part, name): f"{at}: {m}",
                )
        model.zero_grad()
        reference.zero_grad()
