"""What a built model does in a call: a dry run for each new kind of call, then its syncs."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deepsp import collectives
from deepsp.ranks import randomness
from deepsp.ranks.groups import Member, on_all_ranks
from deepsp.schedule import flow
from deepsp.schedule.around import Checkpointed, Drawing
from deepsp.schedule.flow import Findings, call_key
from deepsp.schedule.picking import pick_input, pick_output
from deepsp.schedule.placement import Placement, Shard
from deepsp.schedule.swap import swap
from deepsp.schedule.sync import Sync
from deepsp.weights.rows import ParameterShard, shards_of
from deepsp.weights.shard_gradient import mark

RUNNING = "_deepsp_running"


def recomputes() -> bool:
    """Whether a checkpoint recomputes its forward, in backward."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class Running:
    """The state of a built model, kept at its root."""

    def __init__(self, member: Member, syncs: list[Sync], outputs: str):
        self.member, self.syncs, self.outputs = member, syncs, outputs
        self.kinds: dict[object, Findings] = {}  # by kind of call
        self.now: Findings | None = None  # of the kind of the current call, or of the last one
        self.inside = False  # whether a call of the model is running
        self._first = None  # context of the model's own random numbers, in its first call

    # ---- a call of the model

    def __call__(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """The model's first forward pre-hook."""
        if flow.current() is not None:
            self._begin()
            return
        if torch.compiler.is_compiling():
            self._check_known()
            self.inside = True
            return
        if recomputes():
            return
        before = type(model)
        self.follow(model, args, kwargs)
        self._begin()
        self.inside = True
        if type(model) is not before and not isinstance(model, Checkpointed):
            # The root draws random numbers itself; Python looked up its forward before the swap.
            self._first = self.randomness(model)
            self._first.__enter__()

    def leave(self, model: nn.Module, args: tuple, output) -> None:
        """The model's last forward hook."""
        if flow.current() is None and not recomputes():
            self.inside = False
            if self._first is not None:
                first, self._first = self._first, None
                first.__exit__(None, None, None)

    def _begin(self) -> None:
        for sync in self.syncs:
            sync.begin()

    def follow(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """Runs the dry run, unless this kind of call is known.

        Raises:
            ValueError: the schedule doesn't fit what the model computes; ranks have different
                inputs, or compute different numbers from replicated tensors.
        """
        key = call_key(model, args, kwargs)
        if key not in self.kinds:
            placements: dict[int, Placement] = {
                id(getattr(module, name)): Shard(shard.axis, shard)
                for module in model.modules()
                for name, shard in shards_of(module).items()
            }
            flow.compare_inputs(args, kwargs, self.member)
            meetings = flow.Meetings(self.member)
            run = flow.Flow(model, placements, self.member, self.outputs, meetings)
            with meetings.together():
                kind = run.run(args, kwargs)
            run.alike.compare()
            for module in kind.streams:
                if kind.streams[module] == "sharded" or module in kind.nested:
                    module._deepsp_running = self
                    swap(module, Drawing, type(module).__name__, under=Checkpointed)
            self._check_streams(model, kind)
            self._check_partial(kind)
            self.kinds[key] = kind
        self.now = self.kinds[key]
        self.mark(model)
        self._hook_partial(model)

    def mark(self, model: nn.Module) -> None:
        """Marks each parameter as built by a schedule, with the group it is sharded over."""
        for module in model.modules():
            shards = shards_of(module)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    mark(parameter, shards[name].member if name in shards else None, built=True)

    def _hook_partial(self, model: nn.Module) -> None:
        """Hooks parameters whose gradients are partial, to sum them. Runs in every call: copies of
        the model and ``load_state_dict(assign=True)`` bring new parameters."""
        for name in {name for kind in self.kinds.values() for name in kind.partial}:
            parameter = model.get_parameter(name)
            hooks = (parameter._backward_hooks or {}).values()
            if parameter.requires_grad and not any(
                isinstance(hook, _SumGradient) and hook.running is self for hook in hooks
            ):
                parameter.register_hook(_SumGradient(self, name))

    def _check_partial(self, kind: Findings) -> None:
        """All kinds must agree on each parameter: its hook can't tell which call it is in."""
        for other in self.kinds.values():
            differ = (kind.partial & other.replicated) | (kind.replicated & other.partial)
            if differ:
                raise ValueError(
                    f"the gradient of {min(differ)} is Partial in one kind of call, and Replicate "
                    "in another; use one kind of call, or two parameters"
                )

    def _check_known(self) -> None:
        if self.now is None:
            raise ValueError(
                "expected a call of the model before it is compiled, got none; call the model, or "
                "sch.check(*inputs), once: that finds the gradients that are Partial, and compiled "
                "code can't"
            )

    # ---- a sync

    def apply(self, sync: Sync, x: Tensor) -> Tensor:
        """Runs a sync's collective on a tensor.

        Raises:
            ValueError: the collective doesn't fit the tensor.
        """
        dim = 0 if sync.op == "all_reduce" else sync.dim(x.dim())
        following = flow.current()
        if following is not None:
            sizes = functools.partial(self.find_sizes, sync, x, dim, following.placement(x))
            # The dry run checks placements before it calls the collective.
            return following.sync(
                sync, x, lambda: sync.run(x, dim, sizes(), "replicated", self.member)
            )
        return sync.run(x, dim, self.sizes(sync, x, dim), self.grad_of(sync), self.member)

    def grad_of(self, sync: Sync) -> str:
        """The gradient of a sync's output on each rank: "replicated" or "partial"."""
        if not sync.asks_grad:
            return sync.grad or "replicated"
        if recomputes():
            kinds = list(self.kinds.values())
        else:  # outside a call of the model, another use of the output may follow
            inside = self.inside or torch.compiler.is_compiling()
            kinds = [self.now] if self.now is not None and inside else []
        grads = {kind.grads[sync] for kind in kinds if sync in kind.grads}
        if len(grads) == 1:
            return grads.pop()
        if not torch.is_grad_enabled():
            return "replicated"  # there is no backward
        raise ValueError(
            f"{sync.where}: grad isn't given, and "
            + (
                "it differs between the calls of the model"
                if grads
                else "it can't be found, since the model itself was not called"
            )
            + ". Pass grad='replicated' if the gradient of its output is the same on every rank, "
            "or grad='partial' if the ranks' gradients are to be summed"
        )

    # ---- random numbers

    def randomness(self, module: nn.Module):
        """The context in which a module draws random numbers. It looks at all kinds of calls: in
        backward, a checkpoint may recompute an earlier call."""
        if any(module in kind.nested for kind in self.kinds.values()):
            return randomness.common_randomness(type(module).__name__)
        if any(kind.streams.get(module) == "sharded" for kind in self.kinds.values()):
            return randomness.sharded_randomness(self.member)
        return contextlib.nullcontext()

    def _check_streams(self, model: nn.Module, kind: Findings) -> None:
        names = {module: name for name, module in model.named_modules()}
        for module, stream in kind.streams.items():
            for other in self.kinds.values():
                if other.streams.get(module, stream) != stream:
                    raise ValueError(
                        f"{names[module] or 'the model'} draws random numbers for Shard tensors in "
                        "one kind of call, and for Replicate ones in another; use two modules"
                    )

    # ---- sizes of parts

    def sizes(self, sync: Sync, x: Tensor, dim: int) -> list[int] | None:
        """Length along ``dim`` on each rank, for a sync that gathers."""
        if sync.op not in ("all_gather", "seq_to_heads", "heads_to_seq"):
            return None
        origin = self.now.origins.get(sync) if self.now is not None else None
        sizes = _sizes_of(origin)
        if sizes is None:
            return self._exchange_sizes(x, dim)
        rank = self.member[0]
        if not torch.compiler.is_compiling() and sizes[rank] != x.size(dim):
            raise ValueError(
                f"{sync.where}: expected length {sizes[rank]} in dimension {dim} on rank {rank}, "
                f"since the split before gave the ranks {sizes}, and the first call of this kind "
                f"kept these lengths, got {x.size(dim)}; keep them in every call"
            )
        return sizes

    def find_sizes(self, sync: Sync, x: Tensor, dim: int, placement) -> list[int] | None:
        if sync.op not in ("all_gather", "seq_to_heads", "heads_to_seq"):
            return None
        sizes = self._exchange_sizes(x, dim)
        origin = getattr(placement, "origin", None)
        before = getattr(origin, "sizes", None)
        if before is None or 0 in before or sizes != list(before):
            origin = None
        if isinstance(origin, Sync) and len(origin.totals) > 1:
            origin = None
        origins = flow.current().findings.origins
        if origins.setdefault(sync, origin) is not origin:
            origins[sync] = None  # one sync gathers tensors of different origins
        return sizes

    def _exchange_sizes(self, x: Tensor, dim: int) -> list[int]:
        return [sizes[0] for sizes in on_all_ranks([x.size(dim)], self.member, x.device)]


def _sizes_of(origin: object | None) -> list[int] | None:
    """The sizes of an origin's last split. None if it has split several lengths, in this call or,
    for a recomputing checkpoint, ever: the gathered tensor may then come from an earlier split. The
    same on every rank."""
    if isinstance(origin, Sync):
        if torch.compiler.is_compiling():
            return origin.sizes
        totals = origin.ever if recomputes() else origin.totals
        return origin.sizes if len(totals) == 1 else None
    return origin.sizes if isinstance(origin, ParameterShard) else None


class _SumGradient:
    """A hook that sums a parameter's partial gradient over the ranks."""

    def __init__(self, running: Running, name: str):
        self.running, self.name = running, name

    def __call__(self, gradient: Tensor) -> Tensor | None:
        running = self.running
        narrow = gradient.dtype in (torch.bfloat16, torch.float16)
        return collectives.all_reduce(
            gradient,
            running.member,
            grad="replicated",
            reduce_dtype=torch.float32 if narrow else None,
        )


# ---- hooks of modules


@dataclass
class SyncInput:
    """A forward pre-hook: a collective on one input, or, for bwd_post, on its gradient."""

    running: Running
    sync: Sync

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict):
        x, put = pick_input(module, args, kwargs, self.sync.tensor, self.sync.where)
        return put(self.running.apply(self.sync, x))


@dataclass
class SyncOutput:
    """A forward hook: a collective on one output; then adds the parameter that counts once."""

    running: Running
    sync: Sync
    add: tuple[str, Sync] | None = None  # the parameter's name, and the sync that scatters it

    def __call__(self, module: nn.Module, args: tuple, output):
        x, put = pick_output(output, self.sync.tensor, self.sync.where)
        out = self.running.apply(self.sync, x)
        if self.add is not None:
            out = add_after(self.running, self.sync, module, self.add, out)
        return put(out)


def add_after(running: Running, sync: Sync, module: nn.Module, add: tuple[str, Sync], out: Tensor):
    """``out``, reduced by ``sync``, plus a parameter [features]: the full one, or this rank's part
    if the features were scattered."""
    name, scatter = add
    parameter = module.get_parameter(name)
    if sync.op == "reduce_scatter" and sync.dim(out.dim()) == out.dim() - 1:
        parameter = running.apply(scatter, parameter)
    return out + parameter.to(out.dtype)
