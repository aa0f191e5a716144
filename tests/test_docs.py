"""The README and the docs: their links lead somewhere, and their Python runs, on real ranks."""

import ast
import contextlib
import copy
import functools
import re
import tempfile
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from architectures import make
from by_trl import reward_of
from diffusion import make_diffusion_model
from harness import on_ranks
from models import VOCABULARY, Model
from reference import attention
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler
from trained import Rows, arguments, launched, lists, pairs, tiny, tokenizer
from transformers import AutoModelForSequenceClassification
from under_deepspeed import launch_deepspeed
from vllm_stub import installed

import deepsp

ROOT = Path(__file__).parents[1]
PAGES = {path.stem: path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}


def snippets(page):
    """Without whole programs, which test_guide.py runs."""
    every = re.findall(r"```python\n(.*?)```", PAGES[page].read_text(), re.DOTALL)
    return [x for x in every if not re.match(r"# \w+\.py: torchrun", x)]


def run(page, names, changes=None):
    """Executes a page's snippets one after another, with ``names`` and small sizes."""
    text = "\n".join(snippets(page))
    for old, new in (changes or {}).items():
        assert old in text, f"{page} no longer has {old}"
        text = text.replace(old, new)
    names = {"torch": torch, "nn": nn, "dist": dist, "deepsp": deepsp, "group": None} | names
    exec(compile(text, str(PAGES[page]), "exec"), names)
    return names


def _model():
    torch.manual_seed(0)
    attend = deepsp.DistributedAttention()
    return Model(
        lambda q, k, v, lens: attend(q, k, v, is_causal=True, enable_gqa=True, seq_lens=lens)
    )


def _batch():
    ids = torch.randint(0, VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def _expected_loss():
    torch.manual_seed(0)
    model = Model(lambda q, k, v, _: attention(q, k, v, is_causal=True))
    ids = _batch()["input_ids"]
    logits = model(ids, torch.arange(13)[None])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


# ------------------------------------------------------------------------------ the pages


def _attention():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rank = dist.get_rank()
    lens, generator = [9, 4], torch.Generator().manual_seed(0)
    whole = [torch.randn(2, 13, h, 8, generator=generator) for h in (4, 2, 2)]
    q, k, v = (x.split(lens, 1)[rank] for x in whole)
    batch, seq_lens = deepsp.shard_batch(_batch())
    names = {"q": q, "k": k, "v": v, "seq_lens": lens, "mask": None, "model": _model()}
    names |= {"flex_attention": flex_attention, "create_block_mask": create_block_mask}
    names |= {"slopes": torch.arange(1.0, 5.0)}
    of_a_model, check = (
        s for n in ("model(", "deepsp.check(") for s in snippets("attention") if n in s
    )
    with torch.no_grad():
        names = run("attention", names | {"batch": batch}, {of_a_model: "", check: ""})
        expected = attention(*whole, is_causal=True).split(lens, 1)[rank]
        torch.testing.assert_close(names["out"], expected)
        alibi = names["attend"].local_attention(*whole, torch.arange(4)).split(lens, 1)[rank]
        torch.testing.assert_close(names["attend"](q, k, v, seq_lens=lens), alibi)
        torch.testing.assert_close(names["trunk"][0], expected)
        assert names["merged"].shape == q.shape and names["lse"].gt(names["trunk"][1]).all()
        one = [x[:, :, :1] for x in (q, k, v)]  # head, on two ranks
        expected = attention(*(x[:, :, :1] for x in whole), is_causal=True).split(lens, 1)[rank]
        torch.testing.assert_close(names["by_shares"](*one, seq_lens=lens), expected)
        for snippet in (check, of_a_model):
            exec(snippet, names | {"seq_lens": seq_lens})


def _layer():
    old = types.SimpleNamespace(
        q_proj=nn.Linear(64, 64),
        k_proj=nn.Linear(64, 32),
        v_proj=nn.Linear(64, 32),
        o_proj=nn.Linear(64, 64),
    )
    lens = [9, 4]
    names = {"old": old, "seq_lens": lens, "x": torch.randn(2, lens[dist.get_rank()], 64)}
    names = run(
        "layer",
        names,
        {"4096, 32, num_kv_heads=8": "64, 8, num_kv_heads=4", "num_heads=32": "num_heads=8"},
    )
    assert names["y"].shape == names["x"].shape
    assert names["attn"](names["x"], is_causal=True, seq_lens=lens).shape == names["x"].shape


class _Auto:
    """AutoModelForCausalLM, without a network."""

    @staticmethod
    def from_pretrained(name, **kwargs):
        torch.manual_seed(0)
        return make(name, **kwargs)


def _transformers():
    ids = torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    names = {"AutoModelForCausalLM": _Auto, "name": "Llama", "ids": ids, "mask": mask}
    mixture = _Auto.from_pretrained("Mixtral")
    names |= {"mixture": mixture}
    names = run("transformers", names, {"shard_experts(model,": "shard_experts(mixture,"})
    assert mixture.model.layers[0].mlp.experts.num_experts == 2
    expected = _Auto.from_pretrained("Llama")(ids, labels=ids, attention_mask=mask).loss
    torch.testing.assert_close(names["loss"].float(), expected.float())


def _compile():
    library = torch.library.Library("mine", "FRAGMENT")
    library.define("scale_each_token(Tensor x) -> Tensor")
    torch._dynamo.reset()  # models with attention of ours may have been compiled before
    torch.manual_seed(0)
    model = make("Llama")
    ids = torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(0))
    mask, positions = torch.ones_like(ids), torch.arange(13).expand(2, -1).contiguous()
    expected = model(ids, labels=ids, attention_mask=mask).loss
    names = {"model": model, "ids": ids, "labels": ids.clone(), "mask": mask}
    names |= {"positions": positions, "optimizer": torch.optim.SGD(model.parameters())}
    names = run(
        "compile", names, {"fullgraph=True)": 'fullgraph=True, options={"inner": "eager"})'}
    )
    torch.testing.assert_close(names["loss"], expected, rtol=1e-6, atol=0)
    del library


