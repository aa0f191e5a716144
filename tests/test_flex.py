"""FlexAttention through the compile pass, against one process in float64.

What is public refuses gradients on the CPU, but the op beneath has them, as plain products."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as F
from harness import on_ranks
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import deepsp
from deepsp.compile import explain

VOCAB, DIM, BLOCK, MAX = 32, 24, 4, 40
HOP = torch.ops.higher_order.flex_attention


def causal(b, h, i, j):
    return i >= j


def window(b, h, i, j):
    return (i >= j) & (i - j < 3)


def of_documents(documents):
    return lambda b, h, i, j: (i >= j) & (documents[b, i] == documents[b, j])


def of_heads(reach):
    return lambda b, h, i, j: (i >= j) & (i - j < reach[h])


def dense(q, k, v, score_mod, mask_mod):
    """The same by hand: the functions take all positions at once."""
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
    at = [torch.arange(n).view(-1, *(1,) * (3 - d)) for d, n in enumerate(scores.shape)]
    scores = scores if score_mod is None else score_mod(scores, *at)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*at), -torch.inf)
    return scores.softmax(-1) @ v, flex.AuxOutput(scores.logsumexp(-1))


class Model(nn.Module):
    def __init__(self, name, heads=4, kv_heads=4):
        super().__init__()
        self.name, self.heads, self.kv_heads = name, heads, kv_heads
        self.embed = nn.Embedding(VOCAB, DIM)
        self.q = nn.Linear(DIM, 4 * heads)
        self.kv = nn.Linear(DIM, 8 * kv_heads)
        self.out = nn.Linear(4 * heads, DIM)
        self.bias = nn.Parameter(torch.randn(heads, 2 * MAX)) if name == "learned" else None
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1).double())
        self.register_buffer("reach", 2 + torch.arange(heads))

    def score(self, score, b, h, i, j):
        if self.name == "learned":
            return score + self.bias[h, i - j + MAX]
        return 2 * torch.tanh(score / 2) - self.slopes[h] * (i - j)

    def mask(self, ids):
        """What a block mask is made from."""
        mods = {
            "window": window,
            "documents": of_documents(torch.arange(ids.numel()).view_as(ids) // 5),
            "heads": of_heads(self.reach),
        }
        return mods.get(self.name, None if self.name in ("cross whole", "checkpointed") else causal)

    def attend(self, x, memory, mask):
        q, kv = (
            y.unflatten(-1, (heads, -1)).transpose(1, 2)
            for y, heads in ((self.q(x), self.heads), (self.kv(memory), self.kv_heads))
        )
        k, v = kv.chunk(2, -1)
        mod = self.score if self.name in ("window", "learned") else None
        aux = flex.AuxRequest(lse=True) if self.name == "statistics" else None
        if torch.compiler.is_compiling():
            gqa = self.heads != self.kv_heads
            y = flex.flex_attention(
                q, k, v, score_mod=mod, block_mask=mask, enable_gqa=gqa, return_aux=aux
            )
            y, found = y if aux is not None else (y, None)
        else:
            y, found = dense(q, k, v, mod, mask)
        if aux is not None:
            y = y * torch.sigmoid(found.lse).unsqueeze(-1)
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, ids, labels, mask=None, source=None):
        if self.name == "inside" and torch.compiler.is_compiling():
            n = ids.size(1)
            mask = flex.create_block_mask(causal, None, None, n, n, "cpu", BLOCK)
        x = self.embed(ids)
        memory = x if source is None else self.embed(source)
        if self.name == "checkpointed":
            x = x + checkpoint(self.attend, x, memory, mask, use_reentrant=False)
        else:
            x = x + self.attend(x, memory, mask)
        logits = F.linear(x, self.embed.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Checked(fx.Interpreter):
    """Runs a graph, and looks whether blocks are those of the heads that attend: the products on
    the CPU don't read them."""

    seen, cut, spared = 0, False, False

    def call_function(self, target, args, kwargs):
        if target is HOP:
            Checked.seen += 1
            q, k, mask, read = args[0], args[1], args[4], args[8]
            if mask[-2] == BLOCK:
                blocks = flex.BlockMask.from_kv_blocks(
                    *mask[2:6], BLOCK_SIZE=BLOCK, seq_lengths=(q.size(2), k.size(2))
                )
                rows, heads, *_ = mask[2].shape
                own = flex.create_block_mask(
                    lambda b, h, i, j: mask[-1](b, h, i, j, *read),
                    rows,
                    heads,
                    q.size(2),
                    k.size(2),
                    "cpu",
                    BLOCK,
                )
                assert heads in (1, q.size(1))
                found, wanted = blocks.to_dense().bool(), own.to_dense().bool()
                if Checked.cut:  # blocks that lie across two
                    assert not (wanted & ~found).any()
                    assert torch.equal(mask[6], found.sum(-2))
                    Checked.spared |= not found.all()
                else:
                    assert torch.equal(found, wanted)
                    assert torch.equal(mask[6], own.q_num_blocks)
        return super().call_function(target, args, kwargs)


def checked(gm, inputs):
    return Checked(gm).run


