"""Batches that aren't what every rank takes them for: padding's positions, other batches on other
ranks, what isn't a tensor."""

import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks
from reference import draw

import deepsp

LENGTH = 11


def _padded(left, *, fill, right=0):
    """A mask of rows with so much padding in front, and positions as transformers makes them."""
    mask = torch.ones(len(left), LENGTH, dtype=torch.int64)
    for row, n in zip(mask, left, strict=True):
        row[:n] = 0
        row[LENGTH - right :] = 0
    return mask, (mask.cumsum(-1) - 1).masked_fill(mask == 0, fill)


def _padding():
    """The loss and its gradients keep every label that one process has."""
    weight = draw(13, 6)
    labels = torch.arange(3 * LENGTH).view(3, LENGTH) % 13
    hidden = draw(3, LENGTH, 6)
    seen = []

    def compare(given, expected_labels, dim=1):
        ours, full = weight.clone().requires_grad_(), weight.clone().requires_grad_()
        expected = F.cross_entropy(
            (hidden[:, :-1] @ full.T).flatten(0, 1), expected_labels.flatten()
        )
        batch = {"inputs_embeds": hidden, "labels": labels, **given}
        batch = {
            n: x.transpose(0, 1) if dim == 0 and n != "position_ids" else x
            for n, x in batch.items()
        }
        part, _ = deepsp.shard_batch(batch, dim=dim)
        loss = deepsp.cross_entropy(part["inputs_embeds"] @ ours.T, part["shift_labels"])
        loss.backward()
        expected.backward()
        dist.all_reduce(ours.grad)
        torch.testing.assert_close((loss, ours.grad), (expected, full.grad), rtol=1e-12, atol=1e-12)
        seen.append(1)

    for left, right, fill in [((4, 0, 1), 0, 1), ((4, 0, 1), 2, 0), ((7, 2, 3), 0, 1)]:
        mask, positions = _padded(left, fill=fill, right=right)
        kept = labels.masked_fill(mask == 0, -100)
        labels, kept_of = kept, labels
        for given_mask in (mask, mask.bool(), mask.double(), mask.int() * 2):
            given = {"attention_mask": given_mask, "position_ids": positions}
            compare(given, kept[:, 1:])
        compare({"attention_mask": mask, "position_ids": positions}, kept[:, 1:], dim=0)
        labels = kept_of
    # Without the mask: several ones in front are padding, and one alone may be either.
    mask, positions = _padded((4, 0, 2), fill=1)
    labels = labels.masked_fill(mask == 0, -100)
    compare({"position_ids": positions}, labels[:, 1:])
    with pytest.raises(ValueError, match=r"position_ids'\] begins with 1, 0 .* attention_mask"):
        deepsp.shard_batch(
            {"input_ids": labels, "labels": labels, "position_ids": _padded((1, 0, 2), fill=1)[1]}
        )
    # Documents behind the padding end where they end.
    positions[:, 7:] = torch.arange(4)
    ended = labels[:, 1:].clone()
    ended[:, 6] = -100
    compare({"attention_mask": mask, "position_ids": positions}, ended)
    assert len(seen) == 17


@pytest.mark.parametrize("ranks", [2, 3])
def test_left_padding_loses_no_label(ranks):
    on_ranks(ranks, _padding)


