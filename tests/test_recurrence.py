"""Recurrences over a sharded sequence against one process, float64: by heads and by state."""

import itertools

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from reference import draw, lens_of

import deepsp


def delta(query, key, value, g, beta, initial_state=None, output_final_state=False):
    """The gated delta rule, token by token."""
    readers = value.size(2) // key.size(2)
    query, key = (x.repeat_interleave(readers, 2) for x in (query, key))
    state = value.new_zeros(*value[:, 0].shape[:2], key.size(3), value.size(3))
    state = state if initial_state is None else initial_state
    out = []
    for t in range(value.size(1)):
        k, v = key[:, t], value[:, t]
        state = state * g[:, t, :, None, None].exp()
        error = (v - torch.einsum("bhk,bhkv->bhv", k, state)) * beta[:, t, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", k, error)
        out.append(torch.einsum("bhk,bhkv->bhv", query[:, t], state))
    return torch.stack(out, 1), state if output_final_state else None


def scan(x, B, C, dt, A, D, initial_state=None, output_final_state=False):
    """A state space with a decay for each head, token by token; D passes the input on."""
    readers = x.size(2) // B.size(2)
    B, C = (y.repeat_interleave(readers, 2) for y in (B, C))
    state = x.new_zeros(*x[:, 0].shape[:2], B.size(3), x.size(3))
    state = state if initial_state is None else initial_state
    out = []
    for t in range(x.size(1)):
        state = state * (dt[:, t] * A).exp()[..., None, None]
        state = state + torch.einsum("bhk,bhv->bhkv", B[:, t] * dt[:, t, :, None], x[:, t])
        out.append(torch.einsum("bhk,bhkv->bhv", C[:, t], state) + D[:, None] * x[:, t])
    return torch.stack(out, 1), state


def _log_decay(x, B, C, dt, A, D):
    return dt * A


def _read(x, B, C, dt, A, D):
    return C.repeat_interleave(x.size(2) // C.size(2), 2)


def _arguments(kind, batch, total, heads, groups):
    """The function, how the module is made, its arguments, and the names of those with tokens."""
    if kind == "delta":
        shapes = {"query": (groups, 3), "key": (groups, 3), "value": (heads, 5)}
        shapes |= {"g": (heads,), "beta": (heads,)}
        tokens = {n: draw(batch, total, *s, seed=i) for i, (n, s) in enumerate(shapes.items())}
        tokens["key"] = torch.nn.functional.normalize(tokens["key"], dim=3)
        tokens["g"], tokens["beta"] = -tokens["g"].abs(), tokens["beta"].sigmoid()
        return delta, {}, tokens, {}
    shapes = {"x": (heads, 5), "B": (groups, 3), "C": (groups, 3), "dt": (heads,)}
    tokens = {n: draw(batch, total, *s, seed=i) for i, (n, s) in enumerate(shapes.items())}
    tokens["dt"] = torch.nn.functional.softplus(tokens["dt"])
    fixed = {"A": -draw(heads, seed=7).abs(), "D": draw(heads, seed=8)}
    return scan, {"value": "x", "per_head": ("A", "D")}, tokens, fixed


def _documents(batch, total):
    """Borders anywhere, a document of one token, and tokens in none."""
    cuts = [[0, total // 2, total], [0, 1, total // 3, total - 1]]
    found = []
    for row in range(batch):
        ends = sorted(set(cuts[row % 2]))
        found += [[row * total + a, row * total + b] for a, b in itertools.pairwise(ends)]
    return torch.tensor(found)


def _alone(function, tokens, fixed, documents):
    """In one process; tokens that are in no document are one for each gap."""
    if documents is None:
        return function(**tokens, **fixed)[0]
    batch, total = next(iter(tokens.values())).shape[:2]
    rows = []
    for row in range(batch):
        ends = {0, total} | {int(e) - row * total for e in documents.flatten()}
        ends = sorted(e for e in ends if 0 <= e <= total)
        parts = [
            function(**{n: x[row : row + 1, a:b] for n, x in tokens.items()}, **fixed)[0]
            for a, b in itertools.pairwise(ends)
        ]
        rows.append(torch.cat(parts, 1))
    return torch.cat(rows)


def _equals(kind, state, short, heads, groups, packed, split):
    """``short``: with decays that are told, or a second run."""
    rank, size = dist.get_rank(), dist.get_world_size()
    batch, total = 2, 13
    lens = lens_of(split, total, size)
    function, how, tokens, fixed = _arguments(kind, batch, total, heads, groups)
    if short:
        how = how | {"decay": _log_decay, "read": _read}
    documents = _documents(batch, total) if packed else None
    module = deepsp.DistributedRecurrence(function, state=state, **how)
    full = {n: x.clone().requires_grad_() for n, x in (tokens | fixed).items()}
    mine = {n: x.split(lens, 1)[rank].clone().requires_grad_() for n, x in tokens.items()}
    own = {n: x.clone().requires_grad_() for n, x in fixed.items()}
    expected = _alone(
        function, {n: full[n] for n in tokens}, {n: full[n] for n in fixed}, documents
    )
    out = module(**mine, **own, documents=documents, seq_lens=lens)
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(out, expected.split(lens, 1)[rank], **close)
    grad = draw(*expected.shape, seed=9)
    gradients = torch.autograd.grad(expected, list(full.values()), grad)
    found = torch.autograd.grad(out, [*mine.values(), *own.values()], grad.split(lens, 1)[rank])
    for name, a, b in zip(full, found, gradients, strict=True):
        if name in fixed:
            dist.all_reduce(a)
        else:
            b = b.split(lens, 1)[rank]
        torch.testing.assert_close(a, b, **close, msg=lambda m, n=name: f"gradient of {n}: {m}")
    assert module.chosen == state if size > 1 else "heads"


CASES = [
    ("delta", "heads", False, 4, 2),
    ("delta", "heads", False, 5, 1),
    ("delta", "pass", False, 2, 1),
    ("scan", "heads", False, 6, 3),
    ("scan", "pass", False, 4, 2),
    ("scan", "pass", True, 2, 2),
]


@pytest.mark.messages
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("kind", "state", "short", "heads", "groups"), CASES)
def test_equals_one_process(kind, state, short, heads, groups, packed):
    for ranks in (1, 2, 3, 4):
        for split in ("split", "skewed", "empty"):
            on_ranks(ranks, _equals, kind, state, short, heads, groups, packed, split)
