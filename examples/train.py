"""Train a small language model twice, in one process and sharded with deepsp, and compare.

A byte-level transformer (grouped-query attention, RoPE, RMSNorm, SwiGLU; 2.9 M parameters)
learns real text. First one process trains it on whole sequences in plain PyTorch. Then a group
of ranks trains it again, each rank holding only its share of every sequence. Seed, data and
steps are the same, so losses and gradient norms must agree up to rounding at every step: that
is checked, and the script exits with an error if they don't.

    python examples/train.py                           # two ranks on the CPU
    python examples/train.py --ranks 3 --seq-len 4099  # shards of unequal length
    torchrun --nproc-per-node 2 examples/train.py      # the launcher brings the ranks

All that sharding takes is in `train_sharded`: `shard_batch`, `DistributedAttention` (or, with
`--overlap`, `SequenceParallelAttention` in place of the whole attention layer), `cross_entropy` and
`sync_gradients`. The model itself doesn't know about ranks.
"""

import argparse
import functools
import json
import os
import resource
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import deepsp

VOCAB, DIM, LAYERS, HEADS, HIDDEN = 256, 256, 4, 8, 704
SHARE_KV = 4  # query heads share a key and value head
KV_HEADS, HEAD_DIM = HEADS // SHARE_KV, DIM // HEADS
ROPE_THETA = 10000.0

# The largest differences that rounding explains: of losses, and (relative) of gradient norms.
# Measured on the CPU, up to 50 steps, 2 and 3 ranks: float64 2e-15 and 6e-16, float32 1e-6 and
# 2e-7, bfloat16 5e-4 and 3e-3; longer runs may drift further apart. Wrong positions or one lost
# label show as about 1e-3 with 1024 tokens: float32 and float64 catch them, bfloat16 doesn't.
TOLERANCES = {"float64": (1e-9, 1e-9), "float32": (1e-4, 1e-3), "bfloat16": (1e-2, 5e-2)}

# What a block does with its normalised input h [B, S, DIM]: attention, with its projections.
Attend = Callable[["Block", Tensor], Tensor]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: turn each pair of channels of x [B, S, H, D] by its token's angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


