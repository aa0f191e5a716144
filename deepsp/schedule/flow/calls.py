"""Records an op that the model calls: what it does to placements, on the tape."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from deepsp import placement
from deepsp.ranks import randomness
from deepsp.schedule.flow import drawing, exchanges, items, lengths, pieces, reshapes, writes
from deepsp.schedule.flow.rows import place_of
from deepsp.schedule.flow.values import Entry, Split, TracedCall, Value, differentiable, tensors_in
from deepsp.schedule.placement import REPLICATE

if TYPE_CHECKING:
    from deepsp.schedule.flow.flow import Flow

_READS = {"item", "_local_scalar_dense", "is_nonzero", "equal", "allclose", "tolist", "numpy",
          "__array__", "__contains__"}  # fmt: skip
"""Functions that give Python a tensor's values."""

_STOP = {"detach", "rand_like", "randn_like", "randint_like", "zeros_like", "ones_like",
         "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty",
         "new_empty_strided"}  # fmt: skip
"""Ops whose results need no gradient."""

_FILLED = {"zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty",
           "zeros_like", "ones_like", "full_like", "empty_like", "scalar_tensor", "empty_strided",
           "new_empty_strided"}  # fmt: skip
"""Ops that fill a tensor with one number."""

_MOVES = {"view", "reshape", "expand", "expand_as", "unsqueeze", "squeeze", "transpose", "permute",
          "slice", "select", "broadcast_to", "contiguous", "t", "mT"}  # fmt: skip
_CASTS = {"to", "_to_copy", "type_as", "clone", "contiguous", "detach", "alias", "lift_fresh",
          "lift_fresh_copy"}  # fmt: skip


class Ops(SchemaCheckMode):
    """Sees each op before autograd, as the compile pass's graphs hold it: linear layers, attention
    and losses are one op each, and so are the ops of a scripted function.

    This is the only pre-dispatch mode that torch accepts without others."""

    def __init__(self, flow: Flow):
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self.flow = flow
        self._around = contextlib.ExitStack()

    def __enter__(self):
        self._around.enter_context(enable_python_dispatcher())
        # An optimised script would have one backward op for all its ops.
        self._around.enter_context(torch.jit.optimized_execution(False))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._around.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Ops inside this op must not be followed: a wait would hold the GIL.
        with torch._C._DisablePythonDispatcher():
            if self.flow.is_paused:
                return func(*args, **(kwargs or {}))
            return follow(self.flow, TracedCall(self.flow, func, args, kwargs or {}))


class Functions(TorchFunctionMode):
    """Sees calls that aren't ops: sizes and numbers that Python reads, calls that turn gradients
    off, and ``DistributedAttention`` as one call."""

    sees_attention_as_one_call = True

    def __init__(self, flow: Flow):
        super().__init__()
        self.flow = flow

    def __torch_function__(self, func, types, args=(), kwargs=None):
        flow, kwargs = self.flow, kwargs or {}
        raw = getattr(func, "__name__", str(func))
        if raw == "_set_grad_enabled":
            flow.grad.set(args[0])
        if raw == "_set_grad_enabled" or flow.is_paused:
            return func(*args, **kwargs)
        if raw == "deepsp.DistributedAttention":
            call = TracedCall(flow, None, args, kwargs, raw)
            call.named = dict(zip(("q", "k", "v", "group_name"), args, strict=False))
            return follow(flow, call, lambda: func(*args, **kwargs))
        if raw in _READS:
            _read(flow, raw, args)
        lengths.check(flow, func, args, kwargs)
        if raw == "__getitem__" and isinstance(args[0], Tensor):
            pieces.check_slices(flow, *args)
        flow.sizes = lengths.sizes_of(func, args, kwargs)
        try:
            out = func(*args, **kwargs)
        finally:
            flow.sizes = ()
        if raw in ("arange", "linspace") and any(map(lengths.is_local, [*args, *kwargs.values()])):
            flow.value(out).counted = True
        if raw in ("split", "chunk", "unbind") and isinstance(out, (list, tuple)):
            out = items.hand_out(flow, args[0], out)
        return lengths.read(flow, func, args, kwargs, out)


def _read(flow: Flow, name: str, args) -> None:
    """Values that Python reads must be the same on every rank."""
    for value in map(flow.value, tensors_in(args)):
        if not value.replicated:
            flow.fail(
                name,
                f"its values are read, but {value.name} is {value.place}, and each rank would see "
                "different ones; gather or reduce it before",
            )


def follow(flow: Flow, call: TracedCall, run=None):
    """Follows an op that the model calls. ``run``: calls it, if not as ``call.target``."""
    name = call.name
    writes_to = list(tensors_in(call.written))
    replicated = all(v.replicated for _, v in call.tensors)
    if name in _READS:
        _read(flow, name, call.args)
    ours, piece = exchanges.RULES.get(name), pieces.RULES.get(name)
    places = refusal = None
    if any(v.item for _, v in call.tensors) and name not in _ABOUT:
        places = items.place_of(call)
    elif ours is not None:
        places = ours(call)
    elif name.startswith("deepsp._"):
        pass  # compares ranks
    elif name.startswith("deepsp.") and call.tensors:
        call.fail(
            "this op communicates, which can't be followed inside a module; let the schedule "
            "do it (sync)"
        )
    elif not replicated and name not in _ABOUT and piece is not reshapes.reshape:
        try:
            places = place_of(call)
        except ValueError as error:
            if piece is None:
                raise
            refusal = error  # raised below, unless ``piece`` knows the parts
    # Code that turns torch functions off is deepsp's: it compares ranks or saves generators'
    # states.
    if not _is_view(call) and torch._C._is_torch_function_enabled():
        flow.note_replicated(call.tensors)
    if exchanges.communicates(call):
        flow.meet(f"{name} in {flow.where()}")
    before = randomness.states()
    out = _run(flow, call, run, refusal)
    results = list(tensors_in(out))
    if not results and not writes_to:
        return out
    if callable(places):
        places = places(out)
    elif piece is not None and places is None and not replicated:
        places = piece(call, out)
        if places is None:
            raise refusal
    if isinstance(places, Split):
        if name in ("expand", "expand_as", "repeat"):
            pieces.check_left(call, results[0])
        _check_length(call, results, places)
    random = drawing.note(flow, call, before) or any(v.random for _, v in call.tensors)
    _record(flow, call, writes_to or results, places, bool(writes_to), random)
    return out


