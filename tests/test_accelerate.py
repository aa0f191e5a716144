"""Training loops with accelerate, and the loss that models return themselves."""

import pytest
import torch
import transformers
from harness import on_ranks
from torch.distributed.tensor import DTensor
from trained import Rows, launched, one_process, tiny, wide_loss

import deepsp

f64 = torch.float64


def _accelerated(size, batch, accumulation, labelled, fsdp=False):
    """Losses and weights of a few steps. ``labelled``: all tokens are, so that the mean over data
    ranks of their means is the mean."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    if fsdp:  # accelerate turns FSDP2 on where there are GPUs only
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=False
        )
    model = tiny(dtype=f64)
    rows = Rows(8 * accumulation)
    if labelled:
        rows = [{"input_ids": x, "labels": x} for x in rows.ids]
    loader = torch.utils.data.DataLoader(rows, batch_size=batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if size == 1:
        model.loss_function = wide_loss
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    else:
        from deepsp.integrations.accelerate import prepare

        parts = "auto" if accumulation > 1 else size  # heads are whole, or shared by all ranks
        model, optimizer, loader = prepare(
            accelerator, model, optimizer, loader, sequence_parallel_size=size, query_parts=parts
        )
        attention = transformers.AttentionInterface()["deepsp"]
        assert attention.keywords["registration"].query_parts == parts
    found = []
    assert all(isinstance(p, DTensor) == fsdp for p in model.parameters())
    assert len(loader) == 8 * accumulation // batch // accelerator.num_processes
    for each in loader:
        with accelerator.accumulate(model):
            loss = model(**each).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append(accelerator.reduce(loss.detach(), "mean").item())
    state = accelerator.get_state_dict(model)
    if fsdp:
        state = {n: p.full_tensor() for n, p in model.state_dict().items()}
    return found, {name: x.double() for name, x in state.items()}


def _on_rank(*args):
    with launched():
        return _accelerated(*args)


@pytest.mark.parametrize(
    ("world", "size", "accumulation", "fsdp"),
    [(2, 2, 1, False), (3, 3, 2, False), (4, 2, 2, False), (4, 2, 2, True)],
)
def test_prepare(world, size, accumulation, fsdp):
    groups = world // size
    losses, weights = one_process(_on_rank, 1, 4, accumulation, groups > 1)
    call = (_on_rank, size, 4 // groups, accumulation, groups > 1, fsdp)
    for mine, state in on_ranks(world, *call):
        assert mine == pytest.approx(losses, rel=1e-10)
        torch.testing.assert_close(state, weights, rtol=1e-10, atol=1e-10)


def _own_loss():
    from transformers import BertConfig, BertForTokenClassification

    from deepsp.integrations.transformers import register

    register()
    full, model = tiny(dtype=f64), tiny(dtype=f64)
    batch = torch.utils.data.default_collate([Rows(4)[i] for i in range(4)])
    full.loss_function = wide_loss
    expected = full(**batch).loss
    expected.backward()
    model.set_attn_implementation("deepsp")
    local, _ = deepsp.shard_batch(batch)
    before = model.loss_function
    loss = model(**local).loss
    assert model.loss_function is before and "_loss_function" not in vars(model)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    loss.backward()
    deepsp.sync_gradients(model)
    for (name, a), b in zip(model.named_parameters(), full.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12, msg=name)
    counted = model(**local, num_items_in_batch=7).loss
    valid = (batch["labels"][:, 1:] != -100).sum()
    torch.testing.assert_close(counted, expected * valid / 7)
    with pytest.raises(ValueError, match=r"pass the shift_labels that deepsp.shard_batch returns"):
        model(**{k: v for k, v in local.items() if k != "shift_labels"}, labels=batch["labels"])
    model.loss_function = wide_loss
    with pytest.raises(ValueError, match="loss function of LlamaForCausalLM to be transformers'"):
        model(**local)
    small = BertConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=32,
    )
    tokens = BertForTokenClassification(small)
    tokens.set_attn_implementation("deepsp")
    with pytest.raises(ValueError, match="loss function of BertForTokenClassification"):
        tokens(**local)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_model_returns_the_loss_of_the_full_sequence(ranks):
    on_ranks(ranks, _own_loss)


def _several_terms():
    from accelerate import Accelerator

    from deepsp.integrations.accelerate import prepare

    full = tiny(dtype=f64)
    rows = [Rows(4)[i] for i in (0, 1)]
    ids, labels = (torch.stack([row[n] for row in rows]) for n in ("input_ids", "labels"))
    logits, labels = full(ids).logits[:, :-1], labels[:, 1:]
    penalty = logits.logsumexp(-1)[labels != -100].square().mean()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    expected = expected + 0.1 * penalty
    expected.backward()
    with launched():
        accelerator = Accelerator(cpu=True)
        model = tiny(dtype=f64)
        loader = torch.utils.data.DataLoader(rows, batch_size=2)
        model, loader = prepare(accelerator, model, loader, sequence_parallel_size=2)
        (batch,) = loader
        inputs = {n: batch[n] for n in ("input_ids", "position_ids")}
        for averages in ((False, False), (True, True), (True, False), (False, True)):
            logits = model(**inputs).logits
            terms = (
                function(x, batch["shift_labels"], average_gradients=average)
                for function, x, average in (
                    (deepsp.cross_entropy, logits, averages[0]),
                    (deepsp.token_mean, logits.logsumexp(-1).square(), averages[1]),
                )
            )
            loss = next(terms) + 0.1 * next(terms)
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
            if averages[0] != averages[1]:
                with pytest.raises(ValueError, match="expected all terms of a loss to be for"):
                    accelerator.backward(loss)
                continue
            model.zero_grad()
            accelerator.backward(loss)
            for a, b in zip(model.parameters(), full.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)


def test_several_terms_of_a_loss():
    on_ranks(2, _several_terms)


def _idioms(size, batch, groups):
    """What accelerate's own examples do: a schedule of the rate, the tokens of several batches
    counted, gathered metrics, batches skipped. Losses, norms, rates and what is gathered."""
    from accelerate import Accelerator
    from torch.optim.lr_scheduler import LinearLR

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = tiny(dtype=f64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    # accelerate takes a step of the schedule for each batch of a step.
    scheduler = LinearLR(optimizer, 1.0, 0.1, 16 // (1 if size > 1 else groups))
    rows = [{"input_ids": x, "labels": x} for x in Rows(16).ids]
    loader = torch.utils.data.DataLoader(rows, batch_size=batch)
    evaluation = torch.utils.data.DataLoader(rows[:7], batch_size=batch)
    if size > 1:
        from deepsp.integrations.accelerate import prepare

        prepared = prepare(accelerator, model, optimizer, scheduler, sequence_parallel_size=size)
        model, optimizer, scheduler = prepared
        loader = accelerator.prepare(loader)
        evaluation = prepare(accelerator, evaluation, sequence_parallel_size=size)
    else:
        model.loss_function = wide_loss
        objects = accelerator.prepare(model, optimizer, scheduler, loader, evaluation)
        model, optimizer, scheduler, loader, evaluation = objects
    found = []
    batches = iter(loader)
    for _ in range(len(loader) // 2):
        pair = [next(batches), next(batches)]
        if size > 1:
            count = torch.tensor(sum(int((x["shift_labels"] != -100).sum()) for x in pair))
            with pytest.raises(
                ValueError, match=r"gather of what all ranks .*deepsp.collectives.all_reduce"
            ):
                accelerator.gather(count)
            count = deepsp.collectives.all_reduce(count, grad="replicated")
        else:
            count = accelerator.gather(torch.tensor(20 * 2 * batch)).sum()
        for each in pair:
            with accelerator.accumulate(model):
                loss = model(**each, num_items_in_batch=count).loss
                accelerator.backward(loss * accelerator.num_processes * 2)
                if accelerator.sync_gradients:
                    found.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        found.append(scheduler.get_last_lr()[0])
        found.append(accelerator.reduce(loss.detach(), "sum").item())
    model.eval()
    losses, tokens = [], []
    for each in evaluation:
        with torch.no_grad():
            outputs = model(**each)
        losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(batch)))
        right = accelerator.pad_across_processes(outputs.logits.argmax(-1), dim=1)
        tokens.append(accelerator.gather_for_metrics((right, each["input_ids"])))
    found += [torch.cat([x for x, _ in tokens]), torch.cat([x for _, x in tokens])]
    found.append(torch.cat(losses).shape[0])
    rest = accelerator.skip_first_batches(loader, 1)
    skipped = [accelerator.gather(each["input_ids"]) for each in rest]
    return [*found, torch.cat(skipped)]


def _idioms_on_rank(*args):
    with launched():
        return _idioms(*args)


@pytest.mark.parametrize(("world", "size"), [(2, 2), (3, 3), (4, 2)])
def test_what_accelerates_examples_do(world, size):
    groups = world // size
    expected = one_process(_idioms_on_rank, 1, 4, groups)
    for found in on_ranks(world, _idioms_on_rank, size, 4 // groups, groups):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def _refusals():
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from deepsp.integrations.accelerate import prepare

    for size in (0, 3, None, 1.0):
        with launched(), pytest.raises(ValueError, match="a divisor of 2, the number of proce"):
            prepare(Accelerator(cpu=True), tiny(), sequence_parallel_size=size)
    with launched(), pytest.raises(ValueError, match="causal language model of transformers, got"):
        prepare(Accelerator(cpu=True), torch.nn.Linear(2, 2), sequence_parallel_size=2)
    config = DataLoaderConfiguration(dispatch_batches=True)
    with launched(), pytest.raises(ValueError, match="dispatch_batches=False, got True"):
        prepare(Accelerator(cpu=True, dataloader_config=config), tiny(), sequence_parallel_size=2)
    with launched():
        accelerator = Accelerator(cpu=True)
        rows = [{"input_ids": x, "labels": x} for x in Rows(4).ids]
        model, loader = prepare(
            accelerator, tiny(), torch.utils.data.DataLoader(rows), sequence_parallel_size=2
        )
        batch = next(iter(loader))
        for read in (lambda: batch["labels"], lambda: batch.pop("labels")):
            with pytest.raises(KeyError, match=r"a local batch has .shift_labels. in"):
                read()
        assert batch.pop("nothing", 3) == 3 and "labels" not in batch
        whole = accelerator.gather(batch)
        assert torch.equal(whole["input_ids"], rows[0]["input_ids"][None])
        alike = torch.arange(33.0).view(3, 11)  # as many columns as rank 0 has tokens
        assert torch.equal(accelerator.gather(alike), alike)
        assert torch.equal(accelerator.reduce(alike[:1]), alike[:1])
        for number in range(3):
            if number == torch.distributed.get_rank():
                accelerator.set_trigger()
            assert accelerator.check_trigger() == (number < 2)
        with pytest.raises(ValueError, match=r"no split_between_processes after prepare"):
            accelerator.split_between_processes([1, 2])
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        own = torch.nn.functional.cross_entropy(logits[0], batch["shift_labels"][0])
        with pytest.raises(ValueError, match=r"loss of the full sequence in backward"):
            accelerator.backward(own)
        with pytest.raises(ValueError, match=r"gather_for_metrics of tensors"):
            accelerator.gather_for_metrics(["text"])
        with pytest.raises(ValueError, match=r"reduce of what all ranks of a group have"):
            accelerator.reduce(own)
        with pytest.raises(ValueError, match=r"sequence_parallel_size=2, with which .*, got 1"):
            prepare(accelerator, loader, sequence_parallel_size=1)


def _uneven_batches():
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from deepsp.integrations.accelerate import prepare

    config = DataLoaderConfiguration(even_batches=False)
    with launched(), pytest.raises(ValueError, match="even_batches=True with several groups, got"):
        prepare(Accelerator(cpu=True, dataloader_config=config), tiny(), sequence_parallel_size=2)


def test_refusals():
    on_ranks(2, _refusals)
    on_ranks(4, _uneven_batches)