class Block(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, DIM // heads
        kv_dim = max(1, heads // SHARE_KV) * self.head_dim
        self.attention_norm = nn.RMSNorm(DIM)
        self.q_proj = nn.Linear(DIM, DIM, bias=False)
        self.k_proj = nn.Linear(DIM, kv_dim, bias=False)
        self.v_proj = nn.Linear(DIM, kv_dim, bias=False)
        self.o_proj = nn.Linear(DIM, DIM, bias=False)
        self.mlp_norm = nn.RMSNorm(DIM)
        self.gate_proj = nn.Linear(DIM, HIDDEN, bias=False)
        self.up_proj = nn.Linear(DIM, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, DIM, bias=False)

    def qkv(self, h: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # A shard doesn't start at position 0: angles come from the positions in the sequence.
        wide = torch.float64 if h.dtype == torch.float64 else torch.float32
        channel = torch.arange(0, self.head_dim, 2, device=h.device, dtype=wide) / self.head_dim
        angles = position_ids[..., None, None] * ROPE_THETA**-channel  # [B, S, 1, D / 2]
        cos, sin = angles.cos(), angles.sin()
        q = rotate(self.q_proj(h).unflatten(-1, (-1, self.head_dim)), cos, sin)
        k = rotate(self.k_proj(h).unflatten(-1, (-1, self.head_dim)), cos, sin)
        return q, k, self.v_proj(h).unflatten(-1, (-1, self.head_dim))

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        x = x + attend(self, self.attention_norm(x))
        h = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class ByteTransformer(nn.Module):
    """One class for all runs: what differs between them, attention, is an argument."""

    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(heads) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, attend: Attend) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, attend)
        return self.head(self.norm(x))


def train_one_process(args: argparse.Namespace) -> dict:
    """The reference: full sequences, no deepsp."""
    device = torch.device(args.device)
    position_ids = torch.arange(args.seq_len, device=device)[None]

    def attend(block: Block, h: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in block.qkv(h, position_ids))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return block.o_proj(out.transpose(1, 2).flatten(-2))

    def compute_loss(model: ByteTransformer, ids: Tensor) -> Tensor:
        logits = model(ids, attend)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    make = functools.partial(ByteTransformer, args.heads)
    return train(args, device, compute_loss, make=make, description="one process")


def train_sharded(args: argparse.Namespace, device: torch.device) -> dict:
    """The same training, each rank of the default process group on its share of the tokens."""
    distributed_attention = deepsp.DistributedAttention(chunks=args.chunks)
    layers: dict[Block, deepsp.SequenceParallelAttention] = {}

    def compute_loss(model: ByteTransformer, ids: Tensor) -> Tensor:
        batch, seq_lens = deepsp.shard_batch({"input_ids": ids, "labels": ids}, dim=1)

        def attend(block: Block, h: Tensor) -> Tensor:
            q, k, v = block.qkv(h, batch["position_ids"])
            out = distributed_attention(q, k, v, seq_lens=seq_lens, is_causal=True, enable_gqa=True)
            return block.o_proj(out.flatten(-2))

        def attend_overlapped(block: Block, h: Tensor) -> Tensor:
            if block not in layers:
                layers[block] = deepsp.SequenceParallelAttention.from_projections(
                    block.q_proj,
                    block.k_proj,
                    block.v_proj,
                    block.o_proj,
                    block.heads,
                    rope_theta=ROPE_THETA,
                    chunks=args.chunks,
                )
            return layers[block](h, seq_lens=seq_lens, is_causal=True)

        logits = model(batch["input_ids"], attend_overlapped if args.overlap else attend)
        return deepsp.cross_entropy(logits, batch["shift_labels"])

    return train(
        args,
        device,
        compute_loss,
        make=functools.partial(ByteTransformer, args.heads),
        # A rank's gradients are its tokens' share; their sum over the ranks is the gradient.
        sync_gradients=deepsp.sync_gradients,
        description=f"{dist.get_world_size()} ranks",
        quiet=dist.get_rank() != 0,
    )


def train(
    args: argparse.Namespace,
    device: torch.device,
    compute_loss: Callable[[nn.Module, Tensor], Tensor],
    *,
    make: Callable[[], nn.Module] = ByteTransformer,
    sync_gradients: Callable[[nn.Module], None] = lambda model: None,
    clip: Callable[[nn.Module, float], Tensor] = lambda model, largest: nn.utils.clip_grad_norm_(
        model.parameters(), largest
    ),
    description: str,
    quiet: bool = False,
) -> dict:
    """The loop that both runs share, one sequence per step."""
    torch.set_num_threads(1)  # in both runs, so that a process is worth the same in each
    before = memory_mib(device)  # Python, torch and its libraries, which aren't the training's
    torch.manual_seed(args.seed)
    # bfloat16 is mixed precision: the parameters and the optimizer stay in float32.
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    param_dtype = torch.float64 if args.dtype == "float64" else torch.float32
    model = make().to(device, param_dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    text = load_text(args.data)
    starts = torch.randint(len(text) - args.seq_len + 1, (args.steps,)).tolist()

    losses, gradient_norms, speeds = [], [], []
    progress = tqdm(starts, desc=f"{description:>11}", unit="step", disable=quiet)
    for start in progress:
        began = time.perf_counter()
        ids = text[None, start : start + args.seq_len].long().to(device)
        with autocast:
            loss = compute_loss(model, ids)
        loss.backward()
        sync_gradients(model)
        # Only now: clipping needs the norm of the full gradient, the same on every rank.
        norm = clip(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device, so that the whole step is timed
        gradient_norms.append(norm.item())
        speeds.append(args.seq_len / (time.perf_counter() - began))
        progress.set_postfix_str(f"loss {losses[-1]:.4f}, {speeds[-1]:,.0f} tokens/s")
    return {
        "losses": losses,
        "gradient_norms": gradient_norms,
        "tokens_per_second": statistics.median(speeds[3:] or speeds),  # the first are warm-up
        "peak_memory_mib": peak_memory_mib(device) - before,
    }


def load_text(path: Path | None) -> Tensor:
    """The bytes to learn: a file, or the public modules of Python's standard library."""
    files = [path] if path else sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))
    return torch.frombuffer(bytearray().join(f.read_bytes() for f in files), dtype=torch.uint8)


def memory_mib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 2**20
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_memory_mib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def reference_worker(
    _: int, run: Callable[..., dict], args: argparse.Namespace, result_file: Path
) -> None:
    result_file.write_text(json.dumps(run(args)))


def sharded_worker(
    rank: int,
    run: Callable[..., dict],
    args: argparse.Namespace,
    ranks: int,
    init_method: str,
    result_file: Path,
) -> None:
    """One rank of the sharded run; rank 0 writes the result."""
    backend, device, options = "gloo", torch.device("cpu"), None
    if args.device == "cuda":
        gpus = torch.cuda.device_count()
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % gpus)
        torch.cuda.set_device(device)
        if gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", ranks)):
            backend = "nccl"  # which wants a GPU for each rank; gloo lets ranks share one
            # Its kernels then needn't wait for a product to leave room.
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # The timeout is long because under torchrun the others wait while rank 0 runs the reference.
    timeout = timedelta(hours=6)
    dist.init_process_group(
        backend,
        init_method=init_method,
        rank=rank,
        world_size=ranks,
        timeout=timeout,
        pg_options=options,
    )
    result = run(args, device)
    peak = torch.tensor(result["peak_memory_mib"], device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if rank == 0:
        result_file.write_text(json.dumps(result | {"peak_memory_mib": peak.item()}))
    # Gloo's threads must be done with their last tensors before the interpreter goes away:
    # letting go of one takes the GIL, and a process that is exiting has none to give.
    dist.barrier()
    dist.destroy_process_group()


def report(args: argparse.Namespace, ranks: int, reference: dict, sharded: dict) -> None:
    """Print the table, write plot and JSON, and exit with an error if the runs don't agree."""
    from rich.console import Console
    from rich.table import Table

    steps = f"{args.steps} steps of {args.seq_len} tokens"
    table = Table(title=f"{steps}, {args.dtype}, one torch thread per process")
    # Sequences differ in difficulty; a median of the last losses says more than the last one.
    final = "final loss (median of 5)"
    memory = "training's peak memory per rank"
    for header in ("", "first loss", final, "median tokens/s", memory):
        table.add_column(header, justify="right")
    for name, run in (("one process", reference), (f"{ranks} ranks", sharded)):
        table.add_row(
            name,
            f"{run['losses'][0]:.6f}",
            f"{statistics.median(run['losses'][-5:]):.6f}",
            f"{run['tokens_per_second']:,.0f}",
            f"{run['peak_memory_mib']:,.0f} MiB",
        )
    Console().print(table)

    losses, norms = (
        list(zip(reference[name], sharded[name], strict=True))
        for name in ("losses", "gradient_norms")
    )
    loss_difference = max(abs(a - b) for a, b in losses)
    loss_relative = max(abs(a - b) / a for a, b in losses)
    norm_relative = max(abs(a - b) / a for a, b in norms)
    loss_tolerance, norm_tolerance = TOLERANCES[args.dtype]
    print(f"largest difference of losses: {loss_difference:.1e} (accepted: {loss_tolerance:.0e})")
    print(f"  relative: {loss_relative:.1e}")
    print(f"  of gradient norms, relative: {norm_relative:.1e} (accepted: {norm_tolerance:.0e})")

    args.output.mkdir(parents=True, exist_ok=True)
    plot_file, json_file = args.output / "losses.png", args.output / "losses.json"
    plot(plot_file, ranks, losses, loss_tolerance)
    settings = vars(args) | {"ranks": ranks}
    results = {"settings": settings, "one_process": reference, "sharded": sharded}
    json_file.write_text(json.dumps(results, indent=1, default=str))
    print(f"plot: {plot_file}\nlosses: {json_file}")
    if not (loss_difference <= loss_tolerance and norm_relative <= norm_tolerance):  # NaN fails too
        sys.exit("FAILED: the two runs differ by more than rounding explains")


def plot(file: Path, ranks: int, losses: list[tuple[float, float]], tolerance: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (upper, lower) = plt.subplots(
        2, sharex=True, figsize=(8, 6), height_ratios=(2, 1), layout="constrained"
    )
    reference, sharded = zip(*losses, strict=True)
    differences = [abs(a - b) for a, b in losses]
    upper.plot(reference, color="lightsteelblue", linewidth=6, label="one process")
    upper.plot(sharded, color="darkred", linestyle="--", label=f"{ranks} ranks, deepsp")
    upper.set_ylabel("loss (nats per byte)")
    upper.legend()
    lower.axhline(tolerance, color="gray", linestyle=":", label="accepted")
    lower.semilogy(differences, "k.", label="measured (no dot: none at all)")
    lower.set_ylabel("|difference|")
    lower.legend()
    lower.set_xlabel("step")
    figure.savefig(file, dpi=150)


def parser_of(description: str) -> argparse.ArgumentParser:
    """With what all examples can vary."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.set_defaults(device="cpu", dtype="float32", heads=HEADS)
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="processes of the sharded run (not with torchrun)")
    add("--seq-len", type=int, default=8192, help="tokens (bytes) of the sequence in each step")
    add("--steps", type=int, default=6, help="optimizer steps of each run")
    add("--data", type=Path, help="text to learn; None: the modules of Python's standard library")
    add("--lr", type=float, default=1e-3, help="AdamW's learning rate")
    add("--seed", type=int, default=1, help="seed of the parameters and of the data's order")
    add("--output", type=Path, default=Path("demo-output"), help="folder for plot and losses")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    if args.ranks < 1:
        parser.error("--ranks must be at least 1")
    if args.heads < 1 or DIM % (2 * args.heads):
        parser.error(f"--heads must be a power of 2, at most {DIM // 2}")
    if args.steps < 1 or args.seq_len < 2:
        parser.error("--steps must be at least 1 and --seq-len at least 2")
    if args.seq_len > (available := len(load_text(args.data))):
        parser.error(f"--seq-len {args.seq_len} is more than the {available} bytes of text")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this PyTorch sees no GPU")
    return args


def compare(
    args: argparse.Namespace,
    run_one_process: Callable[[argparse.Namespace], dict],
    run_sharded: Callable[[argparse.Namespace, torch.device], dict],
) -> None:
    """Runs both, each in processes of its own, and reports. Under torchrun: on its processes."""
    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    rank = int(os.environ["RANK"]) if under_torchrun else 0
    ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun else args.ranks
    with tempfile.TemporaryDirectory() as folder:
        reference_file, sharded_file = Path(folder, "reference"), Path(folder, "sharded")
        if rank == 0:
            # In a process of its own, so that its peak memory is its own as well.
            mp.spawn(reference_worker, (run_one_process, args, reference_file), nprocs=1)
        if under_torchrun:
            sharded_worker(rank, run_sharded, args, ranks, "env://", sharded_file)
        else:
            init_method = f"file://{folder}/store"
            job = (run_sharded, args, ranks, init_method, sharded_file)
            mp.spawn(sharded_worker, job, nprocs=ranks)
        if rank == 0:
            reference, sharded = (
                json.loads(file.read_text()) for file in (reference_file, sharded_file)
            )
            report(args, ranks, reference, sharded)


def main() -> None:
    parser = parser_of("Train a small language model in one process and sharded, and compare.")
    add = parser.add_argument
    add("--heads", type=int, help="query heads of the model; may be fewer than ranks")
    add("--chunks", type=int, default=1, help="head chunks of the attention's exchange")
    add("--overlap", action="store_true", help="hide exchanges behind the layers' own compute")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to train")
    add("--dtype", choices=tuple(TOLERANCES), default="float32", help="bfloat16 means autocast")
    compare(parse(parser), train_one_process, train_sharded)


if __name__ == "__main__":
    main()
