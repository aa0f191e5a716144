"""The divergence of two models without their logits, against one process that has all of them, in
float64."""

import itertools
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
TIGHT = {"rtol": 1e-11, "atol": 1e-13}
CLASSES = 7


def _case(tokens=11, classes=CLASSES, features=(6, 4)):
    """Whole hidden [2, S, E], weight and bias of the student, those of the teacher, and labels."""
    models = [
        [draw(2, tokens, e, seed=s), draw(classes, e, seed=s + 1), draw(classes, seed=s + 2)]
        for s, e in zip((0, 3), features, strict=True)
    ]
    # Labels that are no classes still count.
    labels = torch.arange(2 * tokens).view(2, tokens) * 5 % 50 - 10
    return *models, labels


def _logits(model, temperature, softcap, scale):
    logits = F.linear(*model) * scale
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    return logits / temperature


def _merged(log_p, top):
    """The log-probabilities of the classes `top` and of the rest."""
    rest = log_p.scatter(-1, top, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(-1, top), rest], -1)


def _kl(a, b):
    """KL(a || b) of log-probabilities; a class that `a` rules out adds 0."""
    p = a.exp()
    return (p * torch.where(p == 0, 0, a) - torch.where(p == 0, 0, p * b)).sum(-1)


def _expected(
    student,
    teacher,
    labels,
    *,
    beta=0.0,
    temperature=1.0,
    top_k=None,
    softcap=None,
    scale=1.0,
    teacher_softcap=None,
    teacher_scale=1.0,
    reduction="mean",
    token_weights=None,
    ignore_index=-100,
):
    """The divergence and entropy of whole logits, and the gradients of the student's tensors."""
    leaves = [None if x is None else x.double().clone().requires_grad_() for x in student]
    constants = [None if x is None else x.double() for x in teacher]
    log_p = _logits(leaves, temperature, softcap, scale).log_softmax(-1)
    log_q = _logits(constants, temperature, teacher_softcap, teacher_scale).log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * torch.where(p == 0, 0, log_p)).sum(-1)
    if top_k is not None and top_k < log_q.size(-1):
        top = log_q.topk(top_k, -1).indices
        log_p, log_q = _merged(log_p, top), _merged(log_q, top)
    if beta == 0:
        each = _kl(log_q, log_p)
    elif beta == 1:
        each = _kl(log_p, log_q)
    else:
        weights = torch.tensor([1 - beta, beta]).double()
        log_m = torch.logaddexp(log_p + weights[0].log(), log_q + weights[1].log())
        each = beta * _kl(log_q, log_m) + (1 - beta) * _kl(log_p, log_m)
    counts = (labels != ignore_index).double()
    if token_weights is not None:
        counts = token_weights.double().where(labels != ignore_index, 0)
    divisor = counts.sum() if reduction == "mean" and counts.sum() != 0 else 1
    loss, entropy = ((x * counts).sum() / divisor for x in (each, entropy))
    wanted = [x for x in leaves if x is not None]
    return loss.detach(), entropy.detach(), *torch.autograd.grad(loss, wanted)


def _sharded(student, teacher, labels, lens, *, token_weights=None, **kwargs):
    """The same on this rank's tokens: its share of hidden's gradient; the others' sums."""
    rank = dist.get_rank()
    mine = student[0].split(lens, 1)[rank].clone().requires_grad_()
    leaves = [None if x is None else x.clone().requires_grad_() for x in student[1:]]
    if token_weights is not None:
        token_weights = token_weights.split(lens, 1)[rank]
    loss, entropy = deepsp.linear_kl(
        *(mine, leaves[0], teacher[0].split(lens, 1)[rank], teacher[1]),
        *(labels.split(lens, 1)[rank], leaves[1], teacher[2]),
        token_weights=token_weights,
        entropy=True,
        **kwargs,
    )
    assert not entropy.requires_grad and entropy.dtype == loss.dtype
    wanted = [mine, *(x for x in leaves if x is not None)]
    gradients = torch.autograd.grad(loss, wanted)
    for gradient, x in zip(gradients, wanted, strict=True):
        assert gradient.dtype == x.dtype and gradient.shape == x.shape
    for gradient in gradients[1:]:
        dist.all_reduce(gradient)
    return loss.detach(), entropy, *gradients


