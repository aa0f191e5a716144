"""Batches, losses and gradient sums, against one process on the whole batch."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks
from reference import draw, lens_of
from torch.autograd import gradcheck

import deepsp

# ----------------------------------------------------------------------------- shard, unshard


def _shard():
    rank, size = dist.get_rank(), dist.get_world_size()
    x = draw(3, 7, 5).requires_grad_()
    for dim in (0, 1, 2, -1):
        part = deepsp.shard(x, dim)
        assert torch.equal(part, x.tensor_split(size, dim)[rank])
        whole = deepsp.unshard(part, dim)
        assert torch.equal(whole, x) and whole.is_contiguous()
        weight = draw(3, 7, 5, seed=dim + 9)
        (grad,) = torch.autograd.grad((whole * weight).sum(), part)
        assert torch.equal(grad, deepsp.shard(weight, dim))
    lens = lens_of("empty", 7, size)
    mine = x.split(lens, 1)[rank]
    assert torch.equal(deepsp.unshard(mine, 1, seq_lens=lens), x)
    assert torch.equal(deepsp.unshard(mine, 1), x)  # lengths are asked for
    integers = torch.arange(7)
    assert torch.equal(deepsp.unshard(deepsp.shard(integers, 0), 0), integers)
    assert deepsp.ranks.seq_lens(7) == [len(t) for t in integers.tensor_split(size)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shard_and_unshard(ranks):
    on_ranks(ranks, _shard)


def _batch():
    rank, size = dist.get_rank(), dist.get_world_size()
    ids = torch.arange(22).view(2, 11)
    # Two documents in each row: positions restart at 4, and a document of one token at 9.
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 0])
    mask = torch.ones(2, 11)
    batch = {"input_ids": ids, "labels": ids + 100, "attention_mask": mask, "name": "text"}
    expected = torch.full((2, 11), -100)
    expected[:, :-1] = ids[:, 1:] + 100

    def part(x, dim=1):
        return x.tensor_split(size, dim)[rank]

    mine, lens = deepsp.shard_batch(batch)
    assert lens == [len(x) for x in torch.arange(11).tensor_split(size)]
    assert set(mine) == {"input_ids", "shift_labels", "attention_mask", "name", "position_ids"}
    assert torch.equal(mine["input_ids"], part(ids))
    assert torch.equal(mine["shift_labels"], part(expected))
    assert torch.equal(mine["position_ids"], part(torch.arange(11)[None]))
    assert mine["attention_mask"] is mask and mine["name"] == "text"
    assert "labels" in batch and "position_ids" not in batch, "the given batch is left alone"

    cut = expected.clone()
    cut[:, [3, 8, 9]] = -100
    for given in (positions, positions[None], positions.expand(2, 11)):
        mine, _ = deepsp.shard_batch({**batch, "position_ids": given})
        assert torch.equal(mine["shift_labels"], part(cut))
        assert torch.equal(mine["position_ids"], part(given, -1))

    # [S, B] and [S]
    mine, _ = deepsp.shard_batch(
        {"input_ids": ids.T, "labels": ids.T + 100, "position_ids": positions}, dim=0
    )
    assert torch.equal(mine["shift_labels"], part(cut.T, 0))
    mine, _ = deepsp.shard_batch(
        {"input_ids": ids[0], "labels": ids[0] + 100, "position_ids": positions}, dim=0
    )
    assert torch.equal(mine["shift_labels"], part(cut[0], 0))

    # Already shifted: never again.
    mine, _ = deepsp.shard_batch({"input_ids": ids, "shift_labels": ids})
    assert torch.equal(mine["shift_labels"], part(ids))

    # Padded, when asked for.
    mine, lens = deepsp.shard_batch(batch, pad_to=12)
    assert sum(lens) == 12 and torch.equal(
        mine["shift_labels"], part(F.pad(expected, (0, 1), value=-100))
    )
    assert torch.equal(mine["input_ids"], part(F.pad(ids, (0, 1))))
    assert torch.equal(mine["attention_mask"], F.pad(mask, (0, 1)))
    mine, _ = deepsp.shard_batch({"input_ids": ids}, pad_to=12)
    assert torch.equal(mine["attention_mask"], F.pad(torch.ones(2, 11).long(), (0, 1)))

    mine, _ = deepsp.shard_batch({"input_ids": ids.T, "attention_mask": mask.T}, dim=0, pad_to=12)
    assert torch.equal(mine["attention_mask"], F.pad(mask, (0, 1)).T)
    for bad in (torch.zeros(2, 1, 11, 11), torch.full((2, 11), -1e9)):
        with pytest.raises(ValueError, match=r"batch\['attention_mask'\] to have .*, got torch"):
            deepsp.shard_batch({"input_ids": ids, "attention_mask": bad}, pad_to=12)
    with pytest.raises(ValueError, match="dim >= 0, got -1"):
        deepsp.shard_batch(batch, dim=-1)

    embeds = draw(2, 11, 4)
    mine, _ = deepsp.shard_batch({"inputs_embeds": embeds, "labels": ids})
    assert torch.equal(mine["inputs_embeds"], part(embeds))

    for wrong, message in [
        ({"ids": ids}, "to have input_ids or inputs_embeds"),
        ({"input_ids": ids[0]}, r"batch\['input_ids'\] to be a tensor \[B, S\].*, got \(11,\)"),
        ({"input_ids": ids.tolist()}, r"batch\['input_ids'\] to be a tensor.*, got list"),
        (
            {"input_ids": ids, "labels": ids, "shift_labels": ids},
            "labels or shift_labels, got both",
        ),
        (
            {"input_ids": ids, "labels": ids[:, :5]},
            r"batch\['labels'\] to have size 11 .*, got shape \(2, 5\)",
        ),
        ({"input_ids": ids, "wide": ids.T}, r"size 11 in .*, got shape \(11, 2\); .*'wide': 'row'"),
        (
            {"input_ids": ids, "labels": ids, "position_ids": positions.expand(3, 2, 11)},
            "pass shift_labels",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            deepsp.shard_batch(wrong)
    with pytest.raises(ValueError, match=r"pad_to >= 11, .*, got 5"):
        deepsp.shard_batch(batch, pad_to=5)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shard_batch(ranks):
    on_ranks(ranks, _batch)


# ---------------------------------------------------------------------------------- the loss


def _loss(reduction, smoothing, ignored, kind):
    rank, size = dist.get_rank(), dist.get_world_size()
    lens = lens_of(kind, 9, size)
    logits = draw(2, 9, 5).requires_grad_()
    labels = torch.arange(18).view(2, 9) % 5
    if ignored == "some":
        labels[:, 1::3] = -100
    if ignored == "a rank's" and size > 1:
        labels.split(lens, 1)[0].fill_(-100)  # a view
    expected = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction=reduction, label_smoothing=smoothing
    )
    (full,) = torch.autograd.grad(expected, logits)
    mine = logits.detach().split(lens, 1)[rank].clone().requires_grad_()
    mine_labels = labels.split(lens, 1)[rank]
    for average, factor in ((False, 1), (True, size)):
        loss = deepsp.cross_entropy(
            mine,
            mine_labels,
            reduction=reduction,
            label_smoothing=smoothing,
            average_gradients=average,
        )
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        (grad,) = torch.autograd.grad(loss, mine)
        torch.testing.assert_close(grad, factor * full.split(lens, 1)[rank], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignored", ["none", "some", "a rank's"])
def test_cross_entropy(ranks, reduction, ignored):
    for smoothing, kind in ((0.0, "skewed"), (0.1, "split"), (0.0, "empty")):
        on_ranks(ranks, _loss, reduction, smoothing, ignored, kind)


def _nothing_valid():
    logits = draw(2, 3, 5).requires_grad_()
    labels = torch.full((2, 3), -1)
    for reduction in ("mean", "sum"):
        loss = deepsp.cross_entropy(logits, labels, ignore_index=-1, reduction=reduction)
        (grad,) = torch.autograd.grad(loss, logits)
        assert loss == 0 and not grad.any()
    low = deepsp.cross_entropy(logits.bfloat16(), labels.fill_(1))
    assert low.dtype == torch.float32
    for call, message in [
        (lambda: deepsp.cross_entropy(logits, labels[:, :2]), "shift_labels to have shape"),
        (
            lambda: deepsp.cross_entropy(logits, labels, reduction="none"),
            "reduction to be .*, got 'none'",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_no_valid_token_gives_zero():
    on_ranks(2, _nothing_valid)


def _loss_gradcheck():
    labels = torch.arange(6).view(2, 3) % 4
    # Every rank perturbs its own logits at once: the sum of all ranks' changes is seen, so all
    # ranks must hold the same numbers for each one's share to be 1/P of it.
    logits = draw(2, 3, 4).requires_grad_()
    size = dist.get_world_size()
    gradcheck(
        lambda x: (
            deepsp.cross_entropy(x, labels, average_gradients=True)
            if size > 1
            else deepsp.cross_entropy(x, labels)
        ),
        (logits,),
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_loss_gradcheck(ranks):
    on_ranks(ranks, _loss_gradcheck)


def _of_tokens(kind):
    rank, size = dist.get_rank(), dist.get_world_size()
    lens = lens_of(kind, 9, size)
    values, weights = draw(2, 9), draw(2, 9, seed=1).abs()
    weights[0, 0] = 0
    for ignored, weighted in itertools.product(("none", "some", "a rank's", "all"), (False, True)):
        labels = torch.arange(18).view(2, 9)
        if ignored == "some":
            labels[:, 1::3] = -1
        if ignored == "a rank's" and size > 1:
            labels.split(lens, 1)[0].fill_(-1)
        if ignored == "all":
            labels.fill_(-1)
        counts = (labels != -1) * (weights if weighted else torch.ones_like(weights))
        # Values of tokens that don't count may be anything, and have no gradient.
        broken = values.masked_fill(labels == -1, torch.nan)
        if weighted:
            broken[0, 0] = torch.inf
        mine = broken.split(lens, 1)[rank].clone().requires_grad_()
        for function, divisor in (
            (deepsp.token_sum, 1),
            (deepsp.token_mean, counts.sum() if counts.any() else 1),
        ):
            expected, full = (values * counts).sum() / divisor, counts / divisor
            for average, factor in ((False, 1), (True, size)):
                loss = function(
                    mine,
                    labels.split(lens, 1)[rank],
                    ignore_index=-1,
                    average_gradients=average,
                    token_weights=weights.split(lens, 1)[rank] if weighted else None,
                )
                torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
                (grad,) = torch.autograd.grad(loss, mine)
                torch.testing.assert_close(
                    grad, factor * full.split(lens, 1)[rank], rtol=1e-12, atol=1e-12
                )


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["skewed", "empty"])
def test_means_and_sums_of_tokens(ranks, kind):
    on_ranks(ranks, _of_tokens, kind)


def _rest_of_tokens():
    torch._dynamo.reset()
    labels = torch.zeros(1, 6000, dtype=torch.int32)
    # More tokens than 16 bits can count.
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.full((1, 6000), 0.5, dtype=dtype, requires_grad=True)
        loss = deepsp.token_sum(x, labels)
        size = dist.get_world_size()
        assert loss.dtype == torch.float32 and loss.item() == 3000 * size
        assert torch.equal(torch.autograd.grad(loss, x)[0], torch.ones_like(x))
    x = draw(2, 5).requires_grad_()
    labels = torch.arange(10).view(2, 5)
    loss = deepsp.token_mean(x.square(), labels)
    compiled = torch.compile(
        lambda x: deepsp.token_mean(x.square(), labels), fullgraph=True, backend="aot_eager"
    )(x)
    torch.testing.assert_close(compiled, loss)
    gradients = [torch.autograd.grad(y, x)[0] for y in (compiled, loss)]
    torch.testing.assert_close(*gradients)
    for call, message in [
        (
            lambda: deepsp.token_mean(x, labels[:, :2]),
            r"x to have the shape of .* \(2, 2\), .* \(2, 5",
        ),
        (
            lambda: deepsp.token_mean(labels, labels),
            "x to be a floating-point tensor, got torch.int64",
        ),
        (lambda: deepsp.token_sum(2.0, labels), "x to be a floating-point tensor, got float"),
        (lambda: deepsp.token_sum(x, x), "shift_labels to be an integer tensor"),
        (lambda: deepsp.token_sum(x, labels, token_weights=x), "not to require a gradient"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_dtypes_of_means_and_sums():
    on_ranks(2, _rest_of_tokens)


# ------------------------------------------------------------------------------- gradient sums


def _sync():
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    module = torch.nn.ModuleDict(
        {
            "a": torch.nn.Linear(3, 4),
            "b": torch.nn.Linear(2, 2).double(),
            "large": torch.nn.Linear(2048, 4096),
            "unused": torch.nn.Linear(2, 2),
            "frozen": torch.nn.Linear(2, 2).requires_grad_(False),
            "first": torch.nn.Linear(5, 1),
        }
    )
    module["tied"] = module["a"]
    for p in [*module["a"].parameters(), *module["b"].parameters(), *module["large"].parameters()]:
        p.grad = torch.full_like(p, rank + 1.0)
    module["a"].weight.grad = torch.full((3, 4), rank + 1.0).T  # not contiguous
    if rank == 0:
        for p in module["first"].parameters():
            p.grad = torch.full_like(p, 7.0)
    deepsp.sync_gradients(module)
    total = size * (size + 1) / 2
    for name in ("a", "b", "large"):
        for p in module[name].parameters():
            assert torch.equal(p.grad, torch.full_like(p, total))
    for p in module["first"].parameters():
        assert torch.equal(p.grad, torch.full_like(p, 7.0))
    assert all(p.grad is None for n in ("unused", "frozen") for p in module[n].parameters())
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    if size > 1:
        if rank == 1:
            embedding.weight.grad = None  # the others' is sparse: known to all
        with pytest.raises(ValueError, match="the gradient of weight is sparse"):
            deepsp.sync_gradients(embedding)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sync_gradients(ranks):
    on_ranks(ranks, _sync)
