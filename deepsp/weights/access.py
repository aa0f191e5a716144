"""What ``module.weight`` returns for a sharded parameter.

In a forward: a :class:`GatheredWeight`, the full parameter. A write to it would be lost, and
raises. Elsewhere: a :class:`ShardedWeight`, with the full shape and no data. It takes writes that
each rank can do on its own rows. Reading is a collective, so it must be explicit:
:func:`full_parameters`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_leaves, tree_map

from deepsp.placement.functions import ABOUT, is_by_element, name_of
from deepsp.weights.rows import shard_key

if TYPE_CHECKING:
    from deepsp.weights.shards import Shards

# Functions that fill a tensor with random numbers.
_FILLS = {
    "normal",
    "uniform",
    "bernoulli",
    "exponential",
    "geometric",
    "cauchy",
    "log_normal",
    "random",
}


class ShardedWeight(Tensor):
    """A sharded parameter outside of a forward, or rows of it: the full shape and dtype, no data.
    Writes by element, random ones too, go to this rank's rows; every rank makes them. A read
    raises."""

    @staticmethod
    def __new__(cls, shards: Shards, index: int, rows: range | int | None = None, detached=False):
        info, parameter = shards.infos[index], shards.parameters[index]
        shape = info.shape if rows is None else torch.Size(info.row_shape)
        if isinstance(rows, range):
            shape = torch.Size([len(rows), *shape])
        return Tensor._make_wrapper_subclass(
            cls, shape, dtype=info.dtype, device=parameter.device, requires_grad=False
        )

    def __init__(self, shards: Shards, index: int, rows: range | int | None = None, detached=False):
        self._shards, self.index, self._rows, self._detached = shards, index, rows, detached

    def __repr__(self) -> str:
        what = "" if self._rows is None else f"[{self._rows}]"
        return (
            f"ShardedWeight({self.full_name}{what}, shape={tuple(self.shape)}, "
            f"rows on rank={self._shards.infos[self.index].sizes})"
        )

    def __deepcopy__(self, memo):
        self._refuse("copy.deepcopy")

    def __reduce_ex__(self, protocol):
        self._refuse("pickle")

    def is_all_of(self, shards: Shards) -> bool:
        """Whether this is a full parameter of ``shards``, not some rows or its ``data``."""
        return self._shards is shards and self._rows is None and not self._detached

    @property
    def full_name(self) -> str:
        return self._shards.infos[self.index].name

    @property
    def parameter(self) -> nn.Parameter:
        """This rank's rows."""
        return self._shards.owners[self.index]._parameters["original"]

    def gathered(self) -> Tensor:
        """The full parameter, as in a forward. Every rank makes the call."""
        if self._rows is not None or self._detached:
            self._refuse("an op")
        return self._shards.gather_alone(self.index, self.parameter)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, ShardedWeight))
        raw = getattr(func, "__name__", "")
        name, writes = name_of(func)
        if name in ABOUT or (name == "type" and len(args) == 1 and not kwargs):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name.startswith("deepsp."):  # every rank makes the call: linear_cross_entropy, say
            args, kwargs = tree_map(
                lambda x: x.gathered() if isinstance(x, ShardedWeight) else x, (args, kwargs)
            )
            return func(*args, **kwargs)
        target = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
        if target is self:
            if name == "requires_grad" and not writes:
                if raw == "__get__":
                    return self.parameter.requires_grad and not self._detached
                self.parameter.requires_grad_(*args[1:], **kwargs)
                return self
            if name == "set_requires_grad":
                self.parameter.requires_grad_(args[1])
                return None
            if name in ("data", "detach"):
                return ShardedWeight(self._shards, self.index, self._rows, True)
            if name == "set_data":
                value, dtype = args[1], self.parameter.dtype
                if value.shape != self.shape or value.dtype != dtype:
                    raise ValueError(
                        f"expected {self.full_name}.data, which is sharded, to be set to {dtype} "
                        f"{list(self.shape)}, got {value.dtype} {list(value.shape)}"
                    )
                with torch.no_grad():
                    self._write(Tensor.copy_, "copy", args, {})
                return None
            if name == "getitem":
                return self._at(args[1], "reading at these indices")
            if writes:
                self._write(func, name, args, kwargs)
                return self
        self._refuse(name)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        self = next(x for x in tree_leaves((args, kwargs or {})) if isinstance(x, ShardedWeight))
        self._refuse(str(func))

    def _refuse(self, what: str) -> NoReturn:
        name = self.full_name
        raise RuntimeError(
            f"{name} is sharded over the ranks, and {what} needs the full parameter outside of a "
            "module's forward. Reading it is a collective. Call, on every rank, "
            "`with deepsp.full_parameters(module): ...`, in which it is full (and can be written "
            "to), or deepsp.full_state_dict(module) for copies. This rank's rows, and their .grad, "
            f"are in module.parameters(), under {shard_key(name)}"
        )

    # ---- writes

    def _write(self, func, name: str, args: tuple, kwargs: dict) -> None:
        initializes = getattr(func, "__module__", None) == "torch.nn.init"
        if torch.is_grad_enabled() and self.requires_grad and not initializes:
            raise RuntimeError(
                f"{self.full_name} requires grad and is used in an in-place operation, {name}_: "
                "write to it under torch.no_grad()"
            )
        with torch.no_grad():
            if name == "setitem":
                index, value = args[1:]
                if isinstance(index, tuple) and len(index) > 1:
                    first, *rest = index
                    if isinstance(value, Tensor) and value.dim() > 0:
                        self._refuse("writing a tensor at these indices")
                    rows = self._at(first, "writing at these indices")
                    if isinstance(rows._rows, int):
                        local = rows._local_rows()
                        if local is not None:
                            local[tuple(rest)] = value
                    else:
                        rows._local_rows()[(slice(None), *rest)] = value
                    return
                self = self._at(index, "writing at these indices")
                func = Tensor.copy_ if isinstance(value, Tensor) else Tensor.fill_
                args, name = (self, value), "copy"
            if name in _FILLS or initializes:
                # Every rank draws the full tensor, from the same generator state, and takes its
                # rows.
                parameter = self.parameter
                full = torch.empty(self.shape, dtype=parameter.dtype, device=parameter.device)
                args, kwargs = tree_map(lambda x: full if x is self else x, (args, kwargs))
                if any(isinstance(x, ShardedWeight) for x in tree_leaves((args, kwargs))):
                    self._refuse(name)
                func(*args, **kwargs)
                func, args, kwargs = Tensor.copy_, (self, full), {}
            elif not is_by_element(name) or "out" in kwargs:
                self._refuse(name)
            leaves = tree_leaves((args, kwargs))
            locals_ = {id(x): self._part_of(x, name) for x in leaves if isinstance(x, Tensor)}
            if locals_[id(self)] is not None:
                args, kwargs = tree_map(
                    lambda x: locals_[id(x)] if isinstance(x, Tensor) else x, (args, kwargs)
                )
                func(*args, **kwargs)

    def _range(self) -> tuple[int, int]:
        """(begin, end) of this rank's rows in the full parameter."""
        (rows,) = self._shards.infos[self.index].rows.ranges()
        return rows

    def _local_rows(self) -> Tensor | None:
        """This rank's part of these rows; None for a single row of another rank."""
        shard, (begin, end) = self.parameter, self._range()
        if self._rows is None and self.dim() == 0:
            return shard.view(()) if len(shard) > 0 else None
        if self._rows is None:
            return shard
        if isinstance(self._rows, int):
            return shard[self._rows - begin] if begin <= self._rows < end else None
        first, last = max(self._rows.start, begin), min(self._rows.stop, end)
        return shard[first - begin : max(first, last) - begin]

    def _part_of(self, x: Tensor, name: str) -> Tensor | None:
        """The elements of a tensor for this rank's rows."""
        if isinstance(x, ShardedWeight):
            if x._rows != self._rows or x.shape != self.shape or x._range() != self._range():
                self._refuse(f"{name}_ with {x!r}")
            return x._local_rows()
        if x.dim() == 0 or isinstance(self._rows, int) or self.dim() == 0:
            return x
        begin, end = self._range()
        start = 0 if self._rows is None else self._rows.start
        stop = self.shape[0] + start
        first, last = max(start, begin), min(stop, end)
        return x.expand(self.shape)[first - start : max(first, last) - start]

    def _at(self, index, what: str) -> ShardedWeight:
        """A row, or consecutive rows."""
        length = self.shape[0] if self.dim() > 0 else 0
        start = self._rows.start if isinstance(self._rows, range) else 0
        if isinstance(self._rows, int) or self.dim() == 0:
            self._refuse(what)
        if isinstance(index, int) and not isinstance(index, bool):
            if not -length <= index < length:
                raise IndexError(
                    f"expected an index of {self.full_name} from {-length} to {length - 1}, got "
                    f"{index}"
                )
            rows = start + index % length
        elif index is Ellipsis or (isinstance(index, slice) and index.step in (None, 1)):
            begin, end, _ = slice(None).indices(length) if index is ... else index.indices(length)
            rows = range(start + begin, start + max(begin, end))
        else:
            self._refuse(what)
        return ShardedWeight(self._shards, self.index, rows, self._detached)


