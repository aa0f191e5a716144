"""Documents of different lengths, each shared by some of the ranks, against one process in float64:
output, loss and every gradient."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from architectures import VOCAB, make
from harness import on_ranks
from reference import draw, sent
from torch.library import opcheck

import deepsp
from deepsp.data.documents import Deal
from deepsp.integrations.transformers import register


def _firsts(width, ranks):
    """The first ranks of blocks, which lie in aligned blocks of powers of two; or all ranks."""
    stride = next(n for n in (1, 2, 4, 8) if n >= width)
    return [0] if width == ranks else range(0, ranks - width + 1, stride)


def _deal(ranks, seed, lengths=(1, 1, 2, 5, 9, 17, 30)):
    """Any blocks, and any split over their ranks."""
    draws = random.Random(seed)
    widths = deepsp.deal_documents([], ranks).widths
    sizes, places = [], []
    for _ in range(draws.randint(1, 8)):
        level = draws.randrange(len(widths))
        places.append((level, draws.choice(_firsts(widths[level], ranks))))
        sizes.append(draws.choice(lengths))
    lens = [[0] * ranks for _ in widths]
    for level, width in enumerate(widths):
        for first in _firsts(width, ranks):
            total = sum(n for n, p in zip(sizes, places, strict=True) if p == (level, first))
            cuts = sorted(draws.randint(0, total) for _ in range(width - 1))
            borders = [0, *cuts, total]
            lens[level][first : first + width] = [b - a for a, b in itertools.pairwise(borders)]
    return Deal(sizes, ranks, widths, places, lens, (1.0, 2e-5))


def _alone(q, k, v, lengths, window=None, sinks=None, causal=True):
    """Each document by all scores."""
    readers = q.size(2) // k.size(2)
    k, v = (x.repeat_interleave(readers, 2) for x in (k, v))
    outputs = []
    for x, y, z in zip(*(t.split(lengths, 1) for t in (q, k, v)), strict=True):
        n = x.size(1)
        i, j = torch.arange(n)[:, None], torch.arange(n)
        seen = (j <= i) | (not causal)
        if window is not None:
            seen = seen & (j >= i - window)
        scores = torch.einsum("bihd,bjhd->bhij", x, y) * x.size(3) ** -0.5
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, -1, n, 1)], 3)
        weights = scores.softmax(3)[..., :n]
        outputs.append(torch.einsum("bhij,bjhd->bihd", weights, z))
    return torch.cat(outputs, 1)


def _attends(seeds, heads):
    rank, size = dist.get_rank(), dist.get_world_size()
    attention = deepsp.DistributedAttention()
    for seed in seeds:
        deal = _deal(size, seed)
        for n, kv in heads:
            total = sum(deal.lengths)
            whole = [draw(1, total, h, d, seed=seed + d) for h, d in ((n, 3), (kv, 3), (kv, 5))]
            sinks = [draw(n, seed=1)] if seed % 3 == 0 else []
            how = {"is_causal": seed % 4 != 1}
            how |= {"window_size": (4, 0)} if seed % 4 == 2 else {}
            full = [x.clone().requires_grad_() for x in (*whole, *sinks)]
            window = 4 if "window_size" in how else None
            expected = _alone(
                *full[:3], deal.lengths, window, *(full[3:] or [None]), how["is_causal"]
            )
            grad = draw(*expected.shape, seed=2)
            wanted = torch.autograd.grad(expected, full, grad)
            index = deal.tokens(rank)
            mine = [x[:, index].clone().requires_grad_() for x in whole]
            mine += [x.clone().requires_grad_() for x in sinks]
            out = attention(
                *mine[:3], enable_gqa=n != kv, deal=deal, sinks=mine[3] if sinks else None, **how
            )
            found = torch.autograd.grad(out, mine, grad[:, index])
            if sinks:
                share = found[3].clone()
                dist.all_reduce(share)
                torch.testing.assert_close(share, wanted[3], rtol=1e-9, atol=1e-10)
            for a, b in zip((out, *found[:3]), (expected, *wanted[:3]), strict=True):
                torch.testing.assert_close(
                    a,
                    b[:, index],
                    rtol=1e-9,
                    atol=1e-10,
                    msg=lambda m, d=(n, kv, deal): f"{d}: {m}",
                )


_HEADS = [(8, 8), (6, 3), (3, 1), (1, 1)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_attention(ranks):
    on_ranks(ranks, _attends, range(6), _HEADS)


@pytest.mark.messages
def test_attention_by_messages():
    on_ranks(3, _attends, range(4), _HEADS, apart="messages")


def _counted():
    """What travels is what the ranks of a block read of each other's tokens, and no more."""
    rank, size = dist.get_rank(), dist.get_world_size()
    heads, dim = 8, 16
    for seed in range(4):
        deal = _deal(size, seed, (3, 40, 100))
        x = draw(1, deal.seq_lens[rank], heads, dim, dtype=torch.float32)
        deepsp.distributed_attention(x, x, x, is_causal=True, deal=deal)
        found = sum(
            sent(lambda x=x, d=deal: deepsp.distributed_attention(x, x, x, is_causal=True, deal=d))
        )
        expected = 0
        for width, lens in zip(deal.widths, deal.lens, strict=True):
            # q, k and v of other ranks' heads; the output of this rank's heads.
            own = heads // width + (rank % width < heads % width)
            first = rank // width * width
            others = sum(lens[first : first + width]) - lens[rank]
            if first + width <= size:
                expected += 3 * lens[rank] * (heads - own) + others * own
        assert found == expected * dim * 4, (seed, found, expected * dim * 4)


