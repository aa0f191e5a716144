"""How a group sends its blocks: through memory that ranks of a machine share, or as messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.distributed_c10d import _resolve_process_group

from deepsp.ranks.groups import Group, member_of

Use = Literal["auto", "mapped", "messages"]


@dataclass(frozen=True)
class Transport:
    """What :func:`transport` returns. ``print`` shows it.

    Args:
        machines: the ranks of the group, by machine: ranks of one tuple write straight into each
            other's memory; all other pairs send messages.
        reasons: for each rank, why it shares memory with none; empty if it does.
        memory: what ranks of a machine share: "shared memory", or GPUs "symmetric memory".
    """

    machines: tuple[tuple[int, ...], ...]
    reasons: tuple[str, ...]
    memory: str = "shared memory"

    def mapped(self, rank: int, other: int) -> bool:
        """Whether two ranks write into each other's memory.

        Args:
            rank: a rank of the group.
            other: another one.
        """
        return any(rank in ranks and other in ranks for ranks in self.machines)

    def __str__(self) -> str:
        lines = []
        for ranks in self.machines:
            if len(ranks) > 1:
                lines.append(f"ranks {', '.join(map(str, ranks))}: {self.memory}")
            else:
                lines.append(f"rank {ranks[0]}: messages, since {self.reasons[ranks[0]]}")
        if len(self.machines) > 1 and any(len(ranks) > 1 for ranks in self.machines):
            lines.append("all other pairs: messages")
        return "\n".join(lines)


def transport(
    group: Group = None, *, use: Use | None = None, device: torch.device | str | None = None
) -> Transport:
    """Returns how ``group`` sends its blocks, and lets you choose it. All ranks of the group make
    this call.

    A group's first exchange finds out which ranks share memory; the others send messages through
    the group's backend. This function does so earlier.

    Args:
        group: process group, 1-D or 2-D device mesh, or None for the default group.
        use: ``"auto"``: shared memory between CPU ranks that reach each other's, else messages;
            between GPUs, messages. ``"mapped"``: shared memory between all ranks, of GPUs
            PyTorch's symmetric memory. ``"messages"``: messages only. None: what the group uses
            already, else the environment variable ``DEEPSP_TRANSPORT`` (``"auto"`` unless set).
        device: the kind of tensors: CPU and CUDA tensors have separate transports. None: the CPU if
            the group has a backend for it, else CUDA.

    Raises:
        ValueError: ``use`` is none of these, differs between ranks, or differs from what the group
            has used since its first exchange; or it is ``"mapped"``, and two ranks don't reach each
            other's memory (the message says which, and why).
    """
    rank, size, name = member_of(group)
    if device is None:
        kinds = {kind.type for kind in _resolve_process_group(name)._device_types}
        device = "cuda" if "cuda" in kinds and "cpu" not in kinds else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    machine, reasons = torch.ops.deepsp._transport(rank, size, name, use, device)
    machines = [
        tuple(p for p in range(size) if machine[p] == first) for first in sorted({*machine})
    ]
    memory = "symmetric memory" if device.type == "cuda" else "shared memory"
    return Transport(tuple(machines), tuple(reasons), memory)