def _deepspeed():
    launch_deepspeed()
    torch.manual_seed(0)
    model = make("Llama").float()
    ids = torch.randint(3, 60, (1, 12), generator=torch.Generator().manual_seed(0))
    mask, positions = torch.ones_like(ids), torch.arange(12)[None]
    expected = model(ids, labels=ids, attention_mask=mask).loss
    names = {"model": model, "ids": ids, "labels": ids.clone(), "mask": mask}
    changes = {'{"dynamic": True}': '{"dynamic": True, "options": {"inner": "eager"}}'}
    names = run("deepspeed", names | {"positions": positions}, changes)
    torch.testing.assert_close(names["loss"], expected, rtol=1e-4, atol=0)


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        for name in "qkvo":
            setattr(self, f"{name}_proj", nn.Linear(32, 32))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = (
            getattr(self, f"{name}_proj")(x).unflatten(-1, (-1, 8)).transpose(1, 2)
            for name in "qkv"
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.o_proj(out.transpose(1, 2).flatten(2)))


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = _Attention()

    def forward(self, x):
        return x + self.attn(x)


class _Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([_Block() for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def _schedule(folder):
    from safetensors.torch import save_file

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    reference, llama = _Stack(), make("Llama")
    path = f"{folder}/model.safetensors"
    if dist.get_rank() == 0:
        save_file(llama.state_dict(), path)
    dist.barrier()
    names = {"mesh": mesh, "head_dim": 8, "functools": functools, "AdamW": torch.optim.AdamW}
    first, second = snippets("schedule")
    names = run("schedule", names | {"model": copy.deepcopy(reference)}, {second: ""})
    x = torch.randn(2, 13, 32, generator=torch.Generator().manual_seed(1))
    for model in (names["model"], reference):
        model.eval()
    torch.testing.assert_close(names["model"](x), reference(x))
    names = run(
        "schedule", names | {"model": copy.deepcopy(llama)}, {first: "", "model.safetensors": path}
    )
    ids = torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(0))
    ours, theirs = (m.eval()(ids).logits for m in (names["model"], llama))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def _sharded_weights():
    from torch._inductor import config

    rank, sizes, others = dist.get_rank(), [10, 10, 9], [1, 0, 4]
    model = _model()
    batch, seq_lens = deepsp.shard_batch(_batch())
    shard = torch.randn(sizes[rank], 6)
    names = {"model": model, "batch": batch, "seq_lens": seq_lens, "others": others}
    names |= {"optimizer": torch.optim.AdamW(model.parameters()), "shard": shard}
    names["shards"] = [shard, torch.randn(others[rank], 3)]
    torch.manual_seed(0)  # the page writes random numbers, the same on all ranks
    with config.patch(post_grad_custom_post_pass=None, joint_custom_pre_pass=None):
        names = run("sharded-weights", names)
    torch.testing.assert_close(names["loss"], _expected_loss(), rtol=0.05, atol=0.05)
    assert names["w"].shape == (29, 6) and names["w8"].dtype == names["w"].dtype


_TRAINING = {"per_device_train_batch_size": 2, "eval_strategy": "no", "max_steps": 2}


def _trainer():
    from transformers import BertConfig, BertForSequenceClassification

    with launched():
        names = {"model": tiny(), "training_arguments": arguments(**_TRAINING)}
        names |= {"train_data": Rows(20), "eval_data": Rows(4)}
        small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        names |= {"classifier": BertForSequenceClassification(BertConfig(**small))}
        # On four ranks: test_trainer.py.
        changes = {x: "" for x in snippets("trainer") if "DistributedConfig" in x}
        names = run("trainer", names, changes)
    assert names["metrics"]["eval_loss"] > 0


def _trl():
    from trl import DPOConfig, SFTConfig

    with launched():
        names = {"model": tiny(), "reference": tiny(), "tokenizer": tokenizer(splits=True)}
        names |= {"sft_config": arguments(SFTConfig, bf16=False, **_TRAINING)}
        names |= {"dpo_config": arguments(DPOConfig, bf16=False, **_TRAINING)}
        names = run("trl", names | {"sft_data": lists(20), "pairs": pairs(8)})
    assert names["trainer"].state.global_step == 2


def _accelerate():
    model = tiny()
    with launched():
        names = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
        names |= {"loader": DataLoader(Rows(4))}
        names = run("accelerate", names, {"Accelerator()": "Accelerator(cpu=True)"})
    assert names["loss"] > 0


def _lightning():
    quiet = "accelerator='cpu', logger=False, enable_checkpointing=False, "
    changes = {"lightning.pytorch": "pytorch_lightning", "pl.Trainer(": f"pl.Trainer({quiet}"}
    with launched():
        names = {"make_model": tiny, "train_loader": DataLoader(Rows(4))}
        names = run("lightning", names, changes)
    assert names["trainer"].global_step == 4


def _rl():
    given = {"per_device_train_batch_size": 4, "eval_strategy": "no", "max_steps": 2, "bf16": False}
    only_prompts = pairs(8).remove_columns(["chosen", "rejected"])
    config = tiny().config
    config.num_labels = 1
    names = {
        "policy": tiny(),
        "student": tiny(),
        "teacher": tiny(hidden_size=48),
        "reward_model": AutoModelForSequenceClassification.from_config(config),
        "reward": reward_of,
        "prompts": only_prompts,
        "pairs": pairs(8),
        "rows": Rows(8),
        "tokenizer": tokenizer(splits=True),
    }
    with launched(), installed():
        names["training"] = given | {"use_cpu": True, "report_to": [], "save_strategy": "no"}
        names["training_arguments"] = arguments(**given)
        names = run("rl", names)
    assert names["plan"].total > 2**34 and len(names["trainer"].state.log_history) > 0


def _prefixes():
    from deepsp.integrations.transformers import register

    given = {"per_device_train_batch_size": 4, "eval_strategy": "no", "max_steps": 1, "bf16": False}
    training = given | {"use_cpu": True, "report_to": [], "save_strategy": "no"}
    model = tiny()
    ids = torch.randint(5, 40, (4, 20), generator=torch.Generator().manual_seed(0))
    ids[:, :7] = ids[0, :7]
    mask = torch.ones_like(ids)
    mask[1, 10:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :6] = -100
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(1, 16, h, 8, generator=generator) for h in (4, 2, 2)]
    q, k, v = (deepsp.shard(x, 1) for x in whole)
    names = {"policy": tiny(), "prompts": pairs(8).remove_columns(["chosen", "rejected"])}
    names |= {"reward": reward_of, "tokenizer": tokenizer(splits=True), "training": training}
    names |= {"model": model, "ids": ids, "mask": mask, "labels": labels, "q": q, "k": k, "v": v}
    names["advantages"] = torch.linspace(-1, 1, 80).view(4, 20)
    with launched(), installed():
        register()
        model.set_attn_implementation("deepsp")
        names = run("prefixes", names)
    assert str(names["fold"]) in PAGES["prefixes"].read_text()
    path = [*range(10), *range(12, 16)]
    expected = attention(*(x[:, path] for x in whole), is_causal=True)[:, 10:]
    found = deepsp.unshard(names["out"], 1)[:, 12:]
    torch.testing.assert_close(found, expected)


