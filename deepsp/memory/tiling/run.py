"""One call of a tiled module, and its backward.

The call is two autograd nodes. The first saves the inputs and weights; the second runs the tiles
and saves nothing. In backward, the second passes the outputs' gradients to the first, which runs
every tile again and returns each weight's gradient once. Everything is saved before a tile runs, so
a checkpoint around the module stops its recomputation there, and the tiles run once in backward,
not twice."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from deepsp.memory.tiling.recording import record, recorded, recording
from deepsp.memory.tiling.weights import ShardedChildren, Weights, has_grad
from deepsp.ranks import randomness

_LEAST_ROWS = 512


@dataclass(frozen=True)
class TokenDim:
    """The dimension of an output that has the tokens."""

    dim: int
    flat: bool  # merged with the dimensions before it, as in [B * S, ...]
    requires_grad: bool


@dataclass
class Settings:
    """How a module is tiled."""

    name: str  # for errors
    tokens: int | str
    dim: int
    # Checked call signatures, and the token dimension of each of their outputs.
    checked: dict[tuple, list[TokenDim]] = field(default_factory=dict)


def tile_length(x: Tensor, dim: int, tokens: int | str) -> int:
    """Tokens of a tile. For "auto", at least as many rows as ``x`` has features, and at least 512,
    in tiles of equal length."""
    length = max(1, x.size(dim))
    if tokens != "auto":
        return min(tokens, length)
    features = x.size(-1) if dim + 1 < x.dim() and x.is_floating_point() else 0
    rows = max(features, _LEAST_ROWS)
    count = math.ceil(length / max(1, rows // max(1, x.shape[:dim].numel())))
    return math.ceil(length / count)


class TiledCall:
    """One call of a tiled module.

    Args:
        module: the module.
        forward: its forward, for one tile.
        settings: how it is tiled.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        settings: Settings,
        args: tuple,
        kwargs: dict[str, Any],
    ):
        self.module, self._forward, self.settings = module, forward, settings
        self.name = settings.name
        leaves, self._spec = tree_flatten((args, kwargs))
        self._at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.inputs: list[Tensor] = [leaves[i] for i in self._at]
        self.count = len(self.inputs)
        self._leaves = [None if isinstance(x, Tensor) else x for x in leaves]
        if not self.inputs:
            raise ValueError(f"expected {self.name} to be called with a tensor, got none")
        x = self.inputs[0]
        if not -x.dim() <= settings.dim < x.dim():
            raise ValueError(
                f"expected the first tensor that {self.name} is called with to have its tokens in "
                f"dimension {settings.dim}, got shape {list(x.shape)}; pass dim to deepsp.tile"
            )
        self.dim = settings.dim % x.dim()
        self.lead, self.length = x.shape[: self.dim], x.size(self.dim)
        self.tiled = [self._has_tokens(t) for t in self.inputs]
        step = tile_length(x, self.dim, settings.tokens)
        self.tiles = [(a, min(step, self.length - a)) for a in range(0, self.length, step)]
        self._keys = recording()
        self.places: list[TokenDim] = []
        self._returned: Any = None
        self._states: list[Tensor] | None = None
        self.gradients: tuple[Tensor | None, ...] = ()

    def _has_tokens(self, tensor: Tensor) -> bool:
        """Whether the dimensions up to the tokens are the first tensor's, or broadcast to them."""
        return (
            tensor.dim() > self.dim
            and tensor.size(self.dim) == self.length
            and all(n in (1, m) for n, m in zip(tensor.shape[: self.dim], self.lead, strict=True))
        )

    def key(self, grad: bool) -> tuple:
        """The key of a check's result: the modes of the module and its submodules, which arguments
        have tokens, and whether gradients are needed."""
        modes = tuple(m.training for m in self.module.modules())
        shapes = tuple((x.dim(), x.dtype) for x in self.inputs)
        flat = self.lead.numel() == 1
        return grad, flat, modes, shapes, tuple(self.tiled), self._keys, repr(self._spec)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The module's outputs for some tokens."""
        leaves = list(self._leaves)
        for i, x in zip(self._at, inputs, strict=True):
            leaves[i] = x
        args, kwargs = tree_unflatten(leaves, self._spec)
        with recorded(self._keys) as records:
            result = self._forward(*args, **kwargs)
        flat, spec = tree_flatten((result, records))
        self._returned = spec, [None if isinstance(x, Tensor) else (x,) for x in flat]
        return [x for x in flat if isinstance(x, Tensor)]

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """The module's return value, with these outputs."""
        spec, others = self._returned
        rest = iter(outputs)
        flat = [next(rest) if other is None else other[0] for other in others]
        result, records = tree_unflatten(flat, spec)
        record(records)
        return result

    # ---- all tiles

    def of_tile(self, tensors: Sequence[Tensor], start: int, length: int) -> list[Tensor]:
        return [  # contiguous: some modules call view
            x.narrow(self.dim, start, length).contiguous() if tiled else x
            for x, tiled in zip(tensors, self.tiled, strict=True)
        ]

    def _by_token(self, tensor: Tensor, place: TokenDim, length: int) -> Tensor:
        """An output for ``length`` tokens, with a separate dimension for the tokens."""
        return tensor.unflatten(place.dim, (*self.lead, length)) if place.flat else tensor

    def _part(self, full: Tensor, place: TokenDim, start: int, length: int) -> Tensor:
        """A tile's part of an output, or of its gradient."""
        dim = place.dim + (len(self.lead) if place.flat else 0)
        return self._by_token(full, place, self.length).narrow(dim, start, length)

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs for all tokens, written tile by tile."""
        device = inputs[0].device
        before = randomness.states(device)
        outputs: list[Tensor] = []
        for start, length in self.tiles:
            results = self.run(self.of_tile(inputs, start, length))
            if not outputs:
                outputs = [self._empty(x, p) for x, p in self._placed(results)]
            for (x, place), full in zip(self._placed(results), outputs, strict=True):
                self._part(full, place, start, length).copy_(self._by_token(x, place, length))
        if not self.tiles:  # without tokens, run one to learn the outputs' shapes
            results = self.run(
                [
                    x.new_zeros([1 if d == self.dim else n for d, n in enumerate(x.shape)])
                    if tiled
                    else x
                    for x, tiled in zip(inputs, self.tiled, strict=True)
                ]
            )
            outputs = [self._empty(x, p) for x, p in self._placed(results)]
            randomness.restore(before, device)
        after = randomness.states(device)
        self._states = before if differ(before, after) else None
        return outputs

    def _placed(self, results: Sequence[Tensor]) -> Iterator[tuple[Tensor, TokenDim]]:
        if len(results) != len(self.places):
            raise ValueError(
                f"expected {self.name} to return {len(self.places)} tensors, as it did when it was "
                f"checked, got {len(results)}"
            )
        return zip(results, self.places, strict=True)

    def _empty(self, x: Tensor, place: TokenDim) -> Tensor:
        shape = list(x.shape)
        shape[place.dim] = self.length * (self.lead.numel() if place.flat else 1)
        return torch.empty(shape, dtype=x.dtype, device=x.device)

    def backward(
        self,
        weights: Weights,
        alone: Callable[[], contextlib.AbstractContextManager],
        saved: Sequence[Tensor],
        needed: Sequence[bool],
        autocast: Callable[[], contextlib.AbstractContextManager],
    ) -> list[Tensor | None]:
        """The gradients of inputs and weights. For weights, and inputs without tokens, summed over
        tiles in float32 or wider."""
        gradients, self.gradients = self.gradients, ()
        count = self.count
        leaves = [x.detach().requires_grad_(n) for x, n in zip(saved, needed, strict=True)]
        tiled = [*self.tiled, *[False] * (len(leaves) - count)]
        wide = [
            _Sum(x) if n and not t else None for x, n, t in zip(leaves, needed, tiled, strict=True)
        ]
        parts = [
            torch.empty(x.shape, dtype=x.dtype, device=x.device) if n and t else None
            for x, n, t in zip(saved, needed, tiled, strict=True)
        ]
        device = saved[0].device
        with (
            _restored(self._states, device),
            torch.enable_grad(),
            alone(),
            weights.replaced(leaves[count:]),
        ):
            for start, length in self.tiles:
                inputs_of_tile = [
                    x.detach().requires_grad_(n) if t else leaves[i]
                    for i, (x, n, t) in enumerate(
                        zip(self.of_tile(saved[:count], start, length), needed, tiled, strict=False)
                    )
                ]
                with autocast():
                    results = self.run(inputs_of_tile)
                heads = [
                    (self._by_token(x, place, length), self._part(g, place, start, length))
                    for (x, place), g in zip(self._placed(results), gradients, strict=True)
                    if g is not None and x.requires_grad
                ]
                del results
                if heads:
                    # Only these leaves get gradients.
                    ends = [x for x in (*inputs_of_tile, *leaves[count:]) if x.requires_grad]
                    torch.autograd.backward(*zip(*heads, strict=True), inputs=ends)
                for x, part in zip(inputs_of_tile, parts, strict=False):
                    if part is not None:
                        tile = part.narrow(self.dim, start, length)
                        tile.zero_() if x.grad is None else tile.copy_(x.grad)
                for total in wide:
                    if total is not None:
                        total.add()
        return [
            part if part is not None else None if total is None else total.result()
            for part, total in zip(parts, wide, strict=True)
        ]


class _Sum:
    """Sums a leaf's gradients over tiles, in float32 if they are narrower."""

    def __init__(self, leaf: Tensor):
        self._leaf, self._sum = leaf, None

    def add(self) -> None:
        leaf = self._leaf
        if leaf.grad is None or not leaf.is_floating_point() or leaf.dtype.itemsize >= 4:
            return
        if self._sum is None:
            self._sum = leaf.grad.float()
        else:
            self._sum.add_(leaf.grad)
        leaf.grad = None

    def result(self) -> Tensor:
        """Zeros if no tile used the leaf, so that all ranks reduce the same gradients."""
        if self._sum is not None:
            return self._sum.to(self._leaf.dtype)
        return torch.zeros_like(self._leaf) if self._leaf.grad is None else self._leaf.grad


