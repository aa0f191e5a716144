"""Batches whose sequences begin alike, folded into one row: places of tokens, log-probabilities and
gradients, against rows in one process and float64."""

import copy

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from trained import tiny

import deepsp
from deepsp.data.deal_batch import documents_of
from deepsp.data.fold import _sent, fold_documents

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=9)


def _padded(sequences):
    longest = max(map(len, sequences))
    ids = torch.tensor([s + [0] * (longest - len(s)) for s in sequences])
    mask = torch.tensor([[1] * len(s) + [0] * (longest - len(s)) for s in sequences])
    return {"input_ids": ids, "attention_mask": mask}


@given(SEQUENCES, st.booleans())
def test_each_prefix_stands_once(sequences, labelled):
    batch = _padded(sequences)
    if labelled:
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    documents = documents_of(batch, -100)
    fold = fold_documents(documents, 2)
    ids = documents.tokens["input_ids"]
    assert torch.equal(ids[fold.sources][fold.places], ids)
    positions, begin, known = fold.segments.positions[0], 0, {}
    for sequence in sequences:
        places = fold.places[begin : begin + len(sequence)]
        begin += len(sequence)
        assert positions[places].tolist() == list(range(len(sequence)))
        for n, place in enumerate(places.tolist()):
            following = tuple(sequence[n + 1 : n + 2]) if labelled else ()
            assert known.setdefault((*sequence[: n + 1], "then", *following), place) == place
    assert len(known) == len(fold.sources) == sum(fold.seq_lens)
    assert fold.counts().tolist() == torch.bincount(fold.places).tolist()
    # Ancestors are what sequences have before, and descendants adjoin.
    starts = fold.segments.documents[:, 0].tolist()
    begin = 0
    for sequence in sequences:
        place = int(fold.places[begin + len(sequence) - 1])
        begin += len(sequence)
        segment = max(n for n, s in enumerate(starts) if s <= place and fold.segments.lengths[n])
        path = []
        while segment >= 0:
            own = range(starts[segment], starts[segment] + fold.segments.lengths[segment])
            path = [*own, *path]
            segment = fold.segments.parents[segment]
        path = path[: path.index(place) + 1]
        assert path == fold.places[begin - len(sequence) : begin].tolist()


def _batch(seed, answers=4, prompts=2):
    """Completions of prompts, one twice, and a prompt that another begins with."""
    draws = torch.Generator().manual_seed(seed)

    def ids(count):
        return torch.randint(5, 40, (count,), generator=draws).tolist()

    rows, longer = [], []
    for n in range(prompts):
        prompt = ids(4 + 3 * n)
        for m in range(answers):
            rows.append((prompt, ids(1 + 2 * m)))
        longer.append((prompt + rows[-1][1], ids(3)))
    rows += [*longer, rows[1]]
    batch = _padded([p + a for p, a in rows])
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for row, (prompt, _) in zip(labels, rows, strict=True):
        row[: len(prompt)] = -100
    return {**batch, "labels": labels}


def _log_probs(model, batch):
    """Of rows, [B, S], of each label one token later; in one process."""
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    found = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return found.masked_fill(labels == -100, 0)


def _short_prompts(seed):
    """Completions so much longer than their prompts that ranks rather hold a prompt each."""
    draws = torch.Generator().manual_seed(seed)
    rows = [
        [7] * 3 + torch.randint(8, 40, (n,), generator=draws).tolist() for n in range(90, 102, 2)
    ]
    batch = _padded([*rows, rows[2]])
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[:, :3] = -100
    return {**batch, "labels": labels}


@given(st.integers(1, 4), st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(1, 5))
def test_roots_are_cut_where_their_copies_cost_little(root, answers, ranks):
    rows = [[1] * root + [2 + n] * count for n, count in enumerate(answers)]
    documents = documents_of(_padded(rows), -100)
    whole, fold = fold_documents(documents, 1, True), fold_documents(documents, ranks, True)
    ids, copies = documents.tokens["input_ids"], len(fold.sources) - len(whole.sources)
    assert torch.equal(ids[fold.sources][fold.places], ids)
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    assert torch.equal(fold.segments.positions[0][fold.places], positions)
    assert copies % root == 0 and copies <= 0.03 * len(whole.sources)
    if copies:
        assert _sent(fold.deal) < _sent(deepsp.deal_documents(whole.segments, ranks))


def test_cut_roots_leave_nothing_to_share():
    rows = [[], *([1] * 4 + [2 + n] * 300 for n in range(6))]
    documents = documents_of(_padded(rows), -100)
    for ranks, trees in ((1, 1), (2, 2), (3, 3), (4, 4)):
        fold = fold_documents(documents, ranks, True)
        assert len(fold.deal.lengths) == trees, fold.deal
        assert len(fold.sources) == 1800 + 4 * trees
        assert fold.deal.imbalance <= 0.03
        assert (fold.deal.shared > 0) == (ranks == 4)  # six completions: one and a half each
    # Here, cut trees would leave more to send.
    trees = {1: (3, [40, 100]), 2: (2, [200, 200, 40])}
    rows = [[n] * r + [5 + i] * m for n, (r, ends) in trees.items() for i, m in enumerate(ends)]
    fold = fold_documents(documents_of(_padded(rows), -100), 4, True)
    assert len(fold.deal.lengths) == 2


