"""The schedule: what users write. A schedule apart from the model is slapo's idea (Chen et al.,
2023, arXiv:2302.08005)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from deepsp.ranks.groups import Group, member_of
from deepsp.schedule import tree
from deepsp.schedule.attention import parallel_attention
from deepsp.schedule.check import problems
from deepsp.schedule.picking import Key
from deepsp.schedule.plan import Plan
from deepsp.schedule.running import RUNNING
from deepsp.schedule.shard import shard
from deepsp.schedule.sync import Sync
from deepsp.weights.rows import shards_of


def create_schedule(model: nn.Module, group: Group = None) -> Schedule:
    """A schedule that makes ``model`` parallel over ``group``, module by module.

    It only records steps; :func:`deepsp.build` applies them. Every rank writes the same. The idea
    is slapo's (Chen et al., 2023, arXiv:2302.08005). ::

        sch = deepsp.create_schedule(model, group=mesh["tp"])
        sch["layers.*.mlp.up"].shard("weight", axis=0)
        sch["layers.*.mlp.down"].shard("weight", axis=1)
        sch["layers.*.mlp.down"].sync("fwd_post", "all_reduce")
        sch["layers.*.mlp"].sync("bwd_post", "all_reduce")
        model, optimizer = deepsp.build(sch, optimizer=functools.partial(AdamW, lr=1e-4))

    Args:
        model: the module to make parallel. It may be on the meta device.
        group: the ranks.

    Returns:
        The :class:`deepsp.schedule.Schedule` of the model.

    Raises:
        ValueError: ``model`` isn't a module, or is built already; this process isn't in ``group``.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected model to be a module, got {type(model).__name__}")
    member = member_of(group)
    for name, module in model.named_modules():
        if RUNNING in vars(module) or shards_of(module):
            raise ValueError(
                f"{name or 'model'} is built already, by another schedule; put all steps in one "
                "schedule"
            )
    return Schedule(Plan(model, member), [""])