def _others():
    rank, size = dist.get_rank(), dist.get_world_size()
    every = [dist.new_group(range(size)) for _ in range(8)]
    ids = torch.arange(2 * LENGTH).view(2, LENGTH)
    mine = ids + 100 * rank
    last = rank == size - 1
    wide = torch.zeros(2, LENGTH + 2, dtype=torch.int64)
    for group, (batch, name) in enumerate(
        [
            ({"input_ids": mine, "labels": ids}, "input_ids"),
            ({"input_ids": ids, "labels": mine}, "labels"),
            (
                {"input_ids": ids, "attention_mask": (mine > 3).long() * (rank + 1)},
                "attention_mask",
            ),
            ({"input_ids": ids.int() if last else ids}, "input_ids"),
            # Other names, or what another rank can see to be wrong by itself: nobody waits for it.
            ({"input_ids": ids, **({"labels": ids} if last else {})}, "labels"),
            ({"input_ids": ids, "labels": wide if last else ids}, "labels"),
            ({"input_ids": wide if last else ids}, "input_ids"),
        ]
    ):
        other = size - 1 if group in (3, 4, 5, 6) else 1
        with pytest.raises(ValueError, match=rf"batch\['{name}'\],.* and {other}; .*Distributed"):
            deepsp.shard_batch(batch, every[group])
    for _ in range(4):  # on every call
        deepsp.shard_batch({"input_ids": ids, "labels": ids}, every[7])
    with pytest.raises(ValueError, match="DistributedSampler"):
        deepsp.shard_batch({"input_ids": mine}, every[7])
    # In a thread of a loader nothing is sent: it would meet what the training sends.
    other = dist.new_group()
    found = []
    loader = threading.Thread(
        target=lambda: found.append(deepsp.shard_batch({"input_ids": mine}, other))
    )
    loader.start()
    loader.join()
    assert torch.equal(found[0][0]["input_ids"], deepsp.shard(mine, 1))
    with pytest.raises(ValueError, match="DistributedSampler"):
        deepsp.shard_batch({"input_ids": mine}, other)
    # What each rank has for itself is fine: strides.
    deepsp.shard_batch({"input_ids": ids.T.contiguous().T if last else ids}, dist.new_group())


@pytest.mark.parametrize("ranks", [2, 3])
def test_other_batches_on_other_ranks(ranks):
    on_ranks(ranks, _others)


def _carried(name):
    """The digest travels with what attention of a model exchanges; nothing else is sent."""
    from trained import tiny

    from deepsp.data import same_batch
    from deepsp.integrations.transformers import register

    register()
    rank, group = dist.get_rank(), dist.group.WORLD
    model = tiny(name)
    model.set_attn_implementation("deepsp")
    same_batch._of_groups.pop(group, None)  # an earlier test's model may have exchanged numbers
    calls, compare = [], same_batch.difference
    same_batch.difference = lambda *args: calls.append(1) or compare(*args)
    try:
        for step in range(5):
            ids = torch.arange(2 * LENGTH).view(2, LENGTH) + 7 * step
            if step == 4:
                ids[1, 3] += rank
            batch, _ = deepsp.shard_batch({"input_ids": ids, "labels": ids}, group)
            assert len(calls) == 1  # the first batch's, when it isn't known yet what follows
            if step < 4:
                model(**batch)
        with pytest.raises(
            ValueError, match=r"batch\['input_ids'\], a full .* ranks 0 and 1; .* seed"
        ):
            model(**batch)
        deepsp.shard_batch({"input_ids": torch.zeros(1, 4, dtype=torch.int64)}, group)
        # Nothing has come after that batch, so that this one is compared at once.
        with pytest.raises(ValueError, match=r"batch\['input_ids'\], a full .* ranks 0 and 1;"):
            deepsp.shard_batch({"input_ids": torch.full((1, 4), rank)}, group)
    finally:
        same_batch.difference = compare


def test_the_digest_of_a_batch_travels_with_the_models_exchange():
    on_ranks(2, _carried, "llama")


