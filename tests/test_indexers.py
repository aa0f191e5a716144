"""transformers' models that choose keys by an indexer, over a sharded sequence: unmodified models
in float64 against one process, loss and every gradient; what is sent; what is refused."""

import copy
import itertools
import types
from unittest import mock

import indexed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from float64 import in_float64
from harness import on_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from trained import (
    Rows,
    arguments,
    compare_logs,
    lists,
    logs,
    tiny,
    tokenizer,
    trainer_class,
    wide_loss,
)

import deepsp
from deepsp.integrations.transformers import (
    absorbed,
    indexers,
    masks,
    register,
    sequence_parallel,
    shard_experts,
)

KINDS = ["plain", "left", "right", "packed"]
HYBRIDS = ["glm5_next", "qwen4_exp_text"]
UNEXPANDED = [
    *("deepseek_v32", "glm_moe_dsa", "hy_v4", "axk2", "dots3_note_text"),
    *("mistral_large4", "hy_v4_vl"),
]
"""Models whose attention reads chosen latents."""
ONE_DOCUMENT = [*indexed.BLOCKS, "glm5_next"]
"""Models whose rows have one document each."""


def _shards(name, batch):
    at = "decoder" if name in indexed.AROUND else "inputs"
    return deepsp.shard_batch(batch, shard_at=at)[0]


def _alone(model, name, batch):
    """The loss in one process; documents are apart in the row, or, where its recurrences or blocks
    don't know them, alone."""
    labels = indexed.shifted(batch)
    inputs = {n: x for n, x in batch.items() if n != "labels"}
    if "position_ids" in batch and name in HYBRIDS:
        rows = [
            torch.cat([model(ids[None, a:b]).logits for a, b in itertools.pairwise([0, *ends])], 1)
            for ids, ends in zip(batch["input_ids"], indexed.ENDS, strict=True)
        ]
        logits = torch.cat(rows)
    else:
        logits = model(**inputs).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _gradients(model):
    found = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def _compare(kind, loss, model, expected, digits=1e-12):
    wanted, gradients = expected
    assert abs(loss.item() - wanted) < digits * wanted, (kind, loss.item(), wanted)
    for n, found in _gradients(model).items():
        g = gradients[n]
        assert (found is None) == (g is None), (kind, n)
        if g is not None:
            atol = 100 * digits * max(g.abs().max().item(), 1e-12)
            torch.testing.assert_close(
                found, g, rtol=0, atol=atol, msg=lambda m, n=n: f"{kind}, {n}: {m}"
            )


def _sharded(model, name, batch):
    loss = model(**_shards(name, batch)).loss
    loss.backward()
    deepsp.sync_gradients(model)
    return loss


def _equals(name):
    in_float64()
    register()
    model = indexed.make(name)
    before = model.get_decoder().config._attn_implementation
    expected = {}
    for kind in KINDS:
        if kind == "packed" and name in ONE_DOCUMENT:
            continue
        loss = _alone(model, name, indexed.batch(kind))
        loss.backward()
        expected[kind] = loss.item(), _gradients(model)
    indexed.attend_by(model, name, "deepsp")
    with mock.patch.object(absorbed, "attend", wraps=absorbed.attend) as attend:
        for kind in expected:
            _compare(kind, _sharded(model, name, indexed.batch(kind)), model, expected[kind])
    assert (attend.call_count > 0) == (name in UNEXPANDED)
    if name in ONE_DOCUMENT:
        with pytest.raises(ValueError, match="expected one document in each row"):
            model(**_shards(name, indexed.batch("packed")))

    # Some queries at a time, and checkpoints of both kinds.
    most = indexers.ENTRIES
    indexers.ENTRIES = 5 * indexed.ROWS * 2 * indexed.LENGTH
    _compare("some", _sharded(model, name, indexed.batch("left")), model, expected["left"])
    # MistralLarge4 itself fails with the reentrant kind.
    for reentrant in (False,) if name == "mistral_large4" else (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        loss = deepsp.causal_lm_loss(model, _shards(name, indexed.batch("plain")))
        loss.backward()
        deepsp.sync_gradients(model)
        _compare(f"checkpoints, {reentrant}", loss, model, expected["plain"])
    model.gradient_checkpointing_disable()
    indexers.ENTRIES = most

    # A copy has weights of its own, and the model works as before with its own attention.
    assert not any({"forward", "expand_kv"} & vars(m).keys() for m in model.modules())
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1e-3)
    indexed.attend_by(other, name, before)
    wanted = _alone(other, name, indexed.batch("plain")).item()
    indexed.attend_by(other, name, "deepsp")
    loss = _sharded(other, name, indexed.batch("plain")).item()
    assert abs(loss - wanted) < 1e-12 * wanted
    indexed.attend_by(model, name, before)
    model.eval()
    with torch.no_grad():
        loss = _alone(model, name, indexed.batch("plain")).item()
        assert abs(loss - expected["plain"][0]) < 1e-12 * loss
        ids = indexed.batch("plain")["input_ids"][:1, :9]
        grown = model.generate(ids, max_new_tokens=2, do_sample=False, use_cache=True)
        again = model.generate(ids, max_new_tokens=2, do_sample=False, use_cache=False)
    assert torch.equal(grown, again)


