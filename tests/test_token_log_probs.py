"""Log-probabilities of tokens without logits, against one process that has them all, in float64."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks
from reference import draw, lens_of
from torch.autograd import gradcheck

import deepsp

op = torch.ops.deepsp
TIGHT = {"rtol": 1e-11, "atol": 1e-12}


def _case(tokens=11, features=6, classes=7):
    """Whole hidden [2, S, E], weight, bias and ids, the same on every rank."""
    ids = torch.arange(2 * tokens).view(2, tokens) * 5 % classes
    ids[:, 2::4] = -100
    hidden = draw(2, tokens, features)
    return hidden, draw(classes, features, seed=1), draw(classes, seed=2), ids


def _expected(hidden, weight, ids, bias=None, temperature=1.0, softcap=None, scale=1.0):
    """Log-probabilities and entropies of whole logits."""
    logits = F.linear(hidden, weight, bias) * scale
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    log_p = (logits / temperature).log_softmax(-1)
    valid = ids != -100
    chosen = log_p.gather(-1, ids.where(valid, 0)[..., None])[..., 0]
    entropy = -torch.where(log_p.exp() > 0, log_p.exp() * log_p, 0).sum(-1)
    return chosen.where(valid, 0), entropy.where(valid, 0)


def _objective(log_probs, entropy=None):
    """Something that isn't linear, with another gradient for each token."""
    weights = torch.arange(log_probs.numel(), dtype=log_probs.dtype).view(log_probs.shape).cos()
    loss = (weights * log_probs.exp()).sum()
    return loss if entropy is None else loss + 0.3 * (weights.square() * entropy.square()).sum()


SHAPES = [
    {},
    {"temperature": 0.6, "scale": 1.7},
    {"softcap": 1.2, "temperature": 1.9, "scale": -0.8},
]


def _local(kind):
    """Every rank's outputs and gradients; the loss is of its own tokens."""
    rank, size = dist.get_rank(), dist.get_world_size()
    hidden, weight, bias, ids = _case()
    lens = lens_of(kind, 11, size)
    for shape in SHAPES:
        for with_bias, chunk in ((True, 3), (False, None), (True, 1)):
            for outputs in ("local", "full"):
                for entropy in (True, False):
                    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
                    whole = _expected(
                        leaves[0], leaves[1], ids, leaves[2] if with_bias else None, **shape
                    )
                    wanted = leaves if with_bias else leaves[:2]
                    loss = _objective(*whole[: 1 + entropy])
                    expected = torch.autograd.grad(loss, wanted)

                    mine = hidden.split(lens, 1)[rank].clone().requires_grad_()
                    ours = [mine, *(x.clone().requires_grad_() for x in (weight, bias))]
                    found = deepsp.token_log_probs(
                        mine,
                        ours[1],
                        ids.split(lens, 1)[rank],
                        ours[2] if with_bias else None,
                        **shape,
                        chunk_tokens=chunk,
                        entropy=entropy,
                        outputs=outputs,
                        seq_lens=lens if chunk == 1 else None,
                    )
                    found = found if entropy else (found,)
                    if outputs == "full":
                        total = _objective(*found)
                        torch.testing.assert_close(total, loss, **TIGHT)
                        for a, b in zip(found, whole, strict=False):
                            torch.testing.assert_close(a, b.detach(), **TIGHT)
                    else:
                        for a, b in zip(found, whole, strict=False):
                            assert a.dtype == torch.float64
                            torch.testing.assert_close(a, b.split(lens, 1)[rank], **TIGHT)
                        # The gradient of the full outputs, of which a rank has its part.
                        whole = [x.detach().requires_grad_() for x in whole[: 1 + entropy]]
                        parts = torch.autograd.grad(_objective(*whole), whole)
                        parts = [x.split(lens, 1)[rank] for x in parts]
                        total = sum((a * b).sum() for a, b in zip(found, parts, strict=True))
                    gradients = torch.autograd.grad(total, ours if with_bias else ours[:2])
                    for gradient in gradients[1:]:
                        dist.all_reduce(gradient)
                    torch.testing.assert_close(
                        gradients[0], expected[0].split(lens, 1)[rank], **TIGHT
                    )
                    for a, b in zip(gradients[1:], expected[1:], strict=True):
                        torch.testing.assert_close(a, b, **TIGHT)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["split", "skewed", "empty"])