def test_bytes():
    on_ranks(4, _counted, apart="messages")


# ------------------------------------------------------------------ visible to the compiler


def _checked():
    rank, size, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    op, deal = torch.ops.deepsp, _deal(size, 3)
    lens = [n for level in deal.lens[1:] for n in level]
    own = sum(deal.lens[level][rank] for level in range(1, len(deal.lens)))
    q, k = (draw(1, own, h, 4, dtype=torch.float32).requires_grad_() for h in (2, 2))
    more = {"levels": len(deal.lens) - 1}
    with torch.autograd.set_detect_anomaly(True, check_nan=False):  # see tests/lib/calls.py
        (there,) = op.seq_to_heads_start([q, k], lens, 1, False, rank, name, **more)
        there = there.detach().requires_grad_()
        shape = ([2, 2], [4, 4], 1)
        held = op.seq_to_heads([q, k], lens, rank, name, **more)
        held = [x.detach().requires_grad_() for x in held]
        back = op.heads_to_seq_start(held, [2, 2], lens, 0, 1, rank, name, **more)
        back = back.detach().requires_grad_()
        for which, arguments in (
            (op.seq_to_heads, ([q, k], lens, rank, name)),
            (op.heads_to_seq, (held, [2, 2], lens, rank, name)),
            (op.seq_to_heads_start, ([q, k], lens, 1, False, rank, name)),
            (op.seq_to_heads_wait, (there, *shape, lens, 0, 1, rank, name)),
            (op.heads_to_seq_start, (held, [2, 2], lens, 0, 1, rank, name)),
            (op.heads_to_seq_wait, ([back], *shape, lens, rank, name)),
        ):
            opcheck(which.default, arguments, more)


def test_opcheck():
    on_ranks(3, _checked)