def _nightly_but(names):
    return [n if n in names else pytest.param(n, marks=pytest.mark.nightly) for n in indexed.NAMES]


_AT_EVERY_COMMIT = [
    *("deepseek_v32", "hy_v4", "dots3_note_text", "minimax_m3_vl_text"),
    *("qwen4_exp_text", "deepseek_v4", "glm5_next"),
]


@pytest.mark.parametrize("name", _nightly_but(_AT_EVERY_COMMIT))
def test_equals_one_process(name):
    on_ranks(2, _equals, name, apart="hybrid")


@pytest.mark.parametrize("name", _nightly_but(["deepseek_v32", "deepseek_v4"]))
def test_three_ranks(name):
    on_ranks(3, _equals, name, apart="hybrid")


@pytest.mark.nightly
@pytest.mark.parametrize("name", indexed.NAMES)
def test_five_ranks(name):
    on_ranks(5, _equals, name, apart="hybrid")


class _Adapted(torch.nn.Linear):
    pass


def _expanded():
    """With another layer that expands latents, or a hook on it, and few scores at a time."""
    in_float64()
    register()
    for name in ("deepseek_v32", "hy_v4"):
        model = indexed.make(name)
        for layer in model.model.layers:
            expand = layer.self_attn.kv_b_proj
            if name == "hy_v4":
                expand.register_forward_hook(lambda _, args, out: 2 * out)
            else:
                expand.__class__ = _Adapted
        batch = indexed.batch("left")
        loss = _alone(model, name, batch)
        loss.backward()
        expected = loss.item(), _gradients(model)
        model.set_attn_implementation("deepsp")
        most = indexers.ENTRIES
        for entries in (most, 5 * indexed.ROWS * 4 * indexed.LENGTH):
            indexers.ENTRIES = entries
            _compare("expanded", _sharded(model, name, batch), model, expected)
        indexers.ENTRIES = most


def test_expanded_latents():
    on_ranks(2, _expanded, apart="hybrid")


def test_gradients_of_latents_are_added_in_float32():
    """In bfloat16, 257 is 256, and 256 + 258 is 512."""
    tokens, dtype = 515, torch.bfloat16
    module = types.SimpleNamespace(
        kv_b_proj=torch.nn.Linear(2, 4, bias=False, dtype=dtype),
        num_heads=1,
        qk_nope_head_dim=2,
        v_head_dim=2,
    )
    with torch.no_grad():
        module.kv_b_proj.weight.copy_(torch.eye(2).repeat(2, 1))
    keys = types.SimpleNamespace(module=module, cut=lambda _: [range(257), range(257, tokens)])
    mask = types.SimpleNamespace(
        keys=keys,
        indices=torch.zeros(1, tokens, 1, dtype=torch.int32),
        seen=lambda _: tokens,
        mask=types.SimpleNamespace(part=lambda q, k: torch.ones(1, 1, len(q), len(k)).bool()),
    )
    latent = torch.ones(1, 1, tokens, 2, dtype=dtype, requires_grad=True)
    query, rotated = torch.zeros(1, 1, tokens, 3, dtype=dtype), torch.zeros(1, 1, tokens, 1)
    absorbed.attend(query, latent, rotated.to(dtype), mask, 1.0, None).sum().backward()
    assert latent.grad[0, 0, 0].tolist() == [516, 516]
    assert not latent.grad[0, 0, 1:].any()


