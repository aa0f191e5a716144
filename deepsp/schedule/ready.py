"""Ready schedules for models with well-known names."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from deepsp.ranks.groups import Group
from deepsp.schedule import Schedule, create_schedule


@dataclass(frozen=True)
class _Names:
    """The module names in a family of decoders; inside a layer, unless noted."""

    layers: str  # a list of layers, in the model
    attention: str
    norms: tuple[str, str]  # before attention, before the MLP
    qkv: tuple[str, ...]  # in attention: one fused, or three
    out: str  # in attention
    ups: tuple[str, ...]  # the MLP's first linear layers
    down: str
    last_norm: str  # in the model
    embedding: str  # in the model
    divided: tuple[str, ...] = ()  # attention's attributes that count heads
    channels: tuple[str, ...] = ()  # and that count channels


_FAMILIES = {
    "Llama": _Names(
        layers="layers",
        attention="self_attn",
        norms=("input_layernorm", "post_attention_layernorm"),
        qkv=("q_proj", "k_proj", "v_proj"),
        out="o_proj",
        ups=("mlp.gate_proj", "mlp.up_proj"),
        down="mlp.down_proj",
        last_norm="norm",
        embedding="embed_tokens",
    ),
    "GPT-2": _Names(
        layers="h",
        attention="attn",
        norms=("ln_1", "ln_2"),
        qkv=("c_attn",),
        out="c_proj",
        ups=("mlp.c_fc",),
        down="mlp.c_proj",
        last_norm="ln_f",
        embedding="wte",
        divided=("num_heads",),
        channels=("split_size",),
    ),
}
_HEAD = "lm_head"


def tensor_sequence_parallel(
    model: nn.Module, group: Group = None, *, overlap: bool = False
) -> Schedule:
    """A schedule for tensor and sequence parallelism: attention heads, MLP columns and the
    vocabulary are sharded; norms, residuals and dropout work on each rank's tokens.

    After Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053; Korthikanti et al., 2022,
    arXiv:2205.05198). A sub-layer gathers the tokens after its norm, and reduce-scatters them after
    its last linear layer; the logits are gathered, so the model's outputs don't change. Every rank
    passes the same full batch; replicated parameters have full gradients on every rank.

    Args:
        model: a model with the module names of transformers' Llama (as Mistral, Qwen2 and Qwen3
            have) or GPT-2, with tokens along axis 1. It may be on the meta device.
        group: the ranks, at most as many as kv heads: a tensor-parallel dimension of a mesh, say.
        overlap: overlap collectives with the matrix products next to them.

    Returns:
        A schedule: print it, change it, pass it to :func:`deepsp.build`.

    Raises:
        ValueError: the model has other module names, or fewer heads than ranks.
    """
    base, names = _family(model)
    sch = create_schedule(model, group)

    def inner(name: str) -> str:
        return f"{base}.{name}".strip(".")

    layers = model.get_submodule(inner(names.layers))
    for i, layer in enumerate(layers):
        _layer(sch[inner(f"{names.layers}.{i}")], layer, names, overlap)
    sch[inner(f"{names.layers}.0")].sync("fwd_pre", "scatter", axis=1, tensor=0)
    # The sharded head follows, so the gradient is partial.
    head = getattr(model, _HEAD, None)
    last = sch[inner(names.last_norm)]
    last.sync("fwd_post", "all_gather", axis=1, grad="replicated" if head is None else "partial")
    embedding = sch[inner(names.embedding)]
    embedding.shard("weight", axis=0)
    embedding.sync("fwd_post", "all_reduce", grad="replicated")
    if head is not None:
        sch[_HEAD].shard("weight", axis=0)
        sch[_HEAD].sync("fwd_post", "all_gather", axis=-1, grad="replicated")
    return sch


def _layer(sch: Schedule, layer: nn.Module, names: _Names, overlap: bool) -> None:
    attention = layer.get_submodule(names.attention)
    dim = attention.head_dim
    # Query heads stay with the key and value head that they read.
    group = getattr(attention, "num_key_value_groups", 1)
    units = [group * dim, dim, dim]
    heads = sch[names.attention]
    if len(names.qkv) == 1:
        weight = attention.get_submodule(names.qkv[0]).weight
        axis = _output_axis(attention.get_submodule(names.qkv[0]))
        third = weight.size(axis) // 3
        heads[names.qkv[0]].shard("weight", axis=axis, parts=[third] * 3, unit=units)
    else:
        for name, unit in zip(names.qkv, units, strict=True):
            axis = _output_axis(attention.get_submodule(name))
            heads[name].shard("weight", axis=axis, unit=unit)
    if names.divided:
        heads.divide(*names.divided)
    if names.channels:
        heads.divide(*names.channels, unit=dim)
    out = attention.get_submodule(names.out)
    heads[names.out].shard("weight", axis=1 - _output_axis(out), unit=units[0])
    for name in names.ups:
        sch[name].shard("weight", axis=_output_axis(layer.get_submodule(name)))
    down = layer.get_submodule(names.down)
    sch[names.down].shard("weight", axis=1 - _output_axis(down))

    firsts = ([f"{names.attention}.{n}" for n in names.qkv], list(names.ups))
    for norm, first in zip(names.norms, firsts, strict=True):
        if overlap and len(first) == 1:  # no other layer reads the gathered tensor
            sch[first[0]].sync("fwd_pre", "all_gather", axis=1, grad="partial", overlap=True)
        else:
            sch[norm].sync("fwd_post", "all_gather", axis=1, grad="partial")
    for last in (heads[names.out], sch[names.down]):
        last.sync("fwd_post", "reduce_scatter", axis=1, overlap=overlap)


def _output_axis(module: nn.Module) -> int:
    """The dimension of a weight's output features, which differs for transformers' Conv1D."""
    return 0 if isinstance(module, nn.Linear) else 1


def _family(model: nn.Module) -> tuple[str, _Names]:
    """The name of the decoder in the model, and its family's names."""
    for names in _FAMILIES.values():
        for base, module in model.named_modules():
            layers = getattr(module, names.layers, None)
            if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
                continue
            if _has(module, names.embedding, names.last_norm) and _has(layers[0], *_needed(names)):
                return base, names
    kinds = "; ".join(
        f"{family}: " + ", ".join([*_needed(names), names.embedding, names.last_norm])
        for family, names in _FAMILIES.items()
    )
    raise ValueError(
        f"expected model to have the module names of one of {kinds}, got {type(model).__name__}; "
        "write its schedule with deepsp.create_schedule"
    )


def _needed(names: _Names) -> list[str]:
    attention = [f"{names.attention}.{name}" for name in (*names.qkv, names.out)]
    return [*names.norms, *attention, *names.ups, names.down]


def _has(module: nn.Module, *names: str) -> bool:
    modules = dict(module.named_modules())
    return all(name in modules for name in names)
