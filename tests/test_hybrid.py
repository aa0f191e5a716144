"""transformers' models with recurrent layers over a sharded sequence, against one process: whole,
unmodified models in float64, loss and every gradient."""

import copy
import itertools
import sys
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from architectures import HYBRIDS, VOCAB, make
from float64 import in_float64
from harness import on_ranks
from reference import draw
from torch._dynamo import trace_rules

import deepsp
from deepsp.integrations.transformers import register
from deepsp.ranks.groups import member_of
from deepsp.sequence.recurrence import functions as recurrences
from deepsp.sequence.recurrence.functions import FUNCTIONS, Sharded

LENGTH, ROWS = 37, 2
BORDERS = [[0, 5, 6, 17, LENGTH], [0, 13, LENGTH - 2, LENGTH]]


def _batch(kind):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "documents":
        positions = [
            torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(ends)])
            for ends in BORDERS
        ]
        batch["position_ids"] = torch.stack(positions)
    if "padding" in kind:
        mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
        mask[1, slice(9) if kind == "left padding" else slice(-9, None)] = 0
        batch |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return batch


def _alone(model, batch, kind):
    """The loss in one process; each document alone."""
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    more = {n: x for n, x in batch.items() if n == "attention_mask"}
    if kind != "documents":
        logits = model(batch["input_ids"], use_cache=False, **more).logits
    else:
        logits = torch.cat(
            [
                torch.cat(
                    [
                        model(ids[None, a:b], use_cache=False).logits
                        for a, b in itertools.pairwise(ends)
                    ],
                    1,
                )
                for ids, ends in zip(batch["input_ids"], BORDERS, strict=True)
            ]
        )
        for row, ends in enumerate(BORDERS):
            labels[row, [end - 1 for end in ends[1:]]] = -100
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _gradients(model):
    found = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def _equals(name, state):
    in_float64()
    register(state=state)
    torch.manual_seed(0)
    model = make(name)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    kinds = ["plain", "documents", "left padding", "right padding", "checkpoints"]
    expected = {}
    for kind in kinds:
        loss = _alone(model, _batch(kind), kind)
        loss.backward()
        expected[kind] = loss.item(), _gradients(model)
    alone = model.config._attn_implementation
    model.set_attn_implementation("deepsp")
    for kind in kinds:
        if kind == "checkpoints":
            model.gradient_checkpointing_enable()
        part, _ = deepsp.shard_batch(_batch(kind))
        checkpoints = kind == "checkpoints"
        loss = deepsp.causal_lm_loss(model, part) if checkpoints else model(**part).loss
        loss.backward()
        deepsp.sync_gradients(model)
        wanted, gradients = expected[kind]
        assert abs(loss.item() - wanted) < 1e-12 * wanted, (kind, loss.item(), wanted)
        for n, found in _gradients(model).items():
            g = gradients[n]
            assert (found is None) == (g is None), (kind, n)
            if g is not None:
                scale = max(g.abs().max().item(), 1e-12)
                torch.testing.assert_close(
                    found,
                    g,
                    rtol=0,
                    atol=1e-10 * scale,
                    msg=lambda m, n=n, k=kind: f"{k}, {n}: {m}",
                )

    model.set_attn_implementation(alone)
    loss = _alone(model, _batch("plain"), "plain").item()
    assert abs(loss - expected["plain"][0]) < 1e-12 * loss


@pytest.mark.parametrize("name", HYBRIDS)
def test_equals_one_process(name):
    on_ranks(2, _equals, name, "heads", apart="hybrid")


# One for each kind of recurrence; the others in `make nightly`.
_AT_EVERY_COMMIT = ["Qwen3.5", "Kimi Linear", "Nemotron-H", "Jamba"]


@pytest.mark.parametrize(
    "name",
    [n if n in _AT_EVERY_COMMIT else pytest.param(n, marks=pytest.mark.nightly) for n in HYBRIDS],
)
def test_three_ranks(name):
    # A channel of Mamba 1 is a head, and its function takes no state.
    on_ranks(3, _equals, name, "heads" if name == "Jamba" else "pass", apart="hybrid")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Qwen3.5", "Bamba"])
def test_more_ranks_than_heads(name):
    on_ranks(5, _equals, name, None, apart="hybrid")


