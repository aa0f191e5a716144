"""SequenceLoader on real ranks: every batch is shard_batch's of its owner's full batch."""

import contextlib
import multiprocessing
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks
from models import VOCABULARY, Model
from reference import attention
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from trained import launched

import deepsp

SAMPLES = 12
ROLES = {"kept": "tokens", "more": "tokens"}


def _sequence(loader, group=None, **how):
    return deepsp.SequenceLoader(loader, group, **{"roles": ROLES, **how})


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
    batch["kept"] = (ids > 9).unsqueeze(-1)
    batch["more"] = {"half": (ids / 3).bfloat16(), "list": [ids.byte(), (ids.float(), "x")]}
    if n % 3 == 0:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, -2:] = 0
    if n % 2:
        batch["position_ids"] = torch.arange(length).remainder(4).expand(2, -1)
    if dim == 0:
        flip = lambda path, x: x if path == ("position_ids",) else x.transpose(0, 1)  # noqa: E731
        batch = deepsp.data.roles.map_leaves(flip, batch)
    return batch


def same(ours, theirs) -> bool:
    """Bit for bit, with types and structure."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        return (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape) and torch.equal(
            *(
                x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
                for x in (ours, theirs)
            )
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
        local = deepsp.shard_batch(full(n, how.get("dim", 1)), group, roles=ROLES, **how)
        assert same(ours, local), n


# ------------------------------------------------------------------------------ batches


def _epochs():
    rank, size = dist.get_rank(), dist.get_world_size()
    sampler = DistributedSampler(range(SAMPLES), size, rank, seed=3)
    seen = []
    loader = _sequence(_loader(sampler))
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
    numbers = (
        list(range(9)) if 9 % size == 0 else _in_turns([range(r, 9, size) for r in range(size)])
    )
    _check(_sequence(own, pad_to=16, ignore_index=-7), numbers, pad_to=16, ignore_index=-7)
    own = [full(n, 0) for n in range(rank, 9, size)]
    _check(_sequence(own, dim=0), numbers, dim=0)
    _check(_sequence(_loader(), replicated=True), list(range(SAMPLES)))
    assert len(_sequence(_loader(), replicated=True)) == SAMPLES


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_epochs(ranks):
    on_ranks(ranks, _epochs)


def _together():
    """Local batches put together are the full batch; a label crosses the border of ranks."""
    size, rank = dist.get_world_size(), dist.get_rank()
    loader = _sequence([full(4 * rank), full(4 * rank + 2)])
    for batch, lens in loader:
        whole = full(batch["number"])
        assert sum(lens) == whole["input_ids"].size(1)
        assert batch["input_ids"].size(1) == lens[rank]
        labels = deepsp.unshard(batch["shift_labels"], 1, None, lens)
        assert torch.equal(labels, F.pad(whole["labels"], (0, 1), value=-100)[:, 1:])
        positions = deepsp.unshard(batch["position_ids"], 1, None, lens)
        assert torch.equal(positions, torch.arange(sum(lens))[None])
        nested = deepsp.unshard(batch["more"]["list"][0].int(), 1, None, lens)
        assert torch.equal(nested, whole["input_ids"].int())
        assert deepsp.data.last_batch.has_tokens(batch["input_ids"])
        if "attention_mask" in whole:
            assert torch.equal(batch["attention_mask"], whole["attention_mask"])
        # Memory of its own: what is saved isn't the whole round.
        for _, x in deepsp.data.sharding.leaves_of(batch):
            assert x.untyped_storage().nbytes() == x.nbytes
    assert size == 3


def test_local_batches_put_together():
    on_ranks(3, _together)


def _one_all_to_all():
    """A round sends one all-to-all, and each rank only what is its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ids = torch.arange(2000).view(2, 1000)
    loader = _sequence([{"input_ids": ids + rank, "labels": ids}])
    exchange = dist.all_to_all_single
    with mock.patch.object(dist, "all_to_all_single", side_effect=exchange) as called:
        assert len(list(loader)) == size
    (((_, sent, into, out), _),) = [(call.args, call.kwargs) for call in called.call_args_list]
    # ids and labels of two rows, and positions of one.
    expected = [5 * 8 * n for n in deepsp.ranks.seq_lens(1000)]
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
        loader = _sequence(_loader(sampler), group, replicated=replicated)
        assert len(loader) == SAMPLES // 2
        loader.set_epoch(1)
        numbers = []
        for batch, lens in loader:
            numbers.append(batch["number"])
            assert same((batch, lens), deepsp.shard_batch(full(numbers[-1]), group, roles=ROLES))
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
        loader = _sequence(own)
        assert len(loader) == sum(counts[:size]) == len(numbers)
        _check(loader, numbers)
        _check(loader, numbers)
        stream = DataLoader(Stream(rank, counts[rank], size), 1, collate_fn=_batch_of)
        loader = _sequence(stream)
        _check(loader, numbers)
        _check(loader, numbers)
    for without in (0, size - 1):
        lengthless = iter(()) if rank == without else [full(0)]
        with pytest.raises(TypeError, match="some rank of the group has no len"):
            len(_sequence(lengthless))


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
            even_batches=False,
            use_seedable_sampler=True,
            data_seed=5,
        )
        # With 7 samples the ranks have other numbers of batches.
        return Accelerator(cpu=True, dataloader_config=config).prepare(
            _loader(count=7, shuffle=True)
        )
    sampler = DistributedSampler(range(SAMPLES), size, rank)
    return {
        "plain": lambda: _loader(sampler),
        "alike": lambda: _loader(DistributedSampler(range(SAMPLES), 1, 0)),
        "stateful": lambda: _loader(sampler, cls=StatefulDataLoader),
        "stateful, workers": lambda: _loader(sampler, cls=StatefulDataLoader, num_workers=1),
        "shuffled": lambda: _loader(
            None,
            5 - rank,
            StatefulDataLoader,
            shuffle=True,
            generator=torch.Generator().manual_seed(rank),
        ),
        "stream": lambda: StatefulDataLoader(
            Stream(rank, 4 - 2 * rank, size), 1, collate_fn=_batch_of
        ),
    }[kind]()


