"""SequenceLoader on real ranks: every batch is shard_batch's of its owner's full batch."""

import os
import pickle
import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks
from reference import attention
from test_model import VOCABULARY, Model
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from trained import launched

import deepsp

SAMPLES = 12


def full(n: int, dim: int = 1) -> dict:
    """Batch number n: of a length of its own, with all that a batch may hold."""
    generator = torch.Generator().manual_seed(n)
    length = 5 + 7 * n % 9
    ids = torch.randint(0, VOCABULARY, (2, length), generator=generator)
    batch = {"number": n, "names": [f"sample {n}", ("a", {"b": None})], "unset": None}
    if n % 4 == 3:
        batch["inputs_embeds"] = torch.randn(2, length, 3, generator=generator).double()
    else:
        batch["input_ids"] = ids
    batch["labels"] = ids.masked_fill(torch.rand(2, length, generator=generator) > 0.8, -100)
    batch["kept"] = ids > 9
    batch["more"] = {"half": (ids / 3).bfloat16(), "list": [ids.byte(), (ids.float(), "x")]}
    if n % 3 == 0:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, -2:] = 0
    if n % 2:
        batch["position_ids"] = torch.arange(length).remainder(4).expand(2, -1)
    if dim == 0:
        flip = lambda path, x: x if path == ("position_ids",) else x.transpose(0, 1)  # noqa: E731
        batch = deepsp.data.map_leaves(flip, batch)
    return batch


