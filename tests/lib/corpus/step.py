"""A training step through the compile pass, against one process with the whole sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from functorch.compile import min_cut_rematerialization_partition
from lockstep import lockstep
from torch import nn
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch.utils._pytree import tree_leaves

import deepsp
from deepsp.compile.sharding.report import CannotShard


class Case(NamedTuple):
    """A model with the whole batch; ``seq_dims`` says where the marked inputs' tokens are."""

    model: nn.Module
    inputs: dict[str, Any]
    seq_dims: dict[str, int]


class Entry(NamedTuple):
    """``make(length)`` is a case. Equal: up to ``near`` of the largest number of a tensor, and
    ``least``."""

    group: str
    make: Callable[[int], Case]
    near: float = 1e-9
    least: float = 1e-12


# Behind aot_eager, fake tensors have other strides than real ones (torch 2.13).
_OTHER_STRIDES = [torch.ops.aten.elu_backward, torch.ops.aten.softplus_backward]


def inner_of(name: str):
    """Return the compiler behind the pass: aot_eager, but for ops of wrong strides."""
    if name != "aot_eager":
        return name
    return aot_autograd(
        fw_compiler=boxed_nop,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
        decompositions=get_decompositions(_OTHER_STRIDES),
    )


def loss_of(output) -> torch.Tensor:
    """Return the model's own loss, or one to which all numbers of its output contribute."""
    loss = getattr(output, "loss", output)
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return loss
    total = 0
    for x in tree_leaves(dict(output) if isinstance(output, dict) else output):
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            weights = torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view(x.shape)
            total = total + (x * weights).square().mean() + (x * weights).mean()
    return total


def refusal(error: BaseException | None) -> str | None:
    """Return why the pass refuses the model, or None if ``error`` is something else."""
    while error is not None:
        for kind, prefix in ((CannotShard, ""), (torch._dynamo.exc.Unsupported, "Dynamo: ")):
            if isinstance(error, kind):
                return prefix + str(error).strip().split("\n")[0]
        error = getattr(error, "inner_exception", None) or error.__cause__
    return None


def compare_gradients(name: str, model, reference, near: float, least: float) -> None:
    for (n, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), n
        if p.grad is not None:
            largest = q.grad.abs().max().item() if q.numel() else 0
            atol = near * largest + least
            torch.testing.assert_close(
                p.grad, q.grad, rtol=0, atol=atol, msg=lambda m, n=n: f"{name}, {n}: {m}"
            )


def training_step(
    name: str,
    case: Case,
    near: float,
    ranks: int | None = None,
    inner: str = "eager",
    least: float = 1e-12,
) -> str | None:
    """Make a step on ``ranks`` in lock step, or (None) as one rank of this process's group.

    Returns None if the loss and every gradient are those of one process, or why it is refused.
    """
    torch._dynamo.reset()
    reference = case.model
    model = copy.deepcopy(reference)
    if ranks is None:
        options = {"inner": inner_of(inner)}
        compiled = torch.compile(model, backend="deepsp", fullgraph=True, options=options)
    else:
        compiled = lockstep(model, ranks)
    expected = loss_of(reference(**case.inputs))
    expected.backward()
    inputs = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in case.inputs.items()}
    for n, dim in case.seq_dims.items():
        deepsp.prepare_inputs({n: inputs[n]}, seq_dim=dim)
    try:
        loss = loss_of(compiled(**inputs))
        loss.backward()
    except Exception as error:
        text = refusal(error)
        if text is None:
            raise
        return text
    torch.testing.assert_close(loss, expected, rtol=near, atol=0, msg=lambda m: f"{name}: {m}")
    compare_gradients(name, model, reference, near, least)
    return None