def _images():
    in_float64()
    register()
    name, batch = "mistral_large4", indexed.batch("plain")
    model = indexed.make(name)
    token = model.config.image_token_id
    ids = batch["input_ids"].masked_fill(batch["input_ids"] == token, 11)
    ids[0, 13:17] = ids[1, 4:8] = token  # in the middle, and in the first rank's part
    batch |= {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == token, -100),
        "pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)),
        "image_sizes": torch.tensor([[8, 8], [8, 8]]),
    }
    loss = _alone(model, name, batch)
    loss.backward()
    expected = loss.item(), _gradients(model)
    indexed.attend_by(model, name, "deepsp")
    _compare("images", _sharded(model, name, batch), model, expected)


def test_images():
    on_ranks(2, _images, apart="hybrid")


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(
            name, size, marks=[] if name == "deepseek_v3" and size == 2 else pytest.mark.nightly
        )
        for name in indexed.LATENT
        for size in (2, 3, 5)  # on 3 and 5 ranks, heads' queries are split
    ],
)
def test_latents(name, size):
    on_ranks(size, _equals, name, apart="hybrid")


# ------------------------------------------------------------------- what is sent


class _Sent(TorchDispatchMode):
    """Counts the numbers that this rank sends to another, by op."""

    def __init__(self):
        super().__init__()
        self.numbers = {"all_gather": 0, "_rows": 0, "seq_to_heads": 0}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0].removesuffix("_start")
        if name in self.numbers:
            given = args[0] if isinstance(args[0], list) else args[:1]
            self.numbers[name] += sum(x.numel() for x in given)
        return function(*args, **(kwargs or {}))


