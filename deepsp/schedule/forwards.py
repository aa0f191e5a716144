"""The forwards of sharded modules that compute something else than their class does."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepsp import collectives
from deepsp.schedule import flow
from deepsp.schedule.placement import REPLICATE
from deepsp.schedule.running import add_after
from deepsp.schedule.swap import Swapped
from deepsp.weights.rows import shards_of


class Opaque(Swapped):
    """The dry run doesn't follow its forward, and takes the output's placement from the effect."""

    def forward(self, *args, **kwargs):
        following = flow.current()
        if following is None:
            return super().forward(*args, **kwargs)
        name, effect = self._deepsp_effect
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if effect.input is not None and inputs:
            x = inputs[0]
            have = following.placement(x)
            if not fits(have, effect.input, x.dim()):
                raise ValueError(
                    f"{name}: expected its input to be {effect.input}, since its weight is "
                    f"sharded, got {have}"
                )
        with following.communicating(name):
            out = super().forward(*args, **kwargs)
        # The output's placement also gives the placement of the gradients of replicated parameters,
        # except for the one that is added later.
        inputs += [p for n, p in self.named_parameters() if n != effect.add_after]
        outs = out if isinstance(out, (tuple, list)) else [out]
        for n, x in enumerate(x for x in outs if isinstance(x, Tensor)):
            placement = at(effect.output, x.dim()) if n == 0 else REPLICATE
            following.opaque(name, inputs if n == 0 else [], x, placement)
        return out


def at(placement, ndim: int):
    """An effect's placement, for a tensor with ``ndim`` dimensions: its axis counted from 0."""
    axis = getattr(placement, "axis", None)
    return placement if axis is None else type(placement)(axis % ndim, placement.origin)


def fits(have, wanted, ndim: int | None) -> bool:
    """Whether a placement may be the wanted one. ``ndim`` None: the dimensions aren't known."""
    if type(have) is not type(wanted):
        return False
    a, b = getattr(have, "axis", None), getattr(wanted, "axis", None)
    if a is None or b is None:
        return True
    if ndim is None:
        return a == b or (a < 0) != (b < 0)
    return a % ndim == b % ndim


class InputSharded(Swapped):
    """A linear layer with sharded input features: its output is partial, without the bias."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def reset_parameters(self) -> None:
        # nn.Linear's bounds depend on the full number of features.
        bound = 1 / math.sqrt(shards_of(self)["weight"].shape[1])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)


class Conv1DInputSharded(Swapped):
    """InputSharded for transformers' Conv1D, whose weight is [in, out]."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def weight_of(module: nn.Module) -> Tensor:
    """The weight as [out, in]."""
    return module.weight if isinstance(module, nn.Linear) else module.weight.t()


def _dim_of_rows(sync, x: Tensor) -> int:
    """The dimension along which rows of a linear layer's input or output are sent.

    Raises:
        ValueError: it is the features' dimension.
    """
    dim = sync.dim(x.dim())
    if dim == x.dim() - 1:
        raise ValueError(
            f"{sync.where}: expected axis before the features with overlap=True, got {sync.axis}, "
            "the features; leave overlap out"
        )
    return dim


class ReduceOverlapped(Swapped):
    """A linear layer fused with the reduce_scatter of its output, which overlaps the product."""

    def forward(self, x: Tensor) -> Tensor:
        hook = self._deepsp_reduce
        running, sync = hook.running, hook.sync
        dim = _dim_of_rows(sync, x)
        if flow.current() is not None:
            out = running.apply(sync, super().forward(x))
        else:
            sizes = sync.split(x.size(dim), running.member[1])
            out = collectives.matmul_reduce_scatter(
                x, weight_of(self), None, dim, running.member, sizes, reduce_dtype=sync.reduce_dtype
            )
        return out if hook.add is None else add_after(running, sync, self, hook.add, out)


class GatherOverlapped(Swapped):
    """A linear layer fused with the all_gather of its input, which overlaps the product."""

    def forward(self, x: Tensor) -> Tensor:
        hook = self._deepsp_gather
        running, sync = hook.running, hook.sync
        dim = _dim_of_rows(sync, x)
        if flow.current() is not None:
            return super().forward(running.apply(sync, x))
        sizes = running.sizes(sync, x, dim)
        return collectives.all_gather_matmul(
            x,
            weight_of(self),
            self.bias,
            dim,
            running.member,
            sizes,
            reduce_dtype=sync.reduce_dtype,
        )


class VocabularySharded(Swapped):
    """An embedding of a part of the vocabulary. Ids of other ranks' parts give zeros."""

    def forward(self, ids: Tensor) -> Tensor:
        shard = shards_of(self)["weight"]
        ((begin, end),) = shard.ranges()
        torch._assert_async(
            ((ids >= 0) & (ids < shard.shape[0])).all(), "an index is out of the vocabulary"
        )
        elsewhere = (ids < begin) | (ids >= end)
        padding = self.padding_idx
        if padding is not None:
            padding = padding - begin if begin <= padding < end else None
        rows = F.embedding((ids - begin).masked_fill(elsewhere, 0), self.weight, padding)
        return rows.masked_fill(elsewhere.unsqueeze(-1), 0)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        ((begin, end),) = shards_of(self)["weight"].ranges()
        if self.padding_idx is not None and begin <= self.padding_idx < end:
            with torch.no_grad():
                self.weight[self.padding_idx - begin].fill_(0)


def _mean(x: Tensor, shard) -> Tensor:
    """The mean over sharded features. Each rank uses it for its features only, so its gradient is
    partial."""
    total = collectives.all_reduce(x.sum(-1, keepdim=True), shard.member, grad="partial")
    return total / shard.shape[0]


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class LayerNormSharded(Swapped):
    """Layer norm over sharded features."""

    def forward(self, x: Tensor) -> Tensor:
        shard, wide = shards_of(self)["weight"], _wide(x)
        centered = wide - _mean(wide, shard)
        normed = centered * torch.rsqrt(_mean(centered.square(), shard) + self.eps)
        out = normed * self.weight.to(wide.dtype)
        if self.bias is not None:
            out = out + self.bias.to(wide.dtype)
        return out.to(x.dtype)


class RMSNormSharded(Swapped):
    """nn.RMSNorm over sharded features."""

    def forward(self, x: Tensor) -> Tensor:
        shard, wide = shards_of(self)["weight"], _wide(x)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        normed = wide * torch.rsqrt(_mean(wide.square(), shard) + eps)
        return (normed * self.weight.to(wide.dtype)).to(x.dtype)


class LlamaRMSNormSharded(Swapped):
    """Llama's RMSNorm: rounded to the input's dtype before it is scaled."""

    def forward(self, x: Tensor) -> Tensor:
        shard, wide = shards_of(self)["weight"], x.float()
        normed = wide * torch.rsqrt(_mean(wide.square(), shard) + self.variance_epsilon)
        return self.weight * normed.to(x.dtype)
