"""Where a schedule lets ranks communicate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import deepsp.ops
from deepsp import collectives
from deepsp.groups import Member
from deepsp.schedule.picking import Key
from deepsp.schedule.placement import WHOLE, Partial, Placement, Sharded, Whole

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
    # What it has split along its axis: lengths on each rank, of the last call; and the totals that
    # it has split in this call of the model, and ever. From them gathers know the sizes.
    sizes: list[int] | None = None
    totals: set[int] = field(default_factory=set)
    ever: set[int] = field(default_factory=set)

    def __post_init__(self):
        where = f"sync at {self.module_name or 'the model'}"
        if self.mode not in MODES:
            raise ValueError(f"{where}: mode is {self.mode!r}; one of {', '.join(MODES)} is right")
        if self.function is not None:
            if not callable(self.function):
                raise ValueError(
                    f"{where}: sync_op_or_fn is {self.function!r}; one of {', '.join(OPS)}, or a "
                    "function, is right"
                )
            given = [k for k in ("axis", "grad", "tensor") if getattr(self, k) is not None]
            given += ["overlap"] * self.overlap
            if given:
                raise ValueError(
                    f"{where}: {given[0]} is given, but sync_op_or_fn is a function, which knows "
                    "by itself what to do; leave it out"
                )
            return
        if self.op not in OPS:
            raise ValueError(
                f"{where}: sync_op_or_fn is {self.op!r}; one of {', '.join(OPS)}, or a function, "
                "is right"
            )
        if self.mode == "bwd_post" and self.op != "all_reduce":
            raise ValueError(
                f"{where}: sync_op_or_fn is {self.op!r} with mode='bwd_post'; all_reduce of the "
                "gradient, or a function, is right: the other collectives' backward follows from "
                "their forward"
            )
        self._check_axis(where)
        self._check_grad(where)

    def _check_axis(self, where: str) -> None:
        if self.op == "all_reduce":
            if self.axis is not None:
                raise ValueError(f"{where}: axis is {self.axis}; all_reduce has none")
        elif self.op in ("seq_to_heads", "heads_to_seq"):
            right = (None, _TOKENS, _TOKENS - 4)
            if self.axis not in right:
                raise ValueError(
                    f"{where}: axis is {self.axis}; {self.op} exchanges the dimensions 1 and 2 of "
                    "[batch, sequence, heads, head_dim]: leave it out"
                )
        elif not isinstance(self.axis, int):
            raise ValueError(
                f"{where}: axis is {self.axis!r}; {self.op} needs the dimension that is "
                f"{'gathered' if self.op == 'all_gather' else 'split'}"
            )

    def _check_grad(self, where: str) -> None:
        if self.grad is None:
            return
        if self.mode == "bwd_post" or self.op not in ("all_gather", "all_reduce", "scatter"):
            what = "bwd_post all_reduce" if self.mode == "bwd_post" else self.op
            raise ValueError(
                f"{where}: grad is {self.grad!r}; the backward of {what} doesn't depend on it: "
                "leave it out"
            )
        if self.grad not in GRADS:
            raise ValueError(f"{where}: grad is {self.grad!r}; 'replicated' or 'partial' is right")

    @property
    def where(self) -> str:
        return f"{self.module_name or 'the model'} ({self.mode} {self.op or 'function'})"

    @property
    def asks_grad(self) -> bool:
        """Whether its backward depends on what follows, and that is still to be told."""
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
                    f"{self.where}: the tensor has {ndim} dimensions; four are right: [batch, "
                    "sequence, heads, head_dim]"
                )
            return _TOKENS if self.op == "seq_to_heads" else _HEADS
        if not -ndim <= self.axis < ndim:
            raise ValueError(
                f"{self.where}: axis is {self.axis}, but the tensor has {ndim} dimensions; "
                f"{-ndim} to {ndim - 1} is right"
            )
        return self.axis % ndim

    # ---- placements

    def result(self, placement: Placement | None, ndim: int | None = None) -> Placement:
        """What comes out. ``placement``: what comes in, None where that isn't known; ``ndim``: of
        the tensor, None where that isn't known.

        Raises:
            ValueError: the collective doesn't fit what comes in.
        """
        if self.mode == "bwd_post":
            if isinstance(placement, (Sharded, Partial)):
                raise ValueError(
                    f"{self.where}: the module's input is {placement}, and so the ranks' gradients "
                    "aren't shares of one that could be summed; a whole input is right"
                )
            return WHOLE if placement is None else placement
        return getattr(self, f"_{self.op}")(placement, ndim)

    def _all_gather(self, placement, ndim) -> Placement:
        if isinstance(placement, Whole):
            self._refuse(placement, "is it gathered twice? Nothing is left to gather")
        if isinstance(placement, Partial):
            self._refuse(
                placement,
                "the ranks' tensors are summands, not parts; sync it with reduce_scatter (and "
                "gather that) or with all_reduce",
            )
        if isinstance(placement, Sharded):
            self._check_along(placement, self.axis, ndim)
        return WHOLE

    def _reduce_scatter(self, placement, ndim) -> Placement:
        self._check_partial(placement)
        return Sharded(self.axis if ndim is None else self.dim(ndim), self)

    def _all_reduce(self, placement, ndim) -> Placement:
        self._check_partial(placement)
        return WHOLE

    def _scatter(self, placement, ndim) -> Placement:
        if isinstance(placement, Partial):
            self._refuse(placement, "its parts would still have to be summed: use reduce_scatter")
        if isinstance(placement, Sharded):
            self._refuse(placement, "each rank has its part already")
        return Sharded(self.axis if ndim is None else self.dim(ndim), self)

    def _seq_to_heads(self, placement, ndim) -> Placement:
        return self._exchange(placement, ndim, _TOKENS, _HEADS)

    def _heads_to_seq(self, placement, ndim) -> Placement:
        return self._exchange(placement, ndim, _HEADS, _TOKENS)

    def _exchange(self, placement, ndim, source, target) -> Placement:
        if ndim is not None:
            self.dim(ndim)
        if isinstance(placement, (Whole, Partial)):
            self._refuse(placement, f"a tensor sharded along axis {source} is right")
        if isinstance(placement, Sharded):
            self._check_along(placement, source, 4)
        return Sharded(target, self)

    def _check_partial(self, placement) -> None:
        if isinstance(placement, Whole):
            self._refuse(
                placement,
                "the sum over the ranks would be P times too large. Only what is partial, such as "
                "the output of a linear layer with sharded input features, is reduced",
            )
        if isinstance(placement, Sharded):
            self._refuse(
                placement, "the ranks' parts belong side by side, not summed: use all_gather"
            )

    def _check_along(self, placement, axis, ndim) -> None:
        have = placement.axis
        if have is None:
            return
        if ndim is None:
            if (have < 0) != (axis < 0):
                return  # can't be told
        else:
            have, axis = have % ndim, axis % ndim
        if have != axis:
            self._refuse(placement, f"axis={axis} doesn't put its parts together; axis={have} does")

    def _refuse(self, placement, why: str):
        raise ValueError(f"{self.where}: what comes in is {placement}; {why}")

    # ---- at work

    def begin(self) -> None:
        """A call of the model begins."""
        self.totals = set()

    def split(self, total: int, size: int) -> list[int]:
        """Sizes of what it splits, kept for the gathers that put it together again."""
        self.sizes = torch.ops.deepsp.token_split(total, size)
        if not torch.compiler.is_compiling():  # there it's a symbol
            self.totals.add(total)
            self.ever.add(total)
        return self.sizes

    def run(
        self, x: Tensor, dim: int, sizes: list[int] | None, grad: str, member: Member
    ) -> Tensor:
        """``sizes``: of each rank along ``dim``, for what puts parts together."""
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
