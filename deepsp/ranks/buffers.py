"""The pool of CPU buffers for exchanges. It keeps idle buffers for the next exchange, up to a limit
in bytes. (On a GPU, PyTorch's caching allocator does this.)
"""

import torch


def idle_bytes() -> int:
    """The number of idle bytes that the pool keeps."""
    return torch.ops.deepsp._pool_idle_bytes()


def limit() -> int:
    """The largest number of idle bytes that the pool keeps. Unless set, 2 GiB divided by the ranks
    that this machine runs of a group."""
    return torch.ops.deepsp._pool_limit()


def set_limit(limit_bytes: int) -> None:
    """Sets the largest number of idle bytes that the pool keeps in this process, and frees the rest
    at once.

    Args:
        limit_bytes: the limit in bytes, >= 0.

    Raises:
        ValueError: ``limit_bytes`` is negative.
    """
    torch.ops.deepsp._pool_set_limit(limit_bytes)


def clear() -> None:
    """Frees all idle buffers of the pool."""
    torch.ops.deepsp._pool_clear()
