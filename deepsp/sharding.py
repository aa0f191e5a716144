"""Parameters that every rank holds a part of, gathered in a narrow dtype while they are used."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize

from deepsp.gathering import Order, Use, Wait
from deepsp.groups import Group, Member, member_of

_op = torch.ops.deepsp


@dataclass
class _Whole:
    """A sharded parameter as it was."""

    name: str
    shape: torch.Size
    sizes: list[int]  # rows of each rank; a parameter of no dimensions counts as one row
    dtype: torch.dtype  # gathered

    @property
    def row_shape(self) -> list[int]:
        return list(self.shape[1:])

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class Shard(nn.Module):
    """The parametrization of one sharded parameter: from this rank's rows to the whole."""

    def __init__(self, shards: Shards, index: int):
        super().__init__()
        self.shards, self.index = shards, index

    def forward(self, shard: Tensor) -> Tensor:
        return self.shards.use(self.index, shard)

    def right_inverse(self, whole: Tensor) -> Tensor:
        """This rank's rows of the whole parameter; a shard is left as it is."""
        info = self.shards.wholes[self.index]
        if whole.shape != info.shape:
            if whole.shape == self.shards.shard_shape(self.index):  # tied: it was sharded before
                return whole
            raise ValueError(
                f"{info.name} is to be set to a tensor of shape {tuple(whole.shape)}; "
                f"{tuple(info.shape)}, that of the whole parameter, is right"
            )
        return self.shards.rows_of(self.index, whole)


class _Gate(torch.autograd.Function):
    """The identity. Its gradient is divided by ``divisor``; there is none where the gathered
    parameter was never used: it shared a gather with others that were."""

    @staticmethod
    def forward(ctx, shard: Tensor, divisor: int, used: list[bool], n: int) -> Tensor:
        ctx.divisor, ctx.used, ctx.n = divisor, used, n
        return shard.view_as(shard)

    @staticmethod
    def backward(ctx, grad: Tensor):
        if not ctx.used[ctx.n]:
            grad = None
        elif ctx.divisor != 1:
            grad = grad / ctx.divisor
        return grad, None, None, None


