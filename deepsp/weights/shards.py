"""The sharded parameters of a module, and their gathers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize

from deepsp.ranks.groups import Member
from deepsp.weights.access import ShardedWeight, Writes, in_a_forward
from deepsp.weights.dtypes import check_input_dtype, explain_dtypes
from deepsp.weights.prefetch import GatherOrder, Use, Wait, bucket_bytes
from deepsp.weights.rows import ParameterShard, shard_rows
from deepsp.weights.shard_gradient import mark

_op = torch.ops.deepsp


@dataclass
class _Info:
    """A sharded parameter's shape, dtype and owners."""

    rows: ParameterShard
    sizes: list[int]  # rows of each rank
    dtype: torch.dtype  # gathered
    owners: int = 0  # more than one: it is tied

    @property
    def name(self) -> str:
        return self.rows.name

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.rows.shape)

    @property
    def row_shape(self) -> list[int]:
        return list(self.shape[1:])

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class ShardParametrization(nn.Module):
    """The parametrization of one sharded parameter: from this rank's rows to the full one."""

    def __init__(self, shards: Shards, index: int):
        super().__init__()
        self.shards, self.index = shards, index
        # The list that contains this; in a list, so that it isn't a submodule.
        self.home: list[parametrize.ParametrizationList] = []

    @property
    def rows(self) -> ParameterShard:
        return self.shards.infos[self.index].rows

    def forward(self, shard: Tensor) -> Tensor:
        return self.shards.use(self.index, shard)

    def right_inverse(self, full: Tensor) -> Tensor:
        """The shard after an assignment: this rank's rows of a full tensor, or the parameter of
        another sharded one, to which it is tied from now on."""
        shards, info = self.shards, self.shards.infos[self.index]
        if not self.home:  # called while it is being registered
            tied = full.shape != info.shape  # another owner's registration sharded it
            return full if tied else shards.rows_of(self.index, full)
        if shards.inside:
            raise RuntimeError(
                f"{info.name} is sharded, and is set in a forward: set it outside of the forward"
            )
        if not isinstance(full, Tensor) or full.shape != info.shape:
            what = tuple(full.shape) if isinstance(full, Tensor) else full
            raise ValueError(
                f"expected {info.name} to be set to a full tensor of shape {tuple(info.shape)}, "
                f"got {what}"
            )
        (home,) = self.home
        if isinstance(full, ShardedWeight):
            if not full.is_all_of(shards):
                raise ValueError(
                    f"{info.name} is to be tied with {full!r}, which another call of "
                    "shard_parameters has sharded: tie them first, and shard both in one call"
                )
            info.owners -= 1
            self.index = full.index
            shards.infos[self.index].owners += 1
            home.original = full.parameter
            return home.original
        original = home.original
        if isinstance(full, nn.Parameter) and info.owners > 1:
            raise ValueError(
                f"{info.name} is shared by {info.owners} modules and sharded, so that one of them "
                "can't take another parameter: write to it, `with torch.no_grad(): "
                "module.weight.copy_(...)`, or untie them before they are sharded"
            )
        if full.dtype != original.dtype:
            raise ValueError(
                f"expected {info.name} to be set to a tensor of {original.dtype}, the dtype of its "
                f"shards, got {full.dtype}"
            )
        if isinstance(full, nn.Parameter):
            original.requires_grad_(full.requires_grad)
        original.copy_(shards.rows_of(self.index, full))
        return original

    def _apply(self, fn, recurse=True):
        # module.to(dtype) also changes the gathered dtype.
        self.shards.convert(self.index, fn)
        return super()._apply(fn, recurse)


