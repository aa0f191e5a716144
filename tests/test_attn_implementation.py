"""transformers' models with ``attn_implementation="deepsp"``, each rank with its tokens, against
the same model with "sdpa" in one process."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks
from models import SMALL, make_lm
from reference import lens_of, names
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import deepsp
from deepsp.integrations.transformers import register


def _plain(module, query, key, value, attention_mask, scaling=None, s_aux=None, softcap=None, **_):
    """transformers' eager attention, whose softmax is float32, in the dtype of the model."""
    readers = module.num_key_value_groups
    key, value = (x.repeat_interleave(readers, 1) for x in (key, value))
    scores = query @ key.mT * scaling
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~attention_mask, -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    nothing = scores.isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
    weights = weights[..., : key.size(2)]
    return (weights @ value).transpose(1, 2).contiguous(), weights


def _plain_mask(allow_is_causal_skip=False, **kwargs):
    from transformers import masking_utils

    return masking_utils.sdpa_mask(allow_is_causal_skip=False, **kwargs)


def _documents(length, *starts):
    restarts = torch.zeros(length, dtype=torch.int64)
    positions = torch.arange(length)
    for start in starts:
        restarts[start:] = start
    return (positions - restarts)[None]


def _batch(kind, length):
    """The whole batch. Labels at documents' borders and of padding don't count."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, SMALL["vocab_size"], (2, length), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind in ("padding", "holes", "whole mask"):
        mask = torch.ones(2, length, dtype=torch.int64)
        mask[0, :3] = 0
        mask[1, -4:] = 0
        if kind == "holes":
            mask[0, 6:8] = 0
        batch["labels"][mask == 0] = -100
        if kind == "whole mask":
            causal = torch.ones(length, length, dtype=torch.bool).tril()
            # A token sees itself, lest a row be empty.
            mask = (causal & mask[:, None, None].bool()) | torch.eye(length, dtype=torch.bool)
        batch["attention_mask"] = mask
    if kind == "documents":
        batch["position_ids"] = _documents(length, 4, 9).repeat(2, 1)
        batch["position_ids"][1] = _documents(length, 6)
    if kind == "border":  # one document ends where the first rank's tokens do
        first = lens_of("split", length, dist.get_world_size())[0]
        batch["position_ids"] = _documents(length, 2, min(first, length - 1))
    return batch


def _step(model, loss, sync):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss.backward()
    sync(model)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    return loss.detach(), gradients, {name: p.detach() for name, p in model.named_parameters()}


def _part(batch, kind):
    """This rank's part, of other lengths than tensor_split's if ``kind`` is "skewed"."""
    part, lens = deepsp.shard_batch(batch)
    if kind == "skewed":
        rank, lens = dist.get_rank(), lens_of("skewed", sum(lens), len(lens))
        ids, labels = batch["input_ids"], F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        part["input_ids"], part["shift_labels"], part["position_ids"] = (
            x.split(lens, 1)[rank] for x in (ids, labels, torch.arange(sum(lens))[None])
        )
    return part


def _trained(
    family,
    kind,
    length,
    checkpointing=None,
    chunks=1,
    backend=None,
    core="auto",
    kv_chunk=None,
    **options,
):
    import transformers

    register(chunks=chunks, core=core, kv_chunk=kv_chunk)
    batch = _batch(kind, length)
    # "sdpa" has neither softcap nor sinks.
    transformers.AttentionInterface.register("reference", _plain)
    transformers.AttentionMaskInterface.register("reference", _plain_mask)
    theirs = "reference" if family in ("Gemma2", "GptOss") else "sdpa"
    reference = make_lm(family, theirs, **options)
    model = make_lm(family, "deepsp", **options)
    assert model.config._attn_implementation == "deepsp"
    given = {name: batch[name] for name in batch if name != "labels"}
    if family == "GptOss" and kind == "documents":
        # transformers' own masks for it tell documents apart with flash attention only.
        numbers = (batch["position_ids"] == 0).cumsum(1)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        given["attention_mask"] = (causal & (numbers[:, :, None] == numbers[:, None]))[:, None]
    logits = reference(**given).logits
    labels = batch["labels"][:, 1:].clone()
    if "position_ids" in batch:
        labels[(batch["position_ids"][:, 1:] == 0).expand(2, -1)] = -100
    expected = _step(
        reference, F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten()), lambda _: None
    )
    if checkpointing is not None:
        model.activation_checkpointing_enable({"use_reentrant": checkpointing})
    part = _part(batch, kind)
    shifted = part.pop("shift_labels")
    run = model
    if backend is not None:
        torch._dynamo.reset()
        run = torch.compile(model, backend=backend)
    loss = deepsp.cross_entropy(run(**part).logits, shifted)
    found = _step(model, loss, deepsp.sync_gradients)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def _all_trained(cases):
    for family, kind, length, options in cases:
        _trained(family, kind, length, **options)


CASES = {
    "Llama": [
        ("Llama", "plain", 13, {}),
        ("Llama", "skewed", 13, {"chunks": 2}),
        ("Llama", "padding", 14, {}),
        ("Llama", "documents", 13, {}),
        ("Llama", "border", 13, {}),
        ("Llama", "whole mask", 13, {}),
    ],
    "GPT2": [
        ("GPT2", "plain", 13, {}),
        ("GPT2", "skewed", 13, {}),
        ("GPT2", "padding", 13, {}),
        ("GPT2", "documents", 14, {}),
    ],
    "windows": [
        ("Mistral", "plain", 13, {}),
        ("Mistral", "padding", 13, {}),
        ("Mistral", "documents", 13, {}),
        ("Mistral", "plain", 13, {"sliding_window": None}),
        (
            "Qwen3",
            "padding",
            13,
            {
                "use_sliding_window": True,
                "sliding_window": 4,
                "layer_types": ["full_attention", "sliding_attention"],
            },
        ),
    ],
    "softcap and sinks": [
        ("Gemma2", "plain", 13, {"attn_logit_softcapping": 0.5}),
        ("Gemma2", "documents", 13, {"attn_logit_softcapping": 0.5, "chunks": 2}),
        ("Gemma2", "padding", 14, {"attn_logit_softcapping": 0.5, "kv_chunk": 5}),
        ("GptOss", "plain", 13, {}),
        ("GptOss", "documents", 14, {"kv_chunk": 4, "sliding_window": 64}),
        ("GptOss", "padding", 13, {"chunks": 2}),
    ],
    "parts": [
        ("Llama", "skewed", 13, {"kv_chunk": 3}),
        ("Mistral", "documents", 13, {"kv_chunk": 4, "checkpointing": False}),
        ("Llama", "padding", 13, {"kv_chunk": 100}),
        ("Llama", "holes", 13, {}),
    ],
    "sdpa": [
        ("Mistral", "documents", 13, {"core": "sdpa"}),
        ("Llama", "padding", 13, {"core": "sdpa"}),
        ("Llama", "plain", 13, {"core": "sdpa", "chunks": 2}),
    ],
    "checkpoints": [
        ("Llama", "padding", 13, {"checkpointing": False}),
        ("Llama", "documents", 13, {"checkpointing": True}),
        ("GPT2", "plain", 13, {"checkpointing": True}),
    ],
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("cases", CASES)
def test_training_equals_one_process(cases, ranks):
    on_ranks(ranks, _all_trained, CASES[cases])


@pytest.mark.parametrize(
    ("family", "kind"),
    [("Llama", "documents"), pytest.param("GPT2", "skewed", marks=pytest.mark.nightly)],
)
def test_compiled(family, kind):
    on_ranks(2, _trained, family, kind, 13, None, 2, "aot_eager")


def _one_after_another():
    """A model with attention of ours, whose compiled code breaks off, then one without."""
    register()
    part, _ = deepsp.shard_batch(_batch("plain", 13))
    del part["shift_labels"]
    ids = torch.randint(3, 60, (2, 13))
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(make_lm("Llama", "deepsp"), backend="eager")(**part)
        other = make_lm("Llama", "sdpa")
        compiled = torch.compile(other, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(ids).logits, other(ids).logits)


def test_models_compiled_one_after_another():
    on_ranks(2, _one_after_another)


def _once():
    """Lengths and positions travel once a forward, however many layers and checkpoints."""
    register()
    part, _ = deepsp.shard_batch(_batch("documents", 13))
    shifted = part.pop("shift_labels")
    model = make_lm("Llama", "deepsp")
    model.activation_checkpointing_enable({"use_reentrant": False})
    held = []
    forward = names(lambda: held.append(model(**part).logits))
    backward = names(lambda: F.cross_entropy(held[0].flatten(0, 1), shifted.flatten()).backward())
    small = ("deepsp::all_reduce", "deepsp::all_gather")
    assert [forward[n] for n in small] == [1, 1] and [backward[n] for n in small] == [0, 0]
    assert [n["deepsp::distributed_attention"] for n in (forward, backward)] == [2, 2]


def test_lengths_travel_once():
    on_ranks(2, _once)


def _refused():
    import transformers
    from transformers import masking_utils

    register()
    rank = dist.get_rank()
    part, _ = deepsp.shard_batch(_batch("padding", 12))
    del part["shift_labels"]
    padding = part.pop("attention_mask")
    model = make_lm("Llama", "deepsp")
    windowed = make_lm("Mistral", "deepsp")
    cache = transformers.DynamicCache()
    for layer in range(2):
        cache.update(*torch.zeros(2, 2, 2, 3, 8, dtype=torch.float64), layer)
    register(name="masked", core="sdpa")
    capped = make_lm("Gemma2", "masked", attn_logit_softcapping=30.0)
    sunk = make_lm("GptOss", "deepsp")
    dropping = make_lm("Gemma2", "deepsp", attn_logit_softcapping=30.0, attention_dropout=0.5)
    attention = transformers.AttentionInterface()["deepsp"]
    masks = transformers.AttentionMaskInterface()["deepsp"]
    q, k, v = torch.zeros(3, 1, 2, 6, 8, dtype=torch.float64)
    module = nn.Linear(1, 1)
    causal = masks(
        1, 6, 6, mask_function=masking_utils.causal_mask_function, allow_is_causal_skip=True
    )
    config, embeds = model.config, torch.zeros(2, 6, 48)
    blocks = torch.zeros(2, 6, dtype=torch.int64)
    positions = torch.arange(6)[None] + 6 * rank

    def direct(mask=causal, **kwargs):
        return attention(module, q, k, v, mask, **({"position_ids": positions} | kwargs))

    for call, message in [
        (lambda: model(input_ids=part["input_ids"]), "but they count from 0 on every rank"),
        (lambda: model(**part, attention_mask=padding[:, :6]), "full sequence, 12 tokens"),
        (
            lambda: model(**part, attention_mask=None if rank else padding),
            r"got \[12, None\] by rank",
        ),
        (
            lambda: model(**part, attention_mask=torch.ones(2, 1, 6, 6).bool()),
            "attn_mask to have size 12 .* full sequence, got 6",
        ),
        (lambda: model(**part, use_cache=True), "use_cache to be False, got True"),
        (lambda: model(**part, past_key_values=cache), "no past_key_values, got 3 tokens"),
        (lambda: model(**part, output_attentions=True), "output_attentions"),
        (lambda: model(**part, cu_seq_lens_q=torch.arange(3)), r"no cu_seq_lens_q .* shape \(3,\)"),
        (lambda: capped(**part), "no softcap in Gemma2Attention, .* core='auto'"),
        (lambda: dropping(**part), "no softcap in Gemma2Attention, .* attention_dropout to 0"),
        (
            lambda: sunk(**part, attention_mask=torch.ones(2, 1, 12, 12).bool()),
            r"no s_aux in GptOssAttention, .* padding mask \[B, S\]",
        ),
        (lambda: register(core="quick"), r"core to be one of \['auto', .*'sdpa'\], got 'quick'"),
        (lambda: register(core="deepsp"), "got 'deepsp'"),
        (lambda: register(kv_chunk=0), "kv_chunk to be an int >= 1 or None, got 0"),
        (lambda: register(kv_chunk=8, core="sdpa"), "core='auto' and chunks=1 with kv_chunk"),
        (lambda: direct(position_bias=torch.zeros(1, 2, 6, 6)), "no position_bias in Linear"),
        (lambda: direct(mask=None), "attention_mask .*, got None in Linear"),
        (lambda: direct(position_ids=None), "position_ids .*, got None"),
        (lambda: direct(position_ids=positions[None]), r"position_ids .* \(1, 1, 6\)"),
        (lambda: direct(sliding_window=4), "sliding_window of Linear .*, got 4"),
        (
            lambda: attention(
                module,
                q,
                k[:, :, :5],
                v[:, :, :5],
                masks(1, 6, 6, user_mask=padding),
                position_ids=positions,
            ),
            r"key to have .*, got \[5, 5\]",
        ),
        (
            lambda: masking_utils.create_causal_mask(
                config, embeds, None, None, and_mask_function=lambda b, h, q, k: q == k
            ),
            "got other mask functions",
        ),
        (
            lambda: masking_utils.create_causal_mask(
                config, embeds, None, None, positions, block_sequence_ids=blocks
            ),
            "got other mask functions",
        ),
        (
            lambda: masking_utils.create_causal_mask(
                config, embeds, None, None, positions * positions, block_sequence_ids=blocks
            ),
            "got other mask functions",
        ),
        (lambda: register(chunks=0), "chunks to be an int >= 1, got 0"),
    ]:

        def raises(call=call, message=message):
            with pytest.raises(ValueError, match=message):
                call()

        assert names(raises)["deepsp::seq_to_heads"] == 0, message  # no q, k, v was sent
    for function, is_causal in (
        (masking_utils.bidirectional_mask_function, False),
        (masking_utils.sliding_window_causal_mask_function(3), True),
    ):  # without a word on whether they may be left out
        assert masks(1, 6, 6, mask_function=function).causal == is_causal
    direct(sliding_window=12)
    windowed(**part)
    model(**part, attention_mask=padding, num_items_in_batch=torch.tensor(3))  # all is in order


def test_what_would_be_wrong_is_refused():
    on_ranks(2, _refused)


def _two_groups():
    """A name for each group; not causal; ranks that aren't in the first."""
    pair = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        register(pair, name="pair")
        rank = dist.get_rank(pair)
        whole = torch.randn(3, 1, 4, 7, 8, dtype=torch.float64, generator=torch.manual_seed(0))
        q, k, v = whole.split([4, 3], 3)[rank]
        import transformers
        from transformers import masking_utils

        config = make_lm("Llama").config
        config._attn_implementation, config.is_causal = "pair", False
        mask = masking_utils.create_causal_mask(config, q[0], None, None)
        module = nn.Linear(1, 1)
        module.is_causal = False
        positions = torch.arange(7)[None].split([4, 3], 1)[rank]
        y, _ = transformers.AttentionInterface()["pair"](
            module, q, k, v, mask, position_ids=positions
        )
        expected = F.scaled_dot_product_attention(*whole).transpose(1, 2)
        torch.testing.assert_close(y, expected.split([4, 3], 1)[rank], rtol=1e-12, atol=1e-12)


