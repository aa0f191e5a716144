"""The table of placements: every row against brute force, and against DTensor's own strategies.

A row says that parts of the operands give parts of the result. Here all ranks' parts are cut from
one tensor in this process, the op is called on each, and what they make is put together again: the
result and its gradients have to be those of one call, however uneven the parts are.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves, tree_map

from deepsp import placement
from deepsp.placement import ALL, ANY, ANYTHING, MAX, MEAN, MIN, SUM, table

aten = torch.ops.aten
f64 = torch.float64


class Call(placement.Op):
    """A call on whole tensors."""

    def __init__(self, target, args, kwargs):
        super().__init__(target, args, kwargs)
        self.operands = list({id(t): t for t in _tensors((args, kwargs))}.values())

    operands = None

    def shape(self, tensor):
        return list(tensor.shape)

    def dtype(self, tensor):
        return tensor.dtype


def _tensors(x):
    return [t for t in tree_leaves(x) if isinstance(t, torch.Tensor)]


def _x(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + 31 * len(shape))
    return torch.randn(shape, dtype=f64, generator=generator).requires_grad_()


def _ids(*shape, below=4):
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(3))


def _up(*shape):
    """Numbers from 0.2 to 0.8."""
    return torch.rand(*shape, dtype=f64, generator=torch.Generator().manual_seed(4)) * 0.6 + 0.2


X, Y, W = _x(3, 4, 5), _x(3, 4, 5, seed=1), _x(6, 5)
M, Q = _x(4, 5), _x(3, 4, 5, 6)
MASK = X.detach() > 0
STATS = (_x(4).detach(), _x(4).detach().square() + 1)


def _calls():
    """Family by family: an overload, and arguments for it."""
    yield from ((getattr(aten, n).default, (X,)) for n in (
        "relu", "gelu", "silu", "sigmoid", "tanh", "erf", "exp", "clone", "neg", "square", "detach",
        "alias", "contiguous", "positive", "isnan", "logical_not", "mish", "softplus", "hardtanh",
        "negative", "absolute", "nan_to_num", "sum", "mean", "amax", "amin", "max", "min", "any",
        "all", "prod", "std", "var", "argmax", "count_nonzero", "nansum", "zeros_like",
        "ones_like", "median",
    ))  # fmt: skip
    for other in (Y, _x(5), _x(4, 1), _x(3, 1, 5), _x(1, 4, 5)):
        yield from ((op.Tensor, (X, other)) for op in (aten.add, aten.sub, aten.mul, aten.div))
        yield aten.where.self, (MASK, X, other)
        yield aten.maximum.default, (X, other)
        yield aten.mse_loss.default, (X, other.expand(3, 4, 5), 0)
    yield aten.add.Tensor, (_x(5), X)
    yield from ((op, (X, 2.0)) for op in (aten.add.Scalar, aten.mul.Scalar, aten.div.Scalar))
    yield from ((op.Tensor, (X, 0)) for op in (aten.add, aten.sub))
    yield aten.div.Tensor_mode, (X, Y), {"rounding_mode": "floor"}
    yield aten.pow.Tensor_Scalar, (X, 2)
    yield aten.masked_fill.Scalar, (X, MASK, 0)
    yield aten.masked_fill.Scalar, (X, MASK, 1.5)
    yield aten.where.ScalarOther, (MASK, X, 0)
    yield aten.where.ScalarOther, (MASK, X, 1)
    yield aten.to.dtype, (X, torch.float32)
    yield aten.to.dtype, (X, torch.int64)
    yield aten._to_copy.default, (X,), {"dtype": torch.float32}
    yield aten.type_as.default, (X, _x(7).detach().float())
    yield aten.lerp.Tensor, (X, Y, _x(5))
    yield aten.addcmul.default, (X, Y, _x(5))
    yield aten.clamp.default, (X, -0.5, 0.5)
    yield aten.dropout.default, (X, 0.0, True)
    yield aten.feature_dropout.default, (X, 0.0, True)
    yield aten.one_hot.default, (_ids(3, 4), 4)
    yield aten.view_as_complex.default, (_x(3, 4, 2),)
    yield aten.view_as_real.default, (torch.view_as_complex(_x(3, 4, 2).detach()),)
    yield from ((aten.prelu.default, (X, weight)) for weight in (_x(4), _x(1)))
    yield aten.new_zeros.default, (X, [3, 2])
    yield aten.full_like.default, (X, 2.0)
    for source in (Y, _x(5), _x(3, 1, 5)):
        yield aten.copy.default, (X.detach(), source.detach())

    yield aten.linear.default, (X, W)
    yield aten.linear.default, (X, W, _x(6))
    yield aten.linear.default, (X, _x(5))
    yield aten.mm.default, (M, _x(5, 6))
    yield aten.bmm.default, (X, _x(3, 5, 6))
    yield aten.mv.default, (M, _x(5))
    yield from ((op.default, (_x(5), _x(5, seed=2))) for op in (aten.dot, aten.vdot, aten.inner))
    yield aten.inner.default, (X, W)
    yield from (
        (aten.matmul.default, (a, b))
        for a, b in (
            (X, _x(5, 6)),
            (Q, _x(6, 3)),
            (Q, _x(3, 1, 6, 5)),
            (Q, _x(4, 6, 3)),
            (X, _x(5)),
        )
    )
    yield aten.addmm.default, (_x(6), M, _x(5, 6))
    yield aten.addmm.default, (_x(4, 6), M, _x(5, 6))
    yield aten.addmm.default, (_x(6), M, _x(5, 6)), {"beta": 0}
    yield aten.baddbmm.default, (_x(3, 1, 6), X, _x(3, 5, 6))
    yield aten.addmv.default, (_x(4), M, _x(5))
    yield aten.einsum.default, ("bij,bkj->bik", [X, _x(3, 6, 5)])
    yield aten.einsum.default, ("...ij,kj", [X, W])
    yield aten.outer.default, (_x(4), _x(5))
    yield aten.bilinear.default, (X, _x(3, 4, 6), _x(2, 5, 6))
    yield aten.cdist.default, (X, _x(3, 6, 5))
    yield aten.gru_cell.default, (M, _x(4, 2), _x(6, M.size(1)), _x(6, 2))
    yield aten.conv1d.default, (X, _x(6, 4, 2), _x(6))
    yield aten.conv1d.default, (M, _x(6, 4, 1))
    yield aten.conv2d.default, (_x(3, 4, 5, 6), _x(8, 2, 1, 1), None), {"groups": 2}
    yield aten.conv3d.default, (_x(3, 4, 3, 3, 3), _x(3, 4, 1, 1, 1))

    yield from ((op.int, (X, 0, -1)) for op in (aten.transpose,))
    yield aten.swapaxes.default, (X, 0, 1)
    yield from ((op.default, (M,)) for op in (aten.t, aten.numpy_T, aten.mT, aten.mH, aten.adjoint))
    yield aten.permute.default, (X, [2, 0, 1])
    yield aten.movedim.intlist, (X, [0, 2], [1, 0])
    yield aten.unsqueeze.default, (X, -2)
    yield aten.squeeze.dim, (_x(3, 1, 5), 1)
    yield aten.squeeze.default, (_x(3, 1, 5),)
    yield from ((aten.select.int, (X, d, 1)) for d in range(3))
    yield aten.unbind.int, (X, 1)
    yield aten.split.Tensor, (X, 2, 1)
    yield aten.split_with_sizes.default, (X, [1, 4], 2)
    yield aten.chunk.default, (X, 2, -1)
    yield aten.tensor_split.sections, (X, 2, 0)
    yield aten.slice.Tensor, (X, 1, 1, 3)
    yield aten.narrow.default, (X, 0, 1, 2)
    yield aten.expand.default, (_x(4, 1), [3, -1, 5])
    yield aten.expand_as.default, (_x(4, 1), X)
    yield from ((op.default, (X, *args)) for op, *args in ((aten.flip, [1]), (aten.roll, [1], [1])))
    yield aten.unfold.default, (X, 1, 2, 1)
    yield aten.pad.default, (X, [1, 0, 0, 2])
    yield aten.constant_pad_nd.default, (X, [1, 1], 2.0)
    yield from ((op.default, (X,)) for op in (aten.tril, aten.triu))
    yield aten.diagonal.default, (X, 0, 1, 2)
    yield aten.repeat.default, (X, [2, 1, 1, 3])
    yield from ((op.default, ([X, Y, X], d)) for op in (aten.cat, aten.stack) for d in (0, 1, -1))
    yield aten.broadcast_tensors.default, ([X, _x(5)],)
    yield aten.slice_scatter.default, (X, _x(3, 2, 5), 1, 1, 3)
    yield aten.select_scatter.default, (X, _x(3, 5), 1, 1)

    for op in (
        aten.sum.dim_IntList,
        aten.mean.dim,
        aten.amax.default,
        aten.any.dims,
        aten.all.dims,
    ):
        yield from ((op, (X, dims, keep)) for dims in ([1], [0, -1]) for keep in (False, True))
    for op in (aten.max.dim, aten.min.dim, aten.prod.dim_int, aten.median.dim, aten.mode.default):
        yield op, (X, 1)
    yield from ((op.default, (X, 1)) for op in (aten.argmax, aten.argmin))
    yield aten.logsumexp.default, (X, [1])
    yield aten.kthvalue.default, (X, 2, 1)
    yield aten.aminmax.default, (X,), {"dim": 1}
    yield from ((op.dim, (X, [1])) for op in (aten.var, aten.std, aten.var_mean, aten.std_mean))
    yield aten.linalg_vector_norm.default, (X, 2, [1])
    yield aten.norm.ScalarOpt_dim, (X, 2, [1])
    yield aten.nanmean.default, (X, [1])
    yield aten.count_nonzero.dim_IntList, (X, [1])
    yield aten.softmax.int, (X, 1)
    yield aten.log_softmax.int, (X, -1)
    yield from ((op.default, (X, 1)) for op in (aten.cumprod, aten.logcumsumexp, aten.cumsum))
    yield from ((op.default, (X, 1)) for op in (aten.cummax, aten.cummin))
    yield from ((op.default, (X, d)) for op in (aten.sort, aten.argsort) for d in (0, 1))
    yield aten.glu.default, (X, 1)
    yield aten.topk.default, (X, 2, 1)
    yield aten.diff.default, (X, 1, 1)
    yield aten._fft_r2c.default, (X.detach(), [1], 0, True)
    yield aten.layer_norm.default, (X, [5], _x(5), _x(5, seed=1))
    yield aten.layer_norm.default, (X, [4, 5])
    yield aten.rms_norm.default, (X, [5], _x(5))
    yield aten.group_norm.default, (X, 2, _x(4), _x(4, seed=1))
    yield aten.batch_norm.default, (X, _x(4), None, *STATS, False, 0.1, 1e-5, False)
    yield aten.batch_norm.default, (X, None, None, None, None, True, 0.1, 1e-5, False)
    yield aten.instance_norm.default, (X, None, None, None, None, True, 0.1, 1e-5, False)
    yield aten.avg_pool1d.default, (X, [2])
    yield aten.max_pool2d.default, (Q, [2, 2])
    yield aten.adaptive_avg_pool1d.default, (X, [2])

    yield aten.embedding.default, (W, _ids(3, 4))
    yield aten.gather.default, (X, 1, _ids(3, 4, 5))
    yield aten.index_fill.int_Scalar, (X, 1, _ids(2, below=3), 0.5)
    yield aten.scatter.src, (X, 1, _ids(3, 4, 5, below=1), Y)
    yield aten.scatter_add.default, (X, 1, _ids(3, 4, 5), Y)
    yield from ((aten.index_select.default, (X, d, _ids(4, below=3))) for d in range(3))
    for at in ([_ids(3, 4, below=3)], [None, _ids(3)], [None, None, _ids(4)]):
        yield aten.index.Tensor, (X, at)
    yield aten.index.Tensor, (X, [_ids(4, 1, below=3), _ids(3)])
    yield aten.index.Tensor, (X, [X.detach()[:, 0, 0] > -9])
    yield aten.bucketize.Tensor, (X.detach(), torch.tensor([-1.0, 0.0, 1.0], dtype=f64))
    for reduction in range(3):
        yield aten.cross_entropy_loss.default, (X, _ids(3, 5), None, reduction)
        yield aten.cross_entropy_loss.default, (M, _ids(4), None, reduction)
        yield aten.cross_entropy_loss.default, (X, X.detach().softmax(1), None, reduction)
        yield aten.nll_loss_nd.default, (X, _ids(3, 5), None, reduction)
        yield aten.mse_loss.default, (X, Y.detach(), reduction)
        yield aten.l1_loss.default, (X, Y.detach(), reduction)
        yield (
            aten.binary_cross_entropy_with_logits.default,
            (X, _up(3, 4, 5), None, None, reduction),
        )
        yield aten.multi_margin_loss.default, (M, _ids(4), 1, 1, None, reduction)
    attend = aten.scaled_dot_product_attention.default
    for mask in (None, _x(5, 5).detach(), _x(3, 1, 5, 5).detach(), _x(3, 4, 5, 5).detach()):
        yield attend, (Q, _x(3, 4, 5, 6, seed=1), _x(3, 4, 5, 6, seed=2), mask)
    yield attend, (Q, _x(3, 4, 5, 6, seed=1), _x(3, 4, 5, 6, seed=2), None, 0.0, True)


CALLS = [(op, args, *(rest or [{}])) for op, args, *rest in _calls()]


def _parts(x, place, sizes):
    """Each rank's tensor, as functions of the full one."""
    if place == SUM:
        terms = [0.7, -0.2, 0.5][: len(sizes) - 1]
        return [x * t for t in terms] + [x * (1 - sum(terms))]
    if isinstance(place, int):
        return list(x.split(sizes, place))
    return [x] * len(sizes)


