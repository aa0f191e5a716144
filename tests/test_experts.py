"""Mixtures of experts over a sharded sequence, against one process: the loss that balances them,
and experts that are dealt out over the ranks."""

import random
import tempfile

import pytest
import torch
import torch.distributed as dist
from architectures import VOCAB, make
from harness import on_ranks
from reference import draw, sent
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from trained import (
    Rows,
    arguments,
    launched,
    lists,
    logs,
    one_process,
    pairs,
    tiny,
    tokenizer,
    wide_loss,
)

import deepsp
from deepsp.integrations.transformers import register, shard_experts


def _balanced(name):
    register()
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.7}
    models = []
    for attention in ("sdpa", "deepsp"):
        torch.manual_seed(0)
        models.append(make(name, attn_implementation=attention, **options))
    reference, model = models
    ids = torch.randint(3, VOCAB, (2, 17), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    for batch in ({}, {"attention_mask": mask}):
        labels = ids.masked_fill(batch.get("attention_mask", mask * 0 + 1) == 0, -100)
        batch |= {"input_ids": ids, "labels": labels}
        expected = reference(**batch, use_cache=False)
        expected.loss.backward()
        local, _ = deepsp.shard_batch(batch)
        out = model(**local)
        out.loss.backward()
        deepsp.sync_gradients(model)
        assert expected.aux_loss > 1
        torch.testing.assert_close(out.aux_loss, expected.aux_loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(out.loss.double(), expected.loss.double(), rtol=1e-6, atol=0)
        for (n, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            scale = q.grad.abs().max().item()
            torch.testing.assert_close(
                p.grad, q.grad, rtol=0, atol=1e-5 * scale, msg=lambda m, n=n: f"{n}: {m}"
            )
        model.zero_grad()
        reference.zero_grad()


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3 MoE"])
def test_balanced(name):
    on_ranks(3, _balanced, name)


# ------------------------------------------------------------------ experts on the ranks


def _mlp(x, expert, up, down):
    """Each row by its expert."""
    return torch.einsum(
        "nh,neh->ne", torch.einsum("ne,neh->nh", x, up[expert]).tanh(), down[expert]
    )


def _dealt(experts, each):
    """Uneven tokens, one rank without any, and an expert that gets none."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lens = [9, 0, 4, 7][:size] if size > 1 else [9]
    total = sum(lens)
    generator = torch.Generator().manual_seed(experts)
    chosen = torch.stack(
        [torch.randperm(experts - 1, generator=generator)[:each] for _ in range(total)]
    )
    whole = [draw(total, 6), draw(total, each, seed=1)]
    weights = [draw(experts, 6, 5, seed=2), draw(experts, 6, 5, seed=3)]
    full = [x.clone().requires_grad_() for x in (*whole, *weights)]
    expected = sum(
        _mlp(full[0], chosen[:, k], *full[2:]) * full[1][:, k : k + 1] for k in range(each)
    )
    grad = draw(*expected.shape, seed=4)
    wanted = torch.autograd.grad(expected, full, grad)
    own = [x.split(lens)[rank].clone().requires_grad_() for x in whole]
    module = deepsp.DistributedExperts(None, experts)
    mine = slice(module.experts.start, module.experts.stop)
    own += [w[mine].clone().requires_grad_() for w in weights]
    module.function = lambda x, expert: _mlp(x, expert, *own[2:])
    out = module(own[0], chosen.split(lens)[rank], own[1])
    found = torch.autograd.grad(out, own, grad.split(lens)[rank])
    close = {"rtol": 1e-10, "atol": 1e-12}
    for a, b in zip((out, *found[:2]), (expected, *wanted[:2]), strict=True):
        torch.testing.assert_close(a, b.split(lens)[rank], **close)
    for a, b in zip(found[2:], wanted[2:], strict=True):
        torch.testing.assert_close(a, b[mine], **close)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_dealt_out(ranks):
    for experts, each in ((4, 1), (5, 2), (7, 3)):
        on_ranks(ranks, _dealt, experts, each)


@pytest.mark.messages
def test_dealt_out_by_messages():
    on_ranks(3, _dealt, 5, 2, apart="messages")


def _oss(attention):
    from transformers import AutoModelForCausalLM, GptOssConfig

    config = GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
        num_experts_per_tok=2,
        sliding_window=7,
        pad_token_id=0,
        eos_token_id=2,
        attn_implementation=attention,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def _in_models(name):
    """A model's experts, and their memory; saved and loaded whole."""
    register()
    models = []
    for attention in ("eager" if name == "GPT-OSS" else "sdpa", "deepsp"):
        torch.manual_seed(0)
        made = _oss(attention) if name == "GPT-OSS" else make(name, attn_implementation=attention)
        models.append(made.double())
        models[-1].set_experts_implementation("eager")  # others don't know float64
    reference, model = models
    before = {n: p.numel() for n, p in model.named_parameters()}
    shard_experts(model)
    mine = {n: p.numel() for n, p in model.named_parameters()}
    cut = {n for n in mine if mine[n] < before[n]}
    assert cut and all(".experts." in n for n in cut)
    ids = torch.randint(3, VOCAB, (2, 17), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    expected = reference(**batch, use_cache=False).loss
    expected.backward()
    local, _ = deepsp.shard_batch(batch)
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        loss = model(**local).loss
        loss.backward()
        deepsp.sync_gradients(model)
        torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-6, atol=0)
        gradients = deepsp.full_state_dict(model, gradients=True)
        for n, q in reference.named_parameters():
            scale = q.grad.abs().max().item()
            torch.testing.assert_close(
                gradients[n], q.grad, rtol=0, atol=1e-5 * scale, msg=lambda m, n=n: f"{n}: {m}"
            )
    full = {n: x.clone() for n, x in deepsp.full_state_dict(model).items()}
    for n, x in reference.state_dict().items():
        assert torch.equal(full[n], x), n
    deepsp.load_full_state_dict(model, {n: x + 1 for n, x in full.items()})
    for n, x in deepsp.full_state_dict(model).items():
        assert torch.equal(x, full[n] + 1), n
    norm = deepsp.clip_grad_norm_(model, 1e9)
    expected = torch.nn.utils.get_total_norm([q.grad for q in reference.parameters()])
    torch.testing.assert_close(norm.double(), expected.double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("name", "ranks"), [("Mixtral", 2), pytest.param("Qwen3 MoE", 3), pytest.param("GPT-OSS", 2)]
)
def test_in_models(name, ranks):
    on_ranks(ranks, _in_models, name)


# ------------------------------------------------------------------ wrappers


def _mixtral(experts=5, **config):
    counts = {"num_local_experts": experts, "num_experts_per_tok": 2}
    model = tiny("mixtral", torch.float64, **counts, **config)
    model.set_experts_implementation("eager")  # others don't know float64
    return model


def _trained(size, batch):
    """What a Trainer logs, every gradient of its first step, and what it saves."""
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

    from deepsp.integrations.transformers import SequenceParallelTrainer

    with launched(), tempfile.TemporaryDirectory() as folder:
        model, cls, more, gradients = _mixtral(), Trainer, {}, {}
        args = arguments(
            per_device_train_batch_size=batch,
            per_device_eval_batch_size=batch,
            optim="sgd",
            max_grad_norm=0.5,
            learning_rate=1.0,
            gradient_accumulation_steps=2,
        )
        if size > 1:
            mesh = init_device_mesh("cpu", (dist.get_world_size() // size, size))
            whole = sum(p.numel() for p in model.parameters())
            shard_experts(model, mesh.get_group(1))
            assert sum(p.numel() for p in model.parameters()) < whole
            cls, more = SequenceParallelTrainer, {"sequence_parallel_size": size}
        else:
            model.loss_function = wide_loss

        class Keeps(TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, **_):
                if state.global_step == 0:
                    found = deepsp.full_state_dict(model, gradients=True)
                    gradients.update({n: g.clone() for n, g in found.items()})

        trainer = cls(
            model,
            args,
            train_dataset=Rows(40),
            eval_dataset=Rows(6, 1),
            callbacks=[Keeps()],
            **more,
        )
        trainer.train()
        trainer.save_model(folder)
        state = dict(deepsp.full_state_dict(model))
        if trainer.is_world_process_zero():
            again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
            for n, p in again.named_parameters():
                torch.testing.assert_close(p, state[n], rtol=0, atol=0)
    return logs(trainer), gradients, {n: x.detach().clone() for n, x in state.items()}


def _alike(found, expected):
    assert found.keys() == expected.keys() and len(found) > 20
    for n, x in found.items():
        torch.testing.assert_close(
            x, expected[n], rtol=1e-9, atol=1e-12, msg=lambda m, n=n: f"{n}: {m}"
        )


@pytest.mark.parametrize(("world", "size"), [(2, 2), (4, 2)])
def test_trainer(world, size):
    """DDP leaves experts alone; data ranks average those that they share."""
    expected = one_process(_trained, 1, 2)
    for found in on_ranks(world, _trained, size, 2 // (world // size)):
        for a, b in zip(found[0], expected[0], strict=True):
            assert a == pytest.approx(b, rel=1e-6)  # transformers adds up losses in float32
        for a, b in zip(found[1:], expected[1:], strict=True):
            _alike(a, b)


def _tuned(size, batch):
    """What SFTTrainer logs, which computes its loss itself."""
    from trl import SFTConfig, SFTTrainer

    from deepsp.integrations.transformers import sequence_parallel

    with launched():
        model, cls, more = (
            tiny("mixtral", num_local_experts=4, num_experts_per_tok=2),
            SFTTrainer,
            {},
        )
        args = arguments(
            SFTConfig,
            per_device_train_batch_size=batch,
            eval_strategy="no",
            bf16=False,
            max_length=32,
            padding_free=False,
            dataset_num_proc=None,
            max_grad_norm=0.5,
            router_aux_loss_coef=0.0,
        )
        if size > 1:
            shard_experts(model)
            cls, more = sequence_parallel(SFTTrainer), {"sequence_parallel_size": size}
        trainer = cls(model, args, train_dataset=lists(40), processing_class=tokenizer(), **more)
        trainer.train()
        return logs(trainer)


@pytest.mark.nightly
def test_sft():
    expected = one_process(_tuned, 1, 4)
    for found in on_ranks(2, _tuned, 2, 4):
        for a, b in zip(found, expected, strict=True):
            assert a == pytest.approx(b, rel=1e-4)


def _wrapped(how):
    """A loop with a wrapper, over 2 ranks of data and 2 of a sequence, or 2 of a sequence alone."""
    from torch.distributed.fsdp import fully_shard

    register()
    data = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (data, 2), mesh_dim_names=("data", "sequence"))
    group, across = mesh["sequence"].get_group(), mesh["data"].get_group()
    register(group)
    reference, model = _mixtral(attn_implementation="sdpa"), _mixtral(attn_implementation="deepsp")
    shard_experts(model, group)
    experts = [p for n, p in model.named_parameters() if ".experts." in n]
    if how == "FSDP":
        for layer in (*model.model.layers, model):
            fully_shard(
                layer, mesh=init_device_mesh("cpu", (2 * data,)), ignored_params=set(experts)
            ).set_gradient_divide_factor(float(data))  # the sum over a sequence
    wrapped = model if how == "FSDP" else DistributedDataParallel(model, process_group=across)
    ids = torch.randint(5, 97, (data, 2, 17), generator=torch.Generator().manual_seed(1))
    expected = [reference(input_ids=x, labels=x, use_cache=False).loss for x in ids]
    (sum(expected) / data).backward()
    mine = ids[mesh["data"].get_local_rank()]
    local, _ = deepsp.shard_batch({"input_ids": mine, "labels": mine}, group)
    loss = wrapped(**local).loss
    loss.backward()
    if how == "FSDP":
        for p in experts:
            dist.all_reduce(p.grad.as_subclass(torch.Tensor), group=across)
            p.grad /= data
    else:
        deepsp.sync_gradients(model, group)
    mine = expected[mesh["data"].get_local_rank()]
    torch.testing.assert_close(loss.double(), mine.double(), rtol=1e-6, atol=0)
    found = deepsp.full_state_dict(model, gradients=True)
    for n, q in reference.named_parameters():
        p = found[n].full_tensor() if how == "FSDP" and ".experts." not in n else found[n]
        scale = q.grad.abs().max().item()  # transformers computes losses in float32
        torch.testing.assert_close(
            p, q.grad, rtol=0, atol=1e-6 * scale, msg=lambda m, n=n: f"{n}: {m}"
        )
    norm = deepsp.clip_grad_norm_(model, 1e9)
    expected = torch.nn.utils.get_total_norm([q.grad for q in reference.parameters()])
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("how", "ranks"), [("FSDP", 2), ("FSDP", 4), ("DDP", 4)])
def test_wrapped(how, ranks):
    on_ranks(ranks, _wrapped, how)


def _refused_in_wrappers():
    from accelerate import Accelerator, DistributedType
    from peft import LoraConfig, get_peft_model
    from torch.distributed.fsdp import fully_shard
    from trl import DPOConfig, DPOTrainer

    from deepsp.integrations.accelerate import prepare
    from deepsp.integrations.transformers import SequenceParallelTrainer, sequence_parallel

    def dealt(group=None, **config):
        register(group)
        model = _mixtral(attn_implementation="deepsp", **config)
        shard_experts(model, group)
        return model

    def trainer(model=None, cls=SequenceParallelTrainer, size=2, **given):
        args = arguments(eval_strategy="no", **given)
        return cls(model or dealt(), args, train_dataset=Rows(8), sequence_parallel_size=size)

    class Sharded(SequenceParallelTrainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.accelerator.state.distributed_type = DistributedType.FSDP

    def dpo():
        return sequence_parallel(DPOTrainer)(
            dealt(),
            _mixtral(),
            arguments(DPOConfig, eval_strategy="no"),
            train_dataset=pairs(8),
            processing_class=tokenizer(splits=True),
            sequence_parallel_size=2,
        )

    def forward(wrap=lambda model: model, average=False):
        model = dealt(experts=4)  # DDP refuses other sizes itself
        wrapped = wrap(model)
        register(average_gradients=average)
        ids = torch.arange(5, 22)[None]
        wrapped(**deepsp.shard_batch({"input_ids": ids, "labels": ids})[0]).loss.backward()
        return model

    def alone():
        mine = [dist.new_group([r]) for r in range(2)][dist.get_rank()]
        return dealt(mine)

    lora = LoraConfig(r=2, target_modules=["q_proj"])
    on_experts = LoraConfig(r=2, target_parameters=["mlp.experts.gate_up_proj"])
    norm = torch.nn.utils.clip_grad_norm_
    cases = [
        (lambda: trainer(alone()), r"over the ranks of the sequence, \[0, 1\], got \[[01]\]"),
        (lambda: trainer(get_peft_model(dealt(), lora)), r"without adapters, .* PeftModel"),
        (lambda: trainer(cls=Sharded), r"expected DDP around .*experts.*, got FSDP"),
        (lambda: trainer(size=1), r"aren't sharded with sequence_parallel_size=1, got model"),
        (lambda: trainer(save_strategy="steps"), r"save_only_model=True or save_strategy='no'"),
        (lambda: trainer().train("checkpoint-1"), r"no resume_from_checkpoint with sharded exper"),
        (dpo, r"aren't sharded in a sequence-parallel DPOTrainer, got .*leave shard_experts out"),
        (
            lambda: prepare(Accelerator(cpu=True), dealt(), sequence_parallel_size=2),
            r"aren't sharded in prepare, got",
        ),
        (lambda: forward(average=True), r"register\(average_gradients=False\) with shard_experts"),
        (lambda: forward(DistributedDataParallel), r"DistributedDataParallel to leave experts of"),
        (lambda: forward(fully_shard), r"the parameter that shard_experts made, got another: FSDP"),
        (
            lambda: forward(lambda model: get_peft_model(model, on_experts)),
            r"no adapters on the experts of .*MixtralExperts, .* or leave shard_experts out",
        ),
        (lambda: norm(forward().parameters(), 1.0), r"deepsp.clip_grad_norm_\(model, max_norm\)"),
        (lambda: dealt().save_pretrained("never"), r"state_dict=deepsp.full_state_dict\(model\)"),
        (lambda: deepsp.sync_gradients(alone()), r"over ranks \[[01]\], and this group has more"),
    ]
    for call, pattern in cases:
        with launched(), pytest.raises(ValueError, match=pattern):
            call()


def test_refused_in_wrappers():
    on_ranks(2, _refused_in_wrappers)


def _different_experts():
    """Of data ranks: DDP would broadcast those of other parameters."""
    from deepsp.integrations.transformers import SequenceParallelTrainer

    with launched():
        model, mesh = _mixtral(), init_device_mesh("cpu", (2, 2))
        shard_experts(model, mesh.get_group(1))
        with torch.no_grad():
            model.model.layers[0].mlp.experts.down_proj += mesh.get_local_rank(0)
        with pytest.raises(ValueError, match=r"0.mlp.experts.down_proj to be the same on every"):
            SequenceParallelTrainer(
                model,
                arguments(eval_strategy="no"),
                train_dataset=Rows(8),
                sequence_parallel_size=2,
            )


def test_different_experts():
    on_ranks(4, _different_experts)


def _sends():
    """A rank sends the rows of other ranks' experts, and no others."""
    rank, size, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    counts = [(3 * p + q) % 5 for p in range(size) for q in range(size)]
    mine = counts[rank * size : (rank + 1) * size]
    rows = draw(sum(mine), 4, dtype=torch.float32)
    found = sent(lambda: torch.ops.deepsp.expert_dispatch(rows, counts, rank, name))
    assert sum(found) == (sum(mine) - mine[rank]) * 16


def test_bytes():
    on_ranks(3, _sends, apart="messages")


def _compiled(inner):
    rank, size, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    torch._dynamo.reset()
    op = torch.ops.deepsp

    def there_and_back(x, counts):
        y = op.expert_dispatch(x * 2, counts, rank, name)
        return op.expert_combine(y.sin(), counts, rank, name)

    call = torch.compile(there_and_back, backend=inner, fullgraph=True, dynamic=True)
    draws = random.Random(0)
    for _ in range(3):
        counts = [draws.randint(2, 9) for _ in range(size * size)]
        x = draw(sum(counts[rank * size : (rank + 1) * size]), 3).requires_grad_()
        outs = [f(x, counts) for f in (there_and_back, call)]
        grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in outs]
        torch.testing.assert_close(outs[0], (x * 2).sin())
        torch.testing.assert_close(*outs)
        torch.testing.assert_close(*grads)


def test_compiled():
    on_ranks(3, _compiled, "aot_eager")


@pytest.mark.nightly
def test_inductor():
    on_ranks(3, _compiled, "inductor")


def _refused():
    with pytest.raises(ValueError, match=r"at least as many experts as ranks .*\(2\), got 1"):
        deepsp.DistributedExperts(None, 1)
    module = deepsp.DistributedExperts(lambda x, expert: x[:-1], 2)
    x, chosen, weights = draw(3, 4), torch.zeros(3, 1, dtype=torch.long), draw(3, 1)
    with pytest.raises(ValueError, match="hidden of shape"):
        module(x, chosen, weights[:2])
    with pytest.raises(ValueError, match="chosen to be experts below 2, got 5"):
        module(x, chosen + 5, weights)
    module.function = lambda x, expert: None
    with pytest.raises(ValueError, match="a row for each token that it got, got NoneType"):
        module(x, chosen, weights)
    with pytest.raises(ValueError, match=r"rows that counts says rank 0 sends"):
        torch.ops.deepsp.expert_dispatch(x, [1, 1, 1, 1], 0, "0")
    with pytest.raises(ValueError, match=r"P \* P numbers, got 3"):
        torch.ops.deepsp.expert_combine(x, [1, 1, 1], 0, "0")


def test_refused():
    on_ranks(2, _refused)