def _memory():
    torch.manual_seed(0)
    model = make("Llama")
    ids = torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(0))
    expected = model(ids).logits
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        x = torch.randn(2, 3)
        names = run("memory", {"model": model, "layer": torch.sin, "layers": [torch.cos], "x": x})
    assert torch.equal(names["x"], x.sin().cos())
    assert names["names"] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-6, atol=1e-6)


def _diffusers():
    model, inputs = make_diffusion_model("Flux")
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    expected = reference(**inputs).sample
    names = {"transformer": model, "inputs": inputs, "optimizer": optimizers[0]}
    names = run("diffusers", names | {"velocity": torch.zeros_like(expected)})
    torch.testing.assert_close(names["out"], expected)
    expected.square().mean().backward()
    optimizers[1].step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def _multimodal():
    from images_and_text import batch
    from images_and_text import make as make_model

    torch.manual_seed(0)
    model, full = make_model("Qwen2.5-VL"), batch("Qwen2.5-VL")
    expected = model(**full).loss
    names = {"model": model, "batch": full, "dataset": [0, 1], "collate": lambda _: full}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"remove_unused_columns": False, "per_device_train_batch_size": 1}
    with launched():
        names["args"] = arguments(max_steps=1, eval_strategy="no", **given)
        names = run("multimodal", names)
    torch.testing.assert_close(names["loss"], expected)
    assert names["trainer"].state.global_step == 1


