"""Shards that ranks hold of tensors: gathered, cast, and their gradients, against one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from reference import draw, flat, transposed
from torch import nn

import deepsp

op = torch.ops.deepsp
f64 = torch.float64
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def same_bits(a, b):
    """Compares bit for bit, so that zeros have signs; any NaN is like any other."""
    assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, b.dtype, a.shape, b.shape)
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.dtype.itemsize]
    equal = a.contiguous().view(bits) == b.contiguous().view(bits)
    return bool((equal | (a.isnan() & b.isnan())).all())


def sum_in_order(parts, dtype, within=None):
    """Adds one after another; the total is kept in `within`."""
    within = within or (torch.float64 if parts[0].dtype == torch.float64 else torch.float32)
    wide = torch.float64 if within == torch.float64 else torch.float32
    total = torch.zeros(parts[0].shape, dtype=wide)
    for part in parts:
        total = (total + part.to(wide)).to(within).to(wide)
    return total.to(dtype)


def laid_out(x, layout):
    """Returns other strides; "expanded" has other values, too."""
    if layout == "transposed":
        return transposed(x)
    if layout == "strided":
        wide = x.new_full((*x.shape[:-1], 2 * x.size(-1)), float("nan"))
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "expanded":
        return x[:1].expand(x.shape)
    return x


class Shards:
    """Shards of several tensors, on every rank: rows, trailing shape, dtypes, layout of each."""

    def __init__(self, specs):
        self.rank, self.group = dist.get_rank(), dist.group.WORLD.group_name
        self.size = dist.get_world_size()
        self.rows = [list(rows[: self.size]) for rows, *_ in specs]
        self.sizes = flat(self.rows)
        self.dtypes = [spec[3] for spec in specs]
        self.layouts = [spec[4] for spec in specs]
        self.pieces = [
            [
                laid_out(draw(n, *shape, seed=7 * i + p).mul(10).to(source), layout)
                for p, n in enumerate(rows)
            ]
            for i, ((_, shape, source, _, layout), rows) in enumerate(
                zip(specs, self.rows, strict=True)
            )
        ]
        self.full = [
            torch.cat([x.to(dtype) for x in pieces])
            for pieces, dtype in zip(self.pieces, self.dtypes, strict=True)
        ]

    def shards(self):
        return [pieces[self.rank].detach().requires_grad_() for pieces in self.pieces]

    def gradients(self, p):
        """What rank p's loss says of the gathered tensors."""
        return [
            laid_out(draw(*y.shape, seed=50 + 3 * p + i).to(y.dtype), layout)
            for i, (y, layout) in enumerate(zip(self.full, self.layouts, strict=True))
        ]

    def scattered(self, within=None):
        """This rank's rows of the sum of all ranks' gradients."""
        everyone = [self.gradients(p) for p in range(self.size)]
        results = []
        for i, pieces in enumerate(self.pieces):
            total = sum_in_order([g[i] for g in everyone], pieces[0].dtype, within)
            results.append(total.split(self.rows[i])[self.rank])
        return results

    def gather(self, shards, within=None):
        return op.gather_cast_coalesced(
            shards, self.sizes, self.dtypes, self.rank, self.group, reduce_dtype=within
        )

    def halves(self, shards):
        shapes = [list(x.shape[1:]) for x in shards]
        where = (self.rank, self.group)
        if len(shards) == 1:
            buffer = op.gather_cast_start(shards[0], self.sizes, self.dtypes[0], *where)
            return [op.gather_cast_wait(buffer, self.sizes, shapes[0], self.dtypes[0], *where)]
        buffer = op._gather_cast_coalesced_start(shards, self.sizes, self.dtypes, *where)
        dims = [len(shape) for shape in shapes]
        return op._gather_cast_coalesced_wait(
            buffer, self.sizes, flat(shapes), dims, self.dtypes, *where
        )


def check_gather(specs, within, frozen):
    case = Shards(specs)
    for gather in (case.gather, case.halves):
        for y, expected in zip(gather(case.shards()), case.full, strict=True):
            assert same_bits(y, expected) and y.is_contiguous()
    if len(specs) == 1:
        y = op.gather_cast(
            case.shards()[0], case.sizes, case.dtypes[0], case.rank, case.group, reduce_dtype=within
        )
        assert same_bits(y, case.full[0])
    shards = case.shards()
    shards[0].requires_grad_(not frozen)
    outputs = case.gather(shards, within)
    grads = case.gradients(case.rank)
    expected = case.scattered(within)
    if shards[-1].requires_grad:
        for _ in range(2):
            for x in shards:
                x.grad = None
            torch.autograd.backward(outputs, grads, retain_graph=True)
            for x, g in zip(shards, expected, strict=True):
                assert torch.equal(x.grad, g) if x.requires_grad else x.grad is None
    # The adjoint itself, and a single one of it.
    dtypes = [x.dtype for x in shards]
    where = (case.rank, case.group)
    ours = op._reduce_scatter_cast_coalesced(grads, case.sizes, dtypes, *where, reduce_dtype=within)
    for x, g, dtype in zip(ours, expected, dtypes, strict=True):
        assert torch.equal(x, g) and x.dtype == dtype and x.is_contiguous()
    for i, rows in enumerate(case.rows):
        x = op.reduce_scatter_cast(grads[i], rows, dtypes[i], *where, reduce_dtype=within)
        assert torch.equal(x, expected[i])