def _uneven(length, ranks):
    """As uneven as they can be, if no rank has nothing."""
    return [1, length - ranks + 1, *[1] * (ranks - 2)]


def _together(outs, place, sizes):
    if isinstance(place, int):
        return torch.cat(outs, place)
    if place == SUM:
        return sum(outs)
    if place == MEAN:
        return sum(out * n for out, n in zip(outs, sizes, strict=True)) / sum(sizes)
    reduce = {MAX: torch.maximum, MIN: torch.minimum, ANY: torch.logical_or, ALL: torch.logical_and}
    out = outs[0]
    for other in outs[1:]:
        out = reduce[place](out, other) if place is not None else out
    return out


def _sharded(op, args, kwargs, row, ranks):
    """The results of all ranks' calls, put together; None where they can't be compared."""
    lengths = {x.size(place) for x, place in row.inputs if isinstance(place, int)}
    length = lengths.pop() if lengths else 0
    assert not lengths, "dimensions that go together have the same length"
    if op is aten.squeeze.default and length:
        return None  # it takes away a part of one, which both users of the table refuse or reshape
    sizes = _uneven(length, ranks) if length else [1] * ranks
    held = {}
    for x in _tensors((args, kwargs)):
        place = row.place(x)
        if place is ANYTHING and op is aten.copy.default:  # its shape counts
            place = row.outputs if isinstance(row.outputs, int) else None
        held[id(x)] = _parts(x, place, sizes)
    outs = []
    for rank in range(ranks):

        def mine(x, rank=rank):
            return held[id(x)][rank] if isinstance(x, torch.Tensor) else x

        given, named = tree_map(mine, (args, kwargs))
        if op is aten.expand.default and isinstance(row.outputs, int):
            size = list(given[1])
            size[row.outputs] = sizes[rank]
            given = (given[0], size)
        outs.append(op(*given, **named))
    several = isinstance(outs[0], (tuple, list))
    outs = [out if several else [out] for out in outs]
    return [_together(list(out), row.outputs, sizes) for out in zip(*outs, strict=True)]