def _close(ours, expected, lens, factor=1, **tolerance):
    expected = list(expected)
    expected[2] = expected[2].split(lens, 1)[dist.get_rank()]
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        torch.testing.assert_close(a.double(), b * (factor if i > 1 else 1), **tolerance)


SHAPES = [
    {},
    {"temperature": 0.7, "softcap": 1.5, "scale": 0.7},
    {"temperature": 2.0, "teacher_softcap": 0.8, "teacher_scale": -1.5, "scale": 3.0},
]


def _loss(kind):
    size = dist.get_world_size()
    lens = lens_of(kind, 11, size)
    student, teacher, all_labels = _case()
    plain = [[*model[:2], None] for model in (student, teacher)]
    weights = draw(2, 11, seed=5).abs()
    weights[0, 0], weights[:, 1] = 0, torch.nan  # labels of the latter are ignored
    ways = itertools.product((0.0, 0.3, 1.0), (None, 1, 3, CLASSES, CLASSES + 5))
    for n, (beta, top_k) in enumerate(ways):
        labels = all_labels.clone()
        if n % 3 > 0:
            labels[:, 1::3] = -100
        if n % 3 == 2 and size > 1:
            labels.split(lens, 1)[0].fill_(-100)
        kwargs = {"beta": beta, "top_k": top_k, "reduction": ("mean", "sum")[n % 2]}
        kwargs |= SHAPES[n // 2 % 3]
        if n % 3 > 0 and n % 4 < 2:
            kwargs["token_weights"] = weights * (1e-9 if n % 4 else 1)
        models = plain if n % 4 == 3 else (student, teacher)
        expected = _expected(*models, labels, **kwargs)
        for average in (False, True):
            ours = _sharded(
                *models,
                *(labels, lens),
                **kwargs,
                chunk_tokens=(None, 1, 3, 1000)[(n + average) % 4],
                average_gradients=average,
            )
            assert ours[0].dtype == torch.float64
            _close(ours, expected, lens, size if average else 1, **TIGHT)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["split", "skewed", "empty"])
def test_loss_and_gradients(ranks, kind):
    on_ranks(ranks, _loss, kind)


def _many_classes():
    """A chunk whose divergence is computed for few rows at a time."""
    student, teacher, labels = _case(5, 40_000, (3, 2))
    for beta, top_k in ((0.0, None), (0.5, 10), (1.0, None)):
        kwargs = {"beta": beta, "top_k": top_k, "token_weights": draw(2, 5, seed=9).abs()}
        ours = _sharded(student, teacher, labels, [5], **kwargs)
        _close(ours, _expected(student, teacher, labels, **kwargs), [5], **TIGHT)


def test_many_classes():
    on_ranks(1, _many_classes)


def _nothing():
    """No token that counts anywhere, no token on a rank, none at all, weights whose sum is 0."""
    size = dist.get_world_size()
    student, teacher, labels = _case()
    ignored = torch.full_like(labels, -1)
    for kind in ("split", "empty"):
        lens = lens_of(kind, 11, size)
        for reduction in ("mean", "sum"):
            ours = _sharded(
                student, teacher, ignored, lens, ignore_index=-1, reduction=reduction, beta=0.5
            )
            assert not any(x.any() for x in ours)
        zero = torch.tensor([1.0, -1.0])[:, None].expand(2, 11)
        ours = _sharded(student, teacher, labels, lens, token_weights=zero)
        assert not any(x.any() for x in ours)
    models = [[x[:, :0], *others] for x, *others in (student, teacher)]
    ours = _sharded(*models, labels[:, :0], [0] * size)
    assert not any(x.any() for x in ours) and ours[2].shape == (2, 0, 6)


@pytest.mark.parametrize("ranks", [1, 3])
def test_nothing_to_learn(ranks):
    on_ranks(ranks, _nothing)