class Shards:
    """All sharded parameters of a module, and the order in which they are gathered. The root module
    owns it."""

    def __init__(
        self,
        member: Member,
        reduce_dtype: torch.dtype,
        mean: bool,
        reshard_after_forward: bool,
        prefetch_bytes: int,
    ):
        self.member = member
        self.reduce_dtype = reduce_dtype
        self._divisor = member[1] if mean else 1
        self.wholes: list[_Whole] = []
        self.parameters: list[nn.Parameter] = []
        self.owners: list[parametrize.ParametrizationList] = []
        self._reshard = reshard_after_forward
        self._inside = False  # the root module's forward
        self._hooks = None

        def order() -> Order:
            return Order(self._start, self._bytes_of, prefetch_bytes)

        self.forward_order = {True: order(), False: order()}  # with and without autograd
        self.backward_order = order()
        self._forward = self.forward_order[True]
        # Storages that gathered parameters lie in -> where in them, while they live.
        self._gathered: dict[int, tuple[StorageWeakRef, list[tuple[int, int]]]] = {}

    def __getstate__(self):
        # A copy of the module (an average of weights, say) gathers for itself: what is gathered
        # now, and the references to it, aren't copied.
        return {**self.__dict__, "_gathered": {}, "_inside": False, "_hooks": None}

    # ---- which rows are whose

    def add(self, name: str, parameter: nn.Parameter, dtype: torch.dtype) -> int:
        rows = parameter.size(0) if parameter.dim() > 0 else 1
        sizes = _op.token_split(rows, self.member[1])
        self.wholes.append(_Whole(name, parameter.shape, sizes, dtype))
        self.parameters.append(parameter)
        return len(self.wholes) - 1

    def shard_shape(self, index: int) -> torch.Size:
        info = self.wholes[index]
        return torch.Size([info.sizes[self.member[0]], *info.row_shape])

    def rows_of(self, index: int, whole: Tensor) -> Tensor:
        info, rank = self.wholes[index], self.member[0]
        rows = whole.view(1) if whole.dim() == 0 else whole
        # A copy: a view would keep the whole alive.
        return rows.narrow(0, sum(info.sizes[:rank]), info.sizes[rank]).clone()

    def refresh(self) -> None:
        """Takes the parameters that the module has now: ``load_state_dict(assign=True)`` and
        ``functional_call`` put others in their place."""
        self.parameters = [owner._parameters["original"] for owner in self.owners]

    def gather(self, index: int, dtype: torch.dtype) -> Tensor:
        """The whole parameter in any dtype, without autograd."""
        self.refresh()
        info, (rank, _, name) = self.wholes[index], self.member
        with torch.no_grad():
            whole = _op.gather_cast(self.parameters[index], info.sizes, dtype, rank, name)
        return whole.view(info.shape)

    # ---- uses

    def use(self, index: int, shard: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # passes over the graph combine and look ahead
            return self._gather_alone(index, shard)
        if shard is not self.parameters[index]:  # somebody has put another in its place
            return self._gather_alone(index, shard)
        use = Use(index, torch.is_grad_enabled() and shard.requires_grad)
        if _in_backward():  # a checkpoint computes again
            return self.backward_order.take(use)
        if self._inside:
            return self._forward.take(use)
        return self._gather_alone(index, shard)

    def _gather_alone(self, index: int, shard: Tensor) -> Tensor:
        info, (rank, _, name) = self.wholes[index], self.member
        if self._divisor != 1 and shard.requires_grad:
            shard = _op.scale_gradient(shard, 1 / self._divisor)
        whole = _op.gather_cast(
            shard, info.sizes, info.dtype, rank, name, reduce_dtype=self.reduce_dtype
        )
        return whole.view(info.shape)

    def _bytes_of(self, index: int) -> int:
        return self.wholes[index].bytes

    def _start(self, uses) -> Wait:
        rank, _, name = self.member
        infos = [self.wholes[use.index] for use in uses]
        sizes = [rows for info in infos for rows in info.sizes]
        dtypes = [info.dtype for info in infos]
        row_shapes = [n for info in infos for n in info.row_shape]
        row_dims = [len(info.row_shape) for info in infos]
        grad = uses[0].grad
        used = [False] * len(uses)
        with torch.set_grad_enabled(grad):
            shards = [self.parameters[use.index] for use in uses]
            if grad and (self._divisor != 1 or len(uses) > 1):
                shards = [_Gate.apply(x, self._divisor, used, n) for n, x in enumerate(shards)]
            buffer = _op.gather_cast_coalesced_start(
                shards, sizes, dtypes, rank, name, reduce_dtype=self.reduce_dtype
            )

        def wait() -> list[Callable[[], Tensor]]:
            with torch.set_grad_enabled(grad):
                tensors = _op.gather_cast_coalesced_wait(
                    buffer, sizes, row_shapes, row_dims, dtypes, rank, name
                )
                self._remember(uses, tensors)
                wholes = [x.view(i.shape) for x, i in zip(tensors, infos, strict=True)]

            def give(n: int) -> Tensor:
                used[n] = True
                return wholes[n]

            return [functools.partial(give, n) for n in range(len(wholes))]

        return wait

    # ---- the root's forward, and what autograd saves in it

    def enter(self, *_) -> None:
        if torch.compiler.is_compiling() or _in_backward():
            return
        if self._inside:  # an interrupt (Ctrl-C) has left it
            self.leave()
        self._inside = True
        self.refresh()
        self._forward = self.forward_order[torch.is_grad_enabled()]
        self._forward.begin()
        self._forward.look_ahead()
        self.backward_order.begin()
        # Where hooks are around us, a checkpoint's, say, they handle what is saved: it must be the
        # same when the module is computed again, in backward.
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if self._reshard and torch.is_grad_enabled() and outer is None:
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()

    def leave(self, *_) -> None:
        if torch.compiler.is_compiling() or _in_backward():
            return
        self._inside = False
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    def _remember(self, uses, tensors: list[Tensor]) -> None:
        self._gathered = {k: v for k, v in self._gathered.items() if not v[0].expired()}
        for use, tensor in zip(uses, tensors, strict=True):
            storage = tensor.untyped_storage()
            # The reference keeps the key from being given to another storage.
            _, places = self._gathered.setdefault(storage._cdata, (StorageWeakRef(storage), []))
            places.append((tensor.storage_offset() * tensor.element_size(), use.index))

    def _pack(self, tensor: Tensor):
        """Saves, instead of a view of a gathered parameter, which view of which it is."""
        return self._view(tensor) or _Kept(tensor, _version(tensor))

    def _view(self, tensor: Tensor) -> _View | None:
        if tensor.layout != torch.strided or not self._gathered:
            return None
        known = self._gathered.get(tensor.untyped_storage()._cdata)
        if known is None or _version(tensor) != 0:  # written to: a gather wouldn't give it again
            return None
        at = tensor.storage_offset() * tensor.element_size()
        for begin, index in known[1]:
            info = self.wholes[index]
            if begin <= at < begin + info.bytes and tensor.dtype == info.dtype:
                offset = (at - begin) // tensor.element_size()
                version = _version(self.parameters[index])
                return _View(index, tensor.size(), tensor.stride(), offset, version)
        return None

    def _unpack(self, saved: _View | _Kept) -> Tensor:
        # PyTorch itself compares versions only where there are no hooks.
        if isinstance(saved, _Kept):
            _check_version(_version(saved.tensor), saved.version)
            return saved.tensor
        _check_version(_version(self.parameters[saved.index]), saved.version)
        whole = self.backward_order.take(Use(saved.index, False))
        return whole.as_strided(saved.size, saved.stride, whole.storage_offset() + saved.offset)


@dataclass
class _View:
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # elements from the parameter's first
    version: int  # of the shard


@dataclass
class _Kept:
    tensor: Tensor
    version: int


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _check_version(now: int, then: int) -> None:
    if now != then:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: it is at version {now}; expected version {then} instead"
        )


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def shard_parameters(
    module: nn.Module,
    group: Group = None,
    dtype: torch.dtype | Callable[[str, nn.Parameter], torch.dtype] = torch.bfloat16,
    reduce_dtype: torch.dtype = torch.float32,
    *,
    min_numel: int = 0,
    skip: Callable[[str, nn.Parameter], bool] | None = None,
    gradient_reduction: str = "sum",
    reshard_after_forward: bool = True,
    prefetch_bytes: int = 64 << 20,
) -> nn.Module:
    """Leaves each rank a part of every parameter, gathered in ``dtype`` while it is used.

    In place: a parameter becomes this rank's rows of it (dimension 0 split like
    ``torch.tensor_split``), the same ``nn.Parameter`` object, in the dtype that it had; so
    optimizers made before or after see it. What the module computes with is gathered when it is
    used, cast first, and freed after use; autograd keeps nothing of it but gathers again in
    backward. The gathers of what is used next travel meanwhile, after a first step that records the
    order. The gradient of a shard is its rows' sum over the ranks; zero, where the parameter was
    used but had no part in the loss.

    Every rank makes the same calls in the same order, and holds the same parameters before.

    Args:
        module: any module but RNNs; a parameter that several submodules share is sharded once.
        group: whose ranks share the parameters.
        dtype: of the gathered parameters; or a function of name and parameter that gives it.
        reduce_dtype: in which gradients, which travel in ``dtype``, are summed.
        min_numel: a parameter with fewer elements is left alone, and whole.
        skip: a function of name and parameter; where it is true, the parameter is left alone.
            What is left alone is yours to reduce: :func:`deepsp.sync_gradients` does it.
        gradient_reduction: "sum", or "mean": the sum divided by the number of ranks.
        reshard_after_forward: False keeps in memory what autograd saves of gathered parameters.
        prefetch_bytes: at most so many gathered bytes, but for what is in use, travel or lie ready;
            0: every parameter is gathered alone, when it is used.

    Returns:
        ``module``.

    Raises:
        ValueError: a parameter is not floating, has a gradient, is parametrized already, or belongs
            to an RNN or an Embedding with max_norm; ranks disagree about the parameters.

    The sharding is that of ZeRO-3 (Rajbhandari et al., 2020, arXiv:1910.02054).
    """
    if gradient_reduction not in ("sum", "mean"):
        raise ValueError(f'gradient_reduction is {gradient_reduction!r}; "sum" or "mean" is right')
    if prefetch_bytes < 0:
        raise ValueError(f"prefetch_bytes is {prefetch_bytes}; it can't be negative")
    member = member_of(group)
    chosen: dict[nn.Parameter, torch.dtype] = {}
    names: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters():
        if parameter.numel() < min_numel or (skip is not None and skip(name, parameter)):
            continue
        names[parameter] = name
        chosen[parameter] = dtype if isinstance(dtype, torch.dtype) else dtype(name, parameter)
        _check(name, parameter, chosen[parameter])
    owners = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
        if parameter in chosen
    ]
    for owner, name, parameter in owners:
        if isinstance(owner, parametrize.ParametrizationList):
            raise ValueError(
                f"module: {names[parameter]} is parametrized already ({name} of a "
                "ParametrizationList); remove the parametrization, or skip it"
            )
        if isinstance(owner, nn.RNNBase):
            raise ValueError(
                f"module: {names[parameter]} belongs to an {type(owner).__name__}, which keeps its "
                "weights in a list of its own; skip its parameters"
            )
        if isinstance(owner, nn.Embedding) and owner.max_norm is not None:
            raise ValueError(
                f"module: {names[parameter]} belongs to an Embedding with max_norm, which writes "
                "to its weight; skip it"
            )
    _check_ranks_agree(member, [(names[p], p, d) for p, d in chosen.items()])
    mean = gradient_reduction == "mean"
    shards = Shards(member, reduce_dtype, mean, reshard_after_forward, prefetch_bytes)
    indices = {p: shards.add(names[p], p, d) for p, d in chosen.items()}
    shards.owners = [None] * len(indices)
    for owner, name, parameter in owners:
        shard = Shard(shards, indices[parameter])
        parametrize.register_parametrization(owner, name, shard, unsafe=True)
        shards.owners[indices[parameter]] = owner.parametrizations[name]
    module.register_forward_pre_hook(shards.enter, prepend=True)
    module.register_forward_hook(shards.leave, always_call=True)
    return module