def compare(name, heads, kv_heads, lengths, inner):
    torch._dynamo.reset()
    torch.manual_seed(0)
    flex._validate_device = lambda *args: None
    reference = Model(name, heads, kv_heads).double()
    model = copy.deepcopy(reference)
    inner = checked if inner == "checked" else inner
    Checked.seen, Checked.spared = 0, False
    Checked.cut = heads < dist.get_world_size()
    compiled = torch.compile(model, backend="deepsp", fullgraph=True, options={"inner": inner})
    for length in lengths:
        ids = torch.randint(0, VOCAB, (2, length))
        inputs = {"ids": ids, "labels": torch.randint(0, VOCAB, (2, length))}
        keys = length
        if name.startswith("cross"):
            keys = length + 3
            inputs["source"] = torch.randint(0, VOCAB, (2, keys))
        mod = reference.mask(inputs["ids"])
        expected = reference(**inputs, mask=mod)
        expected.backward()
        rows, per_head = 2 if name == "documents" else None, heads if name == "heads" else None
        mask = None
        if mod is not None and name != "inside":
            mask = flex.create_block_mask(mod, rows, per_head, length, keys, "cpu", BLOCK)
        if name == "cross whole":
            source = inputs.pop("source")
            found = compiled(**deepsp.prepare_inputs(inputs), mask=mask, source=source)
        else:
            found = compiled(**deepsp.prepare_inputs(inputs), mask=mask)
        found.backward()
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        for (n, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            scale = q.grad.abs().max().item()
            assert scale > 0, n
            torch.testing.assert_close(
                p.grad, q.grad, rtol=0, atol=1e-9 * scale, msg=lambda m, n=n: f"{n}: {m}"
            )
        model.zero_grad()
        reference.zero_grad()
    if inner is not checked:
        assert Checked.seen == 0
    elif Checked.cut:  # for each range of queries of each cell
        assert 0 < Checked.seen <= 4 * len(lengths) and Checked.spared
    else:
        assert Checked.seen == len(lengths)


# Heads, lengths, groups. A bias that is learned has its gradient in eager mode only: what
# AOTAutograd keeps of it for backward doesn't require one, and the products on the CPU ask.
CASES = {
    "causal": (4, 2, (13, 12), "aot_eager", (2,)),
    "grouped": (4, 2, (13,), "aot_eager", (3,)),
    "window": (5, 5, (13,), "aot_eager", (2, 3)),
    "documents": (6, 2, (12,), "aot_eager", (2, 3)),
    "learned": (4, 2, (13,), "checked", (2, 3)),
    "heads": (8, 2, (13,), "checked", (2, 3)),
    "statistics": (4, 4, (13,), "checked", (2,)),
    "checkpointed": (4, 4, (13,), "aot_eager", (2,)),
    "cross": (6, 6, (13,), "aot_eager", (3,)),
    "cross whole": (8, 2, (13,), "aot_eager", (3,)),
    "inside": (4, 4, (13,), "aot_eager", (2,)),
    "shared": (2, 1, (39,), "checked", (3,)),
    "window:shared": (1, 1, (13,), "checked", (4,)),
    "statistics:shared": (2, 2, (13,), "checked", (3,)),
}


@pytest.mark.parametrize(
    "name, ranks",
    [
        pytest.param(name, ranks, marks=[pytest.mark.nightly] * (name in ("inside", "cross whole")))
        for name, case in CASES.items()
        for ranks in case[-1]
    ],
)
def test_cases(name, ranks):
    on_ranks(ranks, compare, name.partition(":")[0], *CASES[name][:-1])


def _explained():
    flex._validate_device = lambda *args: None
    ids = torch.randint(0, VOCAB, (2, 12))
    ids, labels = deepsp.prepare_inputs(ids, ids.clone())
    mask = flex.create_block_mask(causal, None, None, 12, 12, "cpu", BLOCK)
    found = explain(Model("causal"), ids, labels, mask)
    assert found.refused is None, found
    rows = [d for d in found.decisions if d.what == "distributed FlexAttention"]
    assert [(d.op, d.shape) for d in rows] == [("flex_attention", "[2, 4, 12, 4]")], found
    assert "test_flex.py" in rows[0].line
    assert found.collectives["seq_to_heads"] == found.collectives["heads_to_seq"] == 1


def test_explain():
    on_ranks(2, _explained)


def _refused():
    torch._dynamo.reset()
    flex._validate_device = lambda *args: None
    embed = nn.Embedding(VOCAB, DIM)

    def made_of_tokens(ids):
        x = embed(ids)
        gate = x.mean(-1)
        x = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return flex.flex_attention(x, x, x, lambda score, b, h, i, j: score + gate[b, j])

    def heads_as_tokens(ids):
        x = embed(ids).unflatten(-1, (4, -1))
        return flex.flex_attention(x, x, x)

    blocks = flex.create_block_mask(causal, None, None, 12, 12, "cpu", BLOCK)
    alone = flex.BlockMask.from_kv_blocks(
        blocks.kv_num_blocks, blocks.kv_indices, BLOCK_SIZE=BLOCK, seq_lengths=(12, 12)
    )

    def blocks_alone(ids):
        x = embed(ids)[:, None]
        return flex.flex_attention(x, x, x, block_mask=alone)

    for function, why in (
        (blocks_alone, "whose mask_mod says which keys are seen .*, got blocks alone"),
        (made_of_tokens, "computed from replicated inputs, got mean.*, which is sharded"),
        (heads_as_tokens, r"of shape \[batch, heads, tokens, head_dim\], got its tokens in"),
    ):
        (ids,) = deepsp.prepare_inputs(torch.randint(0, VOCAB, (2, 12)))
        with pytest.raises(Exception) as caught:
            torch.compile(function, backend="deepsp", fullgraph=True)(ids)
        text = str(caught.value)
        assert re.search(why, text) and "test_flex.py" in text, text


def test_refused():
    on_ranks(2, _refused)
