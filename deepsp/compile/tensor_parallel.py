"""Linear layers around collectives as Inductor sees them: collectives, and products between their
launch and their wait."""

from __future__ import annotations

import torch.nn.functional as F

from deepsp.compile import along_dim


def _gather_start(x, dim, sizes, rank, group_name):
    return along_dim.all_gather_start(x, dim, sizes, "partial", rank, group_name)


def _gather_wait(buffer, x, dim, sizes, rank, group_name):
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    return along_dim.all_gather_wait(buffer, dim, sizes, shape, "partial", rank, group_name)[0]


def _weight_grad(grad, x):
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def all_gather_matmul(input, weight, bias, dim, sizes, rank, group_name, *, reduce_dtype=None):
    where = (dim, sizes, rank, group_name)
    return F.linear(_gather_wait(_gather_start(input, *where), input, *where), weight, bias)


def all_gather_matmul_backward(
    grad, input, weight, dim, sizes, wanted, rank, group_name, *, reduce_dtype=None
):
    where = (dim, sizes, rank, group_name)
    results = []
    gathered = _gather_start(input, *where) if wanted[1] else None
    if wanted[0]:
        product = grad @ weight
        leaving = along_dim.reduce_scatter_start(product, *where)
    if wanted[1]:
        of_weight = _weight_grad(grad, _gather_wait(gathered, input, *where))
    if wanted[0]:
        results.append(
            along_dim.reduce_scatter_wait(
                *(leaving, dim, sizes, list(product.shape), rank, group_name),
                reduce_dtype=reduce_dtype,
            )
        )
    if wanted[1]:
        results.append(of_weight)
    if wanted[2]:
        results.append(grad.flatten(0, -2).sum(0))
    return results


def matmul_reduce_scatter(input, weight, bias, dim, sizes, rank, group_name, *, reduce_dtype=None):
    product = input @ weight.t()
    buffer = along_dim.reduce_scatter_start(product, dim, sizes, rank, group_name)
    result = along_dim.reduce_scatter_wait(
        *(buffer, dim, sizes, list(product.shape), rank, group_name), reduce_dtype=reduce_dtype
    )
    return result if bias is None else result + bias


def matmul_reduce_scatter_backward(grad, input, weight, dim, sizes, wanted, rank, group_name):
    where = (dim, sizes, rank, group_name)
    results = []
    if wanted[0] or wanted[1]:
        whole = _gather_wait(_gather_start(grad, *where), grad, *where)
    if wanted[0]:
        results.append(whole @ weight)
    if wanted[1]:
        results.append(_weight_grad(whole, input))
    if wanted[2]:
        results.append(grad.flatten(0, -2).sum(0))
    return results
