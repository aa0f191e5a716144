"""Train a model for one device tensor parallel and sequence parallel, by a schedule.

The model, the text and the loop are those of `examples/train.py` and `compile_train.py`: a plain
model that knows nothing of ranks. A schedule says, module by module, which parameters each rank has
a part of and where ranks communicate; the model's code stays as it is:

    sch["transformer.blocks.*.up_proj"].shard("weight", axis=0)
    sch["transformer.blocks.*.down_proj"].shard("weight", axis=1)
    sch["transformer.blocks.*.down_proj"].sync("fwd_post", "reduce_scatter", axis=1)

Each rank has a part of the heads, of the MLP's columns and of the logits' classes; norms and the
residual stream work on its tokens. It passes the full batch and gets its loss.

First one process trains the model as it is; then a group of ranks. Losses and gradient norms must
agree at every step, up to rounding; the script exits with an error if they don't.

    python examples/schedule.py                        # two ranks on the CPU
    torchrun --nproc-per-node 2 examples/schedule.py   # the launcher brings the ranks
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import train
from compile_train import Model, train_one_process
from torch import nn

import deepsp


def schedule(model: nn.Module, overlap: bool) -> deepsp.schedule.Schedule:
    sch = deepsp.create_schedule(model)
    blocks = sch["transformer.blocks.*"]
    # Query heads stay with the key and value head that they read.
    group = train.HEADS // train.KV_HEADS * train.HEAD_DIM
    blocks["q_proj"].shard("weight", axis=0, unit=group)
    blocks["[kv]_proj"].shard("weight", axis=0, unit=train.HEAD_DIM)
    blocks["o_proj"].shard("weight", axis=1, unit=group)
    blocks["gate_proj"].shard("weight", axis=0)
    blocks["up_proj"].shard("weight", axis=0)
    blocks["down_proj"].shard("weight", axis=1)
    # The residual stream is split along the tokens, axis 1: into the first block, ...
    sch["transformer.blocks.0"].sync("fwd_pre", "scatter", axis=1, tensor=0)
    # ... replicated between a norm and what sums over ranks, ...
    blocks["*_norm"].sync("fwd_post", "all_gather", axis=1)
    blocks["[od]*_proj"].sync("fwd_post", "reduce_scatter", axis=1, overlap=overlap)
    # ... and for the head, whose classes are put together.
    sch["transformer.norm"].sync("fwd_post", "all_gather", axis=1)
    sch["transformer.head"].shard("weight", axis=0).sync("fwd_post", "all_gather", axis=-1)
    return sch


def train_sharded(args: argparse.Namespace, device: torch.device) -> dict:
    """The same, on each rank of the default process group."""

    def make() -> nn.Module:
        sch = schedule(Model(), args.overlap)
        if args.show and dist.get_rank() == 0:
            print(sch)
        model, _ = deepsp.build(sch)  # the loop makes the optimizer
        return model

    return train.train(
        args,
        device,
        lambda model, ids: model(ids, ids),
        make=make,
        clip=deepsp.clip_grad_norm_,  # whose norm is the full gradient's
        description=f"{dist.get_world_size()} ranks",
        quiet=dist.get_rank() != 0,
    )


if __name__ == "__main__":
    parser = train.parser_of(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(steps=20, seq_len=1024, output=Path("demo-output/schedule"))
    parser.add_argument("--overlap", action="store_true", help="hide transfers behind products")
    parser.add_argument("--show", action="store_true", help="print the schedule")
    train.compare(train.parse(parser), train_one_process, train_sharded)