class _Gate(torch.autograd.Function):
    """The identity. Its gradient is divided by ``divisor``; None if the gathered parameter was
    gathered with others but never used."""

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
    """All sharded parameters of a module, and the order of their gathers. The root module owns
    it."""

    def __init__(
        self,
        member: Member,
        reduce_dtype: torch.dtype,
        by_backend: bool,
        mean: bool,
        reshard_after_forward: bool,
        prefetch_bytes: int,
    ):
        self.member = member
        self.reduce_dtype = reduce_dtype
        self._by_backend = by_backend  # whether the group's backend sums the gradients
        self._divisor = member[1] if mean else 1
        self.infos: list[_Info] = []
        self.parameters: list[nn.Parameter] = []
        self.owners: list[parametrize.ParametrizationList] = []
        self._reshard = reshard_after_forward
        self.inside = False  # whether the root module's forward is running
        self._hooks = None
        self.full: dict[int, Tensor] = {}  # filled by full_parameters
        self._outside: dict[int, ShardedWeight] = {}  # one each: a parameter is always one object
        self._writes = Writes()

        def order() -> GatherOrder:
            return GatherOrder(self._start, self._bytes_of, self._bucket_bytes, prefetch_bytes)

        self.forward_order = {True: order(), False: order()}  # with and without autograd
        self.backward_order = order()
        self._forward = self.forward_order[True]
        # By storage of gathered parameters: a reference, and (offset, index) of each parameter.
        self._gathered: dict[int, tuple[StorageWeakRef, list[tuple[int, int]]]] = {}

    def __getstate__(self):
        # A copy of the module (an average of weights, say) gathers for itself: it gets no gathered
        # tensors or references to them.
        fresh = {"_gathered": {}, "inside": False, "_hooks": None}
        return {**self.__dict__, **fresh, "full": {}, "_outside": {}, "_writes": Writes()}

    def add(self, name: str, parameter: nn.Parameter, dtype: torch.dtype) -> int:
        rows = shard_rows(name, parameter.shape, self.member)
        self.infos.append(_Info(rows, rows.sizes, dtype))
        self.parameters.append(parameter)
        return len(self.infos) - 1

    def rows_of(self, index: int, full: Tensor) -> Tensor:
        return self.infos[index].rows.take(full)

    def refresh(self) -> None:
        """Reads the module's parameters again: ``load_state_dict(assign=True)`` and
        ``functional_call`` replace them."""
        self.parameters = [owner._parameters["original"] for owner in self.owners]
        for parameter in self.parameters:
            mark(parameter, self.member, averaged=self._divisor > 1)

    def convert(self, index: int, fn: Callable[[Tensor], Tensor]) -> None:
        """Applies ``fn`` to the dtype in which a parameter is gathered."""
        info = self.infos[index]
        info.dtype = fn(torch.empty(0, dtype=info.dtype)).dtype
        self.reduce_dtype = torch.promote_types(self.reduce_dtype, info.dtype)
        self._outside.pop(index, None)

    def gather_to_write(self, index: int) -> Tensor:
        """A copy of the full parameter in the dtype of its shards. If gradients are enabled,
        autograd sees the gather."""
        self.refresh()
        shard = self.parameters[index]
        return self.gather_alone(index, shard, shard.dtype).clone()

    def take_rows(self, index: int, full: Tensor) -> None:
        """Copies this rank's rows of ``full`` into the shard, if they differ."""
        shard, rows = self.parameters[index].detach(), self.rows_of(index, full)
        if not torch.equal(shard, rows):
            shard.copy_(rows)

    # ---- uses

    def use(self, index: int, shard: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # graph passes combine and prefetch
            return self.gather_alone(index, shard)
        if index in self.full:
            return self.full[index]
        if self.infos[index].dtype != shard.dtype:
            check_input_dtype(self.infos[index].name, self.infos[index].dtype, shard)
        use = Use(index, torch.is_grad_enabled() and shard.requires_grad)
        # Unknown if functional_call has replaced it, for example.
        current = shard is self.parameters[index]
        if _in_backward():  # a checkpoint recomputes
            return self.backward_order.take(use) if current else self.gather_alone(index, shard)
        if self.inside:
            full = self._forward.take(use) if current else self.gather_alone(index, shard)
        elif in_a_forward():  # of a part of the module, or of another module that uses it
            full = self.gather_alone(index, shard)
        else:
            return self._outside.setdefault(index, ShardedWeight(self, index))
        return self._writes.watch(full, self.infos[index].name)

    def gather_alone(self, index: int, shard: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        info, (rank, _, name) = self.infos[index], self.member
        if self._divisor != 1 and shard.requires_grad:
            shard = _op._scale_gradient(shard, 1 / self._divisor)
        full = _op.gather_cast(shard, info.sizes, dtype or info.dtype, rank, name, **self._sums())
        return full.view(info.shape)

    def _sums(self) -> dict[str, torch.dtype]:
        return {"backend_sums" if self._by_backend else "reduce_dtype": self.reduce_dtype}

    def _bucket_bytes(self) -> int:
        return bucket_bytes(self.parameters[0].device)

    def _bytes_of(self, index: int) -> int:
        return self.infos[index].bytes

    def _start(self, uses) -> Wait:
        where = (self.member[0], self.member[2])
        infos = [self.infos[use.index] for use in uses]
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
            sums = self._sums()
            buffer = _op._gather_cast_coalesced_start(shards, sizes, dtypes, *where, **sums)
        also_in_wait = {"backend_sums": sums.get("backend_sums")}

        def wait() -> list[Callable[[], Tensor]]:
            with torch.set_grad_enabled(grad):
                tensors = _op._gather_cast_coalesced_wait(
                    buffer, sizes, row_shapes, row_dims, dtypes, *where, **also_in_wait
                )
                self._remember(uses, tensors)
                full = [x.view(i.shape) for x, i in zip(tensors, infos, strict=True)]

            def give(n: int) -> Tensor:
                used[n] = True
                return full[n]

            return [functools.partial(give, n) for n in range(len(full))]

        return wait

    # ---- the root's forward, and tensors that autograd saves in it

    def enter(self, *_) -> None:
        if torch.compiler.is_compiling() or _in_backward():
            return
        if self.inside:  # left by an interrupt (Ctrl-C)
            self.leave()
        if self.full:
            raise RuntimeError(
                "the module is called within deepsp.full_parameters: leave it first, since what "
                "was written in it isn't in the shards yet"
            )
        self._writes.check()
        self.inside = True
        self.refresh()
        self._forward = self.forward_order[torch.is_grad_enabled()]
        self._forward.begin()
        self._forward.look_ahead()
        self.backward_order.begin()
        # Hooks around this forward, a checkpoint's, say, must see the same saved tensors as in its
        # recomputation, so none are added then.
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if self._reshard and torch.is_grad_enabled() and outer is None:
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()

    def leave(self, *_) -> None:
        if torch.compiler.is_compiling() or _in_backward():
            return
        self.inside = False
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None
        explain_dtypes(sys.exception(), self.infos, self.parameters)
        self._writes.check()

    def _remember(self, uses, tensors: list[Tensor]) -> None:
        self._gathered = {k: v for k, v in self._gathered.items() if not v[0].expired()}
        for use, tensor in zip(uses, tensors, strict=True):
            storage = tensor.untyped_storage()
            # While the weak reference exists, no other storage gets this key.
            _, places = self._gathered.setdefault(storage._cdata, (StorageWeakRef(storage), []))
            places.append((tensor.storage_offset() * tensor.element_size(), use.index))

    def _pack(self, tensor: Tensor):
        """Saves a view of a gathered parameter as the parameter's index and the view's strides."""
        return self._view(tensor) or _Kept(tensor, _version(tensor))

    def _view(self, tensor: Tensor) -> _View | None:
        if tensor.layout != torch.strided or not self._gathered:
            return None
        gathered = self._gathered.get(tensor.untyped_storage()._cdata)
        if gathered is None or _version(tensor) != 0:  # after a write, a gather gives other values
            return None
        begin_bytes = tensor.storage_offset() * tensor.element_size()
        for begin, index in gathered[1]:
            info = self.infos[index]
            if begin <= begin_bytes < begin + info.bytes and tensor.dtype == info.dtype:
                offset = (begin_bytes - begin) // tensor.element_size()
                version = _version(self.parameters[index])
                return _View(index, tensor.size(), tensor.stride(), offset, version)
        return None

    def _unpack(self, saved: _View | _Kept) -> Tensor:
        # PyTorch compares versions only without hooks.
        if isinstance(saved, _Kept):
            _check_version(_version(saved.tensor), saved.version)
            return saved.tensor
        _check_version(_version(self.parameters[saved.index]), saved.version)
        full = self.backward_order.take(Use(saved.index, False))
        return full.as_strided(saved.size, saved.stride, full.storage_offset() + saved.offset)


@dataclass
class _View:
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements, from the parameter's first
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
