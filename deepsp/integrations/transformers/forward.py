"""What is known of the models that use deepsp's attention, and of the call of one that runs."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from deepsp.integrations.transformers.own_loss import OwnLoss
from deepsp.ranks.groups import Member

if TYPE_CHECKING:
    from deepsp.data.documents import Deal
    from deepsp.data.fold import Fold
    from deepsp.integrations.transformers.masks import Masks
    from deepsp.integrations.transformers.mixers import Sequence
    from deepsp.integrations.transformers.multimodal import Door
    from deepsp.integrations.transformers.rows import FullRows
    from deepsp.integrations.transformers.stand_in import StandIn


@dataclass(frozen=True)
class Registration:
    """The arguments of :func:`register`, under whose ``name`` a model's attention is deepsp's."""

    name: str
    member: Member | None
    """None: the default group at the time of a forward."""
    loss: OwnLoss
    """What a model returns for ``shift_labels``."""
    chunks: int
    core: str
    kv_chunk: int | None
    query_parts: int | str
    state: str | None
    deal_images: bool
    required: frozenset[str]
    """Further arguments of a call, of the full sequence, that ``core`` requires."""


FULL_ROWS = "_deepsp_full_rows"
"""The attribute of a model that takes full rows, with how (:class:`FullRows`)."""


def full_rows_of(model: nn.Module) -> FullRows | None:
    """How a model takes full rows, if it does."""
    return getattr(model, FULL_ROWS, None)


def take_local_rows(model: nn.Module) -> None:
    """Makes a model take a rank's rows again, if an earlier trainer has made it take full ones."""
    for module in model.modules():
        if (rows := vars(module).pop(FULL_ROWS, None)) is not None:
            for handle in rows.handles:
                handle.remove()


REGISTRATIONS: dict[str, Registration] = {}
"""By name; the same name again replaces the earlier one."""


class Forward:
    """The call of a model. A call inside of it, of a model that it contains, has a copy."""

    registration: Registration | None = None
    loss: OwnLoss | None = None
    prepared: nn.Module | None = None
    """The model whose arguments are prepared already, when it is called."""
    is_check: bool = False
    """Whether it is a check's dry run, in which nothing may be sent."""
    deal: Deal | Fold | None = None
    """How documents were dealt out, or folded into a tree."""
    has_mixers: bool = False
    """Whether the model has recurrent layers."""
    mask: Masks | None = None
    """A mask that an outer model has passed to this one, which makes no other."""
    positions: Tensor | None = None
    """The model's position_ids, if it has recurrent layers or is a decoder."""
    real_rows: Tensor | None = None
    """[B]: the rows whose tokens count in the loss that balances experts; None: all."""
    has_own_positions: bool = False
    """Whether the model itself has made the positions, of the full sequence."""
    door: Door | None = None
    """What the decoder of a vision-language model is to get, until it runs."""

    def __init__(self, outer: Forward | None = None, **changes: Any):
        if outer is not None:
            self.__dict__.update(outer.__dict__)
        self.__dict__.update(changes)


class _Running(threading.local):
    def __init__(self):
        self.forward = Forward()
        self.mixers: list[tuple[nn.Module, Sequence | None]] = []
        """The recurrent layers that run, also in a checkpoint's second forward, which is in no
        call of the model; None: in a check."""
        self.caches: list[StandIn] = []
        """Likewise the stand-ins for the caches of attentions that run."""


running = _Running()
"""This thread's state."""


class calling:
    """A context in which a call runs: that of the thread, with changes, or a call of its own. Not a
    generator, which Dynamo couldn't compile."""

    def __init__(self, inherits: bool = True, **changes: Any):
        self.inherits, self.changes = inherits, changes

    def __enter__(self) -> Forward:
        self.before = running.forward
        running.forward = Forward(self.before if self.inherits else None, **self.changes)
        return running.forward

    def __exit__(self, *_) -> None:
        running.forward = self.before
