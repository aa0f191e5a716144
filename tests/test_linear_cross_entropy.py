"""The loss without its logits, against one process that has all of them, in float64."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks
from reference import draw, lens_of
from torch.autograd import gradcheck

import deepsp

op = torch.ops.deepsp
TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def _case(tokens=11, features=6, classes=7):
    """Whole hidden [2, S, E], weight, bias and labels, the same on every rank."""
    hidden = draw(2, tokens, features)
    weight, bias = draw(classes, features, seed=1), draw(classes, seed=2)
    labels = torch.arange(2 * tokens).view(2, tokens) * 5 % classes
    return hidden, weight, bias, labels


def _expected(hidden, weight, bias, labels, **kwargs):
    """The loss of whole logits and the gradients of hidden, weight and bias, in float64."""
    leaves = [None if x is None else x.double().requires_grad_() for x in (hidden, weight, bias)]
    logits = F.linear(*leaves).flatten(0, -2)
    reduction = kwargs.get("reduction", "mean")
    loss = F.cross_entropy(logits, labels.flatten().long(), **{**kwargs, "reduction": "sum"})
    if reduction == "mean":
        loss = loss / (labels != kwargs.get("ignore_index", -100)).sum().clamp(min=1)
    wanted = [x for x in leaves if x is not None]
    return loss.detach(), *torch.autograd.grad(loss, wanted)


def _sharded(hidden, weight, bias, labels, lens, **kwargs):
    """The same on this rank's tokens: its share of hidden's gradient; the others' sums."""
    rank = dist.get_rank()
    mine = hidden.split(lens, 1)[rank].clone().requires_grad_()
    leaves = [None if x is None else x.clone().requires_grad_() for x in (weight, bias)]
    loss = deepsp.linear_cross_entropy(
        mine, leaves[0], labels.split(lens, 1)[rank], leaves[1], **kwargs
    )
    wanted = [mine, *(x for x in leaves if x is not None)]
    gradients = torch.autograd.grad(loss, wanted)
    for gradient, x in zip(gradients, wanted, strict=True):
        assert gradient.dtype == x.dtype and gradient.shape == x.shape
    for gradient in gradients[1:]:
        dist.all_reduce(gradient)
    return loss.detach(), *gradients


def _close(ours, expected, lens, factor=1, **tolerance):
    rank = dist.get_rank()
    expected = list(expected)
    expected[1] = expected[1].split(lens, 1)[rank]
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        torch.testing.assert_close(a.double(), b * (factor if i else 1), **tolerance)


def _loss(kind):
    size = dist.get_world_size()
    hidden, weight, bias, labels = _case()
    lens = lens_of(kind, 11, size)
    for ignored in ("none", "some", "a rank's"):
        labels = labels.clone()
        if ignored == "some":
            labels[:, 1::3] = -100
        if ignored == "a rank's" and size > 1:
            labels.split(lens, 1)[0].fill_(-100)
        for reduction, smoothing, with_bias, chunk in (
            ("mean", 0.0, True, None),
            ("sum", 0.1, True, 3),
            ("mean", 1.0, False, 1),
            ("sum", 0.0, False, 1000),
        ):
            kwargs = {"reduction": reduction, "label_smoothing": smoothing}
            whole = (hidden, weight, bias if with_bias else None, labels)
            expected = _expected(*whole, **kwargs)
            for average in (False, True):
                ours = _sharded(
                    *whole, lens, **kwargs, chunk_tokens=chunk, average_gradients=average
                )
                assert ours[0].dtype == torch.float64
                _close(ours, expected, lens, size if average else 1, **TIGHT)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["split", "skewed", "empty"])
def test_loss_and_gradients(ranks, kind):
    on_ranks(ranks, _loss, kind)


def _shaped(hidden, weight, bias, labels, weights, *, softcap, scale, z_loss, smoothing, mean):
    """The loss of whole logits by its definition, and the gradients."""
    leaves = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    logits = F.linear(*leaves) * scale
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    each = F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), reduction="none", label_smoothing=smoothing
    ).view(labels.shape)
    valid = labels != -100
    each = (each + z_loss * logits.logsumexp(-1) ** 2)[valid]
    counts = torch.ones_like(each) if weights is None else weights.double()[valid]
    loss = (each * counts).sum() / (counts.sum() if mean and counts.sum() != 0 else 1)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


