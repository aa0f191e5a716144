"""deepsp's attention layer in place of a model's own."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from torch import Tensor, nn

from deepsp.ranks.groups import Member
from deepsp.schedule import flow
from deepsp.schedule.placement import Shard
from deepsp.schedule.running import Running
from deepsp.schedule.sync import Sync
from deepsp.sequence.attention.layer import SequenceParallelAttention

_NAMES = {
    "q": ("q_proj", "query", "q", "to_q", "wq", "q_lin"),
    "k": ("k_proj", "key", "k", "to_k", "wk", "k_lin"),
    "v": ("v_proj", "value", "v", "to_v", "wv", "v_lin"),
    "o": ("o_proj", "out_proj", "to_out", "wo", "out", "dense", "out_lin"),
}
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")


class ScheduledAttention(SequenceParallelAttention):
    """The layer, with arguments that the model's code doesn't pass, and with the number of tokens
    that the schedule's split gave each rank."""

    _deepsp_closed = True  # the dry run doesn't look inside

    def build(self, name: str, running: Running) -> None:
        self._deepsp_running = running
        self._deepsp_sync = Sync(name, "fwd_pre", "seq_to_heads")  # finds the sizes

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        """As :meth:`deepsp.SequenceParallelAttention.forward`."""
        kwargs = {**self._deepsp_arguments, **kwargs}
        running, sync = self._deepsp_running, self._deepsp_sync
        following = flow.current()
        if following is None:
            kwargs.setdefault("seq_lens", running.sizes(sync, x, 1))
            return super().forward(x, *args, **kwargs)
        placement = following.placement(x)
        if not isinstance(placement, Shard) or placement.axis not in (None, 1):
            raise ValueError(
                f"{sync.module_name}: expected its input to be Shard(1), by tokens, got "
                f"{placement}; scatter the tokens before"
            )
        with following.communicating(sync.module_name):
            kwargs.setdefault("seq_lens", running.find_sizes(sync, x, 1, placement))
            out = super().forward(x, *args, **kwargs)
        following.opaque(sync.module_name, [x, *self.parameters()], out, Shard(1, placement.origin))
        return out


def parallel_attention(
    name: str,
    old: nn.Module,
    member: Member,
    q: str | None = None,
    k: str | None = None,
    v: str | None = None,
    o: str | None = None,
    num_heads: int | None = None,
    arguments: Mapping | None = None,
    **options,
) -> SequenceParallelAttention:
    """:class:`deepsp.SequenceParallelAttention` of a layer's own projections.

    Args:
        name: the layer's name, for errors.
        old: the layer.
        member: rank, size and name of the group.
        q: the name of the query projection in the layer; None: the usual names are tried.
        k: the name of the key projection.
        v: the name of the value projection.
        o: the name of the output projection.
        num_heads: the number of query heads; None: read from the layer or its config.
        arguments: passed in every call, for those that the model doesn't pass: ``is_causal=True``.
        options: those of :meth:`deepsp.SequenceParallelAttention.from_projections`.

    Returns:
        The new layer.

    Raises:
        ValueError: projections or the number of heads weren't found, or don't fit.
    """
    names = {
        what: _projection_name(name, old, what, chosen)
        for what, chosen in zip("qkvo", (q, k, v, o), strict=True)
    }
    if num_heads is None:
        num_heads = _number_of_heads(name, old)
    if "rotary" not in options:
        options = {"rope_theta": None, **options}
    projections = [old.get_submodule(n) for n in names.values()]
    try:
        new = ScheduledAttention.from_projections(
            *projections, num_heads, register=False, group=member, **options
        )
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    # Keep the projections' names, so that checkpoints of the model still fit.
    for child in dict.fromkeys(n.partition(".")[0] for n in names.values()):
        new.add_module(child, old.get_submodule(child))
    for norm in ("q_norm", "k_norm"):
        if options.get(norm) is not None:
            new.add_module(norm, options[norm])
    new._deepsp_arguments = dict(arguments or {})
    return new


def _projection_name(name: str, old: nn.Module, what: str, chosen: str | None) -> str:
    for candidate in (chosen,) if chosen is not None else _NAMES[what]:
        with contextlib.suppress(AttributeError):
            if isinstance(old.get_submodule(candidate), nn.Linear):
                return candidate
    children = [f"{n}: {type(m).__name__}" for n, m in old.named_modules() if n]
    raise ValueError(
        f"{name}: expected a linear layer for {what}, called "
        + (f"{chosen!r}" if chosen is not None else f"{', '.join(_NAMES[what])}")
        + f", got none; pass {what}=, the name of one in {type(old).__name__} "
        f"({', '.join(children)})"
    )


def _number_of_heads(name: str, old: nn.Module) -> int:
    for source in (old, getattr(old, "config", None)):
        for attribute in _HEADS:
            value = getattr(source, attribute, None)
            if isinstance(value, int):
                return value
    raise ValueError(
        f"{name}: expected {type(old).__name__} to have num_heads, which it doesn't; pass num_heads"
    )
