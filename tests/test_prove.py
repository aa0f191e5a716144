"""``deepsp.prove``: steps over sharded sequences that aren't those of one process are refused,
right ones pass, and nothing is left changed."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import deepsp

WORDS, DIM, HEADS = 30, 16, 4


class Block(nn.Module):
    def __init__(self, group, own_positions):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.attend, self.own_positions = deepsp.DistributedAttention(group=group), own_positions
        self.places = nn.Embedding(128, DIM)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, position_ids, seq_lens):
        if self.own_positions:
            position_ids = torch.arange(x.size(1))[None]
        q, k, v = self.qkv(x + self.places(position_ids)).chunk(3, -1)
        heads = (y.unflatten(-1, (HEADS, -1)) for y in (q, k, v))
        out = self.attend(*heads, is_causal=True, seq_lens=seq_lens)
        return x + self.drop(self.out(out.flatten(2)))


class Model(nn.Module):
    def __init__(self, group=None, own_positions=False, loads=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block = nn.Embedding(WORDS, DIM), Block(group, own_positions)
        self.head, self.loads = nn.Linear(DIM, WORDS), loads
        self.register_buffer("load", torch.zeros(4), persistent=False)
        self.steps = 0

    def forward(self, ids, position_ids, seq_lens):
        self.steps += 1
        x = self.embed(ids)
        if self.loads is not None:
            with torch.no_grad():
                counts = torch.bincount(x[..., 0].mul(9).long().flatten() % 4, minlength=4)
                self.load += self.loads(counts)
        return self.head(self.block(x, position_ids, seq_lens))


def _step(model, group=None, syncs=True, loss_of=None, **options):
    def step(batch):
        local, lens = deepsp.shard_batch(batch, group)
        logits = model(local["input_ids"], local["position_ids"], lens)
        loss = (loss_of or deepsp.cross_entropy)(logits, local["shift_labels"], group, **options)
        loss.backward()
        if syncs:
            deepsp.sync_gradients(model, group)
        return loss

    return step


def _mean_of_means(logits, labels, group):
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return deepsp.collectives.all_reduce(loss, group, grad="replicated") / dist.get_world_size()


def _shifted_by_rank(model):
    """Labels that end with a rank's tokens."""

    def step(batch):
        local, lens = deepsp.shard_batch({"input_ids": batch["input_ids"]})
        logits = model(local["input_ids"], local["position_ids"], lens)[:, :-1].contiguous()
        loss = deepsp.cross_entropy(logits, local["input_ids"][:, 1:].contiguous())
        loss.backward()
        deepsp.sync_gradients(model)
        return loss

    return step


def _batch(length=21, rows=2):
    ids = torch.randint(0, WORDS, (rows, length), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids, "number": 3, "rows": torch.arange(rows)}


def _state(models):
    return [
        torch.get_rng_state(),
        *(m.training for m in models.modules()),
        *(x.clone() for x in models.buffers()),
        *(None if p.grad is None else p.grad.clone() for p in models.parameters()),
        models.steps,
        models.block.drop.p,
    ]


def _same(before, after):
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(before, after, strict=True)
    )


def _right():
    for dtype in (torch.float64, torch.float32):
        model = Model(loads=deepsp.sum_over_ranks).to(dtype)
        _step(model)(_batch(9))
        before = _state(model)
        for batch in (_batch(), _batch(300, 7)):
            deepsp.prove(_step(model), batch)
        assert _same(before, _state(model))
    packed = {
        **_batch(60, 1),
        "position_ids": torch.cat([torch.arange(n) for n in (7, 29, 24)])[None],
    }
    deepsp.prove(_step(Model().double()), packed)
    wrapped = DistributedDataParallel(Model().double())
    deepsp.prove(_step(wrapped, syncs=False, average_gradients=True), _batch())
    for mean in ("sum", "mean"):
        sharded = deepsp.shard_parameters(
            Model().double(),
            dtype=torch.float64,
            reduce_dtype=torch.float64,
            gradient_reduction=mean,
        )
        deepsp.prove(_step(sharded, average_gradients=mean == "mean"), _batch())
    compiled = torch.compile(Model().double(), backend="eager")
    deepsp.prove(_step(compiled), _batch())
    deepsp.prove(lambda batch: None, "anything")
    with torch.no_grad():
        model = Model().double()
        ids = _batch()["input_ids"]

        def evaluation(batch):
            local, lens = deepsp.shard_batch(batch)
            logits = model(local["input_ids"], local["position_ids"], lens)
            return deepsp.cross_entropy(logits, local["shift_labels"])

        deepsp.prove(evaluation, {"input_ids": ids, "labels": ids})


def _wrong():
    frozen = Model().double()
    for p in (*frozen.head.parameters(), *frozen.embed.parameters()):
        p.requires_grad_(False)
    wrapped = DistributedDataParallel(Model().double())
    for step, message in (
        (
            _step(Model().double(), syncs=False),
            r"another gradient of .*deepsp.sync_gradients is missing",
        ),
        (_step(frozen, syncs=False), r"another gradient of .*deepsp.sync_gradients is missing"),
        (_step(Model().double(), syncs=False, average_gradients=True), r"another gradient of "),
        (_step(wrapped, syncs=False), r"another gradient of .*scale: it is divided by the numb"),
        (_step(Model().double(), loss_of=_mean_of_means), r"another loss: "),
        (_shifted_by_rank(Model().double()), r"another loss: "),
        (_step(Model(own_positions=True).double()), r"another loss: .* in place of "),
        (_step(Model(loads=lambda x: x).double()), r"content of buffer load.*deepsp.sum_over_ran"),
    ):
        with pytest.raises(ValueError, match=message):
            deepsp.prove(step, _batch())
        assert step.__closure__ is not None
    # The error of one rank is one of all.
    with pytest.raises(ValueError, match="to be that of one process"):
        deepsp.prove(lambda batch: torch.tensor(float(dist.get_rank() == 1)) * _in_group(), 0)


def _in_group():
    """1 where this process runs alone, and with others another number."""
    from deepsp.ranks.groups import member_of

    return member_of(None)[1] ** 2


@pytest.mark.parametrize("ranks", [2, 3])
def test_right(ranks):
    on_ranks(ranks, _right)


@pytest.mark.parametrize("ranks", [2, 3])
def test_wrong(ranks):
    on_ranks(ranks, _wrong)
