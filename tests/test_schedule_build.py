"""Building: optimizers, checkpoints, the meta device, and the whole again."""

import copy
import functools
import json

import pytest
import torch
from harness import on_ranks
from scheduled import GroupedAttention, Mlp, compare, f64, seeded
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import deepsp
from deepsp.schedule import files
from deepsp.weights.rows import sharded


class Model(nn.Module):
    """Tied embedding and head, a fused projection, whole parameters, a buffer."""

    def __init__(self, vocab=33, dim=12, tied=True):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.attn = GroupedAttention(dim)
        self.mlp = Mlp(dim, 41)
        self.norm = nn.LayerNorm(dim)
        self.register_buffer("scale", torch.tensor(0.5))
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.attn(x) * self.scale
        return self.head(self.norm(x + self.mlp(x)))


def plan(model):
    sch = deepsp.create_schedule(model)
    sch["embed"].shard("weight", 0).sync("fwd_post", "all_reduce", grad="replicated")
    sch["attn.qkv"].shard("weight", 0, parts=[24, 12, 12], unit=[8, 4, 4])
    sch["attn"].divide("num_heads", unit=2).divide("num_kv_heads").sync("bwd_post", "all_reduce")
    sch["attn.out"].shard("weight", 1, unit=8).sync("fwd_post", "all_reduce", grad="replicated")
    sch["mlp.up"].shard("weight", 0).sync("bwd_post", "all_reduce")
    sch["mlp.down"].shard("weight", 1).sync("fwd_post", "all_reduce", grad="replicated")
    sch["head"].shard("weight", 0).sync("bwd_post", "all_reduce")
    sch["head"].sync("fwd_post", "all_gather", -1, grad="replicated")
    return sch


def ids(seed=2):
    return torch.randint(0, 33, (2, 7), generator=torch.Generator().manual_seed(seed))


def same_state(model, built):
    full, right = deepsp.full_state_dict(built), model.state_dict()
    assert list(full) == list(right)
    for name, tensor in right.items():
        torch.testing.assert_close(full[name], tensor, rtol=0, atol=0, msg=name)


def _step(model, optimizer, seed):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(ids(seed)).flatten(0, 1), ids(seed + 1).flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


def _trained(before):
    """Losses and the whole state after some steps."""
    model = seeded(Model)
    built = copy.deepcopy(model)
    make = functools.partial(torch.optim.AdamW, lr=0.05)
    right, mine = make(model.parameters()), make
    if before:  # with state of the whole parameters
        mine = make(built.parameters())
        for one, optimizer in ((model, right), (built, mine)):
            _step(one, optimizer, 10)
    parameters = list(built.parameters())
    built, mine = (
        deepsp.build(plan(built), optimizer=mine)
        if not before
        else deepsp.build(_cleared(built), optimizer=mine)
    )
    assert [id(p) for p in built.parameters()] == [id(p) for p in parameters]
    assert built.head.weight is built.embed.weight
    for seed in range(3):
        torch.testing.assert_close(_step(built, mine, seed), _step(model, right, seed))
    full = deepsp.full_state_dict(built)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(full[name], tensor)
    for parameter, state in mine.state.items():
        assert state["exp_avg"].shape == parameter.shape


def _cleared(model):
    with pytest.raises(ValueError, match=r"embed.weight has a gradient.*zero_grad"):
        deepsp.build(plan(copy_with_gradients(model)))
    model.zero_grad()
    return plan(model)


def copy_with_gradients(model):
    other = copy.deepcopy(model)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        mine.grad = theirs.grad
    return other


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("before", [False, True])
def test_training(size, before):
    on_ranks(size, _trained, before)


class Made(TorchDispatchMode):
    """Notes how many elements each new piece of memory has that any op makes. Views, such as those
    of a mapped file, aren't."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        before = {_storage(x) for x in _tensors((args, kwargs))}
        for x in _tensors(out):
            if not x.is_meta and _storage(x) not in before:
                self.seen.add(x.numel())
        return out


def _tensors(x):
    return [x for x in torch.utils._pytree.tree_leaves(x) if isinstance(x, torch.Tensor)]


def _storage(x):
    return x.untyped_storage()._cdata


def _whole_sizes(model):
    """Numbers of elements of the whole sharded parameters; none is that of a rank's part."""
    shards = sharded(model)
    return {int(torch.Size(s.shape).numel()) for s in shards.values() if len(s.shape) > 1}