def test_a_group_of_its_own():
    on_ranks(3, _two_groups)


def _no_masks():
    """What attends by ranges makes no mask of all pairs of tokens."""
    from deepsp.integrations.transformers.masks import Masks

    register()
    made, make = [], Masks._make
    Masks._make = lambda self, *args: made.append(args[0]) or make(self, *args)
    try:
        for family, kind in itertools.product(
            ("Llama", "Mistral", "Gemma2", "GptOss"), ("plain", "padding", "documents")
        ):
            part, _ = deepsp.shard_batch(_batch(kind, 13))
            del part["shift_labels"]
            make_lm(family, "deepsp")(**part)
            assert not made, (family, kind)
        part, _ = deepsp.shard_batch(_batch("holes", 13))
        del part["shift_labels"]
        make_lm("Llama", "deepsp")(**part)
        assert made == ["sdpa"]  # once for all layers
    finally:
        Masks._make = make


def test_no_mask_of_all_pairs():
    on_ranks(2, _no_masks)


def _cores():
    """Another core gets what it would get in one process, of its heads."""
    import transformers

    seen = []

    def plain(
        module, query, *args, position_ids=None, scaling=None, dropout=0.0, s_aux=None, **kwargs
    ):
        seen.append((query.shape, position_ids))
        return _plain(module, query, *args, scaling=scaling, s_aux=s_aux)

    transformers.AttentionInterface.register("plain", plain)
    transformers.AttentionMaskInterface.register("plain", _plain_mask)
    for family, kind, options in [
        ("GptOss", "documents", {"chunks": 2, "sliding_window": 64}),
        ("Llama", "padding", {}),
        ("Mistral", "plain", {}),
    ]:
        _trained(family, kind, 13, core="plain", **options)
    heads = 6 // dist.get_world_size()
    assert {shape[1] for shape, _ in seen} <= {heads - 1, heads, 1}
    assert all(positions.size(-1) == 13 for _, positions in seen)
    register(core="plain")
    part, _ = deepsp.shard_batch(_batch("plain", 13))
    del part["shift_labels"]
    with pytest.raises(
        ValueError, match=r"no softcap in Gemma2Attention, .*'plain' doesn't take it"
    ):
        make_lm("Gemma2", "deepsp", attn_logit_softcapping=30.0)(**part)


