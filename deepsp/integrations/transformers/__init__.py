"""``attn_implementation="deepsp"`` for transformers' models, each rank with its tokens only.

A model of transformers runs as it is on this rank's part of a batch (:func:`deepsp.shard_batch`);
only its attention sees the full sequence. transformers (5; tried with 5.23) has two registers for
that. An entry in each, and what :mod:`.calls` replaces (:mod:`deepsp.patches` lists it), is all the
process-wide state there is here:

- the attention interface: what a model's attention layer calls with q, k and v;
- the mask interface: what a model calls once a forward for each kind of mask, with a function of
  the tokens' indices and the padding mask. Ours can't make a mask there: the model knows this
  rank's tokens only. It returns a :class:`Masks`, which the model hands on to its attention layers
  as it would a mask. The first that gets it exchanges lengths and positions over the group, and has
  transformers itself make the mask of the full sequence; the others find it there, and so does a
  checkpoint's second forward, which thus communicates no more than attention itself.

So a mask can't be dropped, nor be one rank's: attention that gets none refuses. That the rest of a
model works on each token alone is checked on its first forward (:func:`check`).
"""

from __future__ import annotations

from deepsp.integrations.transformers.check import check
from deepsp.integrations.transformers.registration import register

__all__ = ["SequenceParallelTrainer", "check", "register", "sequence_parallel"]


def __getattr__(name: str):
    # A trainer brings accelerate, which a model alone doesn't need.
    if name in ("SequenceParallelTrainer", "sequence_parallel"):
        from deepsp.integrations.transformers import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
