"""One GRPO step (a clipped policy gradient) on a sharded sequence, compared with one process.

A group of completions of one prompt has rewards; what a completion got above the group's mean, in
standard deviations, is its advantage. The loss of a completion's token is

    -min(ratio * advantage, clip(ratio, 1 - eps, 1 + eps) * advantage) + beta * KL - alpha * entropy

with the ratio of the policy's probability of the token to that of the policy that sampled it, and
the KL divergence to a reference policy, estimated as exp(d) - d - 1 with d = log p_ref - log p.

Each rank holds its share of every sequence. `deepsp.token_log_probs(..., outputs="full")` returns
the log-probabilities and entropies of all tokens to every rank, without logits of all tokens
anywhere; from there on the code is that of one process. The same step is computed in one process,
in plain PyTorch, from all logits. The script prints both losses and the largest difference of a
gradient, and exits with an error if that is more than 1e-10 (all is in float64).

    python examples/policy_gradient.py
    python examples/policy_gradient.py --ranks 3 --seq-len 101
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import deepsp

VOCAB, DIM, LAYERS, HEADS = 61, 48, 2, 6
TOLERANCE = 1e-10

# What turns a model, ids and the ids to predict into log-probabilities and entropies [B, S].
Scores = Callable[[nn.Module, dict[str, Tensor]], tuple[Tensor, Tensor]]


class Block(nn.Module):
    def __init__(self, attention: Callable) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(2))
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        x = x + self.out(self.attention(q, k, v).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class Policy(nn.Module):
    """A small language model, without knowledge of ranks."""

    def __init__(self, attention: Callable, seq_len: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(seq_len, DIM)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.double()

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Hidden states, which the head makes logits of."""
        x = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def rollouts(args: argparse.Namespace) -> tuple[dict[str, Tensor], Tensor]:
    """Completions of one prompt, of different lengths, and their rewards: the same everywhere."""
    generator = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(VOCAB, (args.group, args.seq_len), generator=generator)
    prompt = args.seq_len // 4
    ids[:, :prompt] = ids[:1, :prompt]
    labels = ids.clone()
    labels[:, :prompt] = -100
    for row in range(args.group):
        labels[row, args.seq_len - 3 * row :] = -100  # what follows the completion's end
    rewards = torch.randn(args.group, generator=generator, dtype=torch.float64)
    return {"input_ids": ids, "labels": labels}, rewards


def grpo(
    now: tuple[Tensor, Tensor],
    sampled: Tensor,
    reference: Tensor,
    rewards: Tensor,
    valid: Tensor,
    args: argparse.Namespace,
) -> Tensor:
    """The loss, from log-probabilities [B, S] of all tokens: nothing in it knows about ranks."""
    log_probs, entropy = now
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4))[:, None]
    ratio = (log_probs - sampled).exp()
    gain = torch.min(ratio * advantages, ratio.clamp(1 - args.eps, 1 + args.eps) * advantages)
    distance = reference - log_probs
    kl = distance.exp() - distance - 1
    each = -gain + args.beta * kl - args.alpha * entropy
    return (each * valid).sum() / valid.sum()


def step(
    args: argparse.Namespace,
    attention: Callable,
    batch: dict[str, Tensor],
    valid: Tensor,
    rewards: Tensor,
    scores: Scores,
) -> tuple[Tensor, nn.Module]:
    """Loss and gradients of one step."""
    policy = Policy(attention, args.seq_len, args.seed)
    reference = Policy(attention, args.seq_len, args.seed)
    with torch.no_grad():
        sampled = scores(policy, batch)[0]
        for p in policy.parameters():  # as if steps had been taken since
            p.mul_(1 + 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.dim())))
        for p in reference.parameters():
            p.mul_(0.9)
        of_reference = scores(reference, batch)[0]
    loss = grpo(scores(policy, batch), sampled, of_reference, rewards, valid, args)
    loss.backward()
    return loss.detach(), policy


def one_process(args: argparse.Namespace) -> tuple[Tensor, dict[str, Tensor]]:
    """The reference: whole sequences and all logits."""
    batch, rewards = rollouts(args)
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    valid = labels != -100

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def scores(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        positions = torch.arange(args.seq_len)[None]
        logits = model.head(model(batch["input_ids"], positions)) / args.temperature
        log_p = logits.log_softmax(-1)
        chosen = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return chosen * valid, -(log_p.exp() * log_p).sum(-1) * valid

    loss, policy = step(args, attention, batch, valid, rewards, scores)
    return loss, {name: p.grad for name, p in policy.named_parameters()}


def sharded(args: argparse.Namespace) -> tuple[Tensor, dict[str, Tensor]]:
    """The same on this rank's share of every sequence."""
    whole, rewards = rollouts(args)
    batch, seq_lens = deepsp.shard_batch(whole)
    valid = deepsp.unshard(batch["shift_labels"] != -100, 1, seq_lens=seq_lens)
    local = deepsp.DistributedAttention()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return local(q, k, v, is_causal=True, seq_lens=seq_lens)

    def scores(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return deepsp.token_log_probs(
            model(batch["input_ids"], batch["position_ids"]),
            model.head.weight,
            batch["shift_labels"],
            temperature=args.temperature,
            entropy=True,
            outputs="full",
            seq_lens=seq_lens,
        )

    loss, policy = step(args, attention, batch, valid, rewards, scores)
    deepsp.sync_gradients(policy)
    return loss, {name: p.grad for name, p in policy.named_parameters()}


def worker(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.ranks
    )
    found = sharded(args)
    if rank == 0:
        torch.save(found, Path(folder, "found"))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    description, _, details = __doc__.partition("\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=details, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="processes that share the sequences (default: 2)")
    add("--seq-len", type=int, default=64, help="tokens of each sequence (default: 64)")
    add("--group", type=int, default=4, help="completions of the prompt (default: 4)")
    add("--temperature", type=float, default=0.8, help="of the sampling (default: 0.8)")
    add("--eps", type=float, default=0.2, help="where ratios are clipped (default: 0.2)")
    add("--beta", type=float, default=0.04, help="weight of the KL divergence (default: 0.04)")
    add("--alpha", type=float, default=0.01, help="weight of the entropy (default: 0.01)")
    add("--seed", type=int, default=1, help="of parameters, sequences and rewards (default: 1)")
    args = parser.parse_args()
    if not 1 <= args.ranks <= HEADS:
        parser.error(f"--ranks must be between 1 and {HEADS}, the number of heads")
    if args.seq_len < 8 or not 2 <= args.group <= args.seq_len // 6:
        parser.error("--seq-len must be at least 8, and --group from 2 to a sixth of it")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (args, folder), nprocs=args.ranks)
        loss, gradients = torch.load(Path(folder, "found"))
    expected, full = one_process(args)
    difference = max((gradients[name] - full[name]).abs().max().item() for name in full)
    largest = max(gradient.abs().max().item() for gradient in full.values())
    print(f"loss in one process: {expected:.12f}")
    print(f"loss on {args.ranks} ranks:     {loss:.12f}")
    print(f"largest gradient: {largest:.1e}")
    print(f"largest difference of a gradient: {difference:.1e} (accepted: {TOLERANCE:.0e})")
    if not (difference <= TOLERANCE and abs(loss - expected) <= TOLERANCE):  # NaN fails too
        sys.exit("FAILED: the two differ by more than rounding explains")


if __name__ == "__main__":
    main()
