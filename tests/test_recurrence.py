"""Recurrences over a sharded sequence against one process, float64: by heads and by state."""

import itertools

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from reference import draw, lens_of, sent

import deepsp
from deepsp.sequence.recurrence.module import bytes_by_heads, bytes_by_state


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
    if kind == "complex":  # as in LRU and S4D: states turn
        tokens = {
            n: torch.complex(x, draw(*x.shape, seed=10 + i))
            for i, (n, x) in enumerate(tokens.items())
        }
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
    grad = draw(*expected.shape, seed=9).to(expected.dtype)
    gradients = torch.autograd.grad(expected, list(full.values()), grad)
    found = torch.autograd.grad(out, [*mine.values(), *own.values()], grad.split(lens, 1)[rank])
    for name, a, b in zip(full, found, gradients, strict=True):
        if name in fixed:
            dist.all_reduce(torch.view_as_real(a) if a.is_complex() else a)
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
    ("complex", "heads", False, 5, 1),
    ("complex", "pass", False, 4, 2),
    ("complex", "pass", True, 2, 2),
]


@pytest.mark.messages
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("kind", "state", "short", "heads", "groups"), CASES)
def test_equals_one_process(kind, state, short, heads, groups, packed):
    for ranks in (1, 2, 3, 4):
        for split in ("split", "skewed", "empty"):
            on_ranks(ranks, _equals, kind, state, short, heads, groups, packed, split)


# ------------------------------------------------------------------------------ what travels


def _bytes(kind, state):
    """What ranks receive is what the docs say; ranks have other lengths."""
    lens = [5, 0, 7, 3][: dist.get_world_size()]
    rank, size = dist.get_rank(), len(lens)
    function, how, tokens, fixed = _arguments(kind, 2, sum(lens), 4, 2)
    tokens = {n: x.float() for n, x in tokens.items()}
    tokens["value" if kind == "delta" else "B"] = tokens.pop("value" if kind == "delta" else "B")
    fixed = {n: x.float() for n, x in fixed.items()}
    module = deepsp.DistributedRecurrence(function, state=state, **how)
    mine = {n: x.split(lens, 1)[rank] for n, x in tokens.items()}
    module(**mine, **fixed, seq_lens=lens)  # compares
    everyone = [None] * size
    dist.all_gather_object(everyone, sum(sent(lambda: module(**mine, **fixed, seq_lens=lens))))
    name = how.get("value", "value")
    expected = (
        bytes_by_heads(tokens, name, 5, lens)
        if state == "heads"
        else bytes_by_state(2, 4, 3 * 3 + 3 * 5, size)
    )
    assert sum(everyone) == expected


@pytest.mark.parametrize("state", ["heads", "pass"])
@pytest.mark.parametrize("kind", ["delta", "scan"])
def test_bytes(kind, state):
    on_ranks(3, _bytes, kind, state, apart="messages")