SHAPES = [
    {"softcap": 1.5, "scale": 0.7, "z_loss": 0.0, "smoothing": 0.0, "mean": True},
    {"softcap": None, "scale": -2.0, "z_loss": 0.3, "smoothing": 0.1, "mean": False},
    {"softcap": 0.4, "scale": 3.0, "z_loss": 0.05, "smoothing": 0.2, "mean": True},
]


def _terms(kind):
    """Softcap, scale, z_loss and weights of tokens."""
    rank, size = dist.get_rank(), dist.get_world_size()
    hidden, weight, bias, labels = _case()
    labels = labels.clone()
    labels[:, 1::3] = -100
    lens = lens_of(kind, 11, size)
    weights = draw(2, 11, seed=5).abs()
    weights[0, 0] = 0
    weights[:, 1] = torch.nan  # of tokens that are ignored
    for shape in SHAPES:
        for of_tokens in (None, weights, weights * 1e-9):
            expected = _shaped(hidden, weight, bias, labels, of_tokens, **shape)
            mine = None if of_tokens is None else of_tokens.split(lens, 1)[rank]
            kwargs = {n: shape[n] for n in ("softcap", "scale", "z_loss")}
            kwargs |= {"reduction": "mean" if shape["mean"] else "sum", "token_weights": mine}
            kwargs |= {"label_smoothing": shape["smoothing"]}
            for average in (False, True):
                whole = (hidden, weight, bias, labels)
                ours = _sharded(*whole, lens, **kwargs, average_gradients=average, chunk_tokens=3)
                _close(ours, expected, lens, size if average else 1, rtol=1e-11, atol=1e-13)
            # Its twin, of whole logits.
            del kwargs["softcap"], kwargs["scale"]
            logits = F.linear(hidden, weight, bias).split(lens, 1)[rank] * shape["scale"]
            if shape["softcap"] is not None:
                logits = shape["softcap"] * (logits / shape["softcap"]).tanh()
            logits.requires_grad_()
            twin = deepsp.cross_entropy(logits, labels.split(lens, 1)[rank], **kwargs)
            torch.testing.assert_close(twin, expected[0], rtol=1e-11, atol=1e-13)
            (grad,) = torch.autograd.grad(twin, logits)
            assert grad.isfinite().all() and bool(grad.any()) == (logits.numel() > 0)
    # Weights whose sum is 0, of both signs: the mean is 0.
    for zero in (torch.zeros(2, 11), torch.tensor([1.0, -1.0])[:, None].expand(2, 11)):
        kwargs = {"token_weights": zero.split(lens, 1)[rank]}
        found = _sharded(hidden, weight, bias, labels.relu(), lens, **kwargs)
        assert not any(x.any() for x in found)
        logits = F.linear(hidden, weight, bias).split(lens, 1)[rank].requires_grad_()
        loss = deepsp.cross_entropy(logits, labels.relu().split(lens, 1)[rank], **kwargs)
        assert loss == 0 and not torch.autograd.grad(loss, logits)[0].any()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["skewed", "empty"])
def test_terms_of_the_loss(ranks, kind):
    on_ranks(ranks, _terms, kind)


def _terms_in_low_precision():
    hidden, weight, bias, labels = _case(tokens=40, features=32, classes=50)
    shape = SHAPES[0] | {"z_loss": 1e-2}
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
        low = [(x * 0.5).to(dtype) for x in (hidden, weight, bias)]
        # Weights of this size in float16 would leave gradients without digits.
        for factor in (1e-7, 1e5):
            weights = draw(2, 40, seed=5).abs().float() * factor
            expected = _shaped(*low, labels, weights, **shape)
            kwargs = {n: shape[n] for n in ("softcap", "scale", "z_loss")}
            ours = _sharded(*low, labels, [40], token_weights=weights, **kwargs)
            for a, b in zip(ours, expected, strict=True):
                most = b.abs().max().item()
                torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * most)
    # Autocast leaves the weights alone: 1 + 2^-12 isn't a bfloat16.
    weights = torch.full((2, 40), 1 + 2**-12, dtype=torch.float32)
    weights[0] = 1
    single = [x.float() for x in (hidden, weight)]
    with torch.autocast("cpu", torch.bfloat16):
        a = deepsp.linear_cross_entropy(*single, labels, token_weights=weights, reduction="sum")
    low = [x.bfloat16() for x in single]
    b = deepsp.linear_cross_entropy(*low, labels, token_weights=weights, reduction="sum")
    assert torch.equal(a, b)


