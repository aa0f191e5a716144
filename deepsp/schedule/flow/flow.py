"""The dry run: one forward of the model that follows the placement of every tensor.

A mode sees each op before autograd, as the compile pass's graphs hold it, with the user's own
tensors. :mod:`deepsp.placement` says what ops do to placements; ``backward`` derives the gradients'
placements from the tape.
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
from deepsp.schedule.flow import backward, calls, drawing, reshapes, traceless, writes
from deepsp.schedule.flow.alike import Alike
from deepsp.schedule.flow.arguments import copied
from deepsp.schedule.flow.meetings import Meetings
from deepsp.schedule.flow.values import (
    Entry,
    Split,
    TracedPlacement,
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

    grads: by sync, the state of the gradient of an all_gather's or all_reduce's output;
        "replicated" if it gets no gradient.
    origins: by gathering sync, what split its input; None: unknown, so ranks send their sizes.
    partial, replicated: names of replicated parameters with a partial or the full gradient.
    streams: by module that draws random numbers itself, "replicated": the same on each rank, or
        "sharded".
    nested: the "replicated" ones that were called inside of a "sharded" one.
    """

    grads: dict[Any, str] = field(default_factory=dict)
    origins: dict[Any, object] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    replicated: set[str] = field(default_factory=set)
    streams: dict[nn.Module, str] = field(default_factory=dict)
    nested: set[nn.Module] = field(default_factory=set)


def current() -> Flow | None:
    """This thread's running dry run."""
    return getattr(_local, "flow", None)