def _dropout():
    """Each rank drops other elements, and the default generators go on alike."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from trained import tiny

    from deepsp.integrations.transformers import register

    register()
    rank, size = dist.get_rank(), dist.get_world_size()
    model = tiny("gpt2", embd_pdrop=0.5, attn_pdrop=0.0, resid_pdrop=0.0)
    model.set_attn_implementation("deepsp")
    seen = []
    model.transformer.drop.register_forward_hook(lambda m, i, out: seen.append(out == 0))
    ids = torch.zeros(4, 5 * LENGTH, dtype=torch.int64)  # other numbers on each rank
    batch, lens = deepsp.shard_batch({"input_ids": ids, "labels": ids})
    model.eval()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    model(**batch)
    assert torch.equal(torch.rand(3), expected)  # nothing was drawn
    model.train()
    seen.clear()
    for _ in range(2):
        model(**batch).loss.backward()
    states = deepsp.ranks.groups.objects_on_all_ranks(torch.rand(3), None, torch.device("cpu"))
    assert all(torch.equal(x, states[0]) for x in states)
    first = deepsp.unshard(seen[0], 1, seq_lens=lens).split(lens, 1)
    assert len(set(lens)) > 1
    same = (first[0][:, : lens[1]] == first[1][:, : lens[1]]).double().mean()
    again = (seen[0] == seen[1]).double().mean()
    assert abs(same - 0.5) < 0.05 and abs(again - 0.5) < 0.05, (same, again)
    assert rank < size
    # A checkpoint around a part that is a model itself draws the same again.
    plain, found = model.transformer, []
    for checkpointed in (False, True):
        model.zero_grad()
        torch.manual_seed(5)
        model.transformer = checkpoint_wrapper(plain) if checkpointed else plain
        model(**batch).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_ranks_drop_other_elements():
    on_ranks(3, _dropout)


def _beside_labels():
    """What says something of each label moves as labels do."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ids = torch.arange(10)[None]
    batch = {"input_ids": ids, "labels": ids, "weights": ids.double(), "token_type_ids": ids}
    with pytest.raises(
        ValueError, match=r"a role for batch\['weights'\] of shape \(1, 10\).*Known: .*labels"
    ):
        deepsp.shard_batch(batch)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 6]])
    shifted = [[1, 2, 0, 4, 5, 6, 7, 8, 9, 0]]
    for role, expected in (("tokens", ids), ("label_weights", shifted)):
        roles = {"weights": role}
        part, _ = deepsp.shard_batch({**batch, "position_ids": positions}, roles=roles)
        expected = torch.as_tensor(expected).double().tensor_split(size, 1)[rank]
        assert torch.equal(part["weights"], expected)
        assert torch.equal(part["token_type_ids"], ids.tensor_split(size, 1)[rank])
        loader = deepsp.SequenceLoader(
            [{**batch, "position_ids": positions}], replicated=True, roles=roles
        )
        assert torch.equal(next(iter(loader))[0]["weights"], expected)
    for wrong, message in (
        ({"weights": "weight"}, r"roles\['weights'\] to be one of tokens, .*, got 'weight'"),
        ({"input_ids": "row"}, r"names that don't say what they are, got 'input_ids', .* 'tokens'"),
        ({"weights": "row"}, r"weights'\], a value for each of 2 rows, to have as many"),
    ):
        with pytest.raises(ValueError, match=message):
            deepsp.shard_batch({**batch, "input_ids": ids.repeat(2, 1)}, roles=wrong)
    rows, _ = deepsp.shard_batch({"input_ids": ids, "labels": ids, "channel": ids[:, 0]})
    assert torch.equal(rows["channel"], ids[:, 0])  # a value for each row
    shifted, _ = deepsp.shard_batch({n: x for n, x in batch.items() if n != "labels"})
    assert torch.equal(shifted["weights"], ids.double().tensor_split(size, 1)[rank])


def test_what_stands_beside_labels():
    on_ranks(3, _beside_labels)


