"""Vision-language models over a sharded sequence, against one process: whole, unmodified models in
float64, loss and every gradient, those of towers included."""

import inspect

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from float64 import in_float64
from harness import on_ranks
from images_and_text import BEGIN, END, IMAGE, LENGTH, NAMES, QWENS, batch, make
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trained import arguments, launched, logs, tokenizer
from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

import deepsp
from deepsp.integrations.transformers import multimodal, register
from deepsp.ranks.groups import member_of


def _gradients(model):
    found = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def _logits(model, full):
    """In one process. Qwen3.5's recurrent layers don't end documents there: each goes alone."""
    packed = full.get("position_ids")
    if packed is None or packed.dim() == 2 or "Qwen3_5" not in type(model).__name__:
        return model(**full, use_cache=False).logits
    grid, pixels = full["image_grid_thw"], full["pixel_values"]
    first = int(grid[0].prod())  # the only image of the first document
    every = []
    for part, g, x in (
        (slice(12), grid[:1], pixels[:first]),
        (slice(12, None), grid[1:], pixels[first:]),
    ):
        known = {"position_ids": packed[..., part], "image_grid_thw": g, "pixel_values": x}
        known |= {n: full[n][:, part] for n in ("input_ids", "mm_token_type_ids")}
        every.append(model(**known, use_cache=False).logits)
    return torch.cat(every, 1)


def _alone(model, full):
    """The loss in one process, and all gradients."""
    full = dict(full)
    labels = F.pad(full.pop("labels")[:, 1:], (0, 1), value=-100)
    if (positions := full.get("position_ids")) is not None:
        rows = positions[0] if positions.dim() == 3 else positions
        labels = labels.masked_fill(F.pad(rows[:, 1:] == 0, (0, 1)), -100)
    logits = _logits(model, full)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return loss.item(), _gradients(model)


def _same(model, loss, expected, of):
    wanted, gradients = expected
    assert abs(loss.item() - wanted) < 1e-12 * wanted, (of, loss.item(), wanted)
    for n, found in _gradients(model).items():
        g = gradients[n]
        if g is None:
            assert found is None or not found.any(), (of, n)
            continue
        scale = max(g.abs().max().item(), 1e-6)  # a bias of keys has none
        found = torch.zeros_like(g) if found is None else found
        torch.testing.assert_close(
            found, g, rtol=0, atol=1e-10 * scale, msg=lambda m, n=n: f"{of}, {n}: {m}"
        )


def _kinds(name):
    kinds = ["images", "text", "padding", "packed"]
    return [*kinds, "video", "restarts"] if name in QWENS else kinds


def _equals(name):
    in_float64()
    register()
    torch.manual_seed(0)
    model = make(name)
    expected = {kind: _alone(model, batch(name, kind)) for kind in _kinds(name)}
    for deals in (False, True):
        register(deal_images=deals)
        model.set_attn_implementation("deepsp")
        for kind in _kinds(name):
            local, _ = deepsp.shard_batch(batch(name, kind), shard_at="decoder")
            loss = model(**local).loss
            loss.backward()
            deepsp.sync_gradients(model)
            _same(model, loss, expected[kind], (kind, deals))
    model.gradient_checkpointing_enable()
    local, _ = deepsp.shard_batch(batch(name), shard_at="decoder")
    loss = deepsp.causal_lm_loss(model, local)
    loss.backward()
    deepsp.sync_gradients(model)
    _same(model, loss, expected["images"], "checkpoints, without logits")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_equals_one_process(name, size):
    on_ranks(size, _equals, name, apart="hybrid")


def _more(name, kind):
    in_float64()
    register()
    torch.manual_seed(0)
    model, full = make(name), batch(name, kind)
    expected = _alone(model, full)
    model.set_attn_implementation("deepsp")
    local, _ = deepsp.shard_batch(full, shard_at="decoder")
    loss = model(**local).loss
    loss.backward()
    deepsp.sync_gradients(model)
    _same(model, loss, expected, kind)