def _losses():
    from deepsp.integrations.transformers import register

    ids = _batch()["input_ids"]
    loading = [x for x in snippets("losses-and-data") if "SequenceLoader" in x]
    proving = [x for x in snippets("losses-and-data") if "deepsp.prove(" in x]
    register()
    model = _Auto.from_pretrained("Llama", attn_implementation="deepsp")
    hidden = torch.randn(2, 13, 6, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(VOCABULARY, 6, generator=torch.Generator().manual_seed(1))
    mine = deepsp.shard(hidden, 1).clone().requires_grad_()
    names = {"ids": ids, "mask": torch.ones_like(ids), "model": model, "weight": weight}
    teacher = torch.randn(2, 13, 5, generator=torch.Generator().manual_seed(2))
    names |= {"teacher_hidden": deepsp.shard(teacher, 1), "teacher_weight": weight[:, :5] * 3}
    names |= dict.fromkeys(("reference_log_probs", "values", "returns"), mine.detach()[..., 0])
    names["returns"] = mine.detach()[..., 1]
    names = run("losses-and-data", names | {"hidden": mine}, dict.fromkeys(loading + proving, ""))
    batch, seq_lens = names["batch"], names["seq_lens"]
    expected = (hidden @ weight.T).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])
    torch.testing.assert_close(names["log_probs"][:, :-1], expected[..., 0])
    p, q = (
        (x @ w.T)[:, :-1].softmax(-1) for x, w in ((hidden, weight), (teacher, weight[:, :5] * 3))
    )
    m = (p + q) / 2
    expected = (p * (p / m).log() + q * (q / m).log()).sum(-1).mean() / 2
    torch.testing.assert_close(names["divergence"], expected)
    expected = (hidden[..., 0] - hidden[..., 1])[:, :-1].square().mean() / 2
    torch.testing.assert_close(names["value_loss"], expected)
    whole = _Auto.from_pretrained("Llama")(ids, labels=ids).loss
    torch.testing.assert_close(names["loss"], whole.double(), rtol=1e-6, atol=0)
    logits = _model()(batch["input_ids"], batch["position_ids"], seq_lens)
    loss = deepsp.cross_entropy(logits, batch["shift_labels"])
    torch.testing.assert_close(loss, _expected_loss())

    ids = torch.randint(0, VOCABULARY, (8, 13), generator=torch.Generator().manual_seed(0))
    names = {"samples": [{"input_ids": row, "labels": row} for row in ids], "model": _model()}
    names |= {
        "data": 1,
        "sequence": dist.get_world_size(),
        "DistributedSampler": DistributedSampler,
    }
    names |= {"DataLoader": DataLoader, "init_device_mesh": init_device_mesh}
    others = [x for x in snippets("losses-and-data") if x not in loading]
    names = run("losses-and-data", names, {**dict.fromkeys(others, ""), '"cuda"': '"cpu"'})
    ids = deepsp.unshard(names["batch"]["input_ids"], 1, None, names["seq_lens"])
    reference = Model(lambda q, k, v, _: attention(q, k, v, is_causal=True))
    reference.load_state_dict(names["model"].state_dict())
    logits = reference(ids, torch.arange(13)[None])
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(names["loss"], expected)
    assert len(names["loader"]) == len(list(names["replicated"])) == 4
    others = [x for x in snippets("losses-and-data") if x not in proving]
    names = {"model": _model(), "batch": _batch(), "group": None}
    run("losses-and-data", names, dict.fromkeys(others, ""))


