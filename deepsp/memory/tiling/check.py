"""Checks that a module works on each token alone, by dry runs on a few tokens.

The tokens are the call's own, with noise, in an order that repeats one of them, so that experts
with a capacity drop it. They run as one tile and as two; then with one token changed, and with NaN
in it, because NaN reaches everything that depends on it. The call's own first two tiles run
together and one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from deepsp.memory.tiling.run import TiledCall, TokenDim
from deepsp.memory.tiling.run import differ as states_differ
from deepsp.memory.tiling.weights import Weights
from deepsp.ranks import randomness
from deepsp.sequence.tokenwise.probe import (
    Buffers,
    differ,
    evaluation,
    is_rough,
    others_differ,
    version,
)

_ORDER = (0, 1, 0, 2, 0, 0, 3, 4, 0, 0, 5, 6, 0)  # the tokens of the dry runs
_FIRST = 5  # tokens in the first tile
_CHANGED = 3  # the position of the changed token


def check(call: TiledCall, weights: Weights, grad: bool) -> list[TokenDim]:
    """Checks a module, and returns where its outputs have their tokens.

    Raises:
        ValueError: the module mixes tokens, writes to its input or its buffers, communicates, or
            has an output without tokens.
    """
    return _Check(call, weights, grad).places()


class _Check:
    def __init__(self, call: TiledCall, weights: Weights, grad: bool):
        self.call, self.weights, self.grad = call, weights, grad
        self.name, self.dim = call.name, call.dim
        self.device = call.inputs[0].device

    def places(self) -> list[TokenDim]:
        before = randomness.states(self.device)
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in self.weights.tensors]
        real = not any(x.is_meta or isinstance(x, FakeTensor) for x in (*leaves, *self.call.inputs))
        self._buffers = Buffers(self.call.module)
        try:
            with self._aside(real), self.weights.replaced(leaves):
                return self._places(leaves, before, real)
        finally:
            self._buffers.restore()
            randomness.restore(before, self.device)

    @contextlib.contextmanager
    def _aside(self, real: bool) -> Iterator[None]:
        """Hides these runs from the caller's modes and hooks: a checkpoint, say, would expect them
        again in the recomputation."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.grad:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))
            if real:
                stack.enter_context(_disable_current_modes())
                stack.enter_context(_NoCollectives(self.name))
            yield

    def _run(self, inputs: Sequence[Tensor], states: list[Tensor]) -> list[Tensor]:
        randomness.restore(states, self.device)
        try:
            return self.call.run(inputs)
        except ValueError:
            raise
        except Exception as error:
            count = inputs[0].size(self.dim)
            raise ValueError(
                f"{self.name} couldn't be run on {count} tokens (dimension {self.dim} of shape "
                f"{list(inputs[0].shape)}) to check that it works on each token alone: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _places(self, leaves: list[Tensor], states: list[Tensor], real: bool) -> list[TokenDim]:
        inputs = self._tokens()
        versions = [version(x) for x in inputs]
        full = self._run(inputs, states)
        if [version(x) for x in inputs] != versions:
            raise ValueError(
                f"{self.name} writes to its input in place, so that it can't be computed again in "
                "backward: it can't be tiled"
            )
        self._check_buffers()
        random = states_differ(states, randomness.states(self.device))
        self._check_leaves(full, [*leaves, *inputs])
        first = self._run(self._cut(inputs, 0, _FIRST), states)
        places = [self._place(a, b) for a, b in self._pairs(full, first)]
        if not real:
            return places
        changed, poisoned = list(inputs), list(inputs)
        for i, (x, tiled) in enumerate(zip(inputs, self.call.tiled, strict=True)):
            if not tiled:
                continue
            changed[i] = self._put(x, x.select(self.dim, 1))
            if x.is_floating_point():
                poisoned[i] = self._put(x, torch.full_like(x.select(self.dim, 1), torch.nan))
        for other in (changed, poisoned):
            for a, b, place in zip(full, self._run(other, states), places, strict=True):
                a, b = self._by_token(a, place), self._by_token(b, place)
                if others_differ(a, b, _CHANGED, self._dtypes(a)):
                    raise ValueError(self._mixes("a change of one token changes others' outputs"))
        with self._without_randomness(random):
            if random:
                full = self._run(inputs, states)
                first = self._run(self._cut(inputs, 0, _FIRST), states)
            second = self._run(self._cut(inputs, _FIRST, len(_ORDER) - _FIRST), states)
        for a, b, c, place in zip(full, first, second, places, strict=True):
            parts = torch.cat(
                [self._by_token(b, place, _FIRST), self._by_token(c, place, len(_ORDER) - _FIRST)]
            )
            if self._differ(self._by_token(a, place), parts):
                raise ValueError(self._mixes("its outputs for a part of the tokens are others"))
        self._check_two_tiles(states, places, random)
        return places

    def _check_two_tiles(self, states, places: list[TokenDim], random) -> None:
        """Compares the call's own first two tiles, together and one by one: a module may treat many
        tokens differently from few."""
        (_, first), (_, second) = (*self.call.tiles[:2], (0, 0), (0, 0))[:2]
        if second == 0:
            return
        with torch.no_grad(), self._without_randomness(random):
            inputs = self._cut(self.call.inputs, 0, first + second)
            full = self._run(inputs, states)
            parts = [self._run(self._cut(inputs, 0, first), states)]
            parts.append(self._run(self._cut(inputs, first, second), states))
        for a, b, c, place in zip(full, *parts, places, strict=True):
            together = torch.cat(
                [self._by_token(b, place, first), self._by_token(c, place, second)]
            )
            if self._differ(self._by_token(a, place, first + second), together):
                raise ValueError(self._mixes(f"its outputs for {first + second} tokens are others"))

    # ---- tokens

    def _tokens(self) -> list[Tensor]:
        """The arguments with a few tokens, the same ones in each argument."""
        generator = torch.Generator().manual_seed(0)
        length, count = self.call.length, max(_ORDER) + 1
        inputs = []
        for x, tiled in zip(self.call.inputs, self.call.tiled, strict=True):
            if not tiled:
                inputs.append(x.detach().requires_grad_(x.requires_grad))
                continue
            x = x.detach()
            shape = [count if d == self.dim else n for d, n in enumerate(x.shape)]
            if length == 0:
                values = x.new_zeros(shape)
            else:
                index = torch.arange(count, device=x.device) * max(1, length // count) % length
                values = x.index_select(self.dim, index)
            if x.is_floating_point():
                values = values.nan_to_num(0.0, 0.0, 0.0)
                scale = values.float().std() if values.numel() > 1 else values.new_zeros(())
                noise = torch.randn(shape, generator=generator).to(x.device)
                values = values + (noise * torch.where(scale > 0, scale, 1.0)).to(x.dtype)
            order = torch.tensor(_ORDER, device=x.device)
            needs = self.call.inputs[len(inputs)].requires_grad
            inputs.append(values.index_select(self.dim, order).requires_grad_(needs and self.grad))
        return inputs

    def _cut(self, inputs: Sequence[Tensor], start: int, length: int) -> list[Tensor]:
        return [
            x.detach() if not tiled else x.detach().narrow(self.dim, start, length).clone()
            for x, tiled in zip(inputs, self.call.tiled, strict=True)
        ]

    def _put(self, x: Tensor, token: Tensor) -> Tensor:
        return x.detach().select_scatter(token.detach(), self.dim, _CHANGED)

    # ---- outputs

    def _pairs(self, full: list[Tensor], first: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        if len(full) != len(first):
            raise ValueError(
                f"expected {self.name} to return as many tensors for some tokens as for all, got "
                f"{len(first)} and {len(full)}: it can't be tiled"
            )
        return zip(full, first, strict=True)

    def _place(self, full: Tensor, first: Tensor) -> TokenDim:
        sizes = list(zip(full.shape, first.shape, strict=False))
        differing = [d for d, (a, b) in enumerate(sizes) if a != b]
        lead = self.call.lead.numel()
        if full.dim() == first.dim() and len(differing) == 1:
            (dim,) = differing
            if sizes[dim] == (len(_ORDER), _FIRST):
                return TokenDim(dim, False, full.requires_grad)
            if sizes[dim] == (len(_ORDER) * lead, _FIRST * lead):
                return TokenDim(dim, True, full.requires_grad)
        raise ValueError(
            f"expected every output of {self.name} to have a dimension for the tokens, got shapes "
            f"{list(full.shape)} for {len(_ORDER)} tokens and {list(first.shape)} for {_FIRST}: "
            "it is computed from several tokens, and can't be tiled; tile a submodule"
        )

    def _by_token(self, x: Tensor, place: TokenDim, length: int = len(_ORDER)) -> Tensor:
        x, dim = x.detach(), place.dim
        if place.flat:
            x, dim = x.unflatten(dim, (*self.call.lead, length)), dim + len(self.call.lead)
        return x.movedim(dim, 0)

    def _dtypes(self, x: Tensor) -> list[torch.dtype]:
        return [x.dtype, *(w.dtype for w in self.weights.tensors)]

    def _differ(self, full: Tensor, parts: Tensor) -> bool:
        """Whether outputs differ. In narrow types a few tokens may: rounding may send them to other
        experts."""
        dtypes = self._dtypes(full)
        off = differ(full, parts, dtypes).reshape(len(full), -1).any(1)
        return bool(off.double().mean() > (0.25 if is_rough(dtypes) else 0.0))

    def _mixes(self, how: str) -> str:
        return (
            f"{self.name} mixes tokens: {how}. A tiled module must work on each token alone, in "
            f"dimension {self.call.settings.dim}; tile the submodules that do"
        )

    # ---- gradients, buffers, random numbers

    def _check_leaves(self, outputs: Sequence[Tensor], allowed: Sequence[Tensor]) -> None:
        """Raises if an output depends on a leaf that is neither an input nor a weight: it would get
        no gradient."""
        identities = {id(x) for x in allowed}
        nodes = [x.grad_fn for x in outputs if x.grad_fn is not None]
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in identities:
                raise ValueError(
                    f"{self.name} uses a tensor of shape {list(leaf.shape)} that requires "
                    "gradients, and is neither a parameter of it nor an argument: make it one"
                )
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    nodes.append(following)

    def _check_buffers(self) -> None:
        for owner, key in self._buffers.written():
            raise ValueError(
                f"{self.name}: {type(owner).__name__} writes to its buffer {key} in its forward, "
                "so a tile would see other statistics than the next: it can't be tiled"
            )

    def _without_randomness(self, random: bool) -> contextlib.AbstractContextManager:
        """A context without random numbers, if the module draws some: tiles draw others."""
        return evaluation(self.call.module) if random else contextlib.nullcontext()


class _NoCollectives(TorchDispatchMode):
    """Raises if a tile communicates: ranks have different numbers of tiles."""

    def __init__(self, name: str):
        super().__init__()
        self._name = name

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space = func.namespace
        if space in ("c10d", "_c10d_functional") or (
            space == "deepsp" and any(a.name == "group_name" for a in func._schema.arguments)
        ):
            raise ValueError(
                f"{self._name} communicates ({func}) in its forward. Ranks with other numbers of "
                "tiles would do so more or less often: it can't be tiled; tile the submodules that "
                "don't"
            )
        return func(*args, **(kwargs or {}))


def _same(x: Tensor) -> Tensor:
    return x