@pytest.mark.parametrize(("name", "kind"), [("PaliGemma", "images"), ("Gemma 4", "text")])
def test_more_decoders(name, kind):
    """A decoder that asks for a mask of its own, and one with inputs of each layer."""
    on_ranks(3, _more, name, kind, apart="hybrid")


# ------------------------------------------------------------------------------------ trainers


_OF_ROWS = ("input_ids", "labels", "attention_mask")


class _Samples(torch.utils.data.Dataset):
    """Rows of ids, with an image in most of them."""

    def __init__(self, name, count, seed=0):
        self.name, self.count, self.seed = name, count, seed

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        full = batch(self.name, "images", seed=100 * self.seed + i)
        full["attention_mask"] = torch.ones_like(full["input_ids"])
        if i % 3 == 0:
            full["attention_mask"][:, -3:], full["labels"][:, -3:] = 0, -100
        row = 1 if i % 2 else 0
        return {n: full[n][row] for n in _OF_ROWS} | {
            "images": {n: x for n, x in full.items() if n.startswith(("pixel", "image"))},
            "own": [2] if row else [0, 1],
        }


def _collate(name):
    def collate(samples):
        full = {n: torch.stack([s[n] for s in samples]) for n in _OF_ROWS}
        every: dict = {}
        for s in samples:
            given = s["images"]
            for n, x in given.items():
                if n == "pixel_values" and "image_grid_thw" in given:
                    x = x.split(given["image_grid_thw"].prod(-1).tolist())
                every.setdefault(n, []).extend(x[i] for i in s["own"])
        for n, parts in every.items():
            rows = n == "pixel_values" and name in QWENS
            full[n] = torch.cat(parts) if rows else torch.stack(parts)
        if name in QWENS:
            full["mm_token_type_ids"] = (full["input_ids"] == IMAGE).int()
        return full

    return collate


def _pictures(count, seed=0):
    """Text with one or two pictures in each row, for TRL."""
    from datasets import Dataset
    from PIL import Image

    numbers = np.random.default_rng(seed)

    def picture():
        return Image.fromarray(numbers.integers(0, 255, (8, 8, 3), dtype=np.uint8))

    words = [[f"t{i}" for i in numbers.integers(5, 59, 6 + n)] for n in range(count)]
    rows = [
        {
            "text": " ".join(["<boi>", *w, *["<boi>", "t7"] * (n % 2)]),
            "images": [picture() for _ in range(1 + n % 2)],
        }
        for n, w in enumerate(words)
    ]
    return Dataset.from_list(rows)


def _processor():
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokens = {"image_token": "<img>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    ids = {"<img>": IMAGE, "<boi>": BEGIN, "<eoi>": END}
    images = Gemma3ImageProcessorPil(size={"height": 8, "width": 8})
    return Gemma3Processor(images, tokenizer(True, tokens, ids), image_seq_length=4)


def _trained(name, size, batch_size, of_trl=False, options=(), **given):
    from transformers import Trainer

    torch.manual_seed(0)
    model = make(name)
    cls = Trainer
    if of_trl:
        from trl import SFTConfig, SFTTrainer

        cls, given["cls"] = SFTTrainer, SFTConfig
        more = {"processing_class": _processor()}
        more |= {"train_dataset": _pictures(12), "eval_dataset": _pictures(5, 1)}
    else:
        more = {"train_dataset": _Samples(name, 12), "eval_dataset": _Samples(name, 5, 1)}
        more["data_collator"] = _collate(name)
    if size > 1:
        from deepsp.integrations.transformers import sequence_parallel

        cls, more = (
            sequence_parallel(cls),
            {**more, "sequence_parallel_size": size, **dict(options)},
        )
    given |= {"remove_unused_columns": False, "prediction_loss_only": True, "bf16": False}
    sizes = {"per_device_train_batch_size": batch_size, "per_device_eval_batch_size": batch_size}
    with launched():
        trainer = cls(model, arguments(**sizes, **given), **more)
        trainer.train()
    return logs(trainer)


def _trains_alike(name, size, batch_size, expected, kwargs):
    found = _trained(name, size, batch_size, **kwargs)
    assert len(found) == len(expected)
    for step, (mine, other) in enumerate(zip(found, expected, strict=True)):
        assert mine.keys() == other.keys(), (mine, other)
        for n, x in other.items():
            assert abs(mine[n] - x) <= 2e-4 * abs(x) + 1e-6, (step, n, mine[n], x)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("Qwen2.5-VL", {}),
        ("Qwen3-VL", {"options": {"deal_images": True, "without_logits": True}}),
        ("Gemma 3", {"of_trl": True, "options": {"deal_images": True}}),
        ("InternVL", {"options": {"own_batches": True, "deal_images": True}}),
    ],
)
def test_trainers(name, kwargs):
    alone = {n: x for n, x in kwargs.items() if n != "options"}
    own = "own_batches" in kwargs.get("options", {})
    expected = _trained(name, 1, 4, **alone)
    on_ranks(2, _trains_alike, name, 2, 2 if own else 4, expected, kwargs)


