"""DDP and FSDP2 over data ranks x sequence ranks, 2 x 2: training equals one process's."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from harness import on_ranks
from models import VOCABULARY, Model, make_lm
from reference import attention
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import deepsp
from deepsp.integrations.transformers import register

TOTAL, DATA, STEPS = 13, 2, 5
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


def _batches(step):
    """Each data rank's. The second has fewer labels that count, none of them in the last third."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (DATA, 2, TOTAL), generator=generator)
    labels = ids.clone()
    labels[1, :, TOTAL // 3 :] = -100
    return [{"input_ids": i, "labels": wanted} for i, wanted in zip(ids, labels, strict=True)]


def _start(attend):
    torch.manual_seed(0)
    return Model(attend).double()


def _one_process(make_optimizer):
    """The mean over the data ranks of their token means."""
    model = _start(lambda q, k, v, _: attention(q, k, v, is_causal=True))
    optimizer = make_optimizer(model.parameters())
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        each = []
        for batch in _batches(step):
            logits = model(batch["input_ids"], torch.arange(TOTAL)[None])[:, :-1]
            each.append(F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten()))
        (sum(each) / DATA).backward()
        optimizer.step()
        losses.append([x.item() for x in each])
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def _ddp(model, mesh):
    return DistributedDataParallel(model)


def _ddp_over_data(model, mesh):
    return DistributedDataParallel(model, process_group=mesh["dp"].get_group())


def _fsdp(model, mesh):
    """All four shard the weights, and average."""
    return _sharded(model, init_device_mesh("cpu", (4,)))


def _fsdp_over_data(model, mesh):
    return _sharded(model, mesh["dp"])


def _hsdp(model, mesh):
    """The ranks of a sequence shard the weights, the data ranks replicate them; all average."""
    return _sharded(model, mesh)


def _sharded(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _step(model, optimizer, mesh, step, averages):
    optimizer.zero_grad()
    batch = _batches(step)[mesh["dp"].get_local_rank()]
    part, lens = deepsp.shard_batch(batch, mesh["sp"])
    logits = model(part["input_ids"], part["position_ids"], lens)
    loss = deepsp.cross_entropy(
        logits, part["shift_labels"], mesh["sp"], average_gradients=averages
    )
    loss.backward()
    if not averages:
        deepsp.sync_gradients(model, mesh["sp"])
    optimizer.step()
    return loss.item()


def _clipped(wrap, kind):
    mesh = init_device_mesh("cpu", (DATA, 2), mesh_dim_names=("dp", "sp"))
    torch.manual_seed(0)
    reference = torch.nn.Sequential(*[torch.nn.Linear(6, 6) for _ in range(3)]).double()
    model = copy.deepcopy(reference)
    for n in (0, 1):  # the third stays as it is
        # In two meshes, the norms of both count.
        of = mesh[("dp", "sp")[n]] if wrap == "two" else mesh[wrap] if wrap else mesh
        fully_shard(model[n], mesh=of)
    for i, (a, b) in enumerate(zip(model.parameters(), reference.parameters(), strict=True)):
        b.grad = torch.sin(torch.arange(b.numel()) + 3.0 * i).view_as(b).double()
        whole = b.grad.clone()
        a.grad = (
            whole
            if not isinstance(a, DTensor)
            else distribute_tensor(whole, a.device_mesh, a.placements)
        )
    norms = [deepsp.clip_grad_norm_(model, 0.3, kind)]
    norms.append(torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.3, kind))
    torch.testing.assert_close(*norms)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        found = a.grad.full_tensor() if isinstance(a, DTensor) else a.grad
        torch.testing.assert_close(found, b.grad)


@pytest.mark.parametrize("kind", [2.0, float("inf")])
@pytest.mark.parametrize("wrap", ["dp", None, "two"])
def test_clipping_by_the_norm(wrap, kind):
    on_ranks(4, _clipped, wrap, kind)


def _whole(model):
    options = dcp_state.StateDictOptions(full_state_dict=True)
    return dcp_state.get_model_state_dict(model, options=options)


def _trained(wrap, make_optimizer, averages):
    losses, expected = _one_process(make_optimizer)
    mesh = init_device_mesh("cpu", (DATA, 2), mesh_dim_names=("dp", "sp"))
    attend = deepsp.DistributedAttention(group=mesh["sp"])

    def make():
        return wrap(
            _start(
                lambda q, k, v, lens: attend(
                    q, k, v, is_causal=True, enable_gqa=True, seq_lens=lens
                )
            ),
            mesh,
        )

    model = make()
    optimizer = make_optimizer(model.parameters())
    found = []
    for step in range(3):
        found.append(_step(model, optimizer, mesh, step, averages))
    # What was trained so far goes on in another model and optimizer.
    state = copy.deepcopy(dcp_state.get_state_dict(model, optimizer))
    model = make()
    optimizer = make_optimizer(model.parameters())
    dcp_state.set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1])
    for step in range(3, STEPS):
        found.append(_step(model, optimizer, mesh, step, averages))
    mine = [each[mesh["dp"].get_local_rank()] for each in losses]
    torch.testing.assert_close(found, mine, rtol=1e-10, atol=0)
    whole = _whole(model)
    assert list(whole) == list(expected)
    # Adam divides by gradients that are almost zero.
    torch.testing.assert_close(whole, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize(
    "wrap, averages",
    [(_ddp, True), (_ddp_over_data, False), (_fsdp, True), (_fsdp_over_data, False), (_hsdp, True)],
)
def test_training_equals_one_process(wrap, averages, optimizer):
    on_ranks(4, _trained, wrap, optimizer, averages)


def _transformers(wrap):
    """A model of transformers with our attention: its masks go through the wrappers' hooks."""
    mesh = init_device_mesh("cpu", (DATA, 2), mesh_dim_names=("dp", "sp"))
    register(mesh["sp"], name="deepsp over sp")
    reference = make_lm("Llama")
    model = make_lm("Llama", "deepsp over sp")
    for layer in model.model.layers if wrap is not _ddp else ():
        fully_shard(layer, mesh=mesh)
    wrapped = DistributedDataParallel(model) if wrap is _ddp else fully_shard(model, mesh=mesh)
    optimizers = [SGD(m.parameters()) for m in (wrapped, reference)]
    batches = _batches(0)
    for batch in batches:
        logits = reference(batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        (F.cross_entropy(logits, batch["labels"][:, 1:].flatten()) / DATA).backward()
    part, _ = deepsp.shard_batch(batches[mesh["dp"].get_local_rank()], mesh["sp"])
    shifted = part.pop("shift_labels")
    loss = deepsp.cross_entropy(wrapped(**part).logits, shifted, mesh["sp"], average_gradients=True)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    expected = {name: p.detach() for name, p in reference.named_parameters()}
    torch.testing.assert_close(_whole(wrapped), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("wrap", [_ddp, _hsdp])
def test_models_of_transformers(wrap):
    on_ranks(4, _transformers, wrap)


def _summed_twice():
    """What FSDP averages over the sequence's ranks isn't summed again."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    for over in (mesh, mesh["sp"], init_device_mesh("cpu", (4,))):
        model = fully_shard(torch.nn.Linear(4, 4), mesh=over)
        with pytest.raises(ValueError, match=r"weight is a DTensor .* average_gradients=True"):
            deepsp.sync_gradients(model, mesh["sp"])


def test_no_gradient_is_summed_twice():
    on_ranks(4, _summed_twice)