def _bytes():
    """As docs/sparse.md says: numbers of a token and layer."""
    in_float64()
    register()
    batch = indexed.batch("plain")
    tokens = deepsp.shard_batch(batch)[0]["input_ids"].numel()
    for name, expected in {
        "deepseek_v32": 3 * (16 + 8 + 16),  # the latent, its rotated part, the indexer's key
        "glm_moe_dsa": 3 * (16 + 8) + 2 * 16,
        "minimax_m3_vl_text": 2 * (2 * 2 * 16 + 16),
    }.items():
        model = indexed.make(name)
        model.set_attn_implementation("deepsp")
        with torch.no_grad(), _Sent() as sent:
            model(**_shards(name, batch))
        positions = deepsp.shard_batch(batch)[0]["position_ids"].numel()
        assert sent.numbers["all_gather"] == expected * tokens + positions, name

    # Latents, and queries and outputs by heads; keys and values instead where adapters are around
    # the layer that makes them, and where heads' queries are split (3 ranks).
    model = indexed.make("deepseek_v3")
    model.set_attn_implementation("deepsp")
    with torch.no_grad(), _Sent() as sent:
        model(**_shards("deepseek_v3", batch))
    travel = dist.get_world_size() == 2
    assert sent.numbers["all_gather"] == travel * 3 * (16 + 8) * tokens + positions
    assert sent.numbers["seq_to_heads"] == 3 * 4 * (16 + (not travel) * 32) * tokens
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = _Adapted
    with torch.no_grad(), _Sent() as sent:
        model(**_shards("deepseek_v3", batch))
    assert sent.numbers["all_gather"] == positions
    assert sent.numbers["seq_to_heads"] == 3 * 4 * (16 + 16 + 16) * tokens

    # A window, the tokens before a rank's own windows, and entries.
    model = indexed.make("deepseek_v4")
    model.set_attn_implementation("deepsp")
    with torch.no_grad(), _Sent() as sent:
        model(**_shards("deepseek_v4", batch))
    rank, size = dist.get_rank(), dist.get_world_size()
    ends = [0, *itertools.accumulate(len(x) for x in torch.arange(29).tensor_split(size))]
    four, eight = (ends[rank + 1] // n - ends[rank] // n for n in (4, 8))
    entries = indexed.ROWS * (four * (16 + 16) + eight * 16)
    assert sent.numbers["all_gather"] == entries + ends[rank + 1] - ends[rank]
    before = 3 * 5 * 16 + 7 * (2 * 2 * 16 + 2 * 2 * 16) + 7 * 2 * 16
    assert sent.numbers["_rows"] == (indexed.ROWS * before if rank < size - 1 else 0)


@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes(ranks):
    on_ranks(ranks, _bytes, apart="hybrid")


# ------------------------------------------------------------------- other cores and masks


def _sees(module, query, key, value, attention_mask, scaling, dropout=0.0, indices=None, **_):
    """An implementation of ones own, which reads what an indexer chose."""
    chosen = torch.zeros(*indices.shape[:2], key.size(2), dtype=torch.bool)
    mask = attention_mask & chosen.scatter_(-1, indices.long(), True)[:, None]
    assert query.size(2) == indices.size(1) == mask.size(2) and mask.size(3) == key.size(2)
    out = F.scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    return out.transpose(1, 2), None


def _with_core():
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    in_float64()
    model, batch = indexed.make("deepseek_v32"), indexed.batch("left")
    loss = _alone(model, "deepseek_v32", batch)
    loss.backward()
    expected = loss.item(), _gradients(model)
    AttentionInterface.register("sees", _sees)
    AttentionMaskInterface.register("sees", sdpa_mask)
    register(core="sees")
    model.set_attn_implementation("deepsp")
    _compare("core", _sharded(model, "deepseek_v32", batch), model, expected)

    # A mask [B, 1, S, S] of ones own, added to scores.
    register()
    causal = torch.ones(29, 29, dtype=torch.bool).tril()
    causal[:, 3:5] = False
    causal[3:5, 3:5] = torch.eye(2, dtype=torch.bool)
    least = torch.finfo(torch.float64).min
    batch = indexed.batch("plain") | {
        "attention_mask": torch.zeros(2, 1, 29, 29).masked_fill(~causal, least)
    }
    model.set_attn_implementation("sdpa")
    loss = _alone(model, "deepseek_v32", batch)
    loss.backward()
    expected = loss.item(), _gradients(model)
    model.set_attn_implementation("deepsp")
    _compare("mask", _sharded(model, "deepseek_v32", batch), model, expected)

    # One row of padding for all queries.
    padding = torch.ones(2, 1, 1, 29, dtype=torch.bool)
    padding[1, ..., :4] = False
    model.set_attn_implementation("eager")
    with torch.no_grad():
        rows = padding & torch.ones(29, 29, dtype=torch.bool)
        batch = indexed.batch("plain") | {"attention_mask": padding}
        model.set_attn_implementation("sdpa")
        expected = _alone(model, "deepseek_v32", batch).item()
        assert expected == _alone(model, "deepseek_v32", batch | {"attention_mask": rows}).item()
        model.set_attn_implementation("deepsp")
        loss = model(**_shards("deepseek_v32", batch)).loss.item()
        assert abs(loss - expected) < 1e-12 * loss

    # Latents, with scaled_dot_product_attention and a mask of padding.
    model, batch = indexed.make("deepseek_v3"), indexed.batch("left")
    loss = _alone(model, "deepseek_v3", batch)
    loss.backward()
    expected = loss.item(), _gradients(model)
    register(core="sdpa")
    model.set_attn_implementation("deepsp")
    _compare("sdpa", _sharded(model, "deepseek_v3", batch), model, expected)

    # With a mask of ones own, each layer exchanges lengths and positions once.
    mask = {"attention_mask": torch.ones(2, 1, 29, 29, dtype=torch.bool).tril()}
    part = _shards("deepseek_v3", indexed.batch("plain") | mask)
    with mock.patch.object(masks, "on_all_ranks", wraps=masks.on_all_ranks) as exchanged:
        model(**part)
    assert exchanged.call_count == 3


def test_other_cores_and_masks():
    on_ranks(2, _with_core, apart="hybrid")


def _ranks_alike():
    """Ranks call submodules as often, and have gradients of the same weights: wrappers that shard
    weights send in both."""
    in_float64()
    register()
    size = dist.get_world_size()

    def same(value):
        everyone = [None] * size
        dist.all_gather_object(everyone, value)
        assert all(x == everyone[0] for x in everyone), everyone

    # 13 tokens: of the entries of 8 tokens, one rank has the only one.
    model, batch = indexed.make("deepseek_v4"), indexed.batch("plain", 13)
    loss = _alone(model, "deepseek_v4", batch)
    loss.backward()
    expected = loss.item(), _gradients(model)
    model.set_attn_implementation("deepsp")
    loss = model(**_shards("deepseek_v4", batch)).loss
    loss.backward()
    same({n for n, p in model.named_parameters() if p.grad is not None})
    deepsp.sync_gradients(model)
    _compare("few tokens", loss, model, expected)

    model, calls = indexed.make("deepseek_v32"), []
    model.set_attn_implementation("deepsp")
    indexer = model.model.layers[0].self_attn.indexer
    indexer.wq_b.register_forward_hook(lambda *_: calls.append(1))
    before, most = indexer.forward, indexers.ENTRIES
    indexer.forward = lambda *args, **kwargs: before(*args, **kwargs)
    mine = indexer.forward
    batch = indexed.batch("plain")
    longest = -(-indexed.LENGTH // size)
    model(**_shards("deepseek_v32", batch))  # checks the model
    for step in (1, longest - 1):
        indexers.ENTRIES = step * indexed.ROWS * 2 * indexed.LENGTH
        calls.clear()
        with torch.no_grad():
            model(**_shards("deepseek_v32", batch))
        assert vars(indexer)["forward"] is mine
        same(len(calls))
        assert len(calls) == 1 + -(-longest // step)
    indexers.ENTRIES = most

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = indexer.wk.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**_shards("deepseek_v32", batch))
    handle.remove()
    model.set_attn_implementation("sdpa")
    loss = _alone(model, "deepseek_v32", batch)
    assert vars(indexer)["forward"] is mine and torch.isfinite(loss)


def test_ranks_do_alike():
    on_ranks(3, _ranks_alike, apart="hybrid")


# ------------------------------------------------------------------- what is refused


class _Mixes(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x + x.roll(1, 1))


def _refused():
    in_float64()
    register()
    model, batch = indexed.make("deepseek_v32"), indexed.batch("plain")
    model.set_attn_implementation("deepsp")
    for options, message in (
        ({"kv_chunk": 4}, "expected no kv_chunk with DeepseekV32Attention, whose keys travel"),
        ({"core": "flex_attention"}, "expected a core that takes indices with"),
    ):
        register(**options)
        with pytest.raises(ValueError, match=message):
            model(**_shards("deepseek_v32", batch))
    user = batch | {"attention_mask": torch.ones(2, 1, 29, 29, dtype=torch.bool).tril()}
    for name in ("qwen4_exp_text", "deepseek_v4"):
        other = indexed.make(name)
        other.set_attn_implementation("deepsp")
        register()
        with pytest.raises(ValueError, match=r"expected no attention_mask \[B, 1, S, S\] with"):
            other(**_shards(name, user))
        register(core="flex_attention")
        with pytest.raises(ValueError, match="expected core 'auto' with"):
            other(**_shards(name, batch))
    register()
    wrong = batch | {"attention_mask": torch.ones(2, 1, 7, 29, dtype=torch.bool)}
    with pytest.raises(ValueError, match=r"expected attention_mask of shape \[B, 1, 29, 29\]"):
        model(**_shards("deepseek_v32", wrong))
    model.config.is_causal = False
    with pytest.raises(ValueError, match="expected causal attention in DeepseekV32Attention"):
        model(**_shards("deepseek_v32", batch))
    model.config.is_causal = True
    with pytest.raises(ValueError, match="expected no deal or fold with DeepseekV32Att"):
        model(**deepsp.deal_batch(indexed.batch("packed"))[0])
    with pytest.raises(ValueError, match="expected use_cache to be False"):
        model(**_shards("deepseek_v32", batch), use_cache=True)
    wrong = _shards("deepseek_v32", batch)
    with pytest.raises(ValueError, match="expected position_ids of the full sequence"):
        model(input_ids=wrong["input_ids"])
    # An indexer's keys that aren't those of one token.
    own = indexed.make("deepseek_v32")
    own.model.layers[1].self_attn.indexer.wk.__class__ = _Mixes
    own.set_attn_implementation("deepsp")
    with pytest.raises(ValueError, match=r"indexer\.wk"):
        own(**_shards("deepseek_v32", batch))

    # N-grams of ids, in Qwen4's layers with embeddings of their own.
    ple = {"ple_layer_ids": [1], "heads_per_ngram": 2, "ngram_size": 2, "ngram_vocab_size_base": 20}
    ngrams = indexed.make("qwen4_exp_text", **ple)
    ngrams.set_attn_implementation("deepsp")
    with pytest.raises(ValueError, match=r"layers\.0\.ple"):
        ngrams(**_shards("deepseek_v32", batch))

    model = indexed.make("deepseek_v4")
    model.set_attn_implementation("deepsp")
    short = {n: x[:, : 2 * dist.get_world_size() - 1] for n, x in batch.items()}
    with pytest.raises(ValueError, match="expected two tokens or more on each rank"):
        model(**_shards("deepseek_v4", short))


def test_refused():
    on_ranks(2, _refused, apart="hybrid")


# ------------------------------------------------------------------- the compile pass


def _compiled(name, kind):
    in_float64()
    torch._dynamo.reset()
    model, batch = indexed.make(name), indexed.batch(kind)
    loss = model(**batch).loss
    loss.backward()
    expected = loss.item(), _gradients(model)
    options = {"inner": "aot_eager"}
    compiled = torch.compile(model, backend="deepsp", fullgraph=True, options=options)
    loss = compiled(**deepsp.prepare_inputs(batch)).loss
    loss.backward()
    _compare(kind, loss, model, expected, 1e-6)  # transformers' loss is one of float32


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("deepseek_v32", "left"),
        ("hy_v4", "left"),
        *((n, "plain") for n in ("glm_moe_dsa", "axk2", "dots3_note_text", "minimax_m3_vl_text")),
    ],
)
def test_compiled(name, kind):
    on_ranks(2, _compiled, name, kind, apart="hybrid")


