"""The dry run: one forward of the model, in which the placement of every tensor is followed.

A mode sees each op before dispatch, as the compile pass's graphs hold it, with the user's own
tensors. What ops do to placements is told by :mod:`deepsp.placement`; what follows for gradients,
from the tape, by ``backward``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from deepsp.ranks import randomness
from deepsp.ranks.groups import Member
from deepsp.schedule.flow import backward, calls, drawing, writes
from deepsp.schedule.flow.alike import Alike
from deepsp.schedule.flow.arguments import copied
from deepsp.schedule.flow.values import (
    Entry,
    Place,
    Split,
    Trusted,
    Value,
    differentiable,
    internal,
    public,
    tensors_in,
)
from deepsp.schedule.placement import REPLICATE, Placement, Shard

_local = threading.local()


@dataclass
class Findings:
    """What a dry run found.

    grads: by sync, the state of the gradient of what an all_gather or all_reduce makes; one that no
        gradient reaches has "replicated".
    origins: by sync that gathers, who split what comes in; None: several did, or it isn't known.
    partial_parameters: ids of the replicated parameters whose gradients are partial.
    replicated_parameters: of those whose gradients are replicated.
    streams: by module that draws random numbers itself, "replicated" | "sharded".
    nested: those "replicated" ones that were called inside of a "sharded" one.
    outputs: placements of the model's output tensors.
    """

    grads: dict[Any, str] = field(default_factory=dict)
    origins: dict[Any, object] = field(default_factory=dict)
    partial_parameters: set[int] = field(default_factory=set)
    replicated_parameters: set[int] = field(default_factory=set)
    streams: dict[nn.Module, str] = field(default_factory=dict)
    nested: set[nn.Module] = field(default_factory=set)
    outputs: list[Placement] = field(default_factory=list)


def current() -> Flow | None:
    """The dry run that is on in this thread."""
    return getattr(_local, "flow", None)


class Flow:
    """Follows placements through a model.

    Args:
        model: with its shards and syncs in place.
        placements: by id, of the parameters and buffers that aren't replicated.
        member: this process's place in the group.
        outputs: "full": sharded outputs of the model are an error; "local": they are what was
            asked for.
    """

    def __init__(
        self,
        model: nn.Module,
        placements: Mapping[int, Placement],
        member: Member,
        outputs: str = "full",
    ):
        self.model, self.member, self.outputs = model, member, outputs
        self.placements = dict(placements)
        self.names: dict[int, str] = {}
        self.modules = {m: name for name, m in model.named_modules()}
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            self.names.setdefault(id(p), name)
        self.parameters = {id(p) for p in model.parameters()}
        self.findings = Findings()
        self.values = WeakTensorKeyDictionary()
        self._leaves: list[Value] = []
        self.tape: list[Entry] = []
        self.stack: list[nn.Module] = []
        self.drawn_in: dict[nn.Module, set[nn.Module]] = {}  # those that called what draws
        self._paused = 0
        self._drawn = False  # random numbers, by what isn't followed
        self.alike = Alike(member)
        self.grad = GradMode()

    # ---- the run

    def run(self, args: tuple, kwargs: Mapping) -> Findings:
        """Calls the model's forward once. Nothing is kept for a backward.

        Buffers, the default generators and the arguments are as before afterwards.

        Raises:
            ValueError: placements that a function, a sync or the model's end can't take, or a
                gradient that would be wrong on some rank.
        """
        if current() is not None:
            raise RuntimeError("expected no dry run within a dry run")
        args, kwargs = copied((args, dict(kwargs)), {})
        for tensor in tensors_in((args, kwargs)):
            self._know(tensor, REPLICATE, "an input of the model")
        saved = randomness.states()
        buffers = [
            (module, name, b, b.detach().clone(), b.grad_fn is not None)
            for module in self.model.modules()
            for name, b in module._buffers.items()
            if b is not None
        ]
        _local.flow = self
        try:
            nothing = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _no_backward)
            with torch.enable_grad(), nothing, self._following_modules(), self._modes():
                out = _noted(self.model, args, kwargs)
            self.note_replicated((tensor, self.value(tensor)) for tensor in tensors_in(out))
            self._finish(out)
        finally:
            _local.flow = None
            randomness.restore(saved)
            with torch.no_grad():
                for module, name, buffer, before, computed in buffers:
                    module._buffers[name] = buffer  # the model may have put another in its place
                    if buffer.shape == before.shape:
                        buffer.copy_(before)
                    if buffer.grad_fn is None or computed:
                        continue
                    if buffer._is_view():  # can't be detached in place
                        module._buffers[name] = buffer.detach()
                    else:
                        buffer.detach_()
        if self.findings.streams:
            randomness.compare(saved, self.member)
        return self.findings

    def _finish(self, out) -> None:
        outputs = list(tensors_in(out))
        values = [self.value(t) for t in outputs]
        self.findings.outputs = [public(v.place) for v in values]
        for n, value in enumerate(values):
            text = f"the model's output {n} ({value.name}) is {value.place}"
            if value.partial:
                at = f" at {value.since}" if value.since else ""
                raise ValueError(f"{text}; sync it{at} with fwd_post all_reduce or reduce_scatter")
            if value.split and self.outputs != "local":
                raise ValueError(
                    f"{text}; sync it with fwd_post all_gather, or build(..., outputs='local') to "
                    "return the local tensor"
                )
        grads = backward.walk(self.tape, values)
        self.findings.grads = {s: g or "replicated" for s, g in grads.items()}
        self.findings.nested = drawing.nested(self)
        for leaf in self._leaves:
            if leaf.state == "replicated" and id(leaf.leaf) in self.parameters:
                self.findings.replicated_parameters.add(id(leaf.leaf))
            if leaf.state != "partial":
                continue
            if id(leaf.leaf) in self.parameters:
                self.findings.partial_parameters.add(id(leaf.leaf))
                continue
            raise ValueError(
                f"the gradient of {leaf.name} would be Partial, from {leaf.why}; put "
                f"sync(mode='bwd_post', sync_op_or_fn='all_reduce') at {leaf.why.module}"
            )

    @contextlib.contextmanager
    def _following_modules(self) -> Iterator[None]:
        def enter(module, args):
            self.stack.append(module)

        def leave(module, args, output):
            if self.stack and self.stack[-1] is module:
                self.stack.pop()

        # What isn't called, or looked into, needs no hooks, and may refuse to have any.
        closed = {
            inside
            for module in self.modules
            if getattr(module, "_deepsp_closed", False)
            for inside in module.modules()
            if inside is not module
        }
        handles = []
        for module in self.modules:
            if module in closed:
                continue
            handles.append(module.register_forward_pre_hook(enter, prepend=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def _modes(self) -> Iterator[None]:
        with calls.Functions(self), calls.Ops(self):
            yield

    @property
    def is_paused(self) -> bool:
        return self._paused > 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is called in here isn't followed."""
        before = randomness.states()
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1
            self._drawn = drawing.drawn_since(before)

    def note_replicated(self, tensors: Iterable[tuple[Tensor, Value]]) -> None:
        """Something is computed from tensors: what is taken for replicated is compared last."""
        for tensor, value in tensors:
            if value.replicated and not (value.uniform or value.random or value.noted):
                value.noted = True
                if id(tensor) not in self.parameters:
                    with self.paused():
                        self.alike.note(value.name, tensor)

    # ---- what is known of tensors

    def placement(self, tensor: Tensor) -> Placement:
        """What a tensor is over the group."""
        return public(self.value(tensor).place)

    def value(self, tensor: Tensor) -> Value:
        with torch._C.DisableTorchFunction():
            known = self.values.get(tensor)
            if known is None:
                known = self._leaf(tensor)
            return known

    def _leaf(self, tensor: Tensor) -> Value:
        """A tensor that was there before: a parameter, a buffer, a constant.

        Raises:
            ValueError: it wasn't, but shares memory with one that the model has made.
        """
        name = self.names.get(id(tensor))
        made_of = None if name else writes.shares_memory(self, tensor)
        if made_of is not None:
            self.fail(
                "a function that can't be followed",
                f"it made a tensor that shares memory with {made_of.name}, which is "
                f"{made_of.place}; compute it with torch functions, or let the schedule do it "
                "(sync)",
            )
        place = internal(self.placements.get(id(tensor), REPLICATE), tensor, self.member[0])
        text = name or f"a tensor of shape {list(tensor.shape)} made elsewhere"
        return self._know(tensor, place, text)

    def _know(self, tensor: Tensor, place: Place, name: str) -> Value:
        value = Value(place, tensor.requires_grad, name, leaf=tensor)
        self.values[tensor] = value
        self._leaves.append(value)
        return value

    def any_not_replicated(self, tensors) -> bool:
        return any(not v.replicated for _, v in tensors)

    def where(self) -> str:
        """The innermost module that is running."""
        if not self.stack:
            return "the model"
        module = self.stack[-1]
        return f"{self.modules[module] or 'the model'} ({type(module).__name__})"

    def fail(self, name: str, text: str) -> NoReturn:
        raise ValueError(f"{self.where()}: {name}: {text}")

    # ---- what the schedule put there

    def sync(self, sync, x: Tensor, out: Tensor | Callable[[], Tensor]) -> Tensor:
        """Records a sync's work; ``out`` may be a function that does it, called after the check.

        Raises:
            ValueError: the sync doesn't fit what x is.
        """
        value = self.value(x)
        unknown = isinstance(value.place, Split) and public(value.place).axis is None
        if unknown and sync.op in ("all_gather", "seq_to_heads", "heads_to_seq"):
            raise ValueError(
                f"{sync.module_name or 'the model'} ({sync.mode} {sync.op}): its input "
                f"{value.name} is {value.place}, and the ranks' tensors, one after another, aren't "
                "the full tensor; put the sync where they are"
            )
        result = sync.result(public(value.place), x.dim())
        if sync.op == "all_gather":
            origin = getattr(value.place, "origin", None)
            known = self.findings.origins.get(sync, origin)
            self.findings.origins[sync] = origin if known is origin else None
        if callable(out) and not isinstance(out, Tensor):
            with self.paused():
                out = out()
        if isinstance(result, Shard):
            if result.origin is None:
                result = Shard(result.axis, sync)
            axis = result.axis % out.dim()
            place = Split(axis, (out.size(axis),), result.origin)
        else:
            place = result
        if place == value.place and isinstance(place, Split):
            place = value.place
        where = sync.module_name or "the model"
        made = Value(
            place,
            value.carries and self.grad.enabled,
            f"what {sync.op} ({sync.mode}) at {where} makes",
            random=value.random,
        )
        self.tape.append(Entry(f"{sync.mode} {sync.op}", where, [value], [made], sync))
        self.values[out] = made
        return out

    def trusted(self, x: Tensor) -> Tensor:
        """``x``, whose gradient a function makes replicated by itself."""
        value = self.value(x)
        with self.paused():
            out = x.view_as(x)
        made = Value(
            value.place, value.carries and self.grad.enabled, value.name, random=value.random
        )
        sync = Trusted()
        self.tape.append(Entry("a bwd_post function", self.where(), [value], [made], sync))
        self.values[out] = made
        return out

    def opaque(self, module_name: str, inputs, output, placement: Placement) -> None:
        """Records the output of a module that isn't followed: call it in :meth:`paused`."""
        tensors = list(tensors_in(inputs))
        values = [self.value(t) for t in tensors]
        random = self._drawn or any(v.random for v in values)
        self.note_replicated(zip(tensors, values, strict=True))
        outs = []
        for t in tensors_in(output):
            carries = differentiable(t) and self.grad.enabled
            value = Value(
                internal(placement, t, self.member[0]),
                carries,
                f"the output of {module_name}",
                random=random,
            )
            if value.partial:
                value.since = module_name
            outs.append(value)
            self.values[t] = value
        self.tape.append(Entry("forward", module_name, values, outs))