def _low_precision():
    size = dist.get_world_size()
    lens = lens_of("skewed", 40, size)
    student, teacher, labels = _case(40, 50, (32, 16))
    labels[:, 3] = -100
    half, bfloat16 = torch.float16, torch.bfloat16
    for dtype, other, tolerance in (
        (torch.float32, torch.float32, 2e-6),
        (bfloat16, torch.float32, 2e-2),
        (half, half, 1e-2),
        (half, bfloat16, 4e-2),
        (torch.float32, torch.float64, 2e-6),
    ):
        models = [[(x * 0.5).to(d) for x in m] for d, m in ((dtype, student), (other, teacher))]
        for beta, top_k, factor in ((0.0, None, 1e-7), (0.5, 4, 1e5), (1.0, None, 1.0)):
            if dtype != torch.float32:
                top_k = None  # rounded logits may have other classes at the top
            kwargs = {"beta": beta, "top_k": top_k, "temperature": 1.5}
            # Weights of this size in float16 would leave gradients without digits.
            kwargs["token_weights"] = draw(2, 40, seed=5).abs().float() * factor
            expected = _expected(*models, labels, **kwargs)
            ours = _sharded(*models, labels, lens, **kwargs, chunk_tokens=7)
            assert ours[0].dtype == torch.float32
            for part in range(2, 5):  # by each gradient's largest
                most = expected[part].abs().max().item()
                a, b = list(ours), list(expected)
                b[2] = b[2].split(lens, 1)[dist.get_rank()]
                torch.testing.assert_close(
                    a[part].double(), b[part], rtol=tolerance, atol=tolerance * most
                )
            wide = dtype == other == torch.float32
            torch.testing.assert_close(
                torch.stack(ours[:2]).double(),
                torch.stack(expected[:2]),
                rtol=2e-6 if wide else 2e-2,
                atol=0,
            )


@pytest.mark.parametrize("ranks", [1, 2])
def test_low_precision(ranks):
    on_ranks(ranks, _low_precision)


def _masked():
    """Classes that a bias of -infinity rules out, and logits whose exponentials overflow."""
    student, teacher, labels = _case()
    for mine, other in itertools.product((False, True), repeat=2):
        models = [[x.clone() for x in m] for m in (student, teacher)]
        if mine:
            models[0][2][1] = models[0][2][4] = -torch.inf
        if other:
            models[1][2][1] = models[1][2][5] = -torch.inf
        for beta, top_k in itertools.product((0.0, 0.3, 1.0), (None, 2, 5, 6)):
            if other and top_k == 6:  # which of the classes with probability 0 is sixth?
                continue
            infinite = (beta == 0 and mine) or (beta == 1 and other)
            kwargs = {"beta": beta, "top_k": top_k, "scale": 0.7}
            expected = _expected(*models, labels, **kwargs)
            ours = _sharded(*models, labels, [11], **kwargs)
            if infinite and not expected[0].isfinite():
                assert ours[0] == torch.inf
                continue
            # Autograd of the definition needs finite numbers.
            finite = [[x.clamp(min=-1e4) for x in m] for m in models]
            _close(ours, _expected(*finite, labels, **kwargs), [11], **TIGHT)
    # Both models rule out the same classes: as models without them.
    models, kept = [[x.clone() for x in m] for m in (student, teacher)], [0, 2, 3, 6]
    for model in models:
        model[2][[1, 4, 5]] = -torch.inf
    fewer = [[x, w[kept], b[kept]] for x, w, b in models]
    for beta, top_k in itertools.product((0.0, 0.3, 1.0), (None, 2, 4, 5)):
        kwargs = {"beta": beta, "temperature": 0.5}
        expected = list(_expected(*fewer, labels, top_k=top_k, **kwargs))
        ours = _sharded(*models, labels, [11], top_k=top_k, **kwargs)
        for i, dims in ((3, (CLASSES, 6)), (4, (CLASSES,))):
            whole = torch.zeros(dims, dtype=torch.float64)
            whole[kept] = expected[i]
            expected[i] = whole
        _close(ours, expected, [11], **TIGHT)
    large = [torch.eye(3).double(), torch.eye(3).double(), None]
    large[0] = torch.tensor([[[1e4, -2e3, 5e3], [800.0, 0, -800]]]).double()
    other = [large[0].flip(-1) * 0.1, *large[1:]]
    for beta, top_k in itertools.product((0.0, 0.3, 1.0), (None, 1)):
        kwargs = {"beta": beta, "top_k": top_k, "reduction": "sum"}
        labels = torch.zeros(1, 2, dtype=torch.long)
        ours = _sharded(large, other, labels, [2], **kwargs)
        expected = _expected(large, other, labels, **kwargs)
        assert all(x.isfinite().all() for x in ours)
        torch.testing.assert_close(ours[0], expected[0], **TIGHT)