def test_outputs_and_gradients(ranks, kind):
    on_ranks(ranks, _local, kind)


def _low_precision():
    hidden, weight, bias, ids = _case(tokens=600, features=32, classes=50)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 3e-2), (torch.float16, 5e-3)):
        low = [(x * 0.5).to(dtype) for x in (hidden, weight, bias)]
        # A mean over so many tokens has gradients that float16 doesn't have.
        for factor in (1.0, 1e-4):
            leaves = [x.double().requires_grad_() for x in low]
            expected = _expected(leaves[0], leaves[1], ids, leaves[2], temperature=1.5)
            ours = [x.clone().requires_grad_() for x in low]
            found = deepsp.token_log_probs(
                ours[0], ours[1], ids, ours[2], temperature=1.5, entropy=True
            )
            assert all(x.dtype == torch.float32 for x in found)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
            full = torch.autograd.grad(factor * _objective(*expected), leaves)
            gradients = torch.autograd.grad(factor * _objective(*found), ours)
            for a, b, x in zip(gradients, full, low, strict=True):
                assert a.dtype == x.dtype
                # float16 has no numbers below 6e-8.
                rounding = 6e-8 if dtype == torch.float16 else 0
                most = tolerance * b.abs().max().item() + rounding
                torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=most)
    # Autocast: multiplied in the lower precision.
    single = [x.float().requires_grad_() for x in (hidden, weight)]
    with torch.autocast("cpu", torch.bfloat16):
        found = deepsp.token_log_probs(*single, ids)
    rounded = [x.detach().bfloat16().requires_grad_() for x in single]
    by_hand = deepsp.token_log_probs(*rounded, ids)
    assert found.dtype == torch.float32 and torch.equal(found, by_hand)
    for g, h in zip(
        torch.autograd.grad(found.sum(), single),
        torch.autograd.grad(by_hand.sum(), rounded),
        strict=True,
    ):
        assert torch.equal(g, h.float())


def test_low_precision():
    on_ranks(1, _low_precision)


def _extremes():
    """Logits whose exponentials overflow; classes that a bias takes out; nothing that counts."""
    hidden = torch.tensor([[1e4, -2e3, 5e3], [800.0, 0, -800]]).double()[None].requires_grad_()
    weight = torch.eye(3).double().requires_grad_()
    bias = torch.tensor([0.0, -torch.inf, 0.0]).double()
    ids = torch.tensor([[2, 0]])
    for b in (None, bias):
        expected = _expected(hidden, weight, ids, b)
        found = deepsp.token_log_probs(hidden, weight, ids, b, entropy=True)
        torch.testing.assert_close(found, expected, **TIGHT)
        for gradient in torch.autograd.grad(sum(x.sum() for x in found), (hidden, weight)):
            assert gradient.isfinite().all()
    found = deepsp.token_log_probs(hidden, weight, ids - ids - 100, entropy=True)
    assert not any(x.any() for x in found)
    for gradient in torch.autograd.grad(sum(x.sum() for x in found), (hidden, weight)):
        assert not gradient.any()
    empty = deepsp.token_log_probs(hidden[:, :0], weight, ids[:, :0])
    (gradient,) = torch.autograd.grad(empty.sum(), weight)
    assert empty.shape == (1, 0) and not gradient.any()


def test_extremes():
    on_ranks(1, _extremes)