def _arguments():
    ids = torch.arange(2 * LENGTH).view(2, LENGTH)
    part, _ = deepsp.shard_batch(
        {
            "input_ids": ids,
            "inputs_embeds": None,
            "labels": None,
            "position_ids": None,
            "attention_mask": None,
            "name": None,
        },
        pad_to=LENGTH + 1,
    )
    assert set(part) == {"input_ids", "position_ids", "attention_mask", "name"}
    assert part["attention_mask"].sum() == 2 * LENGTH and part["name"] is None
    part, _ = deepsp.shard_batch({"input_ids": None, "inputs_embeds": draw(2, LENGTH, 3)})
    assert set(part) == {"inputs_embeds", "position_ids"}
    for wrong, message in [
        (ids, r"batch to map names to tensors.*, got Tensor of shape \(2, 11\)"),
        ([ids], "batch to map names to tensors.*, got list"),
        (
            {"input_ids": ids, "labels": ids.tolist()},
            r"batch\['labels'\] to be a tensor.*, got list",
        ),
        (
            {"input_ids": ids, "position_ids": range(11)},
            r"batch\['position_ids'\] to be .*, got range",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            deepsp.shard_batch(wrong)
    logits, labels = draw(2, 3, 5), torch.tensor([[1, 2, -100], [0, 4, 3]])
    hidden, weight = draw(2, 3, 4), draw(5, 4)
    for loss, args in (
        (deepsp.cross_entropy, (logits,)),
        (deepsp.linear_cross_entropy, (hidden, weight)),
    ):
        for dtype in (torch.int32, torch.int16, torch.int8):
            assert torch.equal(loss(*args, labels.to(dtype)), loss(*args, labels))
        for wrong, message in ((labels.double(), "torch.float64"), (None, "NoneType")):
            with pytest.raises(
                ValueError, match=f"shift_labels to be an integer tensor.*, got {message}"
            ):
                loss(*args, wrong)
    q = draw(1, 3, 6, 2)
    for call in (
        lambda lens: deepsp.distributed_attention(q, q, q, seq_lens=lens),
        lambda lens: deepsp.DistributedAttention()(q, q, q, seq_lens=lens),
        lambda lens: deepsp.unshard(q, 1, seq_lens=lens),
    ):
        with pytest.raises(
            ValueError, match=r"seq_lens to be ints, such as \[3, 3\], got \[3.0, 3.0\]"
        ):
            call([3.0, 3.0])


def test_arguments():
    on_ranks(2, _arguments)


def _borders():
    """What collators add for kernels says where documents begin."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ids = torch.arange(10)[None]
    expected = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 4, 5]])
    cu = torch.tensor([0, 3, 4, 10], dtype=torch.int32)
    index = torch.tensor([[0] * 3 + [1] + [2] * 6], dtype=torch.int32)
    lengths = {"max_length_q": 6, "max_length_k": 6}
    ends = torch.tensor([[1, 2, -100, -100, 5, 6, 7, 8, 9, -100]])
    for more in (
        {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, **lengths},
        {"seq_idx": index},
        {"cu_seq_lens_q": cu, "seq_idx": index, "position_ids": expected},
        {"position_ids": expected, **lengths},
        {"cu_seq_lens_q": cu, "position_ids": None},
    ):
        batch, _ = deepsp.shard_batch({"input_ids": ids, "labels": ids, **more})
        assert sorted(batch) == ["input_ids", "position_ids", "shift_labels"]
        assert batch["position_ids"].tolist() == expected.tensor_split(size, 1)[rank].tolist()
        assert batch["shift_labels"].tolist() == ends.tensor_split(size, 1)[rank].tolist()
    whole = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    for borders in (
        {"cu_seq_lens_q": torch.tensor([0, 3, 5, 10])},
        {"seq_idx": torch.tensor([[0, 0, 0, 1, 1], [1] * 5])},  # a row begins a document
    ):
        rows, _ = deepsp.shard_batch({"input_ids": ids.view(2, 5), **borders})
        assert rows["position_ids"].tolist() == whole.tensor_split(size, 1)[rank].tolist()
    for more, message in [
        (lengths, r"seq_idx in a batch with \['max_length_k', 'max_length_q'\], got none"),
        ({"cu_seq_lens_q": cu, "position_ids": torch.arange(10)[None]}, "start anew where cu_seq"),
        ({"cu_seq_lens_q": cu[:-1]}, r"go from 0 to 10, .* got \[0, 3, 4\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            deepsp.shard_batch({"input_ids": ids, **more})


def test_borders_of_documents():
    on_ranks(2, _borders)
