"""Train a model for one device on a sharded sequence, by two lines of DeepSpeed's config.

The model is that of `examples/compile_train.py`, which knows nothing of ranks. The config asks for
the pass by its name, and says how many ranks share a sequence:

    "sequence_parallel_size": P,
    "compile": {"deepcompile": True, "passes": ["deepsp"]},

`engine.compile()` then shards the graph. ZeRO (stage 0, 1 or 2), the optimizer, clipping and the
average over the ranks stay DeepSpeed's. All ranks of a sequence pass the same full batch, marked
by `deepsp.prepare_inputs`.

First one process trains it, in plain PyTorch; then a group of ranks. Losses and gradient norms must
agree at every step, up to rounding; the script exits with an error if they don't.

    python examples/deepspeed_train.py --zero 2               # two ranks on the CPU
    torchrun --nproc-per-node 2 examples/deepspeed_train.py   # the launcher brings the ranks
"""

import argparse
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
import train
from compile_train import Model, parser_of, train_one_process
from tqdm import tqdm

import deepsp


def config_of(args: argparse.Namespace) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.zero},
        "zero_allow_untested_optimizer": True,  # torch's AdamW, as in one process
        "steps_per_print": args.steps + 1,
        "sequence_parallel_size": dist.get_world_size(),
        "compile": {"deepcompile": True, "passes": ["deepsp"]},
    }


def train_sharded(args: argparse.Namespace, device: torch.device) -> dict:
    # What a launcher would set; the process group is there already.
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, DS_ACCELERATOR="cpu")
    import deepspeed

    deepspeed.utils.logger.setLevel("WARNING")
    torch.set_num_threads(1)
    before = train.memory_mib(device)
    torch.manual_seed(args.seed)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(args))
    engine.compile(backend=args.inner, compile_kwargs={"dynamic": True})

    text = train.load_text(args.data)
    starts = torch.randint(len(text) - args.seq_len + 1, (args.steps,)).tolist()
    losses, norms, speeds = [], [], []
    progress = tqdm(starts, desc=f"{size:>3} ranks", unit="step", disable=rank != "0")
    for start in progress:
        began = time.perf_counter()
        ids = text[None, start : start + args.seq_len].long()
        input_ids, labels = deepsp.prepare_inputs(ids, ids.clone())
        loss = engine(input_ids, labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
        speeds.append(args.seq_len / (time.perf_counter() - began))
        progress.set_postfix_str(f"loss {losses[-1]:.4f}, {speeds[-1]:,.0f} tokens/s")
    return {
        "losses": losses,
        "gradient_norms": norms,
        "tokens_per_second": statistics.median(speeds[3:] or speeds),
        "peak_memory_mib": train.peak_memory_mib(device) - before,
    }


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.set_defaults(output=Path("demo-output/deepspeed"))
    parser.add_argument("--zero", type=int, default=1, choices=(0, 1, 2), help="ZeRO's stage")
    train.compare(train.parse(parser), train_one_process, train_sharded)