def _dtypes():
    """Decays in float32 beside 16-bit values; shared groups in a dtype of their own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    _, how, full, fixed = _arguments("scan", 1, 12, 4, 2)
    wide = {n: x.bfloat16().double() for n, x in full.items()}
    for kept in ("dt", "B"):
        dtypes = dict.fromkeys(full, torch.bfloat16) | {kept: torch.float32}
        mine = {
            n: x.tensor_split(size, 1)[rank].to(dtypes[n]).requires_grad_() for n, x in wide.items()
        }

        def run(x, B, C, dt, A, D, dtypes=dtypes):
            seen = {"x": x.dtype, "B": B.dtype, "C": C.dtype, "dt": dt.dtype}
            assert seen == dtypes, seen
            y, _ = scan(*(t.double() for t in (x, B, C, dt, A, D)))
            return y.to(x.dtype)

        out = deepsp.DistributedRecurrence(run, **how)(**mine, **fixed)
        expected, _ = scan(**wide, **fixed)
        part = expected.tensor_split(size, 1)[rank]
        torch.testing.assert_close(out.double(), part, rtol=1e-2, atol=1e-2)
        out.double().sum().backward()
        assert all(x.grad is not None and x.grad.dtype == x.dtype for x in mine.values())


def test_dtypes():
    on_ranks(2, _dtypes)


def _chooses():
    """The way that sends fewer bytes: by state for long sequences; also with too few heads."""
    size = dist.get_world_size()
    function, how, _, _ = _arguments("delta", 1, 2, 4, 2)
    module = deepsp.DistributedRecurrence(function, state="auto", **how)
    assert "state='auto'" in repr(module) and module.chosen is None
    for length, heads, expected in ((1, 4, "heads"), (60, 4, "pass"), (1, 1, "pass")):
        _, _, tokens, _ = _arguments("delta", 1, length, heads, 1)
        module(**tokens)
        assert module.chosen == expected and f"({expected})" in repr(module)
        by_heads = bytes_by_heads(tokens, "value", 5, [length] * size) if heads > 1 else None
        by_state = bytes_by_state(1, heads, 24, size)
        assert by_heads is None or (by_heads <= by_state) == (expected == "heads")
    alone = deepsp.DistributedRecurrence(lambda value, g: value, state="auto")
    alone(value=torch.ones(1, 600, 4, 2), g=torch.ones(1, 600, 4))
    assert alone.chosen == "heads"  # a function without a state


def test_auto():
    on_ranks(2, _chooses)


def _borders():
    """A function that knows cu_seqlens is called once, with all rows in one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    calls = []

    def run(value, g, cu_seqlens=None):
        calls.append((value.shape[:2], cu_seqlens.tolist()))
        parts = [value[:, a:b].cumsum(1) for a, b in itertools.pairwise(cu_seqlens.tolist())]
        return torch.cat(parts, 1) * g[..., None]

    value, g = draw(2, 6, 4, 3), draw(2, 6, 4)
    documents = torch.tensor([0, 2, 6, 7, 12])
    mine = [x.tensor_split(size, 1)[rank] for x in (value, g)]
    out = deepsp.DistributedRecurrence(run)(value=mine[0], g=mine[1], documents=documents)
    assert calls == [((1, 12), documents.tolist())]
    flat = value.flatten(0, 1)
    expected = torch.cat([x.cumsum(0) for x in flat.tensor_split([2, 6, 7])]).view_as(value)
    torch.testing.assert_close(out, (expected * g[..., None]).tensor_split(size, 1)[rank])


def test_one_call_for_all_documents():
    on_ranks(2, _borders)


# ------------------------------------------------------------------------------ wrong uses


def _refuses(message, *args, call=(), **kwargs):
    with pytest.raises(ValueError, match=message):
        module = deepsp.DistributedRecurrence(*args, **kwargs)
        module(**dict(call))


def _wrong():
    rank = dist.get_rank()
    x, g = torch.ones(1, 4, 4, 2), torch.ones(1, 4, 4)
    right = {"value": x, "g": g}
    last = lambda value, g: value[:, -1:]  # noqa: E731
    fine = lambda value, g: value  # noqa: E731
    half = lambda value, g, initial_state=None, output_final_state=False: (value, None)  # noqa: E731
    _refuses("'heads', 'pass' or 'auto', got 'both'", fine, state="both")
    _refuses(
        "declares the arguments initial_state .* got <lambda> with g, value", fine, state="pass"
    )
    _refuses("decay and read together", half, state="pass", decay=fine)
    _refuses("'value' to be a tensor .* got None", fine, call={"g": g})
    _refuses("'x' to be a tensor .* got None", fine, value="x", call=right)
    _refuses("got 3 dimensions", fine, call={"value": g})
    _refuses(
        "'g' to have shape .* divides the 4 of 'value'", fine, call={**right, "g": g[:, :, :3]}
    )
    _refuses("'g' to have shape", fine, call={**right, "g": g[:, :3]})
    _refuses(
        "'g' to begin with the 4 heads", fine, per_head=("g",), call={**right, "g": torch.ones(3)}
    )
    _refuses(
        "a head for each of the 2 ranks, got 1", fine, call={"value": x[:, :, :1], "g": g[..., :1]}
    )
    _refuses(r"<lambda> to return \[1, 8, 2, V\].* got \(1, 1, 2, 2\)", last, call=right)
    _refuses(
        r"\(output, final state \[1, 4, K, V\]\).* got NoneType", half, state="pass", call=right
    )
    _refuses("seq_lens says for rank", fine, call={**right, "seq_lens": [3, 3]})
    _refuses("from 0 to 8, the tokens", fine, call={**right, "documents": torch.tensor([0, 9])})
    _refuses(
        "ranks disagree: rank 0 passes shapes", fine, call={"value": x[..., : 1 + rank], "g": g}
    )


def test_errors():
    on_ranks(2, _wrong)