def differ(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    with _disable_current_modes():
        return not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@contextlib.contextmanager
def _restored(states: list[Tensor] | None, device: torch.device) -> Iterator[None]:
    """Draws random numbers from ``states``, and restores the generators afterwards."""
    if states is None:
        yield
        return
    before = randomness.states(device)
    randomness.restore(states, device)
    try:
        yield
    finally:
        randomness.restore(before, device)


def _autocast_now(device: torch.device) -> Callable[[], contextlib.AbstractContextManager]:
    """A function that enters the present autocast state later. It doesn't cache casts: a weight's
    cast in one tile must not be used in another."""
    states = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in dict.fromkeys((device.type, "cpu"))
    ]

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in states:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
                )
            yield

    return enter


class _Inputs(torch.autograd.Function):
    """Saves the inputs and weights; its backward is the call's."""

    @staticmethod
    def forward(ctx, call: TiledCall, backward: Callable, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.run = backward
        return torch.empty(0, device=tensors[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        return None, None, *ctx.run(ctx.saved_tensors, ctx.needs_input_grad[2:])


class _Outputs(torch.autograd.Function):
    """Runs the tiles."""

    @staticmethod
    def forward(ctx, call: TiledCall, tensors: list[Tensor], run: Callable, _: Tensor):
        ctx.set_materialize_grads(False)
        ctx.call, ctx.device = call, tensors[0].device
        outputs = run(tensors)
        without = [x for x, p in zip(outputs, call.places, strict=True) if not p.requires_grad]
        ctx.mark_non_differentiable(*without)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        ctx.call.gradients = gradients
        return None, None, None, torch.empty(0, device=ctx.device)


def run_tiled(call: TiledCall, check: Callable[[TiledCall, Weights, bool], list[TokenDim]]) -> Any:
    """Runs a call by tiles, and returns its result.

    Args:
        call: the call.
        check: checks the module, unless a call like this one was checked; returns the outputs'
            places.
    """
    children = ShardedChildren(call.module, call.name)
    call.inputs[0] = children.gather(call.inputs[0])
    weights = Weights(call.module, call.name)
    count, tensors = call.count, [*call.inputs, *weights.tensors]
    grad = has_grad(tensors)
    device = tensors[0].device
    with children.left_alone():
        key = call.key(grad)
        if key not in call.settings.checked:
            call.settings.checked[key] = check(call, weights, grad)
    call.places = call.settings.checked[key]

    def forward(tensors: Sequence[Tensor]) -> list[Tensor]:
        # Detached: autocast would cache casts of weights that require grad, made without grad.
        plain = [x.detach() for x in tensors]
        with torch.no_grad(), children.left_alone(), weights.replaced(plain[count:]):
            return call.forward(plain[:count])

    if grad:
        autocast = _autocast_now(device)
        token = _Inputs.apply(
            call,
            lambda saved, needed: call.backward(
                weights, children.left_alone, saved, needed, autocast
            ),
            *tensors,
        )
        outputs = _Outputs.apply(call, tensors, forward, token)
    else:
        outputs = tuple(forward(tensors))
    outputs = children.free(call.inputs[0], outputs)
    # From here to backward, only autograd keeps tensors.
    call.inputs, weights.tensors = [], []
    return call.result(outputs)
