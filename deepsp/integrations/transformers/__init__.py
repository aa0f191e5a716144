"""``attn_implementation="deepsp"`` for transformers' models, each rank with its tokens only.

A model of transformers runs as it is on this rank's part of a batch (:func:`deepsp.shard_batch`);
only its attention sees the whole sequence. transformers (5; tried with 5.23) has two registers for
that. An entry in each, and what :mod:`.calls` has, is all the process-wide state there is here:

- the attention interface: what a model's attention layer calls with q, k and v;
- the mask interface: what a model calls once a forward for each kind of mask, with a function of
  the tokens' indices and the padding mask. Ours can't make a mask there: the model knows this
  rank's tokens only. It returns a :class:`Masks`, which the model hands on to its attention layers
  as it would a mask. The first that gets it exchanges lengths and positions over the group, and has
  transformers itself make the mask of the whole sequence; the others find it there, and so does a
  checkpoint's second forward, which thus communicates no more than attention itself.

So a mask can't be dropped, nor be one rank's: attention that gets none refuses. That the rest of a
model works on each token alone is checked on its first forward (:func:`check`).
"""

from __future__ import annotations

import functools
import inspect

from deepsp.groups import Group, member_of
from deepsp.integrations.transformers import calls
from deepsp.integrations.transformers.attention import attention
from deepsp.integrations.transformers.check import check
from deepsp.integrations.transformers.masks import Masks

__all__ = ["check", "register"]


def register(group: Group = None, chunks: int = 1, name: str = "deepsp") -> None:
    """Makes ``attn_implementation=name`` (or ``model.set_attn_implementation(name)``) attention
    over sequences that are sharded over ``group``.

    Args:
        group: the sequence group; None: the default group at the time of a forward.
        chunks: as in :func:`deepsp.distributed_attention`.
        name: under which models find it; another one for each further group. Again with the same
            name: replaces what was there, also for models that have it already.

    The model gets this rank's ``input_ids`` and ``position_ids`` and the whole ``attention_mask``,
    as :func:`deepsp.shard_batch` returns them, at least one token on every rank, and no ``labels``:
    its own loss would be that of this rank's tokens. Ranks may hold different numbers of tokens.
    The result is this rank's part of what one process computes with ``"sdpa"``: causal or not,
    with grouped heads, sliding windows or chunks, padding ([B, S], or a mask [B, 1, S, S]), and
    documents in one row that restart ``position_ids`` (in causal attention without
    ``attention_mask``, as there). Any mask other than causal needs memory for S x S bools.

    Raises (the model's forward):
        ValueError: what :func:`check` finds, and what can't be right: ``labels``; ``position_ids``
            that start from 0 on every rank (left out, or documents that all end where a rank's
            tokens do); ``attention_mask`` of this rank's tokens only; a cache; masks made of a
            model's own functions; attention with sinks, softcap, relative biases or other such;
            cross-attention of other lengths; models that don't make masks by the mask interface or
            don't pass on ``position_ids``.
    """
    import transformers
    from transformers import masking_utils

    if "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise RuntimeError(
            f"transformers {transformers.__version__} makes masks in another way than 5, for which "
            "this is written; install transformers 5"
        )
    if not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"chunks is {chunks!r}; a number, at least 1, is right")
    member = None if group is None else member_of(group)
    transformers.AttentionInterface.register(
        name, functools.partial(attention, member=member, chunks=chunks)
    )
    transformers.AttentionMaskInterface.register(name, Masks)
    calls.install(name)