def _check(name: str, parameter: nn.Parameter, dtype: torch.dtype) -> None:
    floats = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for what, value in ((f"module: {name}", parameter.dtype), (f"dtype of {name}", dtype)):
        if value not in floats:
            raise ValueError(f"{what} is {value}; float64, float32, bfloat16 or float16 is right")
    if parameter.grad is not None:
        raise ValueError(
            f"module: {name} has a gradient, of the whole parameter; "
            "call module.zero_grad(set_to_none=True) before"
        )


def _check_ranks_agree(member: Member, parameters) -> None:
    _, size, name = member
    if size == 1:
        return
    mine = [f"{n}: {p.dtype} {list(p.shape)}, gathered in {d}" for n, p, d in parameters]
    said: list = [None] * size
    dist.all_gather_object(said, mine, group=dist.distributed_c10d._resolve_process_group(name))
    for p, theirs in enumerate(said):
        if theirs == said[0]:
            continue
        for n in range(max(len(theirs), len(said[0]))):
            a, b = (x[n] if n < len(x) else "no more" for x in (said[0], theirs))
            if a != b:
                raise ValueError(
                    f"module: ranks disagree about parameter {n}: rank 0 has {a}; rank {p} has "
                    f"{b}; all ranks must pass the same"
                )


def sharded_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Shards, int]]:
    """(name of the whole parameter, shard, its Shards, its index there) for every sharded
    parameter of the module; one that several submodules share once for each."""
    for prefix, owner in module.named_modules():
        if not parametrize.is_parametrized(owner):
            continue
        for name, parametrizations in owner.parametrizations.items():
            if isinstance(parametrizations[0], Shard):
                whole = f"{prefix}.{name}" if prefix else name
                shard = parametrizations[0]
                yield whole, parametrizations.original, shard.shards, shard.index