def _resume(kind, replicated=False):
    def made():
        return _sequence(_made(kind), replicated=replicated)

    def epochs(loader, first, saved=None):
        for epoch in range(first, last):
            loader.set_epoch(epoch)
            for found in loader:
                yield found
                if saved is not None:
                    saved.append((epoch, pickle.dumps(loader.state_dict())))

    workers = "workers" in kind
    # torchdata's shuffle itself goes on otherwise in the epochs after the one that it resumes.
    last = 1 if workers or kind == "shuffled" else 2
    # The tests' processes may otherwise have no children.
    multiprocessing.current_process()._config["daemon"] = False
    with launched() if kind.startswith("accelerate") else contextlib.nullcontext():
        whole, saved = made(), []
        start = whole.state_dict()
        unbroken = list(epochs(whole, 0, saved))
        if last == 2:  # shuffled anew, as far as the kind shuffles
            numbers, half = [batch["number"] for batch, _ in unbroken], len(unbroken) // 2
            assert half > 5 and sorted(numbers[:half]) == sorted(numbers[half:])
            assert (numbers[:half] != numbers[half:]) == (kind != "stream")

        def goes_on(n, epoch, state, saved=None):
            again = made()
            again.set_epoch(epoch)
            again.load_state_dict(pickle.loads(state))
            assert same(again.state_dict(), pickle.loads(state))
            assert same(list(epochs(again, epoch, saved)), unbroken[n:]), n

        if workers:
            goes_on(5, *saved[4])
            return
        goes_on(0, 0, pickle.dumps(start))
        for n, state in enumerate(saved):
            goes_on(n + 1, *state)
        later = []  # saved behind a resume in the middle of round 1: in that round, and the next
        goes_on(3, *saved[2], later)
        goes_on(4, *later[0])
        goes_on(6, *later[2])


KINDS = [
    "plain",
    "stateful",
    "stateful, workers",
    "shuffled",
    "stream",
    "accelerate",
    "accelerate, stateful",
]


@pytest.mark.parametrize("kind", KINDS)
def test_going_on(kind):
    on_ranks(2, _resume, kind)


def test_going_on_replicated():
    on_ranks(2, _resume, "alike", True)


# ------------------------------------------------------------------------------ training


