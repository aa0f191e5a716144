"""What stands in for a model's cache during one call of an attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from deepsp.ranks.groups import Member
from deepsp.sequence.attention.parts import gather_pair


class StandIn:
    """A cache whose updates gather over the ranks.

    Args:
        module: the attention.
        lens: the number of tokens of each rank.
        member: the sequence group; None: in a check's dry run, in which nothing is sent.
    """

    def __init__(self, module: nn.Module, lens: list[int], member: Member | None):
        self.module, self.lens, self.member = module, lens, member
        self._replaced: list[tuple[dict[str, Any], str, Callable | None]] = []

    @property
    def first(self) -> int:
        """The place of this rank's first token."""
        return 0 if self.member is None else sum(self.lens[: self.member[0]])

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *_, **__) -> tuple[Tensor, Tensor]:
        """Gather k and v, [B, H, S_r, D] to [B, H, S, D]."""
        return (k, v) if self.member is None else gather_pair(k, v, 2, self.lens, self.member)

    def enter(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Begin the call. Return the arguments that change."""
        return {}

    def leave(self) -> None:
        """End the call: modules get their own methods back."""
        while self._replaced:
            attributes, name, method = self._replaced.pop()
            attributes.pop(name, None)
            if method is not None:
                attributes[name] = method

    def replace(self, module: nn.Module, name: str, method: Callable) -> None:
        """Give a module another method until the call ends. A copy of the model made after the
        call has its original method."""
        attributes = vars(module)
        self._replaced.append((attributes, name, attributes.get(name)))
        attributes[name] = method
