"""Which tensors of a diffusion transformer are sharded, and where its output is gathered."""

from __future__ import annotations

from typing import Any

from torch import nn

_THEIR_OWN = (
    "FluxTransformer2DModel",
    "Flux2Transformer2DModel",
    "QwenImageTransformer2DModel",
    "WanTransformer3DModel",
    "LTXVideoTransformer3DModel",
)
"""Models whose ``_cp_plan`` shards all tokens."""


def plan_of(model: nn.Module) -> dict[str, Any] | None:
    """The plan of a model, as diffusers' models have it in ``_cp_plan``; None: it has none that was
    compared with one process."""
    from diffusers.models._modeling_parallel import ContextParallelInput

    for cls in type(model).__mro__:
        name = cls.__name__
        if name in MODELS:
            plan = _OURS[name](model) if name in _OURS else model._cp_plan
            more = {
                argument: ContextParallelInput(split_dim=1, expected_dims=dims)
                for argument, dims in _MORE.get(name, {}).items()
            }
            return {**plan, "": {**plan.get("", {}), **more}}
    return None


def _sd3(model: nn.Module) -> dict[str, Any]:
    from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

    tokens = ContextParallelInput(split_dim=1, expected_dims=3, split_output=True)
    return {
        "pos_embed": {0: tokens},  # after it, the latents are tokens
        "context_embedder": {0: tokens},
        "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    }


def _ltx2(model: nn.Module) -> dict[str, Any]:
    """diffusers' own plan leaves audio whole, which attends to video and is attended to."""
    from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

    tokens = ContextParallelInput(split_dim=1, expected_dims=3)
    of_rows = ContextParallelInput(split_dim=1, expected_dims=2)
    split = model.config.rope_type == "split"  # by heads: [B, H, S, D / 2]
    dims = {"split_dim": 2, "expected_dims": 4} if split else {"split_dim": 1, "expected_dims": 3}
    angles = ContextParallelInput(**dims, split_output=True)
    output = ContextParallelOutput(gather_dim=1, expected_dims=3)
    ropes = ("rope", "audio_rope", "cross_attn_rope", "cross_attn_audio_rope")
    return {
        "": {
            **dict.fromkeys(
                (
                    "hidden_states",
                    "audio_hidden_states",
                    "encoder_hidden_states",
                    "audio_encoder_hidden_states",
                    "video_keyframes_mask",
                ),
                tokens,
            ),
            **dict.fromkeys(
                (
                    "timestep",
                    "audio_timestep",
                    "encoder_attention_mask",
                    "audio_encoder_attention_mask",
                ),
                of_rows,
            ),
        },
        **{path: {0: angles, 1: angles} for path in ropes},
        "proj_out": output,
        "audio_proj_out": output,
    }


_MORE = {
    "FluxTransformer2DModel": {"controlnet_block_samples": 3, "controlnet_single_block_samples": 3},
    "QwenImageTransformer2DModel": {"controlnet_block_samples": 3},
    "SD3Transformer2DModel": {"block_controlnet_hidden_states": 3},
    "LTXVideoTransformer3DModel": {"timestep": 2},  # one for each token
}
"""Arguments with an entry for each image token that plans leave out, and their dimensions."""

PROCESSORS = {
    "FluxAttnProcessor",
    "FusedFluxAttnProcessor2_0",
    "Flux2AttnProcessor",
    "Flux2ParallelSelfAttnProcessor",
    "WanAttnProcessor",
    "QwenDoubleStreamAttnProcessor2_0",
    "LTXVideoAttnProcessor",
    "LTX2AudioVideoAttnProcessor",
    "JointAttnProcessor2_0",
    "FusedJointAttnProcessor2_0",
}
"""The attention processors that were compared with one process. Others, of diffusers, too, may
attend to a rank's tokens only (Flux 2's with a cache of reference images)."""

_OURS = {"SD3Transformer2DModel": _sd3, "LTX2VideoTransformer3DModel": _ltx2}

MODELS = (*_THEIR_OWN, *_OURS)
"""The classes that :func:`deepsp.integrations.diffusers.enable` takes."""