# ------------------------------------------------------------------------------- other doors


def _from_loaders(name, expected):
    """Each rank's loader has a batch of its own: the group trains on one after another."""
    in_float64()
    register(deal_images=True)
    torch.manual_seed(0)
    model = make(name)
    model.set_attn_implementation("deepsp")
    kinds = ["images", "text", "padding"]
    mine = [batch(name, kinds[dist.get_rank()])]
    turns = [lens for _, lens in deepsp.SequenceLoader(mine, shard_at="decoder")]
    assert len(turns) == dist.get_world_size() and sum(turns[0]) == LENGTH
    for kind, (local, _) in zip(kinds, deepsp.SequenceLoader(mine, shard_at="decoder")):  # noqa: B905
        loss = model(**local).loss
        loss.backward()
        deepsp.sync_gradients(model)
        _same(model, loss, expected[kind], kind)


def test_loader():
    on_ranks(2, _from_loaders, "Qwen3-VL", _in_one_process("Qwen3-VL"), apart="hybrid")


def _in_one_process(name):
    (found,) = on_ranks(1, _expected, name, apart="hybrid")
    return found


def _expected(name):
    in_float64()
    torch.manual_seed(0)
    model = make(name)
    return {kind: _alone(model, batch(name, kind)) for kind in _kinds(name)}


def _one_image(name):
    """The batch of one image: with dealt images, all ranks but one have none."""
    full = batch(name)
    full["input_ids"][0, 13:23] = full["input_ids"][1, 15:23] = 5
    full["labels"] = full["input_ids"].masked_fill(full["input_ids"] >= IMAGE, -100)
    full["mm_token_type_ids"] = (full["input_ids"] == IMAGE).int()
    full["image_grid_thw"] = full["image_grid_thw"][:1]
    full["pixel_values"] = full["pixel_values"][:16]
    return full


def _wrapped(name, wrapper):
    """DDP and FSDP need every parameter's gradient from every rank."""
    in_float64()
    register(deal_images=True, average_gradients=True)
    torch.manual_seed(0)
    model = make(name)
    if wrapper == "lora":
        lora = LoraConfig(target_modules=["q_proj", "v_proj", "qkv"], init_lora_weights=False)
        model = get_peft_model(model, lora)
    expected = _alone(model, _one_image(name))
    model.set_attn_implementation("deepsp")
    if wrapper == "lora":
        register(deal_images=True)
        wrapped = model
    elif wrapper == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    else:
        mesh = torch.distributed.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in [*model.model.language_model.layers, *model.model.visual.blocks]:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    for _ in range(2):
        local, _ = deepsp.shard_batch(_one_image(name), shard_at="decoder")
        loss = wrapped(**local).loss
        loss.backward()
        if wrapper == "lora":
            deepsp.sync_gradients(model)
        for p in model.parameters():
            if isinstance(p.grad, DTensor):
                p.grad = p.grad.full_tensor()
        _same(model, loss, expected, wrapper)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "lora"])