def same(ours, theirs) -> bool:
    """Bit for bit, with types and structure."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        return (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape) and torch.equal(
            *(x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
              for x in (ours, theirs))
        )
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(same(x, theirs[k]) for k, x in ours.items())
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


class Numbers(Dataset):
    def __init__(self, count=SAMPLES):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, n):
        return n


def _batch_of(numbers):
    return full(int(numbers[0]))


def _loader(sampler=None, count=SAMPLES, cls=DataLoader, **kwargs):
    return cls(Numbers(count), 1, sampler=sampler, collate_fn=_batch_of, **kwargs)


def _in_turns(lists) -> list:
    longest = max(map(len, lists))
    return [numbers[n] for n in range(longest) for numbers in lists if n < len(numbers)]


def _check(loader, numbers, group=None, **how) -> None:
    """The loader yields exactly these batches, each as shard_batch has it."""
    found = list(loader)
    assert [batch["number"] for batch, _ in found] == numbers
    for ours, n in zip(found, numbers, strict=True):
        assert same(ours, deepsp.shard_batch(full(n, how.get("dim", 1)), group, **how)), n


# ------------------------------------------------------------------------------ batches


def _epochs():
    rank, size = dist.get_rank(), dist.get_world_size()
    sampler = DistributedSampler(range(SAMPLES), size, rank, seed=3)
    seen = []
    loader = deepsp.SequenceLoader(_loader(sampler))
    for epoch in range(2):
        loader.set_epoch(epoch)
        every = [DistributedSampler(range(SAMPLES), size, r, seed=3) for r in range(size)]
        for each in every:
            each.set_epoch(epoch)
        seen.append(_in_turns([list(each) for each in every]))
        assert sorted(seen[-1]) == list(range(SAMPLES)) and len(loader) == SAMPLES
        _check(loader, seen[-1])
    assert seen[0] != seen[1]
    own = [full(n) for n in range(rank, 9, size)]
    numbers = list(range(9)) if 9 % size == 0 else _in_turns([range(r, 9, size) for r in range(size)])
    _check(deepsp.SequenceLoader(own, pad_to=16, ignore_index=-7), numbers, pad_to=16,
           ignore_index=-7)  # fmt: skip
    own = [full(n, 0) for n in range(rank, 9, size)]
    _check(deepsp.SequenceLoader(own, dim=0), numbers, dim=0)
    _check(deepsp.SequenceLoader(_loader(), replicated=True), list(range(SAMPLES)))
    assert len(deepsp.SequenceLoader(_loader(), replicated=True)) == SAMPLES


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_epochs(ranks):
    on_ranks(ranks, _epochs)


def _together():
    """Local batches put together are the full batch; a label crosses the border of ranks."""
    size, rank = dist.get_world_size(), dist.get_rank()
    loader = deepsp.SequenceLoader([full(4 * rank), full(4 * rank + 2)])
    for batch, lens in loader:
        whole = full(batch["number"])
        assert sum(lens) == whole["input_ids"].size(1) and len(set(lens)) > 1
        assert [batch["input_ids"].size(1)] == lens[rank : rank + 1]
        labels = deepsp.unshard(batch["shift_labels"], 1, None, lens)
        assert torch.equal(labels, F.pad(whole["labels"], (0, 1), value=-100)[:, 1:])
        positions = deepsp.unshard(batch["position_ids"], 1, None, lens)
        assert torch.equal(positions, torch.arange(sum(lens))[None])
        nested = deepsp.unshard(batch["more"]["list"][0].int(), 1, None, lens)
        assert torch.equal(nested, whole["input_ids"].int())
        assert deepsp.data.is_handed_out(batch["input_ids"])
        if "attention_mask" in whole:
            assert torch.equal(batch["attention_mask"], whole["attention_mask"])
        # Memory of its own: what is saved isn't the whole round.
        for _, x in deepsp.data.leaves_of(batch):
            assert x.untyped_storage().nbytes() == x.nbytes
    assert size == 3


def test_local_batches_put_together():
    on_ranks(3, _together)


def _one_all_to_all():
    """A round sends one all-to-all, and each rank only what is its own."""
    from unittest import mock

    rank, size = dist.get_rank(), dist.get_world_size()
    ids = torch.arange(2000).view(2, 1000)
    loader = deepsp.SequenceLoader([{"input_ids": ids + rank, "labels": ids}])
    exchange = dist.all_to_all_single
    with mock.patch.object(dist, "all_to_all_single", side_effect=exchange) as called:
        assert len(list(loader)) == size
    ((_, sent, into, out), _), = [(call.args, call.kwargs) for call in called.call_args_list]
    # ids and labels of two rows, and positions of one.
    expected = [5 * 8 * n for n in deepsp.seq_lens(1000)]
    assert out == expected and sent.numel() == sum(expected) and into == [expected[rank]] * size


def test_one_all_to_all_a_round():
    on_ranks(3, _one_all_to_all)


def _mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    group, data = mesh["sequence"], mesh["data"]
    own = DistributedSampler(range(SAMPLES), dist.get_world_size(), dist.get_rank())
    alike = DistributedSampler(range(SAMPLES), data.size(), data.get_local_rank())
    seen = []
    for sampler, replicated in ((own, False), (alike, True)):
        loader = deepsp.SequenceLoader(_loader(sampler), group, replicated=replicated)
        assert len(loader) == SAMPLES // 2
        loader.set_epoch(1)
        numbers = []
        for batch, lens in loader:
            numbers.append(batch["number"])
            assert same((batch, lens), deepsp.shard_batch(full(numbers[-1]), group))
        seen.append(numbers)
    return mesh.get_coordinate()[0], seen


def test_data_and_sequence_ranks():
    answers = on_ranks(4, _mesh)
    for kind in (0, 1):
        of_groups = {0: None, 1: None}
        for data, seen in answers:
            assert of_groups[data] in (None, seen[kind])
            of_groups[data] = seen[kind]
        assert sorted(of_groups[0] + of_groups[1]) == list(range(SAMPLES))


class Stream(IterableDataset):
    """Numbers from ``first`` on, so many; with the state that torchdata asks for."""

    def __init__(self, first, count, step):
        self.numbers, self.at = range(first, first + step * count, step), [0]

    def __iter__(self):
        while self.at[0] < len(self.numbers):
            self.at[0] += 1
            yield self.numbers[self.at[0] - 1]
        self.at = [0]

    def state_dict(self):
        return {"at": self.at}  # what it goes on in

    def load_state_dict(self, state):
        self.at = state["at"]


def _uneven():
    rank, size = dist.get_rank(), dist.get_world_size()
    for counts in ([3, 0, 5], [0, 4, 1], [1, 1, 2], [0, 0, 0]):
        numbers = _in_turns([[r + size * n for n in range(counts[r])] for r in range(size)])
        own = [full(rank + size * n) for n in range(counts[rank])]
        loader = deepsp.SequenceLoader(own)
        assert len(loader) == sum(counts[:size]) == len(numbers)
        _check(loader, numbers)
        _check(loader, numbers)
        stream = DataLoader(Stream(rank, counts[rank], size), 1, collate_fn=_batch_of)
        loader = deepsp.SequenceLoader(stream)
        _check(loader, numbers)
        _check(loader, numbers)
    for without in (0, size - 1):
        lengthless = iter(()) if rank == without else [full(0)]
        with pytest.raises(TypeError, match="some rank of the group has no len"):
            len(deepsp.SequenceLoader(lengthless))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_uneven_lengths_and_iterable_data(ranks):
    on_ranks(ranks, _uneven)


# ------------------------------------------------------------------------------ going on


def _made(kind):
    """A new loader, as a new process would make it."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    rank, size = dist.get_rank(), dist.get_world_size()
    if kind.startswith("accelerate"):
        from accelerate import Accelerator, DataLoaderConfiguration

        config = DataLoaderConfiguration(
            use_stateful_dataloader=kind == "accelerate, stateful",
            even_batches=False, use_seedable_sampler=True, data_seed=5,
        )  # fmt: skip
        # With 7 samples the ranks have other numbers of batches.
        return Accelerator(cpu=True, dataloader_config=config).prepare(_loader(count=7, shuffle=True))
    sampler = DistributedSampler(range(SAMPLES), size, rank)
    return {
        "plain": lambda: _loader(sampler),
        "workers": lambda: _loader(sampler, num_workers=1),
        "stateful": lambda: _loader(sampler, cls=StatefulDataLoader),
        "stateful, workers": lambda: _loader(sampler, cls=StatefulDataLoader, num_workers=1),
        "shuffled": lambda: _loader(
            None, 5 - rank, StatefulDataLoader, shuffle=True,
            generator=torch.Generator().manual_seed(rank),
        ),
        "stream": lambda: StatefulDataLoader(
            Stream(rank, 4 - 2 * rank, size), 1, collate_fn=_batch_of
        ),
    }[kind]()  # fmt: skip