@pytest.mark.parametrize("ranks", [2, 3])
def test_cores(ranks):
    on_ranks(ranks, _cores)


class _Reads(TorchDispatchMode):
    """Counts the numbers that the host reads of tensors: on a GPU it waits for each."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def _read(length):
    register()
    model = make_lm("Llama", "deepsp")
    batch, _ = deepsp.shard_batch(_batch("plain", length))
    labels = batch.pop("shift_labels")
    for _ in range(2):  # the first step compares more
        with _Reads() as reads:
            logits = model(**batch, use_cache=False).logits
            deepsp.cross_entropy(logits, labels).backward()
    # By transformers, which looks for documents among the positions; with any number of layers.
    assert reads.count == 1, reads.count


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_the_host_waits_for(ranks):
    on_ranks(ranks, _read, 13)


def _changed_positions():
    """Positions of shard_batch that were changed in place, or belong to other groups, are searched
    for documents."""
    rank = dist.get_rank()
    register()
    model, reference = make_lm("Llama", "deepsp"), make_lm("Llama", "sdpa")
    ids = torch.arange(12)[None] % 7
    positions = torch.arange(12)[None] % 4
    expected = reference(input_ids=ids, position_ids=positions, use_cache=False).logits
    part, lens = deepsp.shard_batch({"input_ids": ids})
    here = slice(sum(lens[:rank]), sum(lens[: rank + 1]))
    part["position_ids"].remainder_(4)
    logits = model(**part, use_cache=False).logits
    torch.testing.assert_close(logits, expected[:, here], rtol=1e-9, atol=1e-9)

    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    part, _ = deepsp.shard_batch({"input_ids": ids[:, here]}, alone)
    positions = torch.cat([torch.arange(n) for n in lens])[None]
    expected = reference(input_ids=ids, position_ids=positions, use_cache=False).logits
    logits = model(**part, use_cache=False).logits
    torch.testing.assert_close(logits, expected[:, here], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ranks", [2])
def test_changed_positions(ranks):
    on_ranks(ranks, _changed_positions)
