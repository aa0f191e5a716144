"""PyTorch Lightning's Trainer over sharded sequences."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from deepsp.integrations.door import (
    Groups,
    LocalBatch,
    Losses,
    check_size,
    local_batch,
    make_groups,
    replaced,
    subclass,
)
from deepsp.integrations.proof.prove import prove_step
from deepsp.integrations.proof.seen import Seen
from deepsp.ranks.agreement import first_difference
from deepsp.ranks.groups import member_of
from deepsp.ranks.randomness import align, randomness_of_a_model

_FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
"""The packages that Lightning comes in. Their classes are different ones."""


def sequence_parallel(strategy_class: type) -> type:
    """A subclass of Lightning's ``DDPStrategy`` for sequences that ranks share::

        from lightning.pytorch.strategies import DDPStrategy

        strategy = sequence_parallel(DDPStrategy)(sequence_parallel_size=2)
        trainer = Trainer(devices=4, strategy=strategy)

    Consecutive ranks form groups of ``sequence_parallel_size``. Lightning's samplers count groups,
    so the ranks of a group read the same batches. Each step of a module gets the local batch, as
    from :func:`deepsp.shard_batch`, with ``shift_labels`` in place of ``labels``; hooks before it
    get the full batch. The strategy has two attributes for models and losses, from
    ``configure_model`` on: ``sequence_group``, and ``sequence_lens``, the tokens of each rank in
    the current batch.

    DDP averages gradients over all ranks, so backward multiplies those of a loss by the group's
    size, unless it has ``average_gradients=True``. Random numbers in a step differ by rank.

    The subclass takes the arguments of ``strategy_class`` and two further ones:

    - ``sequence_parallel_size``: the number of ranks that share each batch, a divisor of the number
      of processes.
    - ``roles``: as in :func:`deepsp.shard_batch`.
    - ``prove``: whether the first step of training and of validation, and each on a batch with
      other entries, is proven by :func:`deepsp.prove`, without logging. "always": each step is.
      Steps of manual optimization aren't.

    Args:
        strategy_class: ``DDPStrategy`` of ``lightning.pytorch`` or ``pytorch_lightning``, the
            package of the ``Trainer``; or a subclass.

    Returns:
        The subclass.

    Raises:
        ValueError: it isn't such a class. The strategy raises if the size isn't a divisor; a step
            takes ``dataloader_iter``; backward gets a loss of this rank's tokens alone; a value
            that ``self.log(..., sync_dist=True)`` averages or sums differs within a group. Batches
            raise the errors of :func:`deepsp.shard_batch`.
    """
    packages = [p for p in _FABRIC if p in sys.modules]
    bases = tuple(sys.modules[p].strategies.DDPStrategy for p in packages)
    if not (isinstance(strategy_class, type) and issubclass(strategy_class, bases)):
        raise ValueError(
            "expected strategy_class to be DDPStrategy of lightning.pytorch or pytorch_lightning, "
            f"or a subclass, got {strategy_class!r}; pass the class, "
            "sequence_parallel(DDPStrategy)(sequence_parallel_size=2)"
        )
    if issubclass(strategy_class, _OfGroups):
        return strategy_class
    package = next(
        p for p, base in zip(packages, bases, strict=True) if issubclass(strategy_class, base)
    )
    attributes = {"__doc__": sequence_parallel.__doc__, "_sequence_fabric": _FABRIC[package]}
    return subclass(_OfGroups, strategy_class, **attributes)


class _OfGroups:
    """:func:`sequence_parallel` puts this class before a class of strategies."""

    _sequence_fabric: str
    sequence_groups: Groups | None = None
    sequence_lens: Sequence[int] = ()

    def __init__(
        self,
        *args: Any,
        sequence_parallel_size: int,
        roles: Mapping[str, str] | None = None,
        prove: bool | str = True,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.sequence_size, self._roles, self._prove = sequence_parallel_size, roles, prove

    @property
    def sequence_group(self) -> dist.ProcessGroup | None:
        return None if self.sequence_groups is None else self.sequence_groups.group

    def setup_environment(self) -> None:
        advice = ", and Trainer(devices=..., num_nodes=...) sets the number of processes"
        check_size(self.sequence_size, self.num_nodes * self.num_processes, advice=advice)
        super().setup_environment()
        if self.sequence_groups is None:
            self.sequence_groups = make_groups(self.sequence_size)
            self._member = self.sequence_groups.member
            self._sequence_seen = Seen(self._prove, self.sequence_groups.number)
            advice = (
                "return the loss of a model with register(group), or deepsp.cross_entropy(logits, "
                "batch['shift_labels'], group)"
            )
            self._losses = Losses(self._member, advice)

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        align(member_of(None))  # so that samplers and workers draw the same on all ranks

    # ---- batches

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        size = self.sequence_size
        groups = self.num_nodes * self.num_processes // size
        return {"num_replicas": groups, "rank": self.global_rank // size}

    def process_dataloader(self, dataloader: Any) -> Any:
        dataloader = super().process_dataloader(dataloader)
        # Lightning would seed workers by rank, and ranks of a group would read different batches.
        if int(os.environ.get("PL_SEED_WORKERS", 0)) and (
            getattr(dataloader, "worker_init_fn", dataloader) is None
        ):
            seeds = importlib.import_module(f"{self._sequence_fabric}.utilities.seed")
            group = self.global_rank // self.sequence_size
            dataloader.worker_init_fn = functools.partial(seeds.pl_worker_init_function, rank=group)
        return dataloader

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self._sequence_shard(super().batch_to_device(batch, *args, **kwargs))

    def _sequence_shard(self, batch: Any) -> LocalBatch:
        local, self.sequence_lens = local_batch(batch, self.sequence_group, roles=self._roles)
        local.sharded = self._sequence_shard
        if len(local["position_ids"]) == 1:
            # As many rows as the other tensors have: Lightning reads the batch's size off them.
            tokens = local["input_ids"] if "input_ids" in local else local["inputs_embeds"]
            local["position_ids"] = local["position_ids"].expand(len(tokens), -1)
        return local

    # ---- steps

    @contextlib.contextmanager
    def _sequence_step(self, batch: Any) -> Iterator[None]:
        if not isinstance(batch, LocalBatch):
            raise ValueError(
                "expected a step to get a batch that the strategy has sharded, got "
                f"{type(batch).__name__}; declare it as training_step(self, batch, batch_idx), "
                "without dataloader_iter"
            )
        with randomness_of_a_model(self._member, self.root_device):
            yield

    def _sequence_prove(self, step: Callable, name: str, batch: LocalBatch, *args: Any) -> None:
        """Proves a step, unless one on a batch with the same entries has been."""
        module = self.lightning_module
        if not self._sequence_seen.is_new((name, frozenset(batch))):
            return
        if name == "training_step" and not module.automatic_optimization:
            return

        def run(local: LocalBatch) -> Any:
            output = step(local, *args)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if isinstance(loss, Tensor) and loss.requires_grad:
                self._losses.averaged(loss).backward()
            return loss

        muted, lens = (lambda *args, **kwargs: None), self.sequence_lens
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(module, "log", muted))
            stack.enter_context(replaced(module, "log_dict", muted))
            # Also where gradients accumulate, and DDP doesn't average them yet.
            stack.enter_context(replaced(self.model, "require_backward_grad_sync", True))
            advice = "; prove=False leaves it out"
            prove_step(run, batch, self._member, member_of(None), advice, draws_alike=False)
        self.sequence_lens = lens

    def training_step(self, batch: Any, *args: Any) -> Any:
        with self._sequence_step(batch):
            self._sequence_prove(super().training_step, "training_step", batch, *args)
            return super().training_step(batch, *args)

    def validation_step(self, batch: Any, *args: Any) -> Any:
        with self._sequence_step(batch):
            self._sequence_prove(super().validation_step, "validation_step", batch, *args)
            return super().validation_step(batch, *args)

    def test_step(self, batch: Any, *args: Any) -> Any:
        with self._sequence_step(batch):
            return super().test_step(batch, *args)

    def predict_step(self, batch: Any, *args: Any) -> Any:
        with self._sequence_step(batch):
            return super().predict_step(batch, *args)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().backward(self._losses.averaged(closure_loss), *args, **kwargs)

    # ---- logging

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        # self.log passes a string, Lightning's own decisions a ReduceOp.
        counts = isinstance(reduce_op, str) and reduce_op in ("mean", "sum")
        if group is not None or not counts or not isinstance(tensor, Tensor):
            return super().reduce(tensor, group, reduce_op)
        if first_difference([("", tensor)], self._member) is not None:
            raise ValueError(
                "expected self.log(..., sync_dist=True) of a value that all ranks of a group have "
                f"alike, for its {reduce_op} over groups, got different ones; sum this rank's "
                "tokens by deepsp.collectives.all_reduce(x, group, grad='replicated') first, or "
                "log a rank's own number, such as a time, with reduce_fx='max'"
            )
        reduced = super().reduce(tensor, group, reduce_op)
        return reduced / self.sequence_size if reduce_op == "sum" else reduced
