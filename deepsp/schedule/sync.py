"""Syncs: where the ranks of a schedule communicate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import deepsp.ops
from deepsp import collectives
from deepsp.ranks.groups import Member
from deepsp.schedule.picking import Key
from deepsp.schedule.placement import REPLICATE, Partial, Placement, Shard, misfit

MODES = ("fwd_pre", "fwd_post", "bwd_post")
OPS = ("all_gather", "reduce_scatter", "all_reduce", "scatter", "seq_to_heads", "heads_to_seq")
GRADS = ("replicated", "partial")

_TOKENS, _HEADS = 1, 2  # dimensions of [B, S, H, D]


@dataclass(eq=False)
class Sync:
    """A collective, or a function, at a module's input or output, in forward or backward."""

    module_name: str
    mode: str
    op: str | None  # None: a function
    axis: int | None = None
    grad: str | None = None
    tensor: Key = None
    overlap: bool = False
    reduce_dtype: torch.dtype | None = None
    function: Callable | None = None
    # The sizes on each rank of its last split along the axis; and the totals that it has split in
    # this call of the model, and ever. Gathers read their sizes here.
    sizes: list[int] | None = None
    totals: set[int] = field(default_factory=set)
    ever: set[int] = field(default_factory=set)

    def __post_init__(self):
        where = f"sync at {self.module_name or 'the model'}"
        if self.mode not in MODES:
            raise ValueError(
                f"{where}: expected mode to be one of {', '.join(MODES)}, got {self.mode!r}"
            )
        if self.function is not None:
            if not callable(self.function):
                raise ValueError(
                    f"{where}: expected sync_op_or_fn to be one of {', '.join(OPS)}, or a "
                    f"function, got {self.function!r}"
                )
            extra = [k for k in ("axis", "grad", "tensor") if getattr(self, k) is not None]
            extra += ["overlap"] * self.overlap
            if extra:
                raise ValueError(
                    f"{where}: expected no {extra[0]}, since sync_op_or_fn is a function; leave it "
                    "out"
                )
            return
        if self.op not in OPS:
            raise ValueError(
                f"{where}: expected sync_op_or_fn to be one of {', '.join(OPS)}, or a function, "
                f"got {self.op!r}"
            )
        if self.mode == "bwd_post" and self.op != "all_reduce":
            raise ValueError(
                f"{where}: expected sync_op_or_fn to be all_reduce, or a function, with "
                f"mode='bwd_post', got {self.op!r}; the backward of the other collectives follows "
                "from their forward"
            )
        self._check_axis(where)
        self._check_grad(where)

    def _check_axis(self, where: str) -> None:
        if self.op == "all_reduce":
            if self.axis is not None:
                raise ValueError(f"{where}: expected no axis for all_reduce, got {self.axis}")
        elif self.op in ("seq_to_heads", "heads_to_seq"):
            right = (None, _TOKENS, _TOKENS - 4)
            if self.axis not in right:
                raise ValueError(
                    f"{where}: expected no axis, since {self.op} exchanges the dimensions 1 and 2 "
                    f"of [batch, sequence, heads, head_dim], got {self.axis}; leave it out"
                )
        elif not isinstance(self.axis, int):
            raise ValueError(
                f"{where}: expected axis to be the dimension that {self.op} "
                f"{'gathers' if self.op == 'all_gather' else 'splits'}, got {self.axis!r}"
            )

    def _check_grad(self, where: str) -> None:
        if self.grad is None:
            return
        if self.mode == "bwd_post" or self.op not in ("all_gather", "all_reduce", "scatter"):
            what = "bwd_post all_reduce" if self.mode == "bwd_post" else self.op
            raise ValueError(
                f"{where}: expected no grad, since the backward of {what} doesn't depend on it, "
                f"got {self.grad!r}; leave it out"
            )
        if self.grad not in GRADS:
            raise ValueError(
                f"{where}: expected grad to be 'replicated' or 'partial', got {self.grad!r}"
            )

    @property
    def where(self) -> str:
        return f"{self.module_name or 'the model'} ({self.mode} {self.op or 'function'})"

    @property
    def asks_grad(self) -> bool:
        """Whether its backward depends on the ops that follow, and the dry run must find out."""
        return (
            self.op in ("all_gather", "all_reduce")
            and self.mode != "bwd_post"
            and self.grad is None
        )

    @property
    def reduces(self) -> bool:
        return self.mode != "bwd_post" and self.op in ("reduce_scatter", "all_reduce")

    def dim(self, ndim: int) -> int:
        """The axis counted from the front.

        Raises:
            ValueError: the tensor doesn't have it.
        """
        if self.op in ("seq_to_heads", "heads_to_seq"):
            if ndim != 4:
                raise ValueError(
                    f"{self.where}: expected a tensor with 4 dimensions [batch, sequence, heads, "
                    f"head_dim], got {ndim}"
                )
            return _TOKENS if self.op == "seq_to_heads" else _HEADS
        if not -ndim <= self.axis < ndim:
            raise ValueError(
                f"{self.where}: expected axis to be in [{-ndim}, {ndim - 1}] for a tensor with "
                f"{ndim} dimensions, got {self.axis}"
            )
        return self.axis % ndim

    # ---- placements

    def result(self, placement: Placement | None, ndim: int | None = None) -> Placement:
        """The output's placement. ``placement``: the input's, or None if unknown; ``ndim``: the
        input's dimensions, or None if unknown.

        Raises:
            ValueError: the collective doesn't fit the input.
        """
        if self.mode == "bwd_post":
            if isinstance(placement, (Shard, Partial)):
                raise ValueError(
                    f"{self.where}: expected the module's input to be Replicate, so that its "
                    f"gradients can be summed, got {placement}"
                )
            return REPLICATE if placement is None else placement
        exchanged = self.op in ("seq_to_heads", "heads_to_seq")
        axis = {"seq_to_heads": _TOKENS, "heads_to_seq": _HEADS}.get(self.op, self.axis)
        if exchanged and ndim is not None:
            self.dim(ndim)
        wrong = None if placement is None else misfit(self.op, placement)
        if wrong is not None:
            needed, advice = wrong
            self._refuse(f"Shard({axis})" if exchanged else needed, placement, advice)
        if isinstance(placement, Shard):
            self._check_along(placement, axis, 4 if exchanged else ndim)
        if self.op in ("all_gather", "all_reduce"):
            return REPLICATE
        if exchanged:
            return Shard(_TOKENS + _HEADS - axis, self)
        return Shard(self.axis if ndim is None else self.dim(ndim), self)

    def _check_along(self, placement, axis, ndim) -> None:
        have = placement.axis
        if have is None:
            return
        if ndim is None:
            if (have < 0) != (axis < 0):
                return  # unknown
        else:
            have, axis = have % ndim, axis % ndim
        if have != axis:
            self._refuse(f"Shard({axis})", placement, f"pass axis={have}")

    def _refuse(self, expected: str, placement, why: str):
        raise ValueError(
            f"{self.where}: expected a tensor that is {expected}, got {placement}; {why}"
        )

    # ---- running

    def begin(self) -> None:
        """Called when a call of the model begins."""
        self.totals = set()

    def split(self, total: int, size: int) -> list[int]:
        """The sizes of a split, kept for the gathers that undo it."""
        self.sizes = torch.ops.deepsp.token_split(total, size)
        if not torch.compiler.is_compiling():  # total is a symbol then
            self.totals.add(total)
            self.ever.add(total)
        return self.sizes

    def run(
        self, x: Tensor, dim: int, sizes: list[int] | None, grad: str, member: Member
    ) -> Tensor:
        """Runs the collective. ``sizes``: of each rank along ``dim``, if it gathers."""
        size = member[1]
        if self.op == "all_gather":
            return collectives.all_gather(
                x, dim, member, sizes, grad=grad, reduce_dtype=self.reduce_dtype
            )
        if self.op == "all_reduce":
            if self.mode == "bwd_post":
                return collectives.replicate(x, member)
            return collectives.all_reduce(x, member, grad=grad, reduce_dtype=self.reduce_dtype)
        if self.op == "seq_to_heads":
            self.split(x.size(_HEADS), size)
            return deepsp.ops.seq_to_heads([x], member, sizes)[0]
        if self.op == "heads_to_seq":
            return self._run_heads_to_seq(x, sizes, member)
        parts = self.split(x.size(dim), size)
        if self.op == "reduce_scatter":
            return collectives.reduce_scatter(x, dim, member, parts, reduce_dtype=self.reduce_dtype)
        return collectives.scatter(x, dim, member, parts, grad=self.grad or "replicated")

    def _run_heads_to_seq(self, x, sizes, member) -> Tensor:
        heads, size = sum(sizes), member[1]
        expected = torch.ops.deepsp.token_split(heads, size)
        if sizes != expected:
            raise ValueError(
                f"{self.where}: expected the ranks to hold {expected} heads, as torch.tensor_split "
                f"splits them, got {sizes}"
            )
        lens = self.split(x.size(_TOKENS), size)
        return deepsp.ops.heads_to_seq([x], [heads], member, lens)[0]