class GatheredWeight(Tensor):
    """A sharded parameter in a forward: the gathered copy. A plain tensor, except that ``data``
    shares its version counter, so that writes are detected."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    _is_param = True  # for compiled functions, as without sharding

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> NoReturn:
        raise RuntimeError(
            "a sharded parameter's data is set in a forward, where it is a gathered copy: set it "
            "outside of the forward"
        )


class Writes:
    """Detects writes to gathered parameters, which don't reach the shards."""

    def __init__(self):
        self._watched: list[tuple[Tensor, int, str]] = []

    def watch(self, full: Tensor, name: str) -> Tensor:
        if full.is_inference():  # it has no version
            return full
        if len(self._watched) > 512:  # calls of the module's parts never check
            self.check()
        version = full.detach()
        version.data = torch.empty(0, dtype=full.dtype, device=full.device)  # holds no memory
        self._watched.append((version, version._version, name))
        return full.as_subclass(GatheredWeight)

    def check(self) -> None:
        """
        Raises:
            RuntimeError: one of them was written to.
        """
        watched, self._watched = self._watched, []
        for version, then, name in watched:
            if version._version != then:
                raise RuntimeError(
                    f"{name} is sharded, and was written to in a forward, where it is a gathered "
                    "copy: the write would be lost. Write to it outside of the forward, or skip it "
                    "in shard_parameters"
                )


def in_a_forward() -> bool:
    """Whether a module's forward is on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            module = frame.f_locals["self"]
            # Any read calls a parametrization, so it is no forward.
            if not isinstance(module, ParametrizationList) and not hasattr(module, "right_inverse"):
                return True
        frame = frame.f_back
    return False