def _gradients(results, inputs):
    """Of a sum in which each element counts differently."""
    total = 0
    for out in results:
        if out.is_floating_point() and out.requires_grad:
            total = (
                total + (out * torch.linspace(-1, 2, out.numel(), dtype=f64).view(out.shape)).sum()
            )
    if not isinstance(total, torch.Tensor):
        return []
    return torch.autograd.grad(
        total, inputs, retain_graph=True, allow_unused=True, materialize_grads=True
    )


def _rows(op, args, kwargs):
    return placement.find(op).rows(Call(op, args, kwargs))


def test_rows():
    """Every row of every call: what the ranks make, and its gradients, are those of one process."""
    ranks, tried = 3, 0
    for op, args, kwargs in CALLS:
        result = op(*args, **kwargs)
        full = list(result) if isinstance(result, (tuple, list)) else [result]
        inputs = [t for t in _tensors((args, kwargs)) if t.requires_grad]
        for row in _rows(op, args, kwargs):
            said = f"{op}{[tuple(t.shape) for t in _tensors(args)]}: {row.outputs} of " + str(
                [place for _, place in row.inputs]
            )
            if any(p == SUM and not x.is_floating_point() for x, p in row.inputs):
                continue
            got = _sharded(op, args, kwargs, row, ranks)
            if got is None:
                continue
            tried += 1
            try:
                torch.testing.assert_close(got, full, check_stride=False)
                if row.outputs not in (MAX, MIN):
                    torch.testing.assert_close(_gradients(got, inputs), _gradients(full, inputs))
            except AssertionError as error:
                raise AssertionError(f"{said}: {error}") from error
    assert tried > 700