def test_ranks_without_images(wrapper):
    on_ranks(3, _wrapped, "Qwen2.5-VL", wrapper, apart="hybrid")


def _refused():
    in_float64()
    register()
    torch.manual_seed(0)
    model = make("Qwen2.5-VL")
    model.set_attn_implementation("deepsp")
    full = batch("Qwen2.5-VL")
    with pytest.raises(ValueError, match=r"image_grid_thw.*pass shard_at='decoder'"):
        deepsp.shard_batch(full)
    with pytest.raises(ValueError, match="expected shard_at to be 'inputs' or 'decoder', got 'x'"):
        deepsp.shard_batch(full, shard_at="x")
    with pytest.raises(ValueError, match="let the model's processor pad"):
        deepsp.shard_batch(full, pad_to=40, shard_at="decoder")
    with pytest.raises(ValueError, match="leave them out"):
        deepsp.SequenceLoader([full], mix=True, shard_at="decoder")
    words = {n: full[n] for n in ("input_ids", "labels")}
    images = {n: x for n, x in full.items() if n.startswith(("pixel", "image", "mm"))}
    cut, _ = deepsp.shard_batch(words)
    with pytest.raises(ValueError, match=r"expected the full input_ids .* got this rank's"):
        model(**{**cut, **images})
    local, _ = deepsp.shard_batch(full, shard_at="decoder")
    with pytest.raises(ValueError, match=r"expected no labels in the call"):
        model(**{**local, "labels": full["labels"]})
    whole = {**local, "shift_labels": full["labels"]}
    with pytest.raises(ValueError, match=rf"expected shift_labels of this rank's .* got {LENGTH}"):
        model(**whole)
    text = {n: x for n, x in local.items() if n not in images}
    with pytest.raises(ValueError, match=r"pixel_values for the 18 image tokens .* processor"):
        model(**text)
    one = {n: x[:, :1] for n, x in words.items()}
    with pytest.raises(ValueError, match="at least 2 tokens, one for each rank"):
        model(input_ids=one["input_ids"])
    ragged = full["input_ids"][:, : LENGTH - dist.get_rank()]
    with pytest.raises(ValueError, match="input_ids"):
        model(**{**images, "input_ids": ragged})
    pixels = images["pixel_values"] + dist.get_rank()
    with pytest.raises(ValueError, match="pixel_values"):
        model(**{**full, "labels": None, "pixel_values": pixels})
    logits = model(**{n: x for n, x in full.items() if n != "labels"}).logits
    assert logits.size(1) == (LENGTH + 1 - dist.get_rank()) // 2
    # A part of the model that gets something unknown, and an encoder that images can't be dealt to.
    decoder, known = model.model.language_model, model.model.language_model.forward
    base, calls = model.model, []

    def forward(*args, **kwargs):
        calls.append(kwargs)
        return known(*args, **kwargs)

    decoder.forward = forward
    register(deal_images=True)
    ids = {**local, "image_sizes": torch.ones(2, 2)}
    with pytest.raises(ValueError, match="expected no image_sizes"):
        model(**ids)
    encode = type(base).get_image_features
    with pytest.raises(ValueError, match="an entry of image_sizes for each of 3 images"):
        _deal_to(base, lambda pixel_values, image_grid_thw, image_sizes, **_: encode, local)
    with pytest.raises(ValueError, match="batch of deal_batch"):
        model(**local, deal=object())
    assert not calls


def _deal_to(base, encode, local):
    base.get_image_features = encode
    try:
        door = multimodal.Door(base, base.language_model, member_of(None), [19, 18], True)
        multimodal.deal_images(base, door, {**local, "image_sizes": torch.ones(2, 2)})
    finally:
        del base.get_image_features


