"""Sequence-parallel attention for PyTorch.

Every rank of a process group holds a part of the tokens of one long sequence. Around attention,
deepsp exchanges them for a part of the heads. The result is exact, and autograd and torch.compile
see the exchange. The ops are ``torch.ops.deepsp.*``; this package declares, checks and connects.
"""

import deepsp._load  # isort: split  (first: registers the ops)
import deepsp.ranks
import deepsp.schedule.ready
import deepsp.sequence.attention  # noqa: F401
from deepsp import collectives
from deepsp._built_for import VERSION as __version__  # noqa: F401
from deepsp.collectives import sum_over_ranks
from deepsp.compile.sharding.inputs import prepare_inputs, replicated
from deepsp.data.borders import Segments
from deepsp.data.deal_batch import deal_batch
from deepsp.data.documents import Deal, deal_documents
from deepsp.data.fold import Fold, fold
from deepsp.data.loader import SequenceLoader
from deepsp.data.sharding import shard, shard_batch, unshard
from deepsp.gradients import clip_grad_norm_, sync_gradients
from deepsp.integrations.proof.prove import prove
from deepsp.integrations.transformers.causal_lm import causal_lm_loss
from deepsp.loss.cross_entropy import cross_entropy, linear_cross_entropy
from deepsp.loss.divergence import linear_kl
from deepsp.loss.tokens import token_log_probs, token_mean, token_sum
from deepsp.memory.activations.checkpoint import checkpoint_policy
from deepsp.memory.activations.offload import offload
from deepsp.memory.planning.memory import plan_memory
from deepsp.memory.tiling.tile import tile, tile_
from deepsp.ops import (
    heads_to_seq,
    heads_to_seq_start,
    previous_tokens,
    previous_tokens_start,
    seq_to_heads,
    seq_to_heads_start,
)
from deepsp.ranks.randomness import sharded_randomness
from deepsp.ranks.transport import transport
from deepsp.schedule import build, create_schedule, register_shard_method
from deepsp.sequence.attention.balance import plan_attention
from deepsp.sequence.attention.distributed import distributed_attention
from deepsp.sequence.attention.layer import SequenceParallelAttention
from deepsp.sequence.attention.merging import merge_attention
from deepsp.sequence.attention.module import DistributedAttention
from deepsp.sequence.experts.module import DistributedExperts
from deepsp.sequence.recurrence.module import DistributedRecurrence
from deepsp.sequence.tokenwise.check import check
from deepsp.weights.parameters import full_parameters, shard_parameters
from deepsp.weights.state import full_state_dict, load_full_state_dict

__all__ = [
    "Deal",
    "DistributedAttention",
    "DistributedExperts",
    "DistributedRecurrence",
    "Fold",
    "Segments",
    "SequenceLoader",
    "SequenceParallelAttention",
    "build",
    "causal_lm_loss",
    "check",
    "checkpoint_policy",
    "clip_grad_norm_",
    "collectives",
    "create_schedule",
    "cross_entropy",
    "deal_batch",
    "deal_documents",
    "distributed_attention",
    "fold",
    "full_parameters",
    "full_state_dict",
    "heads_to_seq",
    "heads_to_seq_start",
    "linear_cross_entropy",
    "linear_kl",
    "load_full_state_dict",
    "merge_attention",
    "offload",
    "plan_attention",
    "plan_memory",
    "prepare_inputs",
    "previous_tokens",
    "previous_tokens_start",
    "prove",
    "register_shard_method",
    "replicated",
    "seq_to_heads",
    "seq_to_heads_start",
    "shard",
    "shard_batch",
    "shard_parameters",
    "sharded_randomness",
    "sum_over_ranks",
    "sync_gradients",
    "tile",
    "tile_",
    "token_log_probs",
    "token_mean",
    "token_sum",
    "transport",
    "unshard",
]