def test_every_op_has_a_call():
    placement.find(aten.relu.default)
    called = {op._opname for op, *_ in CALLS}
    known = {op._opname for op, rule in table._RULES.items() if rule.family != "pointwise"}
    assert known - called == ALIASES


# Other names of ops that are called above, their kernels, and other numbers of dimensions.
ALIASES = {
    "_fft_c2c", "_fft_c2r", "_fused_rms_norm", "_log_softmax", "_softmax",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "avg_pool2d",
    "avg_pool3d", "binary_cross_entropy", "broadcast_to", "concat", "concatenate", "ger",
    "huber_loss", "kl_div", "lstm_cell", "matrix_H", "max_pool1d", "max_pool1d_with_indices",
    "max_pool2d_with_indices", "max_pool3d", "moveaxis", "multilabel_margin_loss", "nanmedian",
    "native_layer_norm", "nll_loss", "nll_loss2d", "poisson_nll_loss", "rnn_relu_cell",
    "rnn_tanh_cell", "scatter_reduce", "smooth_l1_loss", "soft_margin_loss", "swapdims",
    "take_along_dim", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes",
}  # fmt: skip


def test_overloads_that_write():
    for op, expected in [
        (aten.add_.Tensor, aten.add.Tensor),
        (aten.addcmul_.default, aten.addcmul.default),
        (aten.mul.out, aten.mul.Tensor),
        (aten.sum.IntList_out, aten.sum.dim_IntList),
        (aten._foreach_add_.List, aten._foreach_add.List),
        (aten.copy_.default, aten.copy.default),
        (aten.relu.default, None),
    ]:
        assert placement.functional(op) == expected
        if expected is not None and "foreach" not in str(op):
            assert placement.find(op) == placement.find(expected)
    assert placement.find(aten.linalg_inv.default) is None


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def _of_dtensor(place):
    return Replicate() if place in (None, ANYTHING) else Partial() if place == SUM else Shard(place)


