"""What ops do to dimensions, against an independent oracle: DTensor's own sharding strategies."""

import pytest
import torch
import torch.nn.functional as F
from harness import on_ranks
from reference import draw
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from deepsp.placement import dims

PRODUCTS = [
    ("linear", F.linear, [(4, 6), (8, 6)], dims.linear(2, 2)),
    ("linear of batches", F.linear, [(2, 4, 6), (8, 6)], dims.linear(3, 2)),
    ("mm", torch.mm, [(4, 6), (6, 8)], dims.matmul(2, 2)),
    ("mv", torch.mv, [(4, 6), (6,)], dims.matmul(2, 1)),
    ("dot", torch.dot, [(6,), (6,)], dims.matmul(1, 1)),
    ("bmm", torch.bmm, [(2, 4, 6), (2, 6, 8)], dims.matmul(3, 3)),
    ("matmul", torch.matmul, [(2, 2, 4, 6), (2, 2, 6, 8)], dims.matmul(4, 4)),
    ("broadcast", torch.matmul, [(2, 4, 6), (6, 8)], dims.matmul(3, 2)),
    *(
        (equation, lambda a, b, e=equation: torch.einsum(e, a, b), shapes, dims.einsum(equation, n))
        for equation, shapes, n in (
            ("bik,bkj->bij", [(2, 4, 6), (2, 6, 8)], [3, 3]),
            ("bhqd,bhkd->bhqk", [(2, 4, 6, 8), (2, 4, 2, 8)], [4, 4]),
            ("...ik,...kj", [(2, 4, 6), (2, 6, 8)], [3, 3]),
            ("ik,kj", [(4, 6), (6, 8)], [2, 2]),
        )
    ),
]

MOVES = [
    ("t", lambda x: x.t(), (4, 6), dims.turn(2, "t")),
    ("T", lambda x: x.T, (4, 6), dims.turn(2, "T")),
    ("mT", lambda x: x.mT, (2, 4, 6), dims.turn(3, "mT")),
    ("transpose", lambda x: x.transpose(0, -1), (2, 4, 6), dims.transpose(3, 0, -1)),
    ("permute", lambda x: x.permute(2, 0, -2), (2, 4, 6), dims.permute(3, (2, 0, -2))),
    ("movedim", lambda x: x.movedim(0, -1), (2, 4, 6), dims.movedim(3, 0, -1)),
    ("movedims", lambda x: x.movedim((0, 2), (1, 0)), (2, 4, 6), dims.movedim(3, (0, 2), (1, 0))),
    ("unsqueeze", lambda x: x.unsqueeze(-2), (2, 4), dims.unsqueeze(2, -2)),
    ("select", lambda x: x.select(1, 0), (2, 3, 6), dims.without(3, [1])),
    ("squeeze", lambda x: x.squeeze(1), (2, 1, 6), dims.without(3, [-2])),
]


def _distributed(x, dim, mesh):
    return distribute_tensor(x, mesh, [Replicate() if dim is None else Shard(dim)])


def _products():
    mesh = init_device_mesh("cpu", (2,))
    for name, op, shapes, (operands, result) in PRODUCTS:
        full = [draw(*shape, seed=n) for n, shape in enumerate(shapes)]
        expected = op(*full)
        for label in sorted({x for of in operands for x in of}, key=str):
            places = [of.index(label) if label in of else None for of in operands]
            mine = [_distributed(x, at, mesh) for x, at in zip(full, places, strict=True)]
            out = op(*mine)
            place = Shard(result.index(label)) if label in result else Partial()
            assert out.placements == (place,), f"{name}, {label}: {out.placements}, not {place}"
            torch.testing.assert_close(out.full_tensor(), expected)


def _moves():
    mesh = init_device_mesh("cpu", (2,))
    for name, op, shape, order in MOVES:
        x = draw(*shape)
        assert [1 if d is None else shape[d] for d in order] == list(op(x).shape), name
        for dim in range(x.dim()):
            if dim not in order or shape[dim] == 1:
                continue
            out = op(_distributed(x, dim, mesh))
            assert isinstance(out, DTensor)
            assert out.placements == (Shard(order.index(dim)),), f"{name}, {dim}: {out.placements}"


@pytest.mark.parametrize("what", [_products, _moves])
def test_dimensions_are_dtensors(what):
    on_ranks(2, what)