def test_gradcheck():
    hidden, weight, bias, ids = _case(tokens=3, features=4, classes=5)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    for shape in SHAPES:
        kwargs = {"softcap": None, "scale": 1.0, "temperature": 1.0} | shape
        # All outputs, logsumexp too.
        gradcheck(
            lambda h, w, b, kwargs=kwargs: tuple(
                op.token_log_probs(h, w, b, ids, chunk_tokens=2, entropy=True, **kwargs)
            ),
            leaves,
        )
    # Each gradient alone.
    for i, leaf in enumerate(leaves):
        others = [x.detach() for x in leaves]

        def alone(x, i=i, others=others):
            given = [*others[:i], x, *others[i + 1 :]]
            return deepsp.token_log_probs(given[0], given[1], ids, given[2])

        gradcheck(alone, (leaf,))
    with torch.no_grad():
        assert not deepsp.token_log_probs(*leaves[:2], ids).requires_grad


def test_no_second_derivative():
    hidden, weight, _, ids = _case()
    hidden.requires_grad_()
    log_probs = deepsp.token_log_probs(hidden, weight, ids)
    (gradient,) = torch.autograd.grad(log_probs.exp().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match=r"token_log_probs_backward.*not implemented"):
        gradient.square().sum().backward()


def test_wrong_arguments():
    hidden, weight, bias, ids = _case()

    def call(hidden=hidden, weight=weight, ids=ids, bias=bias, **kwargs):
        return deepsp.token_log_probs(hidden, weight, ids, bias, **kwargs)

    for kwargs, message in [
        ({"ids": ids[:, :2]}, r"ids to have shape \(2, 11\), .* of hidden .*, got \(2, 2\)"),
        ({"ids": ids.double()}, "ids to be an integer tensor.*, got torch.float64"),
        ({"weight": weight.float()}, r"weight to have the dtype of hidden .*, got float32"),
        ({"bias": bias[:3]}, r"bias to have shape \[7\].*, got \[3\]"),
        ({"outputs": "whole"}, "outputs to be 'local' or 'full', got 'whole'"),
        ({"outputs": "full", "seq_dim": 2}, r"seq_dim to be a dimension of ids \(2, 11\), got 2"),
        ({"temperature": 0.0}, "temperature to be a finite number > 0, got 0"),
        ({"temperature": float("nan")}, "temperature to be a finite number > 0, got nan"),
        ({"softcap": -1.0}, "softcap to be None or a finite number > 0, got -1"),
        ({"chunk_tokens": 0}, "chunk_tokens >= 1, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(**kwargs)
    per_token = torch.zeros(2, 11).double()

    def backward(grads, logsumexp=per_token, entropy=None):
        rest = (-100, None, None, 1.0, 1.0, [1, 0, 0])
        return op._token_log_probs_backward(
            grads, hidden, weight, None, ids, logsumexp, entropy, *rest
        )

    with pytest.raises(ValueError, match=r"grads to have 2 entries, .*, got 1"):
        backward([per_token])
    with pytest.raises(ValueError, match=r"each of grads to be .* of ids \[2, 11\], got float64"):
        backward([per_token, per_token[0]])
    with pytest.raises(ValueError, match=r"logsumexp to be floating point, .*, got int64"):
        backward([per_token] * 2, ids)
    with pytest.raises(ValueError, match=r"entropy to be floating point, .*, got float64 \[2\]"):
        backward([per_token] * 3, per_token, per_token[:, 0])
    bad = ids.clone()
    bad[1, 4] = 7
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        call(ids=bad)


def _no_large_tensor():
    """Nothing that an operator reads, in forward or backward, is as large as the logits."""
    hidden, weight, bias, ids = _case(tokens=128, features=8, classes=64)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        found = deepsp.token_log_probs(
            *leaves[:2], ids, leaves[2], softcap=2.0, entropy=True, chunk_tokens=10
        )
        torch.autograd.grad(_objective(*found), leaves)
    shapes = [s for event in profile.events() for s in event.input_shapes]
    sizes = [torch.Size(s).numel() for s in shapes if all(isinstance(n, int) for n in s)]
    assert max(sizes) == hidden.numel() == 256 * 8


def test_no_tensor_of_all_logits():
    on_ranks(1, _no_large_tensor)


def _compiled():
    torch._dynamo.reset()
    rank, size = dist.get_rank(), dist.get_world_size()

    def step(hidden, weight, bias, ids, lens):
        found = deepsp.token_log_probs(
            hidden.cos(),
            weight,
            ids,
            bias,
            temperature=0.7,
            entropy=True,
            outputs="full",
            seq_lens=lens,
        )
        return _objective(*found)

    for tokens in (9, 14, 21):  # dynamic from the second on
        hidden, weight, bias, ids = _case(tokens)
        lens = lens_of("split", tokens, size)
        mine = hidden.split(lens, 1)[rank].clone()
        leaves = [x.requires_grad_() for x in (mine, weight, bias)]
        ids = ids.split(lens, 1)[rank]
        expected = step(*leaves, ids, lens)
        gradients = torch.autograd.grad(expected, leaves)
        out = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves, ids, lens)
        ours = torch.autograd.grad(out, leaves)
        torch.testing.assert_close([out, *ours], [expected, *gradients], **TIGHT)


@pytest.mark.parametrize("ranks", [1, 2])
def test_fullgraph(ranks):
    on_ranks(ranks, _compiled)


def test_the_meta_device():
    hidden = torch.empty(2, 3, 4, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(10**6, 4, device="meta", dtype=torch.bfloat16, requires_grad=True)
    ids = torch.empty(2, 3, device="meta", dtype=torch.long)
    log_probs = deepsp.token_log_probs(hidden, weight, ids)
    gradients = torch.autograd.grad(log_probs.sum(), [hidden, weight])
    assert log_probs.dtype == torch.float32 and log_probs.shape == (2, 3)
    assert [(g.shape, g.dtype) for g in gradients] == [(x.shape, x.dtype) for x in (hidden, weight)]


def _first_step(program):
    """The loss of examples/rl_loop.py's first step, in plain PyTorch, and its gradient norm."""
    from transformers import AutoModelForCausalLM, LlamaConfig, set_seed

    wanted = (ast.Import, ast.ImportFrom, ast.FunctionDef)
    nodes = ast.parse(program).body
    names = {}
    kept = [n for n in nodes if isinstance(n, wanted) or ast.unparse(n).startswith("VOCABULARY")]
    exec(compile(ast.Module(kept, []), "rl_loop", "exec"), names)
    set_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=97, **sizes, num_attention_heads=4, num_key_value_heads=2)
    policy, reference = (AutoModelForCausalLM.from_config(config).double() for _ in range(2))
    total, count = 0, 0
    prompts = [[5, 7 + i, 11 * i % 90] for i in range(names["PROMPTS"])]
    rows = names["rollout"](prompts, 0)
    rewards = torch.tensor([sum(row["answer"]) % 7 / 7 for row in rows]).double().view(4, -1)
    advantages = (rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)
    for row, advantage in zip(rows, advantages.flatten(), strict=True):
        ids = torch.tensor(row["prompt"] + row["answer"])[None]
        scores = [model(ids).logits.log_softmax(-1)[0, 2:-1] for model in (policy, reference)]
        now, before = (x.gather(1, ids[0, 3:, None])[:, 0] for x in scores)
        ratio = (now - torch.tensor(row["sampled"]).double()).exp()
        gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        distance = before.detach() - now
        entropy = -(scores[0].exp() * scores[0]).sum(1)
        each = -gain + 0.04 * (distance.exp() - distance - 1) - 0.01 * entropy
        total, count = total + each.sum(), count + len(each)
    loss = total / count
    loss.backward()
    return float(loss), float(torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0))


def test_rl_loop_example():
    path = Path(__file__).parents[1] / "examples/rl_loop.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", path]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    steps = [re.findall(r"[-\d.]{8,}", line) for line in printed.splitlines() if "step" in line]
    assert len(steps) == 3
    expected = _first_step(path.read_text())
    assert [float(x) for x in steps[0]] == pytest.approx(expected, abs=1e-8)