def _loaded(folder, kind, meta):
    """Only this rank's part of any sharded parameter is made or read."""
    model = seeded(Model)
    path = f"{folder}/{kind}"
    with torch.device("meta") if meta else torch.device("cpu"):
        other = Model().to(f64)
    sch = plan(other)
    read = []
    true_read = files._Safetensors.read, files._Tensors.read

    def spy(which):
        def read_and_note(self, *args):
            piece = true_read[which](self, *args)
            read.append((args[0], piece.numel()))
            return piece

        return read_and_note

    files._Safetensors.read, files._Tensors.read = spy(0), spy(1)
    try:
        with Made() as made:
            built, _ = deepsp.build(sch, checkpoint=model.state_dict() if kind == "dict" else path)
    finally:
        files._Safetensors.read, files._Tensors.read = true_read
    same_state(model, built)
    wholes = _whole_sizes(built)
    assert len(wholes) >= 4
    if meta:
        assert not wholes & made.seen, (wholes, made.seen)
    counted = {}
    for name, numel in read:
        counted[name] = counted.get(name, 0) + numel
    for name, tensor in built.state_dict().items():
        if name in counted:  # one of the tied ones is read
            assert counted[name] == tensor.numel(), name
    assert {"embed.weight", "head.weight"} & set(counted)
    assert built.head.weight is built.embed.weight
    compare(model, built, ids())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from safetensors.torch import save_file

    path = tmp_path_factory.mktemp("checkpoints")
    state = seeded(Model).state_dict()
    torch.save(state, path / "file.pt")
    # A safetensors file has one of several tied tensors.
    state = {n: t.contiguous() for n, t in state.items() if n != "head.weight"}
    save_file(state, path / "file.safetensors")
    (path / "directory").mkdir()
    names = sorted(state)
    where = {}
    for n, some in enumerate((names[::2], names[1::2])):
        save_file({k: state[k] for k in some}, path / "directory" / f"part{n}.safetensors")
        where.update(dict.fromkeys(some, f"part{n}.safetensors"))
    index = json.dumps({"weight_map": where})
    (path / "directory" / "model.safetensors.index.json").write_text(index)
    return str(path)


@pytest.mark.parametrize("kind", ["dict", "file.pt", "file.safetensors", "directory"])
@pytest.mark.parametrize("meta", [True, False])
def test_checkpoints(folder, kind, meta):
    on_ranks(3 if kind == "directory" else 2, _loaded, folder, kind, meta)


def _bad_checkpoints(folder):
    state = seeded(Model).state_dict()

    def build(checkpoint):
        deepsp.build(plan(Model().to(f64)), checkpoint=checkpoint)

    with pytest.raises(ValueError, match=r"checkpoint has no norm\.bias"):
        build({n: t for n, t in state.items() if n != "norm.bias"})
    with pytest.raises(ValueError, match="checkpoint has names that the model doesn't have: extra"):
        build({**state, "extra": torch.ones(1)})
    with pytest.raises(ValueError, match=r"mlp.up.weight to have shape \[41, 12\], got \[40, 12\]"):
        build({**state, "mlp.up.weight": torch.ones(40, 12)})
    with pytest.raises(ValueError, match=r"nothing.pt, where there is neither"):
        build(f"{folder}/nothing.pt")
    with pytest.raises(
        ValueError, match=r"index.json or model.safetensors, got .*, which has neither"
    ):
        build(folder)
    with pytest.raises(ValueError, match=r"checkpoint to map .*, got int for 'step'"):
        build({**state, "step": 3})


def test_checkpoints_that_do_not_fit(folder):
    on_ranks(2, _bad_checkpoints, folder)