def _looped(of, more, deal=False, batch_of=_batch):
    from deepsp.integrations.transformers import register

    register()
    reference = tiny(of, torch.float64, **more)
    model = copy.deepcopy(reference)
    model.set_attn_implementation("deepsp")
    for seed in range(3):
        batch = batch_of(seed)
        expected = _log_probs(reference, batch)
        local, fold = deepsp.fold(batch, deal=deal)
        assert (fold.deal is not None) == deal
        real = int(batch["attention_mask"].sum())
        assert sum(fold.seq_lens) < 0.9 * real
        if batch_of is _short_prompts:
            assert fold.counts().sum() == real and len(fold.deal.lengths) > 1
        labels = local.pop("shift_labels")
        hidden = model.model(**local, use_cache=False).last_hidden_state
        found = deepsp.token_log_probs(hidden, model.lm_head.weight, labels)
        found = fold.unfold(found)
        torch.testing.assert_close(found, expected)
        weights = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view(found.shape)
        for loss, which in ((found * weights, model), (expected * weights, reference)):
            which.zero_grad()
            loss.sum().backward()
        deepsp.sync_gradients(model)
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=lambda m, n=name: f"{n}: {m}")


MODELS = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen3": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("of", MODELS)
def test_a_loop(size, of):
    on_ranks(size, _looped, of, MODELS[of], apart="transformers")


@pytest.mark.parametrize("size", [2, 3])
def test_a_loop_of_dealt_trees(size):
    for batch_of in (_batch, _short_prompts):
        on_ranks(size, _looped, "mistral", MODELS["mistral"], True, batch_of, apart="transformers")


def _refuses():
    from transformers import BertConfig, BertModel

    from deepsp.integrations.transformers import register
    from deepsp.integrations.transformers.rows import FullRows

    register()
    for of, words in (
        ("qwen3_next", "no folded prefixes, in a model with recurrent layers"),
        ("deepseek_v32", "expected no deal or fold with Deepseek.*, whose keys travel"),
    ):
        model = tiny(of)
        model.set_attn_implementation("deepsp")
        local, _ = deepsp.fold(_batch(0))
        del local["shift_labels"]
        with pytest.raises(ValueError, match=words):
            model(**local)
    batch = _batch(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    bert = BertModel(BertConfig(num_hidden_layers=1, **sizes), add_pooling_layer=False)
    bert.set_attn_implementation("deepsp")
    local, _ = deepsp.fold({n: batch[n] for n in ("input_ids", "attention_mask")})
    with pytest.raises(
        ValueError, match=r"expected causal attention, .*, got another mask; use sh"
    ):
        bert(**local)
    embeds = torch.randn(2, 4, 32).requires_grad_()
    for wrong, words in (
        ({"input_ids": batch["input_ids"][:0]}, "expected a batch with tokens, got only padding"),
        ({"inputs_embeds": embeds}, "expected no batch.'inputs_embeds'. that is trained itself"),
    ):
        with pytest.raises(ValueError, match=words):
            deepsp.fold(wrong)
    model = tiny()
    model.set_attn_implementation("deepsp")
    local, fold = deepsp.fold(batch)
    labels = local.pop("shift_labels")
    out = model(**local)
    for wrong, words in (
        ({**local, "shift_labels": labels}, "expected no shift_labels in the call of LlamaForCau"),
        ({**local, "deal": None}, "expected deal in the call of LlamaForCausalLM with the tokens"),
        ({**local, "position_ids": None}, "expected position_ids in the call of LlamaForCausalLM"),
    ):
        with pytest.raises(ValueError, match=words):
            model(**wrong)
    for x in (out.logits[0], out.logits.expand(2, -1, -1)):
        with pytest.raises(
            ValueError, match=r"expected tensor of shape \[1, \d+, ...\], this rank"
        ):
            fold.unfold(x)
    model = tiny()
    FullRows(model, None).folds_prefixes = True
    with pytest.raises(ValueError, match="expected no labels in the call of LlamaForCausalLM with"):
        model(**batch)
    model = tiny()
    model.set_attn_implementation("deepsp")
    with pytest.raises(ValueError, match=r"input_ids.*, a full tensor, to be the same on every"):
        local, _ = deepsp.fold(_batch(dist.get_rank()))
        del local["shift_labels"]
        model(**local)


def test_refuses():
    on_ranks(2, _refuses, apart="transformers")
