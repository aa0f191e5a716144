"""Shard methods of common modules."""

from __future__ import annotations

from torch import nn

from deepsp.schedule import forwards
from deepsp.schedule.heads import HeadsSharded
from deepsp.schedule.placement import PARTIAL, REPLICATE, Shard
from deepsp.schedule.registry import Effect, Follow, register_shard_method

_LAST = Shard(-1)


def _only(module: nn.Module, names: tuple[str, ...], leader: str, *followers: str) -> None:
    cls = type(module).__name__
    if leader not in names:
        raise ValueError(
            f"expected names to have {leader}, which is sharded in {cls}"
            + "".join(f" and which {follower} follows" for follower in followers)
            + f", got {list(names)}"
        )
    others = [name for name in names if name not in (leader, *followers)]
    if others:
        raise ValueError(
            f"expected names to be among {[leader, *followers]}, which {cls} can shard, got "
            f"{others[0]!r}"
        )


@register_shard_method(nn.Linear)
def _linear(module: nn.Linear, names: tuple[str, ...], axis: int) -> Effect:
    _only(module, names, "weight", "bias")
    return _side(axis == 0, "bias" in names, ("out_features", "in_features"), forwards.InputSharded)


@register_shard_method("transformers.pytorch_utils.Conv1D")
def _conv1d(module: nn.Module, names: tuple[str, ...], axis: int) -> Effect:
    _only(module, names, "weight", "bias")
    return _side(axis == 1, "bias" in names, ("nf", "nx"), forwards.Conv1DInputSharded)


def _side(output: bool, with_bias: bool, attributes: tuple[str, str], summand: type) -> Effect:
    if output:
        return Effect(
            also={"bias": 0},
            attributes=attributes[:1],
            input=REPLICATE,
            output=_LAST,
            input_gradient="partial",
        )
    if with_bias:
        raise ValueError(
            "expected names without 'bias', which stays Replicate where the input features of the "
            "weight are sharded; leave it out"
        )
    return Effect(
        attributes=attributes[1:], input=_LAST, output=PARTIAL, add_after="bias", forward=summand
    )


@register_shard_method(nn.Embedding)
def _embedding(module: nn.Embedding, names: tuple[str, ...], axis: int) -> Effect:
    _only(module, names, "weight")
    if module.max_norm is not None:
        raise ValueError(
            f"expected max_norm to be None, got {module.max_norm}; an embedding that writes to its "
            "weight can't be sharded"
        )
    if axis == 1:
        return Effect(attributes=("embedding_dim",), input=REPLICATE, output=_LAST)
    for name in ("scale_grad_by_freq", "sparse"):
        if getattr(module, name):
            raise ValueError(
                "expected scale_grad_by_freq to be False, got True; a rank doesn't know how often "
                "the tokens of a sharded vocabulary are used on others"
                if name == "scale_grad_by_freq"
                else "expected sparse to be False, got True; a sharded one has dense gradients"
            )
    return Effect(
        attributes=("num_embeddings",),
        input=REPLICATE,
        output=PARTIAL,
        forward=forwards.VocabularySharded,
        opaque=True,
    )


def _norm(forward: type):
    def method(module: nn.Module, names: tuple[str, ...], axis: int) -> Effect:
        followers = ("bias",) if getattr(module, "bias", None) is not None else ()
        _only(module, names, "weight", *followers)
        if module.weight.dim() != 1:
            raise ValueError(
                f"expected weight to have 1 dimension, the features, got {module.weight.dim()}"
            )
        also = dict.fromkeys(followers, 0)
        return Effect(also=also, input=_LAST, output=_LAST, forward=forward, opaque=True)

    return method


register_shard_method(nn.LayerNorm)(_norm(forwards.LayerNormSharded))
register_shard_method(nn.RMSNorm)(_norm(forwards.RMSNormSharded))
register_shard_method(
    *(
        f"transformers.models.{name.lower()}.modeling_{name.lower()}.{name}RMSNorm"
        for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
    )
)(_norm(forwards.LlamaRMSNormSharded))


@register_shard_method(nn.MultiheadAttention)
def _attention(module: nn.MultiheadAttention, names: tuple[str, ...], axis: int) -> Effect:
    _only(module, names, "in_proj_weight", "in_proj_bias", "out_proj.weight")
    if axis != 0:
        raise ValueError(
            f"expected axis 0, along which the heads of in_proj_weight lie, got {axis}"
        )
    if module.in_proj_weight is None:
        raise ValueError(
            "expected no kdim or vdim; with separate weights for q, k and v it can't be sharded"
        )
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError(
            "expected add_bias_kv and add_zero_attn to be False; with them it can't be sharded"
        )
    heads = module.head_dim
    return Effect(
        also={"in_proj_bias": 0, "out_proj.weight": Follow(1, 1, heads)},
        attributes=("num_heads",),
        input=REPLICATE,
        output=PARTIAL,
        input_gradient="partial",
        add_after="out_proj.bias",
        forward=HeadsSharded,
        opaque=True,
        parts=3,
        unit=heads,
    )