class _Chooses(torch.nn.Module):
    """Attention to the best three of the tokens before, of a latent's."""

    def __init__(self, dropout=0.0, of_keys=False):
        super().__init__()
        self.q, self.latent, self.kv = (torch.nn.Linear(*n) for n in ((16, 16), (16, 6), (6, 32)))
        self.index = torch.nn.Linear(16, 4)
        self.dropout, self.of_keys = dropout, of_keys

    def forward(self, x, labels):
        heads = (-1, 2, 8)
        q = self.q(x).unflatten(-1, heads[1:]).transpose(1, 2)
        k, v = self.kv(self.latent(x)).unflatten(-1, (2, 16)).transpose(1, 2).split(8, -1)
        with torch.no_grad():
            keys = self.index(x)
            scores = torch.relu(keys @ keys.transpose(1, 2))
            n = torch.arange(x.size(1))
            scores = scores.masked_fill(n > n[:, None], float("-inf"))
            chosen = scores.topk(min(3, x.size(1)), -1).indices
            seen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)
            mask = (seen & (n <= n[:, None]))[:, None]
            if self.of_keys:
                mask = keys[:, None, None, :, 0] > 0
        out = F.scaled_dot_product_attention(q, k, v, mask, self.dropout)
        out = out.transpose(1, 2).flatten(2)
        return F.cross_entropy(out.flatten(0, 1), labels.flatten())


