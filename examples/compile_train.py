"""Train a model for one device on a sharded sequence, by one line: `torch.compile`.

The model, the text and the loop are those of `examples/train.py`. There, the model is told which
tokens it has; here it knows nothing of ranks:

    model = torch.compile(model, backend="deepsp", fullgraph=True)
    ids, labels = deepsp.prepare_inputs(ids, labels)
    loss = model(ids, labels)

The backend takes the graph of a plain model, attention by `F.scaled_dot_product_attention` and loss
included, gives each rank its part of the tokens and puts the exchanges in. Each rank passes the
full batch, marked by `deepsp.prepare_inputs`, gets its loss, and every parameter's full
gradient, so that the training loop is that of one process.

First one process trains it, without `torch.compile`; then a group of ranks. Losses and gradient
norms must agree at every step, up to rounding; the script exits with an error if they don't.

    python examples/compile_train.py                        # two ranks on the CPU
    torchrun --nproc-per-node 2 examples/compile_train.py   # the launcher brings the ranks
"""

import argparse
import functools
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import train
from torch import Tensor, nn

import deepsp


class Model(nn.Module):
    """examples/train.py's transformer as one would write it for one device."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = train.ByteTransformer()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        position_ids = torch.arange(input_ids.size(1), device=input_ids.device)[None]

        def attend(block: train.Block, h: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in block.qkv(h, position_ids))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return block.o_proj(out.transpose(1, 2).flatten(-2))

        logits = self.transformer(input_ids, attend)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def train_one_process(args: argparse.Namespace) -> dict:
    return train.train(
        args,
        torch.device("cpu"),
        lambda model, ids: model(ids, ids),
        make=Model,
        description="one process",
    )


def train_sharded(args: argparse.Namespace, device: torch.device) -> dict:
    """The same, compiled, on each rank of the default process group."""

    @functools.cache  # once for the model
    def compiled(model: nn.Module):
        return torch.compile(model, backend="deepsp", options={"inner": args.inner})  # the line

    def compute_loss(model: nn.Module, ids: Tensor) -> Tensor:
        input_ids, labels = deepsp.prepare_inputs(ids, ids.clone())
        return compiled(model)(input_ids, labels)

    return train.train(
        args,
        device,
        compute_loss,
        make=Model,
        description=f"{dist.get_world_size()} ranks",
        quiet=dist.get_rank() != 0,
    )


def parser_of(description: str) -> argparse.ArgumentParser:
    parser = train.parser_of(description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(steps=20, seq_len=1024, output=Path("demo-output/compile"))
    parser.add_argument("--inner", default="inductor", help="compiler behind the pass")
    return parser


if __name__ == "__main__":
    args = train.parse(parser_of(__doc__))
    train.compare(args, train_one_process, train_sharded)
