"""The schedule: what people write."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from deepsp.groups import Group, member_of
from deepsp.schedule import tree
from deepsp.schedule.attention import parallel_attention
from deepsp.schedule.check import problems
from deepsp.schedule.picking import Key
from deepsp.schedule.plan import Plan, tensor_of
from deepsp.schedule.registry import Effect, Follow, method_of
from deepsp.schedule.running import RUNNING
from deepsp.schedule.sync import Sync
from deepsp.weights.rows import ParameterShard, make_shard, shards_of


def create_schedule(model: nn.Module, group: Group = None) -> Schedule:
    """A schedule that makes ``model`` parallel over ``group``, module by module.

    It only records what is said; :func:`deepsp.build` does it. Every rank writes the same. ::

        sch = deepsp.create_schedule(model, group=mesh["tp"])
        sch["layers.*.mlp.up"].shard("weight", axis=0)
        sch["layers.*.mlp.down"].shard("weight", axis=1)
        sch["layers.*.mlp.down"].sync("fwd_post", "all_reduce")
        sch["layers.*.mlp"].sync("bwd_post", "all_reduce")
        model, optimizer = deepsp.build(sch, optimizer=functools.partial(AdamW, lr=1e-4))

    Raises:
        ValueError: ``model`` isn't a module, or is built already; ``group`` is no group.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; a module is right")
    member = member_of(group)
    for name, module in model.named_modules():
        if RUNNING in vars(module) or shards_of(module):
            raise ValueError(
                f"{name or 'model'} is built already, by another schedule; say everything in one"
            )
    return Schedule(Plan(model, member), [""])


