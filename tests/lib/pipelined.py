"""Two pipeline stages of a model, its batches, and its training in one process."""

import torch
import torch.nn.functional as F
from models import VOCABULARY, Model
from reference import attention
from torch import nn

import deepsp

TOTAL, ROWS, MICROBATCHES = 13, 6, 3


class First(nn.Module):
    """The embedding and a layer."""

    def __init__(self, model, seq_lens):
        super().__init__()
        self.embed, self.position = model.embed, model.position
        self.layers = model.layers[:1]
        self.seq_lens = seq_lens

    def forward(self, ids, positions):
        return self.layers[0](self.embed(ids) + self.position(positions), self.seq_lens)


class Last(nn.Module):
    """The other layer and the head."""

    def __init__(self, model, seq_lens):
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.Identity(), model.layers[1]]), model.head
        self.seq_lens = seq_lens

    def forward(self, x):
        return self.head(self.layers[1](x, self.seq_lens))


def draw_batch(step, masked=False):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (ROWS, TOTAL), generator=generator)
    labels = ids.clone()
    if masked:  # other numbers of tokens that count in each microbatch, and on each rank
        labels[0, 3:] = labels[3, 8:] = labels[4] = -100
    return {"input_ids": ids, "labels": labels}


def make_model(attend):
    torch.manual_seed(0)
    return Model(attend).double()


def make_stage(number, group, seq_lens, chunks=1):
    attend = deepsp.DistributedAttention(group=group, chunks=chunks)
    model = make_model(
        lambda q, k, v, lens: attend(q, k, v, is_causal=True, enable_gqa=True, seq_lens=lens)
    )
    return (First, Last)[number](model, seq_lens)


def train_in_one_process(batches):
    """Returns the loss of each step, and all gradients."""
    model = make_model(lambda q, k, v, _: attention(q, k, v, is_causal=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    found = []
    for batch in batches:
        optimizer.zero_grad()
        logits = model(batch["input_ids"], torch.arange(TOTAL)[None])[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        found.append((loss.item(), gradients))
        optimizer.step()
    return found