def _hybrid():
    ids = torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(0))
    lens, rank = [9, 4], dist.get_rank()
    whole = {"query": (4, 3), "key": (4, 3), "value": (4, 5), "log_decay": (4,)}
    generator = torch.Generator().manual_seed(1)
    whole = {n: torch.randn(2, 13, *s, generator=generator) for n, s in whole.items()}
    whole["log_decay"] = -whole["log_decay"].abs()
    mine = {n: x.split(lens, 1)[rank] for n, x in whole.items()}
    names = {"AutoModelForCausalLM": _Auto, "name": "Qwen3.5", "ids": ids, "seq_lens": lens}
    names = run("hybrid", names | mine)
    expected = names["linear_attention"](**whole)[0].split(lens, 1)[rank]
    torch.testing.assert_close(names["out"], expected)
    torch.testing.assert_close(names["passed"], expected)
    expected = _Auto.from_pretrained("Qwen3.5")(ids, labels=ids).loss
    torch.testing.assert_close(names["loss"].float(), expected.float())


def _mixed_lengths():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (3, 13), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 4:] = mask[2, 9:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    whole = [torch.randn(1, 39, 4, 8, generator=generator) for _ in range(3)]

    def mine(deal):
        return [x[:, deal.tokens(dist.get_rank())] for x in whole]

    names = {"AutoModelForCausalLM": _Auto, "name": "Llama", "ids": ids, "labels": labels}
    names |= {"mask": mask, "mine": mine}
    names = run("mixed-lengths", names, {"out = ": "q, k, v = mine(deal); out = "})
    q, k, v = (x.view(3, 13, 4, 8) for x in whole)
    expected = attention(q, k, v, is_causal=True).view(1, 39, 4, 8)
    torch.testing.assert_close(names["deal"].unshard(names["out"]), expected)
    model = _Auto.from_pretrained("Llama")
    expected = model(ids, attention_mask=mask, labels=labels).loss
    torch.testing.assert_close(names["loss"].float(), expected.float())


def _gradients():
    from torch.distributed.fsdp import fully_shard

    names = {"init_device_mesh": init_device_mesh, "fully_shard": fully_shard, "data": 1}
    names |= {"sequence": dist.get_world_size(), "model": _model(), "batch": _batch()}
    names = run("gradients", names, {'"cuda"': '"cpu"'})
    torch.testing.assert_close(names["loss"], _expected_loss())


def _kernel(q, k, v):
    """Linear attention, whose kv heads are repeated."""
    k, v = (x.repeat_interleave(q.size(2) // x.size(2), 2) for x in (k, v))
    return torch.einsum("bshd,bthd,bthe->bshe", q, k, v)


def _kernel_backward(grad, q, k, v):
    heads, repeats = k.size(2), q.size(2) // k.size(2)
    k, v = (x.repeat_interleave(repeats, 2) for x in (k, v))
    of_k = torch.einsum("bshe,bshd,bthe->bthd", grad, q, v).unflatten(2, (heads, repeats)).sum(3)
    of_v = torch.einsum("bshe,bshd,bthd->bthe", grad, q, k).unflatten(2, (heads, repeats)).sum(3)
    return [torch.einsum("bshe,bthd,bthe->bshd", grad, k, v), of_k, of_v]


def _check_attend(attend, kv_heads):
    """The page's Function against one process and autograd's gradients."""
    lens, rank, generator = [9, 4], dist.get_rank(), torch.Generator().manual_seed(0)
    whole = [
        torch.randn(2, 13, heads, 5, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, kv_heads, kv_heads)
    ]
    weight = torch.randn(2, 13, 4, 5, generator=generator, dtype=torch.float64)
    expected = _kernel(*whole)
    gradients = torch.autograd.grad(expected, whole, weight)
    mine = [x.detach().split(lens, 1)[rank].requires_grad_() for x in whole]
    out = attend(*mine, lens, rank, dist.group.WORLD.group_name)
    torch.testing.assert_close(out, expected.split(lens, 1)[rank])
    out.backward(weight.split(lens, 1)[rank])
    for x, gradient in zip(mine, gradients, strict=True):
        torch.testing.assert_close(x.grad, gradient.split(lens, 1)[rank])


def _ops():
    x = torch.randn(2, [10, 9][dist.get_rank()], 3, requires_grad=True)
    names = {"given": x, "kernel": _kernel, "kernel_backward": _kernel_backward}
    names = run("ops", names, {"k = 4": "x = given; k = 4"})
    for kv_heads in (2, 1):  # the single one is on both ranks
        _check_attend(names["Attend"].apply, kv_heads)
    assert names["same"].shape == names["q"].shape and torch.equal(names["same"], names["q"])
    torch.testing.assert_close(names["z"], 2 * x)
    whole = F.pad(deepsp.unshard(x, 1, seq_lens=[10, 9]), (0, 0, 3, 0)).transpose(1, 2)
    expected = names["conv"](whole).transpose(1, 2).split([10, 9], 1)[dist.get_rank()]
    torch.testing.assert_close(names["convolved"], expected)


def _sparse():
    rank, lens = dist.get_rank(), [9, 4]
    names = run("sparse", {})
    torch.manual_seed(0)
    model = names["SparseAttention"](16, 2, 4)
    whole = torch.randn(2, 13, 16)
    x = whole.split(lens, 1)[rank]
    model(x, lens).square().sum().backward()
    deepsp.sync_gradients(model)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    alone = dist.new_subgroups(1)[0]
    model.attend = deepsp.DistributedAttention(names["attend"], alone, exchange="keys")
    model(whole).square().sum().backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys() and len(expected) == 10
    for n, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[n], msg=n)


def test_every_public_op_has_a_call():
    text = "\n".join(snippets("ops"))
    found = {
        name.removeprefix("deepsp::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("deepsp::") and not name.startswith("deepsp::_")
    }
    assert not [name for name in found if f"ops.{name}(" not in text]


def _transport():
    run("transport", {})


def _machines():
    text, rank = "", dist.get_rank()

    def say(value):
        nonlocal text
        text += f"{value}\n"

    ids = torch.randint(0, 50, (2, 13), generator=torch.Generator().manual_seed(0))
    names = {"data": 2, "sequence": 2, "machines": 2, "gpus": 2, "ids": ids, "print": say}
    names = run("machines", names | {"heads": 4, "kv_heads": 2}, {'"cuda"': '"cpu"'})
    assert names["number"] == rank // 2
    assert text.startswith("ranks 0, 1: shared memory\n4 query heads on 4 ranks")
    assert str(deepsp.transport()) in PAGES["machines"].read_text()
    whole = [
        torch.randn(2, 13, h, 8, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2)
    ]
    q, k, v = (x.split(names["seq_lens"], 1)[rank] for x in whole)
    lens = names["seq_lens"]
    out = names["attend"](q, k, v, is_causal=True, enable_gqa=True, seq_lens=lens)
    torch.testing.assert_close(out, attention(*whole, is_causal=True).split(lens, 1)[rank])


def _diagnose():
    model = _model()

    def training_step(full):
        batch, seq_lens = deepsp.shard_batch(full)
        logits = model(batch["input_ids"], batch["position_ids"], seq_lens)
        deepsp.cross_entropy(logits, batch["shift_labels"]).backward()

    names = {"model": model, "full_batch": _batch(), "training_step": training_step}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        names = run("diagnose", names)
        trace = Path("step.json").read_text()
    assert names["batch"]["input_ids"].shape == (2, [7, 6][dist.get_rank()])
    assert len(names["peaks"]) == 2
    assert "deepsp::exchange" in names["sent"] and "deepsp::exchange" in trace
    page = PAGES["diagnose"].read_text()
    source = "".join(path.read_text() for path in (ROOT / "csrc").rglob("*.cpp"))
    for name in re.findall(r"`deepsp::(\w+)`", page):
        assert f'"deepsp::{name}"' in source or hasattr(torch.ops.deepsp, name), name


RUNS = {
    "attention": (_attention, 2),
    "layer": (_layer, 2),
    "transformers": (_transformers, 2),
    "compile": (_compile, 2),
    "deepspeed": (_deepspeed, 2),
    "schedule": (_schedule, 2),
    "sharded-weights": (_sharded_weights, 3),
    "losses-and-data": (_losses, 2),
    "gradients": (_gradients, 2),
    "memory": (_memory, 1),
    "hybrid": (_hybrid, 2),
    "sparse": (_sparse, 2),
    "mixed-lengths": (_mixed_lengths, 2),
    "diffusers": (_diffusers, 2),
    "multimodal": (_multimodal, 2),
    "ops": (_ops, 2),
    "trainer": (_trainer, 2),
    "trl": (_trl, 2),
    "accelerate": (_accelerate, 2),
    "lightning": (_lightning, 2),
    "rl": (_rl, 2),
    "prefixes": (_prefixes, 2),
    "transport": (_transport, 2),
    "machines": (_machines, 4),
    "diagnose": (_diagnose, 2),
}
ELSEWHERE = {"guide", "training", "loops"}  # test_guide.py, test_loops.py


@pytest.mark.parametrize("page", RUNS)
def test_snippets(page):
    function, ranks = RUNS[page]
    # DeepSpeed and transformers keep state of the process. Ranks of "machines" are on two of them.
    apart = (
        page
        if page
        in (
            "deepspeed",
            "transformers",
            "losses-and-data",
            "trainer",
            "trl",
            "accelerate",
            "lightning",
            "rl",
            "multimodal",
            "prefixes",
            "machines",
        )
        else ""
    )
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(ranks, function, *([folder] if page == "schedule" else []), apart=apart)


def test_every_page_is_run():
    assert {page for page in PAGES if snippets(page)} == RUNS.keys() | ELSEWHERE


def test_reasons_are_those_of_the_pass():
    """Each text in the first column of docs/refusals.md stands in the source, but for f-strings."""
    rows = re.findall(r"^\| (`.*?`) \|", PAGES["refusals"].read_text(), re.MULTILINE)
    files = [*(ROOT / "deepsp").rglob("compile/**/*.py"), *(ROOT / "deepsp/placement").glob("*.py")]
    source = "".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text()) for path in files)
    reasons = [reason for row in rows for reason in re.findall("`(.*?)`", row)]
    assert len(reasons) > 20
    assert [reason for reason in reasons if reason not in source] == []


def anchors(text):
    """Returns the anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#{1,3} (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_anchors():
    for path in PAGES.values():
        text = path.read_text()
        for file, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]*)\)", text):
            if "://" not in file:
                there = (path.parent / file).read_text() if file else text
                assert anchor in anchors(there), f"{path.name}: {file}#{anchor}"


def test_quotes_are_those_of_the_source():
    """Each line of a quote in docs/contributing.md stands in its file, after the line before it."""
    page = PAGES["contributing"].read_text()
    quotes = re.findall(r"```(?:cpp|py)\n(?://|#) (\S+)\n(.*?)```", page, re.DOTALL)
    assert len(quotes) == len(re.findall("```(?:cpp|py)\n", page)) == 10
    for path, quote in quotes:
        source = _stripped((ROOT / path).read_text())
        for part in re.split(r"^(?://|#) \.\.\.\n", quote, flags=re.MULTILINE):
            assert _stripped(part) in source, f"{path} no longer has {part}"


def _stripped(text):
    """Its lines without indentation, each with the line breaks around it."""
    return "\n" + "".join(f"{line.strip()}\n" for line in text.splitlines())


def test_links():
    for path in PAGES.values():
        text = path.read_text()
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            assert "://" in link or (path.parent / link).exists(), f"{path.name}: {link}"
    readme = PAGES["README"].read_text()
    assert readme.count("\n") <= 220
    linked = {Path(link).stem for link in re.findall(r"\]\((docs/\w[\w-]*\.md)\)", readme)}
    reachable = set(linked)
    for page in linked:
        reachable |= {
            Path(x).stem for x in re.findall(r"\]\(([\w-]+\.md)\)", PAGES[page].read_text())
        }
    assert PAGES.keys() - {"README", "index"} <= reachable  # the index is Sphinx's


def test_every_page_is_in_the_index():
    """Once, in one of four groups."""
    text = (ROOT / "docs/index.md").read_text()
    trees = re.findall(r"```{toctree}\n:hidden:\n:caption: (.*)\n\n((?:[\w-]+\n)+)```", text)
    captions, pages = zip(*trees, strict=True)
    assert captions == ("How-to", "Explanation", "Reference", "Measurements")
    assert sorted("".join(pages).split()) == sorted({*PAGES, "api"} - {"README", "index"})


def test_snippets_parse():
    for page in PAGES:
        for snippet in snippets(page):
            ast.parse(snippet)


def test_public_names_are_explained():
    """Each is named on a page, as users write it."""
    pages = "".join(path.read_text() for path in PAGES.values())
    assert not [n for n in deepsp.__all__ if not re.search(rf"\bdeepsp\.{n}\b", pages)]


def test_reference():
    """The API reference has every public name."""
    listed = re.findall(r"^\.\. auto\w+:: (\S+)", (ROOT / "docs/api.rst").read_text(), re.MULTILINE)
    public = {f"deepsp.{name}" for name in deepsp.__all__}
    public |= {f"deepsp.compile.{name}" for name in deepsp.compile._HOMES}
    assert public <= set(listed), sorted(public - set(listed))