def test_terms_in_low_precision():
    on_ranks(1, _terms_in_low_precision)


def _dtypes():
    size = dist.get_world_size()
    hidden, weight, bias, labels = _case(tokens=40, features=32, classes=50)
    labels[0, :7] = 3  # many tokens of one class
    lens = lens_of("skewed", 40, size)
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
        low = [(x * 0.5).to(dtype) for x in (hidden, weight, bias)]
        expected = _expected(*low, labels)
        ours = _sharded(*low, labels, lens, chunk_tokens=7)
        assert ours[0].dtype == torch.float32
        # A sum of 16-bit gradients over the group rounds, too: by its largest.
        _close(ours, expected, lens, rtol=tolerance, atol=tolerance * expected[2].abs().max())
        torch.testing.assert_close(
            ours[0].double(), expected[0], rtol=1e-6 if dtype == torch.float32 else 1e-3, atol=0
        )


@pytest.mark.parametrize("ranks", [1, 2])
def test_dtypes(ranks):
    on_ranks(ranks, _dtypes)


def _sums_are_wide():
    """Tokens beyond what 16 bits can count: what each adds is still there."""
    for dtype in (torch.bfloat16, torch.float16):
        hidden = torch.ones(6000, 1, dtype=dtype)
        weight = torch.zeros(2, 1, dtype=dtype, requires_grad=True)
        labels = torch.zeros(6000, dtype=torch.long)
        loss = deepsp.linear_cross_entropy(hidden, weight, labels, reduction="sum", chunk_tokens=8)
        torch.testing.assert_close(loss.item(), 6000 * torch.log(torch.tensor(2.0)).item())
        (grad,) = torch.autograd.grad(loss, weight)
        assert torch.equal(grad, torch.tensor([[-3000.0], [3000.0]], dtype=dtype)), grad
    # A float16 gradient beyond 65504 that is scaled to less: it is scaled before it is rounded.
    hidden = torch.full((6000, 1), 512.0).half()
    weight = torch.zeros(2, 1).half().requires_grad_()
    (grad,) = torch.autograd.grad(deepsp.linear_cross_entropy(hidden, weight, labels), weight)
    assert grad.flatten().tolist() == [-256, 256]


def test_sums_are_wide():
    on_ranks(1, _sums_are_wide)


def _nothing():
    """No valid token anywhere, no token on a rank, none at all."""
    hidden, weight, bias, labels = _case()
    size = dist.get_world_size()
    labels = torch.full_like(labels, -1)
    for lens in (lens_of("split", 11, size), lens_of("empty", 11, size)):
        for reduction in ("mean", "sum"):
            for found in _sharded(
                hidden, weight, bias, labels, lens, ignore_index=-1, reduction=reduction
            ):
                assert not found.any()
    lens = [0] * size
    found = _sharded(hidden[:, :0], weight, bias, labels[:, :0], lens)
    assert not any(x.any() for x in found) and found[1].shape == (2, 0, 6)
    # ignore_index may be a class.
    labels = torch.arange(22).view(2, 11) % 7
    lens = lens_of("split", 11, size)
    kwargs = {"ignore_index": 2, "label_smoothing": 0.2}
    whole = (hidden, weight, bias, labels)
    _close(_sharded(*whole, lens, **kwargs), _expected(*whole, **kwargs), lens, **TIGHT)


@pytest.mark.parametrize("ranks", [1, 3])
def test_nothing_to_learn(ranks):
    on_ranks(ranks, _nothing)


def _large_logits():
    """Logits whose exponentials overflow, far from the label's, too."""
    hidden = torch.tensor([[1e4, -2e3, 5e3], [800.0, 0, -800]]).double()[None]
    weight, labels = torch.eye(3).double(), torch.tensor([[1, 0]])
    for smoothing in (0.0, 0.1):
        kwargs = {"label_smoothing": smoothing, "reduction": "sum"}
        ours = _sharded(hidden, weight, None, labels, [2], **kwargs)
        _close(ours, _expected(hidden, weight, None, labels, **kwargs), [2], **TIGHT)


