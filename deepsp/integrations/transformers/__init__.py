"""``attn_implementation="deepsp"`` for transformers' models, each rank with its tokens only.

A model of transformers runs unchanged on this rank's part of a batch (:func:`deepsp.shard_batch`);
only its attention sees the full sequence. transformers (5; tried with 5.23) has two registries for
that. All process-wide state here is an entry in each, and the functions that :mod:`.calls` replaces
(:mod:`deepsp.patches` lists them):

- the attention interface: the function that a model's attention layer calls with q, k and v;
- the mask interface: the function that a model calls once a forward for each kind of mask, with a
  function of the tokens' indices and the padding mask. deepsp's can't make a mask at that point,
  because the model knows this rank's tokens only. It returns a :class:`Masks`, which the model
  passes to its attention layers like a mask. The first layer that gets it exchanges lengths and
  positions over the group, and lets transformers make the mask of the full sequence. Later layers
  reuse it, and so does a checkpoint's second forward, which thus communicates no more than
  attention itself.

So a mask can't be dropped, or be one rank's: attention without a mask raises. The first forward
checks that the rest of the model works on each token alone (:func:`check`).
"""

from __future__ import annotations

from deepsp.integrations.transformers.check import check
from deepsp.integrations.transformers.experts import shard_experts
from deepsp.integrations.transformers.registration import register

__all__ = ["SequenceParallelTrainer", "check", "register", "sequence_parallel", "shard_experts"]


def __getattr__(name: str):
    # The trainer imports accelerate, which a model alone doesn't need.
    if name in ("SequenceParallelTrainer", "sequence_parallel"):
        from deepsp.integrations.transformers import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