_ABOUT = {"is_same_size", "sym_size", "sym_numel", "sym_stride", "result_type", "is_pinned"}


def _is_view(call: TracedCall) -> bool:
    """Whether the op only views or copies: its result is compared where it is used."""
    if call.name in _CASTS or call.name in pieces.RULES:
        return True
    returns = call.target._schema.returns if call.target is not None else ()
    return bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)


def _run(flow: Flow, call: TracedCall, run, refusal: ValueError | None):
    try:
        if run is not None:
            with flow.paused():
                return run()
        return call.target(*call.args, **call.kwargs)
    except (RuntimeError, IndexError, TypeError) as error:
        if refusal is not None:
            raise refusal from None
        split = next((v for _, v in call.tensors if v.split), None)
        if split is not None and pieces.RULES.get(call.name) is reshapes.reshape:
            shape = list(call.tensors[0][0].shape)
            call.fail(
                f"its sizes don't fit {split.name}, which is {split.place} and has local shape "
                f"{shape} ({error}). A number of heads or channels in it must be the local one: "
                "divide the module's attribute (sch[...].divide), or pass -1 for that size"
            )
        what = ", ".join(f"{v.name}: {v.place}" for _, v in call.tensors)
        error.add_note(f"In the schedule's dry run, in {flow.where()}: {call.name} of {what}.")
        raise


def _check_length(call: TracedCall, results: list[Tensor], place: Split) -> None:
    """Fails if an op's size arguments changed the sharded dimension's length."""
    for tensor in results:
        axis = place.axis
        if axis is not None and (axis >= tensor.dim() or tensor.size(axis) != sum(place.parts)):
            value = next(v for _, v in call.tensors if v.split)
            call.fail_split(value, "the sharded dimension is repeated")


def _record(
    flow: Flow, call: TracedCall, results: list[Tensor], places, inplace: bool, random: bool
):
    if not isinstance(places, list):
        places = [REPLICATE if places is None else places] * len(results)
    inputs = [v for _, v in call.tensors]
    name = call.name
    carries = flow.grad.enabled and any(v.carries for v in inputs) and name not in _STOP
    uniform = name in _FILLED or (
        bool(inputs) and all(v.uniform for v in inputs) and not random and _is_even(call)
    )
    since = next((v.since for v in inputs if v.since), "")
    where = flow.where()
    outputs = []
    for tensor, place in zip(results, places, strict=True):
        if not inplace and any(tensor is t for t, _ in call.tensors):
            continue  # contiguous() and to() may return their input
        value = Value(place, carries and differentiable(tensor), f"what {name} in {where} makes")
        value.uniform, value.random = uniform, random
        value.counted = value.replicated and any(v.counted for v in inputs)
        if flow.has_items and value.replicated:
            items.note(call, value, len(outputs))
        if value.partial:
            value.since = since or where
        outputs.append((tensor, value))
    if inplace:
        writes.overwrite(flow, call, outputs)
    sync = getattr(call, "sync", None)
    if sync is not None:
        inputs = [inputs[0]]
    carrying = [v for _, v in outputs if v.carries]
    if carrying:
        flow.tape.append(Entry(name, where, [v for v in inputs if v.carries], carrying, sync))
    for tensor, value in outputs:
        flow.values[tensor] = value
        if value.split and not inplace:
            flow.alike.note_numbers(
                f"the sizes of {value.name}, except along the sharded dimension,",
                _whole_sizes(tensor, value.place),
            )
    if call.name == "scaled_dot_product_attention":
        _note_groups(flow, call)
    if inplace:
        writes.pass_to_aliases(flow, call, outputs)


def _whole_sizes(tensor: Tensor, place: Split) -> list[int] | None:
    """The sizes of the dimensions that aren't sharded, and the number of parts."""
    if place.axis is None:
        return None
    return [*(n for d, n in enumerate(tensor.shape) if d != place.axis), len(place.parts)]


def _note_groups(flow: Flow, call: TracedCall) -> None:
    """Records how many query heads read each kv head: they must be as many on all ranks."""
    query, key = call["query"], call["key"]
    if call.value(query).split and call.value(key).split and query.dim() > 2:
        groups = [query.size(-3), key.size(-3)]
        divisor = math.gcd(*groups) or 1
        flow.alike.note_numbers(
            f"the number of query heads for each kv head, in {call.name} in {flow.where()},",
            [n // divisor for n in groups],
        )


def _is_even(call: TracedCall) -> bool:
    """Whether the op keeps uniform tensors uniform."""
    if call.name in _MOVES:
        return True
    rule = placement.find(call.target) if call.target is not None else None
    return rule is not None and rule.family == "pointwise"