def _resume(kind, replicated):
    from unittest import mock

    def made():
        return deepsp.SequenceLoader(_made(kind), replicated=replicated)

    def epochs(loader, first, saved=None):
        for epoch in range(first, 2):
            loader.set_epoch(epoch)
            for found in loader:
                yield found
                if saved is not None:
                    saved.append((epoch, pickle.dumps(loader.state_dict())))
        if saved is not None:
            saved.append((2, pickle.dumps(loader.state_dict())))

    with launched() if kind.startswith("accelerate") else mock.MagicMock():
        whole, saved = made(), []
        start = whole.state_dict()
        unbroken = list(epochs(whole, 0, saved))
        assert len(unbroken) == 2 * len(whole) > 0
        # Shuffled anew, as far as the kind shuffles.
        numbers = [batch["number"] for batch, _ in unbroken]
        half = len(whole)
        assert sorted(numbers[:half]) == sorted(numbers[half:])
        assert (numbers[:half] != numbers[half:]) == (kind != "stream")
        step = 3 if "workers" in kind else 1
        for n, (epoch, state) in list(enumerate(saved[:-1]))[::step]:
            again = made()
            again.set_epoch(epoch)
            again.load_state_dict(pickle.loads(state))
            assert pickle.dumps(again.state_dict()) == state
            went_on = list(epochs(again, epoch))
            assert same(went_on, unbroken[n + 1 :]), (n, [b["number"] for b, _ in went_on], numbers)
        # From the begin, and saved again behind a resume.
        again = made()
        again.set_epoch(0)
        again.load_state_dict(start)
        assert same(list(epochs(again, 0)), unbroken)
        again = made()
        again.load_state_dict(pickle.loads(saved[0][1]))
        states = []
        assert same(list(epochs(again, 0, states)), unbroken[1:])
        assert states[:half - 1] == saved[1:half]


KINDS = ["plain", "workers", "stateful", "stateful, workers", "shuffled", "stream",
         "accelerate", "accelerate, stateful"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_going_on(kind):
    on_ranks(2, _resume, kind, False)


def test_going_on_replicated():
    on_ranks(2, _resume, "replicated", True)