def _compiled(name, lengths):
    """By the compile pass: padded, with checkpoints, then of another length; and what is changed of
    Dynamo is taken out again."""
    in_float64()
    torch.manual_seed(0)
    reference = make(name).train()
    model = copy.deepcopy(reference)
    model.gradient_checkpointing_enable()
    options = {"inner": "aot_eager"}
    compiled = torch.compile(model, backend="deepsp", fullgraph=True, options=options)
    for length in lengths:
        batch = {n: x[:, :length] for n, x in _batch("left padding").items()}
        expected = reference(**batch).loss
        expected.backward()
        loss = compiled(**deepsp.prepare_inputs(batch)).loss
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        wanted = _gradients(reference)
        for n, g in _gradients(model).items():
            scale = wanted[n].abs().max().item()
            torch.testing.assert_close(g, wanted[n], rtol=0, atol=1e-10 * scale, msg=n)
    functions = list(recurrences.captured)
    assert functions and all(map(trace_rules.is_callable_allowed, functions))
    recurrences.uninstall()
    assert not recurrences.captured and not any(map(trace_rules.is_callable_allowed, functions))


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("Mamba 2", (LENGTH,)),
        *(
            pytest.param(n, (LENGTH, LENGTH - 6), marks=pytest.mark.nightly)
            for n in ("Mamba 2", "Qwen3.5", "Jamba")
        ),
    ],
)
def test_compiled(name, lengths):
    on_ranks(2, _compiled, name, lengths, apart="hybrid")


def _by_kernel():
    """A kernel that knows packed documents gets all of them in one call."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

    calls = []

    def kernel(
        query,
        key,
        value,
        g,
        beta,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=None,
    ):
        ends = [0, value.size(1)] if cu_seqlens is None else cu_seqlens.tolist()
        calls.append(ends)
        return torch.cat([value[:, a:b].cumsum(1) for a, b in itertools.pairwise(ends)], 1), None

    def torch_function(query, key, value, g, beta, **_):
        return value.cumsum(1), None

    rank, size = dist.get_rank(), dist.get_world_size()
    documents = torch.tensor([[0, 3], [3, 8], [8, 12]])
    full = [draw(1, 12, 2, 3, seed=n) for n in range(3)] + [draw(1, 12, 2, seed=n) for n in (3, 4)]
    expected = torch.cat([full[2][:, a:b].cumsum(1) for a, b in documents.tolist()], 1)
    sys.modules["a_package"] = types.SimpleNamespace(chunk_gated_delta_rule=kernel)
    wraps = use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "a_package")
    for given in (wraps(torch_function), torch_function):
        sharded = Sharded("a layer", member_of(None), [6] * size, documents, "heads")
        call = FUNCTIONS["torch_chunk_gated_delta_rule"](given, sharded)
        out, _ = call(*(x.tensor_split(size, 1)[rank] for x in full))
        torch.testing.assert_close(out, expected.tensor_split(size, 1)[rank])
        assert len(calls) == 1 and calls[0] == [0, 3, 8, 12]


def test_by_a_kernel():
    on_ranks(2, _by_kernel, apart="hybrid")


def _refused():
    in_float64()
    register()
    part, _ = deepsp.shard_batch(_batch("left padding"))
    model = make("Mamba 2", attn_implementation="deepsp")
    restarts = torch.arange(part["input_ids"].size(1)).expand(ROWS, -1).contiguous()
    alone = {n: x for n, x in part.items() if n != "attention_mask"}
    with pytest.raises(ValueError, match="they count from 0 on every rank"):
        model(**{**alone, "position_ids": restarts})
    cut = part["attention_mask"][:, : part["input_ids"].size(1)]
    with pytest.raises(ValueError, match=f"of the full sequence, {LENGTH} tokens, on every rank"):
        model(**{**part, "attention_mask": cut})
    model = make("LFM2", attn_implementation="deepsp")
    model(**part)
    space = sys.modules[type(model.model).__module__].__dict__
    given = space["create_recurrent_attention_mask"]
    space["create_recurrent_attention_mask"] = lambda **_: None
    try:
        with pytest.raises(ValueError, match=r"Lfm2ShortConv to get the mask .* got none"):
            model(**part)
    finally:
        space["create_recurrent_attention_mask"] = given
    assert torch.isfinite(model(**part).loss)


def test_errors():
    on_ranks(2, _refused, apart="hybrid")
