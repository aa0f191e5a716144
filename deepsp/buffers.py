"""The pool of CPU buffers that exchanges use: what is idle is kept for the next one, up to a limit.

(On a GPU, PyTorch's caching allocator does this.)
"""

import torch


def idle_bytes() -> int:
    """Bytes that the pool keeps and nobody uses at the moment."""
    return torch.ops.deepsp.pool_idle_bytes()


def limit() -> int:
    """The most bytes that may lie idle (2 GiB unless set)."""
    return torch.ops.deepsp.pool_limit()


def set_limit(limit_bytes: int) -> None:
    """Sets the most bytes that may lie idle in this process; what is over is freed at once.

    Raises:
        ValueError: a negative number.
    """
    torch.ops.deepsp.pool_set_limit(limit_bytes)


def clear() -> None:
    """Frees everything that lies idle."""
    torch.ops.deepsp.pool_clear()