def _compiled(inner, heads):
    """One graph more for other lengths, whatever these are, as long as all blocks have tokens."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch._dynamo.reset()
    module, graphs = deepsp.DistributedAttention(), []

    def attend(q, k, v, deal):
        return module(q * 2, k, v, is_causal=True, enable_gqa=True, deal=deal)

    def count(gm, inputs):
        graphs.append(gm)
        return torch._dynamo.lookup_backend(inner)(gm, inputs)

    call = torch.compile(attend, backend=count, fullgraph=True)
    for t in (0, 3, 11, 20):
        lengths = [10 + t, 12 + t, 9 + t, 20 + 2 * t, 30 + 3 * t, 15]
        places = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 0)]
        lens = [lengths[:3], [8 + t, 12 + t, 0], [15 + t] * 3]
        deal = Deal(lengths, size, [1, 2, 3], places, lens, (1.0, 0.0))
        mine = [draw(1, deal.seq_lens[rank], h, 8, seed=h, dtype=torch.float32) for h in heads]
        mine = [x.requires_grad_() for x in (*mine, mine[1].clone())]
        found = []
        for function in (attend, call):
            out = function(*mine, deal)
            found.append((out, *torch.autograd.grad(out.square().sum(), mine)))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert len(graphs) == 2


def test_compiled():
    on_ranks(3, _compiled, "aot_eager", (4, 2))


@pytest.mark.nightly
def test_inductor():
    on_ranks(3, _compiled, "inductor", (4, 2))


# ------------------------------------------------------------------ models


def _rows(kind, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (5, 40), generator=generator)
    labels = ids.clone()
    labels[1, 3:9] = -100
    batch = {"input_ids": ids, "labels": labels}
    if kind == "padded":
        mask = torch.ones_like(ids)
        for row, n in enumerate((40, 1, 7, 22, 3)):
            mask[row, n:] = 0
        batch |= {"attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}
    else:
        borders = [[0, 40], [0, 1, 40], [0, 2, 40], [0, 40], [0, 40]]
        positions = [
            torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(x)]) for x in borders
        ]
        batch["position_ids"] = torch.stack(positions)
    return batch


def _model(name, slack):
    """``slack``: how many tokens more than the mean a rank may hold."""
    rank, size = dist.get_rank(), dist.get_world_size()
    register()
    for kind in ("padded", "packed"):
        torch.manual_seed(0)
        reference = make(name).double()
        torch.manual_seed(0)
        model = make(name, attn_implementation="deepsp").double()
        batch = _rows(kind, seed=1)
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        if kind == "packed":
            labels[:, :-1][batch["position_ids"][:, 1:] == 0] = -100
        inputs = {n: x for n, x in batch.items() if n != "labels"}
        logits = reference(**inputs, use_cache=False).logits
        expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        expected.backward()
        for checkpoints in (False, True):
            if checkpoints:
                model.gradient_checkpointing_enable()
            total = int(batch.get("attention_mask", torch.ones_like(batch["input_ids"])).sum())
            most = -(-total // size) + slack
            local, deal = deepsp.deal_batch(batch, max_tokens=most)
            assert max(deal.seq_lens) <= most and deal.shared > 0
            loss = model(**local).loss
            loss.backward()
            deepsp.sync_gradients(model)
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
            for (n, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
                scale = q.grad.abs().max().item()
                torch.testing.assert_close(
                    p.grad, q.grad, rtol=0, atol=1e-5 * scale, msg=lambda m, n=n: f"{n}: {m}"
                )
            model.zero_grad()
        whole = torch.cat(
            [
                x[m.bool()]
                for x, m in zip(
                    batch["input_ids"],
                    batch.get("attention_mask", torch.ones_like(batch["input_ids"])),
                    strict=True,
                )
            ]
        )
        assert torch.equal(deal.unshard(local["input_ids"]), whole[None])
        assert torch.equal(local["input_ids"][0], whole[deal.tokens(rank)])


@pytest.mark.parametrize(("name", "ranks", "slack"), [("Llama", 3, 0), ("Mistral", 2, 5)])
def test_models(name, ranks, slack):
    on_ranks(ranks, _model, name, slack)


def _positions():
    """deal_batch trains on the positions that a batch has."""
    from transformers import GPT2Config, GPT2LMHeadModel, RobertaConfig, RobertaForCausalLM

    sizes = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    plain = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}

    def learned():
        size = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        return GPT2LMHeadModel(GPT2Config(**sizes, **size, **plain))

    ids = torch.randint(3, VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))
    left = torch.ones_like(ids)
    left[1, :9] = 0
    after = torch.where(torch.arange(20) < torch.tensor([[0], [10]]), -100, ids)
    twice = torch.cat([torch.arange(12), torch.arange(8)]).expand(2, -1)
    once = ids.masked_fill(twice == 0, -100)
    register()
    for make_model, batch in (
        (learned, {"labels": ids, "position_ids": torch.arange(7, 27).expand(2, -1)}),
        (learned, {"labels": after, "attention_mask": left}),
        (
            lambda: make("Llama"),
            {"labels": once, "position_ids": twice, "attention_mask": torch.ones_like(ids)},
        ),
        (lambda: make("Llama"), {"labels": once, "position_ids": twice}),
    ):
        torch.manual_seed(0)
        model = make_model().double()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.1)
        expected = model(input_ids=ids, **batch).loss
        model.set_attn_implementation("deepsp")
        local, deal = deepsp.deal_batch({"input_ids": ids, **batch})
        loss = model(**local).loss
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0, check_dtype=False)
    assert len(deal.lengths) == 4  # without a mask, positions that restart begin a document
    roberta = RobertaForCausalLM(
        RobertaConfig(
            **sizes,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            is_decoder=True,
            pad_token_id=0,
        )
    )
    roberta.eval().set_attn_implementation("deepsp")
    with pytest.raises(ValueError, match=r"as deepsp.deal_batch makes them, but .*counts other"):
        roberta(**deepsp.deal_batch({"input_ids": ids, "labels": ids})[0])
    few = {"input_ids": ids[:1, :1], "labels": ids[:1, :1]}
    for door in (deepsp.shard_batch, deepsp.deal_batch):
        with pytest.raises(ValueError, match=r"a token in the call of .*, got \[[01], [01]\] by"):
            model(**door(few)[0])


def test_positions():
    on_ranks(2, _positions)


# ------------------------------------------------------------------ loaders


def _samples(rank, count):
    """A rank's batches: rows of any lengths, padded."""
    draws = random.Random(rank)
    for n in range(count):
        lengths = [draws.choice([1, 2, 7, 15, 40]) for _ in range(3)]
        ids = torch.zeros(3, max(lengths), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, length in enumerate(lengths):
            ids[row, :length] = torch.arange(length) + 1000 * rank + 100 * n + 300 * row
            mask[row, :length] = 1
        weights = ids[..., None] * torch.tensor([0.5, 0.25])
        labels = ids.masked_fill(mask == 0, -100)
        yield {"input_ids": ids, "labels": labels, "attention_mask": mask, "weights": weights}


class _Stream(torch.utils.data.IterableDataset):
    def __init__(self, rank, count):
        self.rank, self.count = rank, count

    def __iter__(self):
        return _samples(self.rank, self.count)


def _loads(replicated):
    """Nothing is lost or repeated; loaders end at different times; resumed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    counts = [2] * size if replicated else [3, 1, 2][:size]
    mine = 0 if replicated else rank
    how = {"replicated": replicated, "mix": True, "roles": {"weights": "tokens"}}

    def loader():
        data = torch.utils.data.DataLoader(_Stream(mine, counts[rank]), batch_size=None)
        return deepsp.SequenceLoader(data, **how)

    every = [list(_samples(r, n)) for r, n in enumerate(counts)]
    every = every[:1] if replicated else every
    whole = loader()
    found = list(whole)
    assert len(found) == max(map(len, every))
    for n, (batch, deal) in enumerate(found):
        rows = [x[n] for x in every if n < len(x)]
        expected = torch.cat([x["input_ids"][x["attention_mask"] == 1] for x in rows])
        assert torch.equal(deal.unshard(batch["input_ids"])[0], expected)
        weights = deal.unshard(batch["weights"])[0]
        torch.testing.assert_close(weights, expected[:, None] * torch.tensor([0.5, 0.25]))
        ids, labels, first = (
            deal.unshard(batch[name])[0] for name in ("input_ids", "shift_labels", "position_ids")
        )
        shifted = F.pad(ids[1:], (0, 1), value=-100)
        ends = F.pad(first[1:] == 0, (0, 1), value=True)
        assert torch.equal(labels, shifted.masked_fill(ends, -100))
        mean = sum(deal.costs) / size
        assert batch["deal"] is deal and max(deal.costs) <= max(1.03 * mean, mean + 1)
    again = loader()
    next(iter(again))
    state = again.state_dict()
    resumed = loader()
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert len(rest) == len(found) - 1
    for (a, _), (b, _) in zip(rest, found[1:], strict=True):
        assert torch.equal(a["input_ids"], b["input_ids"])


@pytest.mark.parametrize("replicated", [False, True])
def test_loader(replicated):
    on_ranks(3, _loads, replicated)


# ------------------------------------------------------------------ wrong uses


def _refused():
    rank, size = dist.get_rank(), dist.get_world_size()
    deal = deepsp.deal_documents([5, 9, 30], size)
    x = draw(1, deal.seq_lens[rank], 4, 2)
    call = deepsp.distributed_attention
    two = torch.cat([x, x])
    for error, function in (
        (
            "for the 2 ranks of the group, got one for 3",
            lambda: call(x, x, x, deal=deepsp.deal_documents([5, 9, 30], 3)),
        ),
        ("seq_lens to be left out", lambda: call(x, x, x, seq_lens=[1, 2], deal=deal)),
        ("one row with dealt, got 2", lambda: call(two, two, two, deal=deal)),
        (
            "no documents with deal,",
            lambda: call(x, x, x, deal=deal, documents=torch.tensor([[0, 44]])),
        ),
        ("chunks to be 1", lambda: call(x, x, x, deal=deal, chunks=2)),
        ("no kv_chunk with deal", lambda: call(x, x, x, deal=deal, kv_chunk=4)),
        ("dropout_p to be 0", lambda: call(x, x, x, deal=deal, dropout_p=0.1)),
        (
            "no local_attention with deal",
            lambda: deepsp.DistributedAttention(lambda q, k, v, **_: q)(x, x, x, deal=deal),
        ),
        ("sequence length", lambda: call(x[:, 1:], x[:, 1:], x[:, 1:], deal=deal)),
        (
            "is in no block of 2",
            lambda: torch.ops.deepsp.seq_to_heads([x], [0, 0, 1, 0, 0, 0], 0, "0", levels=2),
        ),
        (
            "this rank's of all levels, got 1",
            lambda: torch.ops.deepsp.seq_to_heads([x[:, :1]], [2, 1, 0, 1, 1, 1], 0, "0", levels=2),
        ),
        (
            "each of the levels of width 2",
            lambda: torch.ops.deepsp.seq_to_heads([x], [0, 0, 1, 0], 0, "0", levels=2),
        ),
    ):
        with pytest.raises(ValueError, match=error):
            function()
    batch = _rows("padded", 0)
    holes = batch["attention_mask"].clone()
    holes[0, 5] = 0
    for error, wrong in (
        (
            "zeros of attention_mask at the ends",
            {"attention_mask": holes, "labels": batch["labels"].masked_fill(holes == 0, -100)},
        ),
        (
            r"batch\['labels'\] to be -100 .*; pass labels.masked_fill\(attention_mask == 0, -100",
            {"labels": batch["input_ids"]},
        ),
        (
            r"batch\['shift_labels'\] to be -100 .*; pad on the right",
            {**{n: batch[n].flip(1) for n in ("attention_mask", "input_ids", "labels")}},
        ),
        (
            r"by name, got batch\['more'\]\['extra'\] of shape \(5, 40\) within another value",
            {"more": {"extra": batch["input_ids"]}},
        ),
        (
            r"\['position_ids'\] of shape \[40\] or \[5, 40\], got \(3, 5, 40\)",
            {"position_ids": torch.arange(40).expand(3, 5, -1), "labels": None},
        ),
        (
            r"\['seq_idx'\] to be a tensor \[5, 40\] .*, got list",
            {"seq_idx": [1], "attention_mask": None, "labels": None},
        ),
        (r"batch\['extra'\] of shape \[5, 40", {"extra": torch.zeros(1, 40)}),
    ):
        with pytest.raises(ValueError, match=error):
            deepsp.deal_batch({**batch, **wrong}, roles={"extra": "tokens"})
    for error, how in (
        ("dim=1, no pad_to", {"mix": True, "pad_to": 8}),
        ("max_tokens and cost with mix=True only", {"max_tokens": 8}),
    ):
        with pytest.raises(ValueError, match=error):
            deepsp.SequenceLoader([], **how)
    register()
    model = make("Llama", attn_implementation="deepsp").double()
    local, _ = deepsp.deal_batch(batch)
    one = deepsp.deal_documents([sum(deal.lengths)], size)
    for error, wrong in (
        ("same deal", {"deal": deal if rank else one}),
        ("no attention_mask", {"attention_mask": torch.ones(1, 73)}),
        ("as their deal says", {"deal": one}),
    ):
        with pytest.raises(ValueError, match=error):
            model(**{**local, **wrong})


def test_refused():
    on_ranks(2, _refused)