def _made():
    """Parameters from nothing: whole ones alike on each rank, parts apart, bounds as of the whole,
    and no whole parameter anywhere."""
    with torch.device("meta"):
        model = nn.Sequential(Mlp(16, 300), Mlp(16, 300), nn.BatchNorm1d(16))
    rank, size, _ = deepsp.ranks.groups.member_of(None)
    sch = deepsp.create_schedule(model)
    sch["*.up"].shard("weight", 0).sync("bwd_post", "all_reduce")
    sch["*.down"].shard("weight", 1).sync("fwd_post", "all_reduce", grad="replicated")
    torch.manual_seed(rank)  # even so
    with Made() as made:
        built, optimizer = deepsp.build(sch, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    assert 16 * 300 not in made.seen and not any(p.is_meta for p in built.parameters())
    assert len(optimizer.param_groups[0]["params"]) == 10
    full = deepsp.full_state_dict(built)
    for n in range(2):
        down, up = full[f"{n}.down.weight"], full[f"{n}.up.weight"]
        bound = 300**-0.5
        assert 0.98 * bound < down.abs().max() <= bound
        assert full[f"{n}.down.bias"].abs().max() <= bound
        assert 0.98 / 4 < up.abs().max() <= 1 / 4
        mine = [300 // size + (r < 300 % size) for r in range(size)]
        parts = down.split(mine, 1)
        assert not torch.equal(parts[0][:, :80], parts[1][:, :80])
    assert not torch.equal(full["0.up.weight"], full["1.up.weight"])
    assert torch.equal(full["2.running_var"], torch.ones(16))
    everyones = [None] * size
    whole = {n: t for n, t in built.state_dict().items() if n not in sharded(built)}
    torch.distributed.all_gather_object(everyones, whole)
    assert len(whole) == 2 + 5
    for other in everyones:
        for name, tensor in other.items():
            assert torch.equal(tensor, whole[name]), name
    return {name: tensor.sum().item() for name, tensor in full.items()}


def test_made_from_nothing():
    first, second = on_ranks(2, _made), on_ranks(2, _made)
    assert first == second
    on_ranks(3, _made)


def _made_attention():
    with torch.device("meta"):
        model = nn.Sequential(nn.MultiheadAttention(48, 6))
    sch = deepsp.create_schedule(model)
    sch["0"].shard("in_proj_weight", 0).sync("fwd_post", "all_reduce", tensor=0)
    for n in range(3):
        sch["0"].sync("bwd_post", "all_reduce", tensor=n)
    full = deepsp.full_state_dict(deepsp.build(sch)[0])
    for name, bound in (("in_proj_weight", (6 / (4 * 48)) ** 0.5), ("out_proj.weight", 48**-0.5)):
        parts = full[f"0.{name}"]
        assert 0.98 * bound < parts.abs().max() <= bound, name
    first, second = full["0.out_proj.weight"].tensor_split(2, 1)
    assert not torch.equal(first, second)
    assert not full["0.in_proj_bias"].any() and not full["0.out_proj.bias"].any()


def test_attention_made_from_nothing():
    on_ranks(2, _made_attention)


def _init():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("table", torch.arange(4), persistent=False)

        def forward(self, x):
            return x * self.weight

    def make():
        with torch.device("meta"):
            return deepsp.create_schedule(nn.Sequential(nn.Linear(4, 4), Bare()))

    with pytest.raises(
        ValueError, match=r"1\.weight was on the meta device.*Bare has no reset_par"
    ):
        deepsp.build(make())
    state = {
        "0.weight": torch.ones(4, 4),
        "0.bias": torch.zeros(4),
        "1.weight": torch.full((4,), 3.0),
    }
    with pytest.raises(ValueError, match=r"1\.table was on the meta device"):
        deepsp.build(make(), checkpoint=state)

    class Around(nn.Sequential):
        """As transformers' models: fills buffers that no checkpoint has, if it knows them."""

        def __init__(self, known):
            super().__init__(nn.Linear(4, 4), Bare())
            self[1].register_buffer("table", torch.arange(4.0), persistent=False)
            self.known = known

        def _init_weights(self, module):
            if self.known:
                module.table.copy_(torch.arange(4.0))

    for known in (True, False):
        with torch.device("meta"):
            sch = deepsp.create_schedule(Around(known))
        if known:
            assert deepsp.build(sch, checkpoint=state)[0][1].table.tolist() == [0, 1, 2, 3]
        else:
            with pytest.raises(ValueError, match=r"table was on the meta device.*pass init="):
                deepsp.build(sch, checkpoint=state)

    def init(module):
        seen.append(type(module).__name__)
        with torch.no_grad():
            module.weight.fill_(2)
        if isinstance(module, Bare):
            module.table.copy_(torch.arange(4))

    seen = []
    built, _ = deepsp.build(make(), checkpoint=state, init=init)
    # What the checkpoint has filled stays.
    assert seen == ["Bare"] and built[1].weight.tolist() == [3] * 4
    assert built[1].table.tolist() == [0, 1, 2, 3]
    seen = []
    built, _ = deepsp.build(make(), init=init)
    assert seen == ["Bare", "Linear"] and built[1].weight.tolist() == [2] * 4


def test_init():
    on_ranks(2, _init)


def _stale_optimizer():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="isn't in the model any more"):
        deepsp.build(deepsp.create_schedule(model), optimizer=optimizer)


def test_optimizer_of_parameters_that_are_gone():
    on_ranks(2, _stale_optimizer)