def _train(batches, model, loss_of, sync):
    """The loss and every gradient of each step."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        sync(model)
        seen.append((loss.detach(), [p.grad.clone() for p in model.parameters()]))
        optimizer.step()
    return seen


def _ids(n):
    batch = full(4 * n + n % 3)
    ids = torch.randint(0, VOCABULARY, batch["labels"].shape, generator=torch.manual_seed(n))
    return {"input_ids": ids, "labels": batch["labels"]}


def _trains_like_one_process():
    rank, size = dist.get_rank(), dist.get_world_size()
    attend = deepsp.DistributedAttention()

    def made(attention_of):
        torch.manual_seed(0)
        return Model(attention_of).double()

    ours = made(
        lambda q, k, v, lens: attend(q, k, v, is_causal=True, enable_gqa=True, seq_lens=lens)
    )
    reference = made(lambda q, k, v, _: attention(q, k, v, is_causal=True))

    def our_loss(model, found):
        batch, lens = found
        logits = model(batch["input_ids"], batch["position_ids"], lens)
        return deepsp.cross_entropy(logits, batch["shift_labels"])

    def one_loss(model, batch):
        ids = batch["input_ids"]
        logits = model(ids, torch.arange(ids.size(1))[None])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    own = [_ids(n) for n in range(rank, 7, size)]  # of other numbers
    found = _train(_sequence(own), ours, our_loss, deepsp.sync_gradients)
    expected = _train(map(_ids, range(7)), reference, one_loss, lambda model: None)
    assert len(found) == 7
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 3])
def test_trains_like_one_process(ranks):
    on_ranks(ranks, _trains_like_one_process)


# ------------------------------------------------------------------------------ errors


class Failing:
    """Batches, and then an error on one rank."""

    def __init__(self, rank, wrong, replicated=False):
        self.first = full(0 if replicated else dist.get_rank())
        self.wrong = wrong if dist.get_rank() == rank else full(6)

    def __iter__(self):
        yield self.first
        if isinstance(self.wrong, Exception):
            raise self.wrong
        yield self.wrong


def _errors():
    rank, size = dist.get_rank(), dist.get_world_size()
    last, ids = size - 1, torch.zeros(2, 8, dtype=torch.int64)
    for at in {0, last}:
        for replicated in (False, True):
            error = OSError("no disk")
            loader = _sequence(Failing(at, error, replicated), replicated=replicated)
            found = []
            with pytest.raises(
                RuntimeError, match=f"rank {at} of the group .*OSError: no disk"
            ) as e:
                found.extend(loader)
            assert len(found) == (1 if replicated else size)
            assert (e.value.__cause__ is error) == (rank == at)
        for wrong, message in [
            ({"labels": ids}, "input_ids or inputs_embeds"),
            ({"input_ids": ids, "labels": ids[:, 1:]}, r"\['labels'\] to have size 8 .*\(2, 7\)"),
            ({"input_ids": ids, "a": {"b": [ids[0]]}}, r"batch\['a'\]\['b'\]\[0\] to have size 8"),
            ({"input_ids": ids, "a": {"labels": ids}}, r"got batch\['a'\]\['labels'\]; shift it"),
            ({"input_ids": ids, "a": lambda: 0}, "pickle"),
            ({"input_ids": ids, "attention_mask": ids.to_sparse()}, "attention_mask.*to be dense"),
            (ids, "to map names to tensors"),
            (None, "to map names to tensors.*NoneType"),
        ]:
            loader = _sequence(Failing(at, wrong))
            with pytest.raises(
                ValueError, match=f"rank {at}'s batch can't be sharded: .*{message}"
            ):
                list(loader)
    with pytest.raises(ValueError, match=r"got the same one on all . ranks.*DistributedSampler"):
        list(_sequence([full(0), full(rank)]))
    with pytest.raises(ValueError, match=r"rank 0's batch .*expected pad_to >= 10"):
        list(_sequence([full(2)], pad_to=9))
    uneven = [full(0)] * (2 if rank == last else 1)
    with pytest.raises(
        ValueError, match=r"equally many batches.*of ranks \[0.*make their samplers"
    ):
        list(_sequence(uneven, replicated=True))
    with pytest.raises(
        ValueError,
        match=r"batch\['number'|batch\['input_ids'\], a full .* ranks 0 and 1; .*Sequence",
    ):
        other = {"input_ids": ids + rank}
        list(_sequence([other], dist.new_group(), replicated=True))


@pytest.mark.parametrize("ranks", [2, 3])
def test_errors_reach_every_rank(ranks):
    on_ranks(ranks, _errors)


def _refusals():
    size = dist.get_world_size()
    for loader, how, message in [
        (3, {}, "loader to be iterable.*, got int; pass what"),
        ([], {"dim": -1}, "dim >= 0, got -1"),
        ([], {"group": 3}, "group to be a ProcessGroup"),
        ([], {"pad_to": 8 + dist.get_rank()}, "pad_to 8.*pad_to 9"),
        ([], {"replicated": dist.get_rank() == 0}, "replicated True.*replicated False"),
    ]:
        with pytest.raises(ValueError, match=message):
            _sequence(loader, **how)
    loader = _sequence([full(0)])
    state = loader.state_dict()
    with pytest.raises(ValueError, match=f"of {size} ranks has saved, got one of 5 ranks"):
        loader.load_state_dict(state | {"ranks": 5})
    with pytest.raises(ValueError, match="got one of None ranks"):
        loader.load_state_dict({})


def test_refusals():
    on_ranks(2, _refusals)


def _one_rank():
    with pytest.raises(RuntimeError, match="loader of rank 0 of the group failed: OSError"):
        list(_sequence(Failing(0, OSError("no disk"))))


def test_a_group_of_one():
    on_ranks(1, _one_rank)