class Flow:
    """Follows placements through a model.

    Args:
        model: the model, with its shards and syncs in place.
        placements: by id, of the parameters and buffers that aren't replicated.
        member: rank, size and name of the group.
        outputs: "full": sharded outputs of the model are an error; "local": they are allowed.
        meetings: of the ranks, before each collective; None: there are none.
    """

    def __init__(
        self,
        model: nn.Module,
        placements: Mapping[int, Placement],
        member: Member,
        outputs: str = "full",
        meetings: Meetings | None = None,
    ):
        self.model, self.member, self.outputs = model, member, outputs
        self.meetings = meetings
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
        self.drawn_in: dict[nn.Module, set[nn.Module]] = {}  # callers of each module that draws
        self.sizes: tuple = ()  # the sizes that the running function was given
        self.made: dict[object, int] = {}  # numbers of calls, while there are items
        self.has_items = False
        self._noted: set = set()
        self._paused = 0
        self._drawn = False  # whether code that isn't followed drew random numbers
        self.alike = Alike(member)
        self.grad = traceless.GradMode()

    # ---- the run

    def run(self, args: tuple, kwargs: Mapping) -> Findings:
        """Calls the model's forward once and keeps nothing for backward. Restores buffers, the
        default generators and the arguments.

        Raises:
            ValueError: an op, a sync or the model's end can't take a placement, or a gradient would
                be wrong on some rank.
        """
        if current() is not None:
            raise RuntimeError("expected no dry run within a dry run")
        args, kwargs = copied((args, dict(kwargs)), {})
        for tensor in tensors_in((args, kwargs)):
            self._know(tensor, REPLICATE, "an input of the model")
        _local.flow = self
        try:
            with (
                traceless.unchanged(self.model),
                self._following_modules(),
                reshapes.divided(self.model),
                calls.Functions(self),
                calls.Ops(self),
            ):
                out = traceless.noted(self.model, args, kwargs)
            self.note_replicated((tensor, self.value(tensor)) for tensor in tensors_in(out))
            self._finish(out)
        finally:
            _local.flow = None
        if self.findings.streams:
            self.meet("the comparison of random numbers")
            randomness.compare(randomness.states(), self.member)
        return self.findings

    def _finish(self, out) -> None:
        outputs = list(tensors_in(out))
        values = [self.value(t) for t in outputs]
        self._refuse_items("the model's output", values)
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
            if id(leaf.leaf) in self.parameters:
                kinds = {"partial": self.findings.partial, "replicated": self.findings.replicated}
                kinds.get(leaf.state, set()).add(self.names[id(leaf.leaf)])
            elif leaf.state == "partial":
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

        # Modules inside a closed one need no hooks, and may refuse them.
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

    @property
    def is_paused(self) -> bool:
        return self._paused > 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Calls in this context aren't followed."""
        before = randomness.states()
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1
            self._drawn = drawing.drawn_since(before)

    def meet(self, where: str) -> None:
        """Waits for the other ranks, before a collective.

        Raises:
            ValueError: the forward has failed on another rank, or that rank is somewhere else.
        """
        if self.meetings is not None:
            with self.paused():
                self.meetings.join(where)

    @contextlib.contextmanager
    def communicating(self, where: str) -> Iterator[None]:
        """Calls in this context send something, and aren't followed."""
        self.meet(where)
        with self.paused():
            yield

    def note_replicated(self, tensors: Iterable[tuple[Tensor, Value]]) -> None:
        """Records the replicated tensors among an op's inputs, to compare them at the end."""
        for tensor, value in tensors:
            if value.replicated and not (value.uniform or value.random or value.noted):
                value.noted = True
                if value.made is not None and value.made in self._noted:
                    continue
                self._noted.add(value.made)
                if id(tensor) not in self.parameters:
                    with self.paused():
                        self.alike.note(value.name, tensor)

    # ---- values of tensors

    def placement(self, tensor: Tensor) -> Placement:
        """A tensor's placement over the group."""
        value = self.value(tensor)
        self._refuse_items(self.where(), [value])
        return public(value.place)

    def _refuse_items(self, where: str, values: list[Value]) -> None:
        """Items of a list of heads go nowhere but into ops."""
        for value in values:
            if value.item:
                raise ValueError(
                    f"{where}: expected all heads of a rank in one tensor, but {value.name} is "
                    f"{value.place}; join them in order with cat or stack before"
                )

    def value(self, tensor: Tensor) -> Value:
        with torch._C.DisableTorchFunction():
            value = self.values.get(tensor)
            if value is None:
                value = self._leaf(tensor)
            return value

    def _leaf(self, tensor: Tensor) -> Value:
        """The value of a tensor that no followed op made: a parameter, a buffer, a constant.

        Raises:
            ValueError: it shares memory with a tensor of the model.
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

    def _know(self, tensor: Tensor, place: TracedPlacement, name: str) -> Value:
        value = Value(place, tensor.requires_grad, name, leaf=tensor)
        self.values[tensor] = value
        self._leaves.append(value)
        return value

    def where(self) -> str:
        """The innermost module that is running."""
        if not self.stack:
            return "the model"
        module = self.stack[-1]
        return f"{self.modules[module] or 'the model'} ({type(module).__name__})"

    def fail(self, name: str, text: str) -> NoReturn:
        raise ValueError(f"{self.where()}: {name}: {text}")

    # ---- modules and syncs of the schedule

    def sync(self, sync, x: Tensor, out: Tensor | Callable[[], Tensor]) -> Tensor:
        """Records a sync. ``out``: its output, or a function that computes it after the check.

        Raises:
            ValueError: the sync doesn't fit x's placement.
        """
        value = self.value(x)
        self._refuse_items(sync.where, [value])
        unknown = isinstance(value.place, Split) and public(value.place).axis is None
        if unknown and sync.op in ("all_gather", "seq_to_heads", "heads_to_seq"):
            raise ValueError(
                f"{sync.module_name or 'the model'} ({sync.mode} {sync.op}): its input "
                f"{value.name} is {value.place}, and the ranks' tensors, one after another, aren't "
                "the full tensor; put the sync where they are"
            )
        result = sync.result(public(value.place), x.dim())
        if callable(out) and not isinstance(out, Tensor):
            with self.communicating(sync.where):
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
        synced = Value(
            place,
            value.carries and self.grad.enabled,
            f"what {sync.op} ({sync.mode}) at {where} makes",
            random=value.random,
        )
        self.tape.append(Entry(f"{sync.mode} {sync.op}", where, [value], [synced], sync))
        self.values[out] = synced
        return out

    def trusted(self, x: Tensor) -> Tensor:
        """``x``. A user's backward function makes its gradient replicated."""
        value = self.value(x)
        with self.paused():
            out = x.view_as(x)
        returned = Value(
            value.place, value.carries and self.grad.enabled, value.name, random=value.random
        )
        sync = Trusted()
        self.tape.append(Entry("a bwd_post function", self.where(), [value], [returned], sync))
        self.values[out] = returned
        return out

    def opaque(self, module_name: str, inputs, output, placement: Placement) -> None:
        """Records the output of a module that isn't followed: call it in :meth:`paused`."""
        tensors = list(tensors_in(inputs))
        values = [self.value(t) for t in tensors]
        self._refuse_items(module_name, values)
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
