"""A module around experts, each of which one rank computes for the tokens of all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from deepsp.ranks.agreement import compare_calls
from deepsp.ranks.groups import Group, member_of, on_all_ranks

DEALT = "_deepsp_experts"
"""The attribute of a module whose experts are sharded."""


class DistributedExperts(nn.Module):
    """Experts of a mixture, dealt out over the ranks of the sequence group: each rank computes some
    experts for the tokens of all ranks. (The idea is GShard's expert parallelism, arXiv:2006.16668,
    here over the ranks that hold the tokens anyway.)

    Args:
        function: called with the tokens of this rank's experts, [N, E], ordered by the rank that
            they come from, and the expert of each, int64 [N], counted from this rank's first one;
            returns [N, E']. N may be 0.
        num_experts: of all ranks; they are split like ``torch.tensor_split``, so this rank holds
            those of :attr:`experts`.
        group: the sequence group.

    Raises:
        ValueError: there are fewer experts than ranks; when called, arguments that don't fit each
            other, or what ``function`` returns.

    The gradients of a rank's experts are full: they saw the tokens of all ranks. So leave their
    parameters out of :func:`deepsp.sync_gradients`. Each call exchanges how many tokens each expert
    gets (the host waits for that), then the tokens, and what became of them. The first call
    compares shapes across the group.
    """

    def __init__(
        self, function: Callable[[Tensor, Tensor], Tensor], num_experts: int, group: Group = None
    ):
        super().__init__()
        rank, size, _ = self.member = member_of(group)
        if num_experts < size:
            raise ValueError(
                f"expected at least as many experts as ranks of the group ({size}), got "
                f"{num_experts}; use a smaller group"
            )
        self.function = function
        self.num_experts = num_experts
        lens = torch.ops.deepsp.token_split(num_experts, size)
        self._borders = [sum(lens[:r]) for r in range(size + 1)]
        self.experts = range(self._borders[rank], self._borders[rank + 1])
        """The experts that this rank computes."""
        self._compared = False

    def extra_repr(self) -> str:
        rank, size, _ = self.member
        return f"{self.num_experts} experts, rank={rank}, size={size}, experts={self.experts}"

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """What the chosen experts make of this rank's tokens, weighted and summed.

        Args:
            hidden: [T, E], this rank's tokens; T may be 0, and differ between ranks.
            chosen: int64 [T, K], the experts of each token, counted over all ranks.
            weights: [T, K].

        Returns:
            [T, E'].

        Raises:
            ValueError: arguments that don't fit each other, or what ``function`` returns.
        """
        if (
            hidden.dim() != 2
            or chosen.shape != weights.shape
            or chosen.shape[:1] != hidden.shape[:1]
        ):
            raise ValueError(
                "expected hidden of shape [T, E], chosen and weights of shape [T, K], got "
                f"{tuple(hidden.shape)}, {tuple(chosen.shape)} and {tuple(weights.shape)}"
            )
        if not self._compared:
            self._compared = compare_calls(
                "DistributedExperts",
                self.member,
                hidden,
                num_experts=self.num_experts,
                width=hidden.size(1),
                dtype=hidden.dtype,
                chosen=chosen.size(1),
                gradients=[hidden.requires_grad, weights.requires_grad],
            )
        rank, size, name = self.member
        each = chosen.size(1)
        counted = torch.bincount(chosen.flatten(), minlength=self.num_experts).tolist()
        if len(counted) != self.num_experts:
            raise ValueError(
                f"expected chosen to be experts below {self.num_experts}, got {len(counted) - 1}"
            )
        everyone = on_all_ranks(counted, self.member, hidden.device)
        counts = [
            sum(of_rank[a:b])
            for of_rank in everyone
            for a, b in zip(self._borders, self._borders[1:], strict=False)
        ]
        order = chosen.flatten().argsort(stable=True)
        sent = hidden.index_select(0, order // each)
        received = torch.ops.deepsp.expert_dispatch(sent, counts, rank, name)
        of_rows = torch.arange(len(self.experts), device=hidden.device).repeat(size)
        mine = [n for row in everyone for n in row[self.experts.start : self.experts.stop]]
        expert = of_rows.repeat_interleave(torch.tensor(mine, device=hidden.device))
        output = self.function(received, expert)
        if (
            not isinstance(output, Tensor)
            or output.dim() != 2
            or output.size(0) != received.size(0)
        ):
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"expected function to return [{received.size(0)}, E'], a row for each token that "
                f"it got, got {got}"
            )
        back = torch.ops.deepsp.expert_combine(output, counts, rank, name)
        by_token = back.index_select(0, order.argsort()).view(hidden.size(0), each, output.size(1))
        # A product of matrices makes no [T, K, E'] in forward or backward. Autocast would round it.
        dtype = torch.promote_types(by_token.dtype, weights.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            return (weights.to(dtype).unsqueeze(1) @ by_token.to(dtype)).squeeze(1)
