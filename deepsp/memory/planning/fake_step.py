"""A training step on fake tensors, which have sizes and no data, and its live bytes."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from deepsp.loss.cross_entropy import cross_entropy, linear_cross_entropy
from deepsp.memory.activations.checkpoint import checkpoint_policy
from deepsp.memory.tiling.tile import tile_
from deepsp.sequence.attention.distributed import distributed_attention

_ATTENTION = "deepsp-plan"


class _Live(TorchDispatchMode):
    """Counts live bytes by part, and the largest sum in each phase."""

    def __init__(self):
        super().__init__()
        self.refs: dict[int, weakref.ref] = {}
        self.storages: dict[int, tuple[str, int]] = {}
        self.live: Counter[str] = Counter()
        self.peaks: dict[str, Counter[str]] = {}
        self.phase, self.part = "set-up", "activations"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            out = _grouped_mm(*args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        namespace, name = func.namespace, func._schema.name
        sends = namespace == "deepsp" and ("_to_heads" in name or "_to_seq" in name)
        part = "exchange buffers" if sends else self.part
        tree_map_only(Tensor, lambda x: self.see(x, part), out)
        if sum(self.live.values()) > sum(self.peaks.get(self.phase, Counter()).values()):
            self.peaks[self.phase] = self.live.copy()
        return out

    def see(self, tensor: Tensor, part: str) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.storages:
            size = storage.nbytes()
            self.storages[key] = (part, size)
            self.live[part] += size
            self.refs[key] = weakref.ref(storage, lambda _: self._freed(key))
        return tensor

    def _freed(self, key: int) -> None:
        part, size = self.storages.pop(key)
        self.live[part] -= size
        del self.refs[key]

    def move(self, tensor: Tensor, part: str) -> None:
        """Counts a tensor under another part."""
        key = tensor.untyped_storage()._cdata
        before, size = self.storages.get(key, (None, 0))
        if before is not None:
            self.storages[key] = (part, size)
            self.live[before] -= size
            self.live[part] += size


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, *_, **__) -> Tensor:
    """The result's sizes: PyTorch computes it in every dtype, but its fake kernel takes bfloat16
    only."""
    if a.dim() == b.dim() == 2:
        return a.new_empty(offs.size(0), a.size(0), b.size(1))
    if a.dim() == 2:
        return a.new_empty(a.size(0), b.size(2))
    if b.dim() == 2:
        return a.new_empty(a.size(1), b.size(1))
    return a.new_empty(a.size(0), a.size(1), b.size(2))


def _blocks(model: torch.nn.Module, layers: int) -> torch.nn.ModuleList:
    decoder = model.get_decoder()
    for module in decoder.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == layers:
            return module
    raise ValueError(
        f"expected {type(decoder).__name__} to have its {layers} layers in a list, got none of "
        "that length; its memory can't be planned"
    )


@contextlib.contextmanager
def _attention_over(ranks: int, seq_lens: list[int], kv_chunk: int | None) -> Iterator[None]:
    """Replaces transformers' attention by deepsp's on rank 0, causal. Nothing is sent, since fake
    tensors have no data."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
        out = distributed_attention(
            *(x.transpose(1, 2) for x in (query, key, value)),
            is_causal=True,
            scale=scaling,
            enable_gqa=query.size(1) != key.size(1),
            group=(0, ranks, _ATTENTION),
            seq_lens=seq_lens,
            kv_chunk=kv_chunk,
        )
        return out, None

    AttentionInterface._global_mapping[_ATTENTION] = attend
    AttentionMaskInterface._global_mapping[_ATTENTION] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del AttentionInterface._global_mapping[_ATTENTION]
        del AttentionMaskInterface._global_mapping[_ATTENTION]


def _with_layers(config, layers: int):
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    kinds = getattr(text, "layer_types", None)
    if kinds:
        text.layer_types = [kinds[i % len(kinds)] for i in range(layers)]
    return config


def peaks_of_step(
    config,
    layers,
    dtype,
    ranks,
    batch,
    seq_len,
    without_logits,
    tiled,
    checkpoint,
    keep_attention=False,
    kv_chunk=None,
):
    """Peaks by phase of a step of the model with ``layers`` layers, its parameters' sizes, and one
    layer's size."""
    from transformers import AutoModelForCausalLM

    seq_lens = list(torch.ops.deepsp.token_split(seq_len, ranks))
    member = (0, ranks, _ATTENTION)
    # Apart, since each grows linearly with tokens and layers, and one more than another.
    phases = {
        layers - 1: "backward of the last layer",
        layers - 2: "backward of a layer between",
        0: "backward of the first layer",
    }
    with FakeTensorMode(), _attention_over(ranks, seq_lens, kv_chunk), _Live() as live:
        live.part = "parameters"
        model = AutoModelForCausalLM.from_config(
            _with_layers(config, layers), attn_implementation=_ATTENTION, dtype=dtype
        )
        model.train()
        if tiled:
            tile_(model)
        if checkpoint:
            name = "activation_checkpointing_enable"  # transformers' name from 5.24 on
            kept = {"context_fn": checkpoint_policy()} if keep_attention else {}
            enable = getattr(model, name, model.gradient_checkpointing_enable)
            enable({"use_reentrant": False} | kept)
        blocks = _blocks(model, layers)
        for index, phase in phases.items():
            if index >= 0:
                blocks[index].register_forward_hook(_phase_hook(live, phase))
        for p in model.parameters():
            live.see(p, "parameters")
            p.register_post_accumulate_grad_hook(lambda p: live.move(p.grad, "gradients"))
        live.part, live.phase = "activations", "forward"
        ids = torch.zeros(batch, seq_lens[0], dtype=torch.int64)
        positions = torch.zeros(1, seq_lens[0], dtype=torch.int64)
        hidden = model.get_decoder()(
            input_ids=ids, position_ids=positions, use_cache=False, attention_mask=None
        ).last_hidden_state
        live.phase, live.part = "the loss", "logits"
        head = model.get_output_embeddings()
        if without_logits:
            loss = linear_cross_entropy(hidden, head.weight, ids, head.bias, group=member)
        else:
            logits = head(hidden)
            loss = cross_entropy(logits, ids, group=member)
            del logits
        del hidden
        loss.backward()
        sizes = [p.numel() * p.element_size() for p in model.parameters()]
        block = sum(p.numel() * p.element_size() for p in blocks[0].parameters())
        largest_activation = batch * seq_lens[0] * config.get_text_config().hidden_size
        return live.peaks, sizes, block, largest_activation * dtype.itemsize


def _phase_hook(live: _Live, phase: str):
    def entered(_):
        live.phase, live.part = phase, "activations"

    def after(module, args, output):
        output = output[0] if isinstance(output, tuple) else output
        if output.requires_grad and live.phase == "forward":
            output.register_hook(entered)

    return after