def _noted(model: nn.Module, args: tuple, kwargs: Mapping):
    """The model's output; an error of its forward says that this was the dry run."""
    try:
        return model(*args, **kwargs)
    except RuntimeError as error:
        error.add_note(
            "In the schedule's dry run, which calls the model's forward once with gradients on, "
            "also under torch.no_grad, and with saved tensors replaced. A forward that uses "
            "torch.func.grad or vjp, or writes to a parameter in place outside of its own "
            "torch.no_grad, can't be followed: register a method for that module "
            "(deepsp.register_shard_method)."
        )
        raise


def _no_backward(_) -> NoReturn:
    raise RuntimeError(
        "expected no backward through tensors of the schedule's dry run: call backward outside of "
        "the model's forward, and detach tensors that the model keeps from one call to the next"
    )


class GradMode:
    """Follows calls of ``torch._C._set_grad_enabled``, for which gradients are on but where the
    model has turned them off. They also are off, without such a call, in the forward of a
    ``torch.autograd.Function``, a reentrant checkpoint's too: what is made in there has gradients
    all the same."""

    def __init__(self):
        self._off = False

    def set(self, enabled: bool) -> None:
        """Before the call is made."""
        if enabled:
            self._off = False
        elif torch.is_grad_enabled():
            self._off = True

    @property
    def enabled(self) -> bool:
        self._off = self._off and not torch.is_grad_enabled()
        return not self._off