class Schedule:
    """Modules of a model, and what can be said of them; the whole model's is the schedule itself.

    ``sch["layers.*.mlp"]``: a schedule of modules inside, by their names; shell patterns, of which
    each stands for one part of a dotted name. Steps are for each of the modules, and return the
    schedule, so that they can be written in a row.
    """

    def __init__(self, plan: Plan, names: list[str]):
        self.plan, self.names = plan, names

    def __getitem__(self, pattern: str) -> Schedule:
        if not isinstance(pattern, str):
            raise ValueError(f"{pattern!r}: the name of a module, or a pattern, is right")
        found: list[str] = []
        for name in self.names:
            found += self.plan.find(f"{name}.{pattern}" if name and pattern else name or pattern)
        return Schedule(self.plan, list(dict.fromkeys(found)))

    def __str__(self) -> str:
        return tree.text(self.plan, self.names)

    __repr__ = __str__

    # ---- steps

    def shard(
        self,
        names: str | Sequence[str],
        axis: int,
        parts: int | Sequence[int] = 1,
        unit: int | Sequence[int] = 1,
    ) -> Schedule:
        """Leaves each rank a part of parameters or buffers.

        What else follows (a bias, ``out_features``, what comes out) is said by the class's method:
        :func:`deepsp.register_shard_method`.

        Args:
            names: of the module's own, or "child.weight".
            axis: along which they are split, like ``torch.tensor_split``; may be negative.
            parts: of what a parameter consists along the axis, each of which is split by itself: a
                number of equal ones, 3 for q, k and v in one; or the sizes of each.
            unit: what stays together: rows of a head. One for all parts, or one for each: with
                shared key and value heads, all query heads of one for q.

        Raises:
            ValueError: no such parameter; it is sharded already; axis, parts or unit don't fit
                it or the group; nobody has said how such a module is sharded.
        """
        names = (names,) if isinstance(names, str) or not isinstance(names, Sequence) else names
        if not names:
            raise ValueError("names is empty; at least one parameter is right")
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"names is {list(names)}; names of parameters are right")
        if not isinstance(axis, int):
            raise ValueError(f"axis is {axis!r}; a dimension's number is right")
        for module in self._open():
            _shard(self.plan, module, tuple(names), axis, parts, unit)
        return self

    def sync(
        self,
        mode: str,
        sync_op_or_fn: str | Callable,
        axis: int | None = None,
        grad: str | None = None,
        tensor: Key = None,
        overlap: bool = False,
        reduce_dtype: torch.dtype | None = None,
    ) -> Schedule:
        """Lets the ranks communicate at the module's input or output.

        Args:
            mode: "fwd_pre": on an input; "fwd_post": on an output; "bwd_post": on an input's
                gradient.
            sync_op_or_fn: "all_gather", "reduce_scatter", "scatter" (along ``axis``),
                "all_reduce"; "seq_to_heads", "heads_to_seq" of [batch, sequence, heads, head_dim];
                with bwd_post "all_reduce". Or a function: a forward pre-hook, forward hook or full
                backward hook of the module, with the usual arguments.
            axis: which dimension; may be negative.
            grad: of all_gather and all_reduce: what the gradient of what comes out is on each rank.
                "replicated": the same everywhere, since what follows is; "partial": a summand,
                since what follows is shared out. None: found when the model is first called.
            tensor: which input or output, by position or name; None: the only tensor.
            overlap: at a linear layer, the transfer is hidden behind the product: all_gather before
                one with sharded output features, reduce_scatter after one with sharded input
                features.
            reduce_dtype: in which sums are made; None: the tensor's.

        Raises:
            ValueError: arguments that don't go together.
        """
        is_op = isinstance(sync_op_or_fn, str)
        for module in self._open():
            sync = Sync(
                module,
                mode,
                sync_op_or_fn if is_op else None,
                axis,
                grad,
                tensor,
                overlap,
                reduce_dtype,
                None if is_op else sync_op_or_fn,
            )
            self.plan.of(module).syncs.append(sync)
        return self

    def replace(self, module: nn.Module | Callable[[nn.Module], nn.Module]) -> Schedule:
        """Puts another module in the place of this one.

        Args:
            module: the new one; or a function that makes it from the old one, called for each.

        Raises:
            ValueError: it isn't a module; one for several places; steps were recorded for what
                would go.
        """
        names = self._open()
        if not callable(module):
            raise ValueError(
                f"module is {module!r}; a module, or a function that makes one from the old one, "
                "is right"
            )
        if isinstance(module, nn.Module) and len(names) > 1:
            raise ValueError(
                f"module is one for {len(names)} places; pass a function that makes one from each: "
                "lambda old: ..."
            )
        for name in names:
            new = module if isinstance(module, nn.Module) else module(self.plan.module(name))
            self._put(name, new)
        return self

    def parallelize_attention(self, *args, **kwargs) -> Schedule:
        """Puts a :class:`deepsp.SequenceParallelAttention` in the place of an attention layer; it
        works with the layer's own projections, whose names stay.

        See :func:`deepsp.schedule.attention.parallel_attention` for arguments and errors.
        """
        for name in self._open():
            old = self.plan.module(name)
            self._put(name, parallel_attention(name, old, self.plan.member, *args, **kwargs))
        return self

    def checkpoint(self, **options) -> Schedule:
        """Computes the module's forward again in backward (``torch.utils.checkpoint``), its syncs
        excepted.

        Args:
            options: of ``torch.utils.checkpoint.checkpoint``; ``use_reentrant`` is False if not
                given.
        """
        for name in self._open():
            steps = self.plan.of(name)
            if steps.checkpoint is not None:
                raise ValueError(f"{name or 'the model'} is checkpointed already")
            steps.checkpoint = {"use_reentrant": False, **options}
        return self

    def divide(self, *attributes: str, unit: int = 1) -> Schedule:
        """Makes whole numbers that the module computes with this rank's share of them:
        ``num_heads`` of an attention layer whose projections are sharded.

        Args:
            attributes: their names; each is split like ``torch.tensor_split``, as the heads are.
            unit: what stays together: head_dim, where an attribute counts channels and the heads
                aren't the same number on each rank.

        Raises:
            ValueError: no such number; fewer than ranks; unit doesn't divide it.
        """
        rank, size, _ = self.plan.member
        for name in self._open():
            module, steps = self.plan.module(name), self.plan.of(name)
            for attribute in attributes:
                value = getattr(module, attribute, None)
                where = f"{name or 'the model'}.{attribute}"
                if not isinstance(value, int) or isinstance(value, bool):
                    raise ValueError(f"{where} is {value!r}; a whole number can be divided")
                if attribute in steps.attributes:
                    raise ValueError(f"{where} is divided already")
                if unit < 1 or value % unit != 0 or value // unit < size:
                    raise ValueError(
                        f"{where} is {value}, in units of {unit}; a multiple of the unit, at least "
                        f"one for each of {size} ranks, is right"
                    )
                steps.attributes[attribute] = (
                    torch.ops.deepsp.token_split(value // unit, size)[rank] * unit
                )
        return self

    # ---- and then

    def check(self, *args, **kwargs) -> None:
        """Says what doesn't fit. Before it is built: what can be told without the model's inputs.
        After: with the model's inputs, follows a call of it, as its first call does.

        Raises:
            ValueError: something doesn't, named by module; or there are inputs before the model was
                built, or none after it.
        """
        running = self.plan.running
        if running is None:
            if args or kwargs:
                raise ValueError(
                    "inputs are given, but the model isn't built yet: without inputs, check() says "
                    "what can be told now"
                )
            found = problems(self.plan)
            if found:
                raise ValueError("\n".join(found))
            return
        if not args and not kwargs:
            raise ValueError("the model is built: pass inputs, with which a call is followed")
        running.follow(self.plan.model, args, kwargs)

    def _open(self) -> list[str]:
        if self.plan.running is not None:
            raise ValueError("the schedule is built already; steps come before deepsp.build")
        return self.names

    def _put(self, name: str, new: nn.Module) -> None:
        if not isinstance(new, nn.Module):
            raise ValueError(f"module: {type(new).__name__} for {name}; a module is right")
        if name == "":
            raise ValueError("the whole model can't be replaced; make a schedule of the other one")
        there = self.plan.below(name)
        if there:
            raise ValueError(
                f"{name} is replaced, but there are steps for {there[0]} already; replace it first"
            )
        for other in [n for n in self.plan.replaced if n.startswith(f"{name}.")]:
            del self.plan.replaced[other]
        self.plan.replaced[name] = new


def _shard(plan: Plan, name: str, names: tuple[str, ...], axis: int, parts, unit) -> None:
    if all("." in n for n in names):  # of a child
        child = names[0].rpartition(".")[0]
        if any(n.rpartition(".")[0] != child for n in names):
            raise ValueError(f"names is {list(names)}; parameters of one module are right")
        (name,) = plan.find(f"{name}.{child}" if name else child)
        names = tuple(n.rpartition(".")[2] for n in names)
    module = plan.module(name)
    where = name or "the model"
    tensors = {n: _tensor(where, module, n) for n in names}
    first = tensors[names[0]]
    if not -first.dim() <= axis < first.dim():
        make_shard(f"{where}.{names[0]}", first.shape, axis, parts, unit, plan.member)  # raises
    if name in plan.steps and set(names) <= plan.of(name).followers:
        for n, tensor in tensors.items():
            _confirm(plan, name, n, tensor, axis, parts, unit)
        return
    method = method_of(name, module)
    axis %= first.dim()
    try:
        effect = method(module, names, axis)
    except ValueError as error:
        why = _together(plan, name, method, names) or error
        raise ValueError(f"{where}: {why}") from None
    if not isinstance(effect, Effect):
        raise ValueError(
            f"{where}: the shard method of {type(module).__name__} returned a "
            f"{type(effect).__name__}; a deepsp.schedule.Effect is right"
        )
    parts = effect.parts if parts == 1 and effect.parts is not None else parts
    unit = effect.unit if unit == 1 and effect.unit is not None else unit
    wanted = {n: Follow(axis, parts, unit) for n in names if n not in effect.also}
    for n, how in effect.also.items():
        if not isinstance(how, Follow):
            how = Follow(how, parts, unit)
        owner, _, own = n.rpartition(".")
        if tensor_of(module.get_submodule(owner), own) is not None:
            wanted[n] = how
    made: list[tuple[str, str, ParameterShard]] = []
    for n, how in wanted.items():
        child, _, own = n.rpartition(".")
        owner = f"{name}.{child}".strip(".") if child else name
        full = f"{owner}.{own}" if owner else own
        if own in plan.of(owner).shards:
            raise ValueError(f"{full} is sharded already")
        shape = _tensor(owner, plan.module(owner), own).shape
        made.append(
            (owner, own, make_shard(full, shape, how.axis, how.parts, how.unit, plan.member))
        )
    steps = plan.of(name)
    merged = effect if steps.effect is None else steps.effect.merged(effect, where)
    attributes = _shrunk(where, module, effect.attributes, made[0][2])
    steps.effect = merged
    steps.attributes.update(attributes)
    for owner, own, shard in made:
        plan.of(owner).shards[own] = shard
        if owner != name or own not in names:
            plan.of(owner).followers.add(own)


def _together(plan: Plan, name: str, method, names: tuple[str, ...]) -> ValueError | None:
    """Why parameters can't be sharded in one step with those that were sharded before: a better
    reason than that they can't be sharded without them."""
    before = plan.of(name).shards if name in plan.steps else {}
    if not before or set(before) & set(names):
        return None
    try:
        method(plan.module(name), (*before, *names), next(iter(before.values())).axis)
    except ValueError as error:
        return error
    return None


def _confirm(plan: Plan, name: str, own: str, tensor: torch.Tensor, axis: int, parts, unit) -> None:
    """A parameter that follows another one is named by itself, too: ``shard("weight", 0)``, then
    ``shard("bias", 0)``.

    Raises:
        ValueError: it is to be sharded in another way than it follows.
    """
    steps = plan.of(name)
    have = steps.shards[own]
    if parts == 1:
        parts, unit = have.parts, have.units if unit == 1 else unit
    asked = make_shard(have.name, tensor.shape, axis, parts, unit, plan.member)
    if not have.alike(asked):
        raise ValueError(
            f"{have.name} is to be sharded along axis {asked.axis}, parts={list(asked.parts)}, "
            f"unit={list(asked.units)}; it follows what was sharded before: axis={have.axis}, "
            f"parts={list(have.parts)}, unit={list(have.units)}; leave it out"
        )
    steps.followers.discard(own)


def _tensor(where: str, module: nn.Module, name: str) -> torch.Tensor:
    tensor = tensor_of(module, name)
    if tensor is None:
        own = [
            n
            for own in (module._parameters, module._buffers)
            for n, v in own.items()
            if v is not None
        ]
        raise ValueError(
            f"{where}: {type(module).__name__} has no parameter or buffer {name!r}; it has {own}"
        )
    return tensor


def _shrunk(where: str, module, attributes, shard: ParameterShard) -> dict[str, int]:
    shrunk = {}
    for attribute in attributes:
        value = getattr(module, attribute)
        local, rest = divmod(value * shard.local, shard.shape[shard.axis])
        if rest != 0:
            raise ValueError(
                f"{where}: {attribute} is {value}, and {shard.local} of "
                f"{shard.shape[shard.axis]} of {shard.name} isn't a whole number of it; pass unit="
            )
        shrunk[attribute] = local
    return shrunk