def in_float8(whole, dtype):
    """Casts the whole tensor in one process: (data, inv_scale)."""
    largest, finite = torch.finfo(dtype).max, torch.finfo(torch.float32).max
    amax = whole.abs().max().float() if whole.numel() else torch.tensor(0.0)
    scale = (amax.reciprocal() * largest).clamp(max=finite) if amax > 0 else torch.tensor(1.0)
    return (whole.float() * scale).clamp(-largest, largest).to(dtype), scale.reciprocal()


def check_float8_gather(specs, dtype):
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    rows = [list(lens[:size]) for lens, *_ in specs]
    whole = [
        (draw(sum(lens), *shape, seed=i) * scale).to(source)
        for i, (lens, (_, shape, source, scale)) in enumerate(zip(rows, specs, strict=True))
    ]
    shards = [x.split(lens)[rank] for x, lens in zip(whole, rows, strict=True)]
    shards[0] = transposed(shards[0])
    sizes = flat(rows)
    data, inv_scales = op._gather_cast_float8_coalesced(shards, sizes, dtype, rank, group)
    assert inv_scales.dtype == torch.float32 and inv_scales.shape == (len(specs),)
    one, one_inv = op.gather_cast_float8(shards[0], rows[0], dtype, rank, group)
    assert torch.equal(one.view(torch.uint8), data[0].view(torch.uint8))
    assert torch.equal(one_inv, inv_scales[0]) and one_inv.shape == ()
    for y, inv, x in zip(data, inv_scales, whole, strict=True):
        expected, expected_inv = in_float8(x, dtype)
        assert torch.equal(inv, expected_inv)
        assert y.dtype == dtype and y.shape == x.shape and y.is_contiguous()
        assert torch.equal(y.view(torch.uint8), expected.view(torch.uint8))
    assert len({y.untyped_storage().data_ptr() for y in data if y.numel()}) == sum(
        y.numel() > 0 for y in data
    )
    for target in DTYPES:
        through = op.gather_through_float8(shards, sizes, dtype, target, rank, group)
        for y, d, inv in zip(through, data, inv_scales, strict=True):
            assert torch.equal(y, (d.float() * inv).to(target)) and y.dtype == target


def shard_by_schedule(reference):
    sch = deepsp.create_schedule(copy.deepcopy(reference))
    sch["0"].shard("weight", axis=0)
    sch["2"].shard("weight", axis=1)
    sch["2"].sync("fwd_post", "all_reduce")
    sch["0"].sync("bwd_post", "all_reduce")
    model, _ = deepsp.build(sch)
    return model, lambda: deepsp.full_state_dict(model)


def check_gradients_of_parameters():
    """Passes sync_gradients and clip_grad_norm_ parameters, as torch's functions take them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 5)).double()
    sharded = copy.deepcopy(reference)
    deepsp.shard_parameters(
        sharded, dtype=f64, reduce_dtype=f64, skip=lambda name, p: name in ("0.bias", "2.weight")
    )
    x = draw(3 * size, 4)
    reference(x).pow(2).sum().backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    for model in (copy.deepcopy(reference), sharded):
        for take in (lambda m: m, lambda m: m.parameters(), lambda m: list(m.parameters())):
            model.zero_grad()
            model(x.split(3)[rank]).pow(2).sum().backward()
            deepsp.sync_gradients(take(model))
            found = deepsp.clip_grad_norm_(take(model), 0.5)
            torch.testing.assert_close(found, norm)
            for name, p, shards, index in deepsp.weights.parameters.sharded_parameters(model):
                expected = shards.rows_of(index, reference.get_parameter(name).grad)
                torch.testing.assert_close(p.grad.as_subclass(torch.Tensor), expected)
            for name in ("0.bias", "2.weight"):
                grads = [m.get_parameter(name).grad for m in (model, reference)]
                torch.testing.assert_close(*grads)
    weight = copy.deepcopy(reference[0].weight)
    weight.grad = torch.ones_like(weight)
    deepsp.sync_gradients(weight)  # one tensor, as torch's takes it
    assert torch.equal(weight.grad, torch.full_like(weight, size))
    assert deepsp.clip_grad_norm_([], 1.0) == 0
    # What torch's own would do to parts, each rank by another factor.
    for foreach in (True, False):
        with pytest.raises(ValueError, match=r"deepsp\.clip_grad_norm_\(model, max_norm\)"):
            nn.utils.clip_grad_norm_(sharded.parameters(), 0.5, foreach=foreach)
    with pytest.raises(ValueError, match="that is sharded: the norm"):
        sharded[0].parametrizations.weight.original.grad.norm()
    built, _ = shard_by_schedule(reference)
    for of in (built, built.parameters(), [built[2].bias], built[0]):
        with pytest.raises(ValueError, match="was built by a schedule"):
            deepsp.sync_gradients(of)
    for wrong in ([1], dict(reference.named_parameters())):
        with pytest.raises(
            ValueError, match=r"module or its parameters, .*, got (int|str) as item 0"
        ):
            deepsp.sync_gradients(wrong)


# Specs of shards that every way of sending must gather.
GATHERS = [
    ((2, 2, 2, 2), (4, 3), torch.float32, torch.bfloat16, "plain"),
    ((3, 0, 5, 1), (7,), f64, torch.float32, "transposed"),
    ((1, 0, 0, 0), (), f64, f64, "strided"),
]