class Schedule:
    """The steps for some modules of a model; for the model itself in the schedule you create.

    ``sch["layers.*.mlp"]`` is a schedule of the modules with such names: each part of the dotted
    name is a shell pattern. A step applies to each of the modules and returns the schedule, so that
    steps can be chained. Printed, a schedule is a tree of its modules and steps.

    Args:
        plan: the recorded steps, by module.
        names: the modules.
    """

    def __init__(self, plan: Plan, names: list[str]):
        self.plan, self.names = plan, names

    def __getitem__(self, pattern: str) -> Schedule:
        if not isinstance(pattern, str):
            raise ValueError(f"expected the name of a module, or a pattern, got {pattern!r}")
        names: list[str] = []
        for name in self.names:
            names += self.plan.find(f"{name}.{pattern}" if name and pattern else name or pattern)
        return Schedule(self.plan, list(dict.fromkeys(names)))

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
        """Shards parameters or buffers: each rank keeps its local part.

        The shard method of the module's class says what follows (a bias, ``out_features``, the
        placement of the output): :func:`deepsp.register_shard_method`.

        Args:
            names: the module's own, or "child.weight".
            axis: the dimension along which they are split, like ``torch.tensor_split``; may be
                negative.
            parts: the parts of a parameter along the axis, each split on its own: a number of equal
                parts, such as 3 for fused q, k and v, or the size of each.
            unit: the number of rows that stay together, such as head_dim. One for all parts, or one
                for each: with grouped kv heads, q's unit is all query heads of a kv head.

        Returns:
            The schedule.

        Raises:
            ValueError: no such parameter; it is sharded already; axis, parts or unit don't fit it
                or the group; no shard method is registered for the module.
        """
        names = (names,) if isinstance(names, str) or not isinstance(names, Sequence) else names
        if not names:
            raise ValueError("expected names to have at least one parameter, got none")
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"expected names to be strings, got {list(names)}")
        if not isinstance(axis, int):
            raise ValueError(f"expected axis to be an int, got {axis!r}")
        for module in self._open():
            shard(self.plan, module, tuple(names), axis, parts, unit)
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
        """Adds a collective at the module's input or output.

        Args:
            mode: "fwd_pre": on an input. "fwd_post": on an output. "bwd_post": on an input's
                gradient.
            sync_op_or_fn: "all_gather", "reduce_scatter" or "scatter" (along ``axis``),
                "all_reduce"; "seq_to_heads" or "heads_to_seq" of [batch, sequence, heads,
                head_dim]; with bwd_post "all_reduce". Or a function: a forward pre-hook, forward
                hook or full backward hook of the module, with the usual arguments.
            axis: the dimension; may be negative.
            grad: for all_gather, all_reduce and scatter: the placement of the gradient of the full
                tensor. "replicated": the same on every rank, since replicated ops follow.
                "partial": a term of a sum, since sharded ops follow. None: found when the model is
                first called.
            tensor: which input or output, by position or name; None: the only tensor.
            overlap: at a linear layer, overlaps the collective with the matrix product: all_gather
                before one with sharded output features, reduce_scatter after one with sharded input
                features.
            reduce_dtype: the dtype in which sums are taken; None: float32 for 16-bit floats, else
                the tensor's.

        Returns:
            The schedule.

        Raises:
            ValueError: arguments that don't fit each other.
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
        """Replaces the module.

        Args:
            module: the new module; or a function that makes it from the old one, called for each.

        Returns:
            The schedule.

        Raises:
            ValueError: it isn't a module; one module for several places; there are steps for
                modules that would be replaced.
        """
        names = self._open()
        if not callable(module):
            raise ValueError(
                "expected module to be a module, or a function that makes one from the old one, "
                f"got {module!r}"
            )
        if isinstance(module, nn.Module) and len(names) > 1:
            raise ValueError(
                f"expected a function for {len(names)} places, got one module; pass a function "
                "that makes a module from each old one, lambda old: ..."
            )
        for name in names:
            new = module if isinstance(module, nn.Module) else module(self.plan.module(name))
            self._put(name, new)
        return self

    def parallelize_attention(self, *args, **kwargs) -> Schedule:
        """Replaces an attention layer by a :class:`deepsp.SequenceParallelAttention` that uses the
        layer's own projections, whose names stay.

        Args:
            args: those of :func:`deepsp.schedule.attention.parallel_attention` from ``q`` on.
            kwargs: the same by name.

        Returns:
            The schedule.

        Raises:
            ValueError: projections or the number of heads weren't found, or don't fit.
        """
        for name in self._open():
            old = self.plan.module(name)
            self._put(name, parallel_attention(name, old, self.plan.member, *args, **kwargs))
        return self

    def checkpoint(self, **options) -> Schedule:
        """Recomputes the module's forward in backward (``torch.utils.checkpoint``), except for its
        syncs.

        Args:
            options: those of ``torch.utils.checkpoint.checkpoint``; ``use_reentrant`` is False if
                not given.

        Returns:
            The schedule.

        Raises:
            ValueError: the module is checkpointed already.
        """
        for name in self._open():
            steps = self.plan.of(name)
            if steps.checkpoint is not None:
                raise ValueError(f"{name or 'the model'} is checkpointed already")
            steps.checkpoint = {"use_reentrant": False, **options}
        return self

    def divide(self, *attributes: str, unit: int = 1) -> Schedule:
        """Replaces int attributes of the module by this rank's part: ``num_heads`` of an attention
        layer whose projections are sharded.

        Args:
            attributes: their names; each is split like ``torch.tensor_split``, as the heads are.
            unit: the number that stays together: head_dim, if an attribute counts channels and the
                ranks have different numbers of heads.

        Returns:
            The schedule.

        Raises:
            ValueError: an attribute isn't an int, is less than one unit for each rank, or isn't a
                multiple of ``unit``.
        """
        rank, size, _ = self.plan.member
        for name in self._open():
            module, steps = self.plan.module(name), self.plan.of(name)
            for attribute in attributes:
                value = getattr(module, attribute, None)
                where = f"{name or 'the model'}.{attribute}"
                if not isinstance(value, int) or isinstance(value, bool):
                    raise ValueError(f"expected {where} to be an int, got {value!r}")
                if attribute in steps.attributes:
                    raise ValueError(f"{where} is divided already")
                if unit < 1 or value % unit != 0 or value // unit < size:
                    raise ValueError(
                        f"expected {where} to be a multiple of unit ({unit}), with at least one "
                        f"for each of the {size} ranks, got {value}"
                    )
                steps.attributes[attribute] = (
                    torch.ops.deepsp.token_split(value // unit, size)[rank] * unit
                )
        return self

    # ---- checks

    def check(self, *args, **kwargs) -> None:
        """Checks the schedule. Before it is built: reports what can be found without inputs. After:
        makes the dry run of a call.

        Args:
            args: the model's inputs, once it is built.
            kwargs: its inputs by name.

        Raises:
            ValueError: a mistake, named by module; inputs before the model was built, or none after
                it.
        """
        running = self.plan.running
        if running is None:
            if args or kwargs:
                raise ValueError(
                    "expected no inputs, since the model isn't built yet; call check() without "
                    "inputs for what can be found now"
                )
            mistakes = problems(self.plan)
            if mistakes:
                raise ValueError("\n".join(mistakes))
            return
        if not args and not kwargs:
            raise ValueError("expected inputs, since the model is built; pass those of a call")
        running.follow(self.plan.model, args, kwargs)

    def _open(self) -> list[str]:
        if self.plan.running is not None:
            raise ValueError("the schedule is built already; add steps before deepsp.build")
        return self.names

    def _put(self, name: str, new: nn.Module) -> None:
        if not isinstance(new, nn.Module):
            raise ValueError(
                f"expected module to make a module for {name}, got {type(new).__name__}"
            )
        if name == "":
            raise ValueError(
                "the model itself can't be replaced; make a schedule of the new model instead"
            )
        steps = self.plan.below(name)
        if steps:
            raise ValueError(
                f"expected {name} to be replaced before its steps, but there are steps for "
                f"{steps[0]} already; replace it first"
            )
        for other in [n for n in self.plan.replaced if n.startswith(f"{name}.")]:
            del self.plan.replaced[other]
        self.plan.replaced[name] = new