def test_large_logits():
    on_ranks(1, _large_logits)


def _in_use():
    hidden, weight, bias, labels = _case()
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, my_labels = hidden.tensor_split(size, 1)[rank], labels.tensor_split(size, 1)[rank]

    # A tied embedding: the weight's gradients come from both ends, and add up.
    def tied(weight, ids, labels, loss):
        return loss(F.embedding(ids, weight) @ weight.new_ones(6, 6).triu(), weight, labels)

    whole = weight.clone().requires_grad_()
    expected = tied(
        whole, labels, labels, lambda h, w, y: F.cross_entropy((h @ w.T).flatten(0, 1), y.flatten())
    )
    (full,) = torch.autograd.grad(expected, whole)
    ours = weight.clone().requires_grad_()
    loss = tied(ours, my_labels, my_labels, deepsp.linear_cross_entropy)
    for factor in (1, 2):  # accumulated, the graph kept
        loss.backward(retain_graph=factor == 1)
        total = ours.grad.clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, full * factor, **TIGHT)
    torch.testing.assert_close(loss, expected, **TIGHT)

    # Strides that aren't dense, integers of 32 bits.
    strided = mine.transpose(0, 1).contiguous().transpose(0, 1)
    a = deepsp.linear_cross_entropy(strided, weight.T.contiguous().T, my_labels.int(), bias)
    b = deepsp.linear_cross_entropy(mine.contiguous(), weight, my_labels, bias)
    torch.testing.assert_close(a, b, **TIGHT)
    torch.testing.assert_close(
        b, deepsp.cross_entropy(F.linear(mine, weight, bias), my_labels), **TIGHT
    )

    # One gradient of three; none.
    frozen = mine.clone().requires_grad_()
    loss = deepsp.linear_cross_entropy(frozen, weight, my_labels, bias)
    (grad,) = torch.autograd.grad(loss, frozen)
    expected_grad = _expected(hidden, weight, bias, labels)[1].tensor_split(size, 1)[rank]
    torch.testing.assert_close(grad, expected_grad, **TIGHT)
    with torch.no_grad():
        again = deepsp.linear_cross_entropy(frozen, weight, my_labels, bias)
    assert not again.requires_grad
    torch.testing.assert_close(again, loss.detach(), **TIGHT)

    # A graph that is differentiated again says so: not only when it is made.
    loss = deepsp.linear_cross_entropy(frozen, weight, my_labels, bias)
    (grad,) = torch.autograd.grad(loss, frozen, create_graph=True)
    torch.testing.assert_close(grad, expected_grad, **TIGHT)
    with pytest.raises(RuntimeError, match="linear_cross_entropy has no second derivative"):
        (frozen.sum() + grad.square().sum()).backward()

    # Under autocast: the multiplications in the lower precision, the loss in float32.
    low = [x.float().requires_grad_() for x in (mine, weight, bias)]
    with torch.autocast("cpu", torch.bfloat16):
        loss = deepsp.linear_cross_entropy(low[0], low[1], my_labels, low[2])
    gradients = torch.autograd.grad(loss, low)
    assert loss.dtype == torch.float32 and all(g.dtype == torch.float32 for g in gradients)
    rounded = [x.detach().bfloat16().requires_grad_() for x in low]
    by_hand = deepsp.linear_cross_entropy(rounded[0], rounded[1], my_labels, rounded[2])
    assert torch.equal(loss, by_hand)
    for g, h in zip(gradients, torch.autograd.grad(by_hand, rounded), strict=True):
        assert torch.equal(g, h.float())


@pytest.mark.parametrize("ranks", [1, 2])
def test_in_use(ranks):
    on_ranks(ranks, _in_use)


def _gradcheck():
    hidden, weight, bias, labels = _case(tokens=3, features=4, classes=5)
    labels[0, 1] = -100
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]

    def loss(hidden, weight, bias):
        return deepsp.linear_cross_entropy(
            hidden,
            weight,
            labels,
            bias,
            label_smoothing=0.1,
            chunk_tokens=2,
            softcap=0.8,
            scale=1.3,
            z_loss=0.2,
            token_weights=torch.arange(6).view(2, 3) / 4,
        )

    gradcheck(loss, leaves)