def test_errors():
    on_ranks(2, _refused, apart="hybrid")


def _failures():
    """A rank whose share can't be encoded doesn't leave the others waiting."""
    in_float64()
    register(deal_images=True)
    model = make("Qwen2.5-VL")
    model.set_attn_implementation("deepsp")
    local, _ = deepsp.shard_batch(batch("Qwen2.5-VL"), shard_at="decoder")
    given, encode = model.model.get_image_features, type(model.model).get_image_features

    def fails(*args, **kwargs):
        if dist.get_rank() == 1:
            raise RuntimeError("a grid that doesn't fit")
        return given(*args, **kwargs)

    def more(*args, **kwargs):
        out = given(*args, **kwargs)
        out.pooler_output = [half for x in out.pooler_output for half in x.split(1)]
        return out

    for wrong, message in (
        (fails, r"rank 1 failed.*; pass deal_images=False"),
        (more, r"rank 0 failed: expected features of 1 images, got 8 .*; pass deal_images=False"),
    ):
        wrong.__signature__ = inspect.signature(given)
        model.model.get_image_features = wrong
        if wrong is more and dist.get_rank():
            message = "rank 0 failed"
        with pytest.raises(ValueError, match=message):
            model(**local)
        del model.model.get_image_features
    assert model.model.get_image_features.__func__ is encode

    one = make("LLaVA-OneVision")
    one.set_attn_implementation("deepsp")
    full = batch("LLaVA-OneVision") | {"batch_num_images": torch.tensor([2, 1, 0])}
    local, _ = deepsp.shard_batch(full, shard_at="decoder")
    with pytest.raises(ValueError, match="an entry of batch_num_images for each of 3 images"):
        one(**local)


def _settings():
    """What comes before and beside a call."""
    in_float64()
    register(deal_images=True)
    register(name="another")
    torch.manual_seed(0)
    model = make("Qwen3-VL")
    full = batch("Qwen3-VL")
    expected = _alone(model, full)
    model.set_attn_implementation({"text_config": "deepsp"})
    # Full ids that are the local ones of an earlier batch.
    deepsp.shard_batch({"input_ids": full["input_ids"].repeat(1, 2)})
    for name in ("deepsp", "another"):
        model.set_attn_implementation({"text_config": name})
        local, _ = deepsp.shard_batch(full, shard_at="decoder")
        loss = model(**local).loss
        loss.backward()
        deepsp.sync_gradients(model)
        _same(model, loss, expected, name)
    model.set_attn_implementation("deepsp")
    compiled = torch.compile(model, backend="eager")
    loss = compiled(**local).loss
    loss.backward()
    deepsp.sync_gradients(model)
    _same(model, loss, expected, "compiled")

    audio = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2}
    audio |= {"encoder_ffn_dim": 16, "num_mel_bins": 8, "max_source_positions": 16}
    text = make("InternVL").config.text_config.to_dict()
    config = Qwen2AudioConfig(text_config=text, audio_config=audio, audio_token_id=IMAGE)
    model = Qwen2AudioForConditionalGeneration(config)
    model.set_attn_implementation("deepsp")
    local, _ = deepsp.shard_batch(batch("InternVL", "text"), shard_at="decoder")
    with pytest.raises(ValueError, match="but it has code of its own for that"):
        model(**local)
    logits = model(input_ids=local["input_ids"]).logits
    assert deepsp.cross_entropy(logits, local["shift_labels"]).isfinite()


def test_failures():
    on_ranks(2, _failures, apart="hybrid")


def test_settings():
    on_ranks(2, _settings, apart="hybrid")


def test_images_are_balanced():
    shares = multimodal.shares_of([16, 32, 24, 8, 64], 2)
    assert shares == [[3, 4], [0, 1, 2]]
    assert multimodal.shares_of([5], 3) == [[0], [], []]