def test_classes_that_are_ruled_out():
    on_ranks(1, _masked)


def _ignored_values():
    """Hidden states of ignored tokens may be anything in the teacher."""
    student, teacher, labels = _case()
    labels[:, ::2] = -100
    expected = _sharded(student, teacher, labels, [11], beta=0.4)
    broken = teacher[0].clone()
    broken[:, ::2] = torch.nan
    for chunk in (1, 4, None):  # chunks without a token that counts, and others
        ours = _sharded(student, [broken, *teacher[1:]], labels, [11], beta=0.4, chunk_tokens=chunk)
        torch.testing.assert_close(ours, expected, **TIGHT)
        assert not ours[2][:, ::2].any()
    # What a token that counts has of NaN is seen.
    broken[0, 1] = torch.nan
    for top_k in (None, 2):
        models = student, [broken, *teacher[1:]]
        assert all(x.isnan().any() for x in (_sharded(*models, labels, [11], top_k=top_k)[::2]))


def test_ignored_tokens():
    on_ranks(1, _ignored_values)


def _in_use():
    (hidden, weight, bias), (other, head, _), labels = _case()
    rest = other, head, labels

    # A frozen head; nothing to learn; a teacher that requires gradients.
    frozen = hidden.clone().requires_grad_()
    loss = deepsp.linear_kl(frozen, weight, *rest, bias, beta=0.3)
    (grad,) = torch.autograd.grad(loss, frozen)
    expected = _expected([hidden, weight, bias], [other, head, None], labels, beta=0.3)
    torch.testing.assert_close(grad, expected[2], **TIGHT)
    with torch.no_grad():
        again = deepsp.linear_kl(frozen, weight, *rest, bias, beta=0.3)
    assert not again.requires_grad and torch.equal(again, loss.detach())
    learns = [x.clone().requires_grad_() for x in (other, head)]
    loss = deepsp.linear_kl(hidden, weight, *learns, labels, bias)
    assert not loss.requires_grad
    loss = deepsp.linear_kl(frozen, weight, *learns, labels, bias, beta=0.3)
    loss.backward()
    assert all(x.grad is None for x in learns)
    torch.testing.assert_close(frozen.grad, expected[2], **TIGHT)

    # A second derivative raises.
    loss = deepsp.linear_kl(frozen, weight, *rest)
    (grad,) = torch.autograd.grad(loss, frozen, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_kl has no second derivative"):
        grad.square().sum().backward()

    # Autocast casts both models' tensors, and leaves the tokens' weights alone.
    low = [x.float().requires_grad_() for x in (hidden, weight, bias)]
    single = [x.float() for x in (other, head)]
    weights = torch.full((2, 11), 1 + 2**-12, dtype=torch.float32)
    weights[0] = 1
    with torch.autocast("cpu", torch.bfloat16):
        loss = deepsp.linear_kl(*low[:2], *single, labels, low[2], token_weights=weights)
    gradients = torch.autograd.grad(loss, low)
    assert all(x.dtype == torch.float32 for x in (loss, *gradients))
    rounded = [x.detach().bfloat16() for x in (*low, *single)]
    by_hand = deepsp.linear_kl(
        *rounded[:2], *rounded[3:], labels, rounded[2], token_weights=weights
    )
    assert torch.equal(loss.detach(), by_hand)

    # The divergence of a model from itself is 0, as its gradient is.
    for beta, top_k in ((0.0, None), (0.5, 3), (1.0, 2)):
        same = deepsp.linear_kl(frozen, weight, hidden, weight, labels, beta=beta, top_k=top_k)
        (grad,) = torch.autograd.grad(same, frozen)
        assert abs(same) < 1e-14 and grad.abs().max() < 1e-14


def test_in_use():
    on_ranks(1, _in_use)


def _gradcheck():
    student, teacher, labels = _case(3)
    leaves = [x.requires_grad_() for x in student]
    for beta, top_k in ((0.0, 3), (0.6, None), (0.6, 2), (1.0, None)):

        def loss(hidden, weight, bias, beta=beta, top_k=top_k):
            return deepsp.linear_kl(
                *(hidden, weight, *teacher[:2], labels, bias, teacher[2]),
                beta=beta,
                top_k=top_k,
                temperature=1.7,
                chunk_tokens=2,
                softcap=0.8,
                scale=1.3,
                token_weights=torch.arange(6).view(2, 3) / 4,
            )

        gradcheck(loss, leaves)


def test_gradcheck():
    on_ranks(1, _gradcheck)


def _wrong():
    student, teacher, labels = _case()
    names = ("hidden", "weight", "bias", "teacher_hidden", "teacher_weight", "teacher_bias")
    right = dict(zip(names, [*student, *teacher], strict=True)) | {"shift_labels": labels}
    learned = torch.ones(2, 11, requires_grad=True)
    for kwargs, message in [
        ({"shift_labels": labels.double()}, "shift_labels to be an integer tensor"),
        ({"shift_labels": labels[:, :2]}, r"shift_labels to have shape \(2, 11\).* of hidden "),
        ({"teacher_hidden": teacher[0][:, :3]}, r"shift_labels to have .* of teacher_hidden "),
        ({"reduction": "none"}, "reduction to be .*, got 'none'"),
        ({"weight": student[1].T}, r"expected weight to have shape \[C, 6\].*, got \[6, 7\]"),
        ({"teacher_weight": student[1]}, r"teacher_weight to have shape \[C, 4\].*teacher_hidden"),
        ({"teacher_weight": torch.nn.Linear(4, 7)}, "teacher_weight to be a tensor .*got Linear"),
        ({"teacher_bias": teacher[2][:3]}, r"teacher_bias to have shape \[7\].*, got \[3\]"),
        ({"teacher_bias": teacher[2].half()}, "teacher_bias to have the dtype of teacher_hidden"),
        ({"teacher_bias": dist.group.WORLD}, "teacher_bias to be a tensor .*got ProcessGroup"),
        ({"teacher_hidden": teacher[0].long()}, "teacher_hidden to be float64.*, got int64"),
        ({"teacher_hidden": teacher[0].to("meta")}, "teacher_hidden to be on the device of hidden"),
        (
            {"teacher_weight": torch.ones(9, 4).double(), "teacher_bias": None},
            r"weight and teacher_weight to have the same classes, got 7 and 9; .* slice it: "
            r"weight\[:C\]",
        ),
        ({"beta": 1.5}, "0 <= beta <= 1, got 1.5"),
        ({"beta": float("nan")}, "0 <= beta <= 1, got nan"),
        ({"temperature": 0.0}, "temperature to be a finite number > 0, got 0"),
        ({"top_k": 0}, "top_k >= 1, got 0"),
        ({"chunk_tokens": 0}, "chunk_tokens >= 1, got 0"),
        ({"softcap": -1.0}, "expected softcap to be None or a finite number > 0, got -1"),
        ({"teacher_softcap": 0.0}, "teacher_softcap to be None or a finite number > 0, got 0"),
        ({"teacher_scale": float("inf")}, "teacher_scale to be finite, got inf"),
        ({"token_weights": labels}, "token_weights to be a floating-point tensor"),
        ({"token_weights": learned}, "token_weights not to require a gradient"),
    ]:
        with pytest.raises(ValueError, match=message):
            deepsp.linear_kl(**right | kwargs)
    arguments = (student[0], student[1], None, *teacher, labels)
    with pytest.raises(ValueError, match="token_weights not to require a gradient"):
        op.linear_kl(*arguments, token_weights=learned)
    with pytest.raises(ValueError, match=r"token_weights to be floating point, of shape \[2, 11\]"):
        op.linear_kl(*arguments, token_weights=learned[:1].detach())
    with pytest.raises(ValueError, match="wanted asks for the gradient of bias"):
        op._linear_kl_gradients(*arguments, -100, 0.0, 1.0, None, None, [1, 1, 1])


def test_wrong_arguments():
    on_ranks(1, _wrong)


# --------------------------------------------------------------------------- memory, compile

# The peak of the process's memory over what it was before, in MiB.
_PEAK = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import deepsp
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
torch.set_num_threads(1)
tokens, features, classes = 4096, 32, 8192
hidden = torch.randn(tokens, features, requires_grad=True)
weight = torch.randn(classes, features, requires_grad=True)
labels = torch.zeros(tokens, dtype=torch.long)

def loss(tokens):
    models = hidden[:tokens], weight, hidden.detach()[:tokens] * 2, weight.detach()
    return deepsp.linear_kl(*models, labels[:tokens], chunk_tokens=512, beta=0.5, top_k=9)

def status(name):
    with open("/proc/self/status") as file:
        return next(int(l.split()[1]) for l in file if l.startswith(name)) >> 10

loss(512).backward()  # whatever is made once
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
loss(tokens).backward()
print(status("VmHWM") - before)
"""


def test_memory_is_bounded_by_the_chunk():
    # One model's whole logits take 128 MiB; a chunk's of both 32, and gradients about 3.
    done = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 64


def _compiled():
    torch._dynamo.reset()
    rank, size = dist.get_rank(), dist.get_world_size()

    def step(hidden, weight, bias, other, head, labels):
        return deepsp.linear_kl(
            *(hidden.cos(), weight, other.sin(), head, labels, bias),
            beta=0.4,
            top_k=3,
            chunk_tokens=4,
            softcap=2.0,
            temperature=0.7,
            token_weights=hidden.detach()[..., 0].abs(),
            entropy=True,
        )

    for tokens in (9, 14):  # dynamic from the second on
        student, teacher, labels = _case(tokens)
        hidden, other, labels = (
            x.tensor_split(size, 1)[rank].clone() for x in (student[0], teacher[0], labels)
        )
        leaves = [x.requires_grad_() for x in (hidden, *student[1:])]
        rest = other, teacher[1], labels
        expected = step(*leaves, *rest)
        gradients = torch.autograd.grad(expected[0], leaves)
        out = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves, *rest)
        ours = torch.autograd.grad(out[0], leaves)
        torch.testing.assert_close([*out, *ours], [*expected, *gradients], **TIGHT)


@pytest.mark.parametrize("ranks", [1, 2])
def test_fullgraph(ranks):
    on_ranks(ranks, _compiled)


def test_the_meta_device_needs_no_group():
    bf16 = {"device": "meta", "dtype": torch.bfloat16}
    hidden = torch.empty(2, 3, 4, **bf16, requires_grad=True)
    weight = torch.empty(10**6, 4, **bf16, requires_grad=True)
    other, head = torch.empty(2, 3, 5, device="meta"), torch.empty(10**6, 5, device="meta")
    labels = torch.empty(2, 3, device="meta", dtype=torch.long)
    loss, entropy = op.linear_kl(hidden, weight, None, other, head, None, labels)
    gradients = torch.autograd.grad(loss, [hidden, weight])
    assert loss.dtype == entropy.dtype == torch.float64 and loss.shape == entropy.shape == ()
    assert [(g.shape, g.dtype) for g in gradients] == [(x.shape, x.dtype) for x in (hidden, weight)]