def test_gradcheck():
    on_ranks(1, _gradcheck)


def _wrong():
    hidden, weight, bias, labels = _case()
    bad = labels.clone()
    for wrong, outside in ((7, "7"), (-3, "-3")):
        bad[1, 4] = wrong
        with pytest.raises(IndexError, match=f"Target {outside} is out of bounds"):
            deepsp.linear_cross_entropy(hidden, weight, bad)
    deepsp.linear_cross_entropy(hidden, weight, bad, ignore_index=-3)

    def call(hidden=hidden, weight=weight, labels=labels, bias=bias, **kwargs):
        return deepsp.linear_cross_entropy(hidden, weight, labels, bias, **kwargs)

    for kwargs, message in [
        ({"labels": labels[:, :2]}, r"shift_labels to have shape .* of hidden .*, got \(2, 2\)"),
        ({"labels": labels.double()}, "shift_labels to be an integer tensor.*, got torch.float64"),
        ({"labels": labels.bool()}, "shift_labels to be an integer tensor.*, got torch.bool"),
        ({"reduction": "none"}, "reduction to be .*, got 'none'"),
        ({"weight": weight.T}, r"weight to have shape \[C, 6\].*, got \[6, 7\]"),
        ({"weight": weight[:0]}, r"weight to have shape .*, got \[0, 6\]"),
        (
            {"weight": weight.float()},
            r"weight to have the dtype of hidden \(float64\), got float32",
        ),
        ({"weight": weight.to("meta")}, r"weight to be on the device of hidden \(cpu\), got meta"),
        ({"bias": bias[:3]}, r"bias to have shape \[7\].*, got \[3\]"),
        ({"bias": bias.half()}, "bias to have the dtype .*, got float16"),
        ({"bias": dist.group.WORLD}, "bias to be a tensor .*, got ProcessGroup; .*group=..."),
        ({"weight": torch.nn.Linear(6, 7)}, r"weight to be a tensor .*linear\.weight, got Linear"),
        ({"hidden": hidden.long()}, "hidden to be float64.*, got int64"),
        ({"hidden": hidden[0, 0], "labels": labels}, "shift_labels to have shape"),
        ({"label_smoothing": 1.5}, "0 <= label_smoothing <= 1, got 1.5"),
        ({"label_smoothing": float("nan")}, "label_smoothing <= 1, got nan"),
        ({"chunk_tokens": 0}, "chunk_tokens >= 1, got 0"),
        ({"softcap": 0.0}, "softcap to be None or a finite number > 0, got 0"),
        ({"scale": float("inf")}, "scale to be finite, got inf"),
        ({"z_loss": -0.1}, "z_loss to be a finite number >= 0, got -0.1"),
        ({"token_weights": labels}, "token_weights to be a floating-point tensor, got torch.int64"),
        ({"token_weights": 2.0}, "token_weights to be a floating-point tensor, got float"),
        (
            {"token_weights": torch.ones(2, 1)},
            r"token_weights to have the shape of shift_labels \(2, 11\), got \(2, 1\)",
        ),
        (
            {"token_weights": torch.ones(2, 11, requires_grad=True)},
            "token_weights not to require a gradient, .*; detach them",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call(**kwargs)
    logits = F.linear(hidden, weight, bias)
    for kwargs, message in [
        ({"z_loss": float("nan")}, "z_loss to be .* >= 0, got nan"),
        ({"token_weights": torch.ones(2, 11, requires_grad=True)}, "not to require a gradient"),
    ]:
        with pytest.raises(ValueError, match=message):
            deepsp.cross_entropy(logits, labels, **kwargs)
    learned = torch.ones(2, 11, requires_grad=True)
    with pytest.raises(ValueError, match="token_weights not to require a gradient"):
        op.linear_cross_entropy(hidden, weight, None, labels, token_weights=learned)
    with pytest.raises(ValueError, match=r"token_weights to be floating point, of shape \[2, 11\]"):
        op.linear_cross_entropy(hidden, weight, None, labels, token_weights=learned[:1].detach())
    with pytest.raises(ValueError, match="wanted asks for the gradient of bias"):
        op._linear_cross_entropy_gradients(hidden, weight, None, labels, -1, 0.0, None, [1, 1, 1])


def test_wrong_arguments():
    on_ranks(1, _wrong)


# --------------------------------------------------------------------------- memory, compile

# The peak of the process's memory over what it was before, in MiB.
_PEAK = """
import sys, torch, torch.distributed as dist, torch.nn.functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
import deepsp
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
torch.set_num_threads(1)
dtype = getattr(torch, sys.argv[1])
tokens, features, classes = 8192, 32, 8192
hidden = torch.randn(tokens, features, dtype=dtype, requires_grad=True)
weight = torch.randn(classes, features, dtype=dtype, requires_grad=True)
labels = torch.randint(0, classes, (tokens,))

def ours(tokens):
    return deepsp.linear_cross_entropy(
        hidden[:tokens], weight, labels[:tokens], chunk_tokens=512, label_smoothing=0.1)

def theirs(tokens):
    return deepsp.cross_entropy(F.linear(hidden[:tokens], weight), labels[:tokens])

def status(name):
    with open("/proc/self/status") as file:
        return next(int(l.split()[1]) for l in file if l.startswith(name)) >> 10

loss = {"ours": ours, "theirs": theirs}[sys.argv[2]]
loss(512).backward()  # whatever is made once
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
loss(tokens).backward()
print(status("VmHWM") - before)
"""


def _peak(*args):
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, *args], capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[-1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_bounded_by_the_chunk(dtype):
    # Whole logits take 256 MiB in float32; a chunk's 16, and gradients about 3.
    assert _peak(dtype, "ours") < 64
    if dtype == "float32":
        assert _peak(dtype, "theirs") > 400, "what is measured shows whole logits"


def _no_large_tensor():
    """Nothing that is allocated, and nothing that an operator reads, is as large as the logits."""
    hidden, weight, bias, labels = _case(tokens=128, features=8, classes=64)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]

    def largest(call):
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(
            activities=activities, profile_memory=True, record_shapes=True
        ) as profile:
            call()
        shapes = [s for event in profile.events() for s in event.input_shapes]
        sizes = [torch.Size(s).numel() for s in shapes if all(isinstance(n, int) for n in s)]
        return max(sizes)

    def ours():
        loss = deepsp.linear_cross_entropy(hidden, weight, labels, bias, chunk_tokens=10)
        torch.autograd.grad(loss, leaves)

    def theirs():
        torch.autograd.grad(deepsp.cross_entropy(F.linear(hidden, weight, bias), labels), leaves)

    assert largest(theirs) == 256 * 64
    assert largest(ours) == hidden.numel() == 256 * 8


def test_no_tensor_of_all_logits():
    on_ranks(1, _no_large_tensor)


def _compiled():
    torch._dynamo.reset()
    rank, size = dist.get_rank(), dist.get_world_size()

    def step(hidden, weight, bias, labels):
        return deepsp.linear_cross_entropy(
            hidden.cos(),
            weight,
            labels,
            bias,
            label_smoothing=0.1,
            chunk_tokens=4,
            softcap=2.0,
            scale=0.5,
            z_loss=0.1,
            token_weights=hidden.detach()[..., 0].abs(),
        )

    for tokens in (9, 14, 21):  # dynamic from the second on
        hidden, weight, bias, labels = _case(tokens)
        mine = hidden.tensor_split(size, 1)[rank].clone()
        leaves = [x.requires_grad_() for x in (mine, weight, bias)]
        labels = labels.tensor_split(size, 1)[rank]
        expected = step(*leaves, labels)
        gradients = torch.autograd.grad(expected, leaves)
        out = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves, labels)
        ours = torch.autograd.grad(out, leaves)
        torch.testing.assert_close([out, *ours], [expected, *gradients], **TIGHT)


@pytest.mark.parametrize("ranks", [1, 2])
def test_fullgraph(ranks):
    on_ranks(ranks, _compiled)


def test_the_meta_device_needs_no_group():
    hidden = torch.empty(2, 3, 4, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(10**6, 4, device="meta", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.empty(2, 3, device="meta", dtype=torch.long)
    loss = op.linear_cross_entropy(hidden, weight, None, labels)
    gradients = torch.autograd.grad(loss, [hidden, weight])
    assert loss.dtype == torch.float64 and loss.shape == ()
    assert [(g.shape, g.dtype) for g in gradients] == [(x.shape, x.dtype) for x in (hidden, weight)]