def _pass_by_keys(of_keys):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = _Chooses(of_keys=of_keys).double()
    x = torch.randn(2, 13, 16, dtype=torch.float64)
    labels = torch.randint(0, 16, (2, 13))
    loss = model(x, labels)
    loss.backward()
    expected = loss.item(), _gradients(model)
    options = {"inner": "aot_eager"}
    given = deepsp.prepare_inputs({"x": x, "labels": labels})
    with pytest.raises(Exception, match="each rank has its queries' weights"):
        torch.compile(_Chooses(dropout=0.5).double(), backend="deepsp", options=options)(**given)
    compiled = torch.compile(model, backend="deepsp", fullgraph=True, options=options)
    loss = compiled(**given)
    loss.backward()
    _compare("pass", loss, model, expected)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_pass_takes_a_mask_of_queries(ranks):
    on_ranks(ranks, _pass_by_keys, False)
    on_ranks(ranks, _pass_by_keys, True)


# ------------------------------------------------------------------- trainers


def _trained(size, batch, name, experts=False, sft=False, **given):
    """What a trainer logs, with an evaluation; ``experts``: dealt out over the ranks."""
    from trl import SFTConfig, SFTTrainer

    cls, more = trainer_class(size)
    kind, dtype = None, torch.float64
    if sft:
        cls, kind, dtype = SFTTrainer, SFTConfig, torch.float32
        given |= {"bf16": False, "padding_free": False, "dataset_num_proc": None}
        if size > 1:
            cls = sequence_parallel(SFTTrainer)
    model = tiny(name, dtype)
    if experts and size > 1:
        shard_experts(model)
    elif dtype == torch.float64 and size == 1:
        model.loss_function = wide_loss
    args = arguments(
        kind,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        ddp_find_unused_parameters=True,  # indexers have no gradients
        **given,
    )
    data = (lists(40), lists(6, 1)) if sft else (Rows(40), Rows(6, 1))
    if sft:
        more["processing_class"] = tokenizer()
    trainer = cls(model, args, train_dataset=data[0], eval_dataset=data[1], **more)
    trainer.train()
    return logs(trainer)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("glm_moe_dsa", {"experts": True, "gradient_accumulation_steps": 2}),
        pytest.param("deepseek_v4", {"gradient_checkpointing": True}, marks=pytest.mark.nightly),
        ("deepseek_v32", {"sft": True}),
    ],
)
def test_trainer(name, more):
    compare_logs(_trained, 2, 2, name=name, **more)
