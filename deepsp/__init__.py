"""Sequence-parallel attention for PyTorch.

Every rank of a process group holds a part of the tokens of one long sequence; deepsp exchanges
them for a part of the heads around attention, exactly, and lets autograd and torch.compile see
what it does. The ops are ``torch.ops.deepsp.*``; this package declares, checks and wires.
"""

from deepsp import (
    _load,  # noqa: F401  (first: it registers the ops)
    buffers,
    plans,
)
from deepsp.attention import DistributedAttention, distributed_attention
from deepsp.attention_plan import AttentionPlan, plan_attention
from deepsp.collectives import (
    all_gather,
    all_gather_matmul,
    all_gather_start,
    all_reduce,
    all_reduce_start,
    matmul_reduce_scatter,
    reduce_scatter,
    reduce_scatter_start,
    replicate,
    scatter,
    scatter_start,
)
from deepsp.compile.sharding.inputs import prepare_inputs
from deepsp.data import shard, shard_batch, unshard
from deepsp.gradients import clip_grad_norm_, sync_gradients
from deepsp.integrations.transformers.causal_lm import causal_lm_loss
from deepsp.layer import SequenceParallelAttention
from deepsp.loader import SequenceLoader
from deepsp.loss import cross_entropy, linear_cross_entropy, token_log_probs
from deepsp.memory import MemoryPlan, plan_memory
from deepsp.ops import (
    Pending,
    heads_to_seq,
    heads_to_seq_start,
    seq_to_heads,
    seq_to_heads_start,
)
from deepsp.parts import local_heads, seq_lens
from deepsp.randomness import sharded_randomness
from deepsp.schedule import build, create_schedule, register_shard_method
from deepsp.tiling.tile import tile, tile_
from deepsp.tokenwise import check
from deepsp.transport import Transport, transport
from deepsp.weights.access import full_parameters
from deepsp.weights.parameters import shard_parameters
from deepsp.weights.state import full_state_dict, load_full_state_dict

__all__ = [
    "AttentionPlan",
    "DistributedAttention",
    "MemoryPlan",
    "Pending",
    "SequenceLoader",
    "SequenceParallelAttention",
    "Transport",
    "all_gather",
    "all_gather_matmul",
    "all_gather_start",
    "all_reduce",
    "all_reduce_start",
    "buffers",
    "build",
    "causal_lm_loss",
    "check",
    "clip_grad_norm_",
    "create_schedule",
    "cross_entropy",
    "distributed_attention",
    "full_parameters",
    "full_state_dict",
    "heads_to_seq",
    "heads_to_seq_start",
    "linear_cross_entropy",
    "load_full_state_dict",
    "local_heads",
    "matmul_reduce_scatter",
    "plan_attention",
    "plan_memory",
    "plans",
    "prepare_inputs",
    "reduce_scatter",
    "reduce_scatter_start",
    "register_shard_method",
    "replicate",
    "scatter",
    "scatter_start",
    "seq_lens",
    "seq_to_heads",
    "seq_to_heads_start",
    "shard",
    "shard_batch",
    "shard_parameters",
    "sharded_randomness",
    "sync_gradients",
    "tile",
    "tile_",
    "token_log_probs",
    "transport",
    "unshard",
]