def test_rows_are_dtensors(mesh):
    """DTensor's strategies are an independent oracle: what it computes from operands placed as a
    row says is placed as the row says, unless it has none for the op, or replicates first."""
    agreed, wrong = 0, []
    for op, args, kwargs in CALLS:
        if placement.find(op).family not in ("products", "moves", "along", "pointwise"):
            continue
        for row in _rows(op, args, kwargs):
            even = all(x.size(p) % 2 == 0 for x, p in row.inputs if isinstance(p, int))
            if not even or not (isinstance(row.outputs, int) or row.outputs == SUM):
                continue

            def held(x, row=row):
                if not isinstance(x, torch.Tensor):
                    return x
                place = row.place(x)
                local = x.detach().chunk(2, place)[0] if isinstance(place, int) else x.detach()
                return DTensor.from_local(local, mesh, [_of_dtensor(place)], run_check=False)

            given, named = tree_map(held, (args, kwargs))
            try:
                out = op(*given, **named)
            except (RuntimeError, NotImplementedError, AssertionError, IndexError, ValueError):
                continue  # it has no strategy for this
            out = next(x for x in tree_leaves(out) if isinstance(x, torch.Tensor))
            if out.placements == (_of_dtensor(row.outputs),):
                agreed += 1
            elif out.placements != (Replicate(),):  # it gathers, or reduces, first
                wrong.append((str(op), row.outputs, [p for _, p in row.inputs], out.placements))
    assert not wrong and agreed > 150
