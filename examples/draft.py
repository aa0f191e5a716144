"""Train a draft model, three steps ahead, on a sharded sequence.

torchrun --nproc-per-node 2 examples/draft.py  # each rank holds half of the tokens
torchrun --nproc-per-node 1 examples/draft.py --dense  # one process, by a mask of all pairs

Both print the same numbers. A draft guesses the tokens after the next from what a model says of the
tokens so far, as in EAGLE-3 (Li et al., arXiv:2503.01840): its first step makes a key for each
token; each further one goes on from the step before, and its queries see the first step's keys up
to their own token, and their own token's keys of all further steps.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import deepsp

VOCABULARY, HIDDEN, HEADS, TOKENS, STEPS, UPDATES = 97, 32, 4, 301, 3, 3


class Draft(nn.Module):
    """One layer, called STEPS times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.mix = nn.Linear(2 * HIDDEN, HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.attention = deepsp.DistributedAttention()

    def forward(self, hidden: Tensor, ids: list[Tensor], attend) -> list[Tensor]:
        """hidden [B, S_r, HIDDEN]: the model's, of this rank's tokens. ids: each step's tokens,
        [B, S_r]. Returns each step's logits."""
        logits, keys, values = [], [], []
        for of_step in ids:
            hidden = self.mix(torch.cat([hidden, self.embed(of_step)], -1))
            q, k, v = self.qkv(hidden).unflatten(-1, (HEADS, -1)).chunk(3, -1)
            keys.append(k)
            values.append(v)
            hidden = hidden + self.out(attend(self, q, keys, values).flatten(2))
            logits.append(self.head(hidden))
        return logits


def attend(draft: Draft, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention to all tokens' first keys over the ranks; further keys are of the same token."""
    lens = deepsp.ranks.seq_lens(TOKENS)
    trunk = draft.attention(q, keys[0], values[0], seq_lens=lens, is_causal=True, return_lse=True)
    scale = q.size(-1) ** -0.5
    own = [(v, (q * k).sum(-1) * scale) for k, v in zip(keys[1:], values[1:], strict=True)]
    out, _ = deepsp.merge_attention([trunk, *own])
    return out


def attend_dense(draft: Draft, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """The same by its definition, in one process."""
    tokens = q.size(1)
    own = torch.eye(tokens, dtype=torch.bool)
    mask = torch.cat([torch.ones_like(own).tril(), *[own] * (len(keys) - 1)], 1)
    q, k, v = (x.transpose(1, 2) for x in (q, torch.cat(keys, 1), torch.cat(values, 1)))
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--dense", action="store_true", help="attend by a mask of all pairs")
dense = parser.parse_args().dense
dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
draft = Draft().double()
optimizer = torch.optim.AdamW(draft.parameters(), 1e-2)
for update in range(UPDATES):
    # Stands for a batch and the hidden states of the model that the draft is for.
    ids = torch.randint(VOCABULARY, (1, TOKENS + STEPS + 1))
    hidden = torch.randn(1, TOKENS, HIDDEN, dtype=torch.float64)
    # Shifts cross the borders of ranks: they are made in the full sequence, then shared out.
    tokens = [ids[:, n + 1 : n + 1 + TOKENS] for n in range(STEPS + 1)]
    hidden, *tokens = (deepsp.shard(x, 1) for x in (hidden, *tokens))
    logits = draft(hidden, tokens[:-1], attend_dense if dense else attend)
    losses = [
        F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="sum")
        for x, labels in zip(logits, tokens[1:], strict=True)
    ]
    # A step weighs 0.8 of the one before it.
    loss = sum(0.8**n * x for n, x in enumerate(losses)) / TOKENS
    loss.backward()
    deepsp.sync_gradients(draft)
    norm = nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"update {update}: loss {total:.10f}, gradient norm {norm:.10f}", flush=True)

dist.destroy_process_group()
