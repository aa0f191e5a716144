"""Small diffusion transformers of diffusers, each with its inputs."""

import torch

F64 = torch.float64


def draw_normal(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def _flux(text=7):
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    inputs = {
        "hidden_states": draw_normal(2, 25, 4),
        "encoder_hidden_states": draw_normal(2, text, 32, seed=1),
        "pooled_projections": draw_normal(2, 32, seed=2),
        "img_ids": draw_normal(25, 3, seed=3),
        "txt_ids": torch.zeros(text, 3, dtype=F64),
        "timestep": torch.tensor([0.5, 0.2], dtype=F64),
    }
    return model, inputs


def _flux2():
    from diffusers import Flux2Transformer2DModel

    model = Flux2Transformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
    )
    inputs = {
        "hidden_states": draw_normal(1, 23, 4),
        "encoder_hidden_states": draw_normal(1, 8, 32, seed=1),
        "img_ids": torch.arange(23 * 4).view(1, 23, 4),
        "txt_ids": torch.zeros(1, 8, 4).long(),
        "timestep": torch.tensor([0.5], dtype=F64),
        "guidance": torch.tensor([1.0], dtype=F64),
    }
    return model, inputs


def _wan():
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    inputs = {
        "hidden_states": draw_normal(1, 4, 3, 10, 6),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": draw_normal(1, 5, 16, seed=1),
    }
    return model, inputs


def _qwen_image():
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False
    inputs = {
        "hidden_states": draw_normal(2, 20, 16),
        "encoder_hidden_states": draw_normal(2, 7, 16, seed=1),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.tensor([0.5, 0.2], dtype=F64),
        "img_shapes": [[(1, 4, 5)]] * 2,
    }
    return model, inputs


def _ltx():
    from diffusers import LTXVideoTransformer3DModel

    model = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=12,
        cross_attention_dim=24,
        num_layers=2,
        caption_channels=16,
    )
    mask = torch.ones(2, 5, dtype=torch.int64)
    mask[0, 3:] = 0
    inputs = {
        "hidden_states": draw_normal(2, 3 * 3 * 4, 8),
        "encoder_hidden_states": draw_normal(2, 5, 16, seed=1),
        "timestep": torch.tensor([3, 5]),
        "encoder_attention_mask": mask,
        "num_frames": 3,
        "height": 3,
        "width": 4,
    }
    return model, inputs


def _sd3():
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    inputs = {
        "hidden_states": draw_normal(2, 4, 10, 6),
        "encoder_hidden_states": draw_normal(2, 7, 32, seed=1),
        "pooled_projections": draw_normal(2, 32, seed=2),
        "timestep": torch.tensor([3, 5]),
    }
    return model, inputs


def _ltx2(rope="interleaved"):
    from diffusers import LTX2VideoTransformer3DModel

    model = LTX2VideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=12,
        cross_attention_dim=24,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=6,
        audio_cross_attention_dim=12,
        num_layers=2,
        caption_channels=16,
        rope_type=rope,
    )
    mask = torch.ones(2, 5, dtype=torch.int64)
    mask[0, 3:] = 0
    inputs = {
        "hidden_states": draw_normal(2, 3 * 3 * 4, 8),
        "audio_hidden_states": draw_normal(2, 7, 4, seed=3),
        "encoder_hidden_states": draw_normal(2, 5, 16, seed=1),
        "encoder_attention_mask": mask,
        "audio_encoder_hidden_states": draw_normal(2, 5, 16, seed=2),
        "audio_encoder_attention_mask": mask,
        "timestep": torch.tensor([3, 5]),
        "num_frames": 3,
        "height": 3,
        "width": 4,
        "audio_num_frames": 7,
    }
    return model, inputs


def _ltx2_split():
    model, inputs = _ltx2("split")
    times = torch.arange(36).expand(2, -1).contiguous()  # one for each token
    return model, {**inputs, "timestep": times, "audio_timestep": torch.tensor([3, 5])}


def _flux_control():
    """With the residuals of a ControlNet."""
    model, inputs = _flux()
    more = {
        "controlnet_block_samples": [draw_normal(2, 25, 64, seed=8)],
        "controlnet_single_block_samples": [draw_normal(2, 25, 64, seed=9)],
    }
    return model, {**inputs, **more}


def _qwen_image_control():
    model, inputs = _qwen_image()
    return model, {**inputs, "controlnet_block_samples": [draw_normal(2, 20, 48, seed=8)] * 2}


def _sd3_control():
    model, inputs = _sd3()
    return model, {**inputs, "block_controlnet_hidden_states": [draw_normal(2, 15, 32, seed=8)]}


def _ltx_times():
    """With a timestep for each token."""
    model, inputs = _ltx()
    return model, {**inputs, "timestep": torch.arange(36).expand(2, -1).contiguous()}


MODELS = {
    "Flux": _flux,
    "Flux 2": _flux2,
    "Wan": _wan,
    "QwenImage": _qwen_image,
    "LTX": _ltx,
    "SD3": _sd3,
    "LTX 2": _ltx2,
    "LTX 2, split": _ltx2_split,
    "Flux, control": _flux_control,
    "QwenImage, control": _qwen_image_control,
    "SD3, control": _sd3_control,
    "LTX, times": _ltx_times,
}


def make_diffusion_model(name, **options):
    """Makes the model in float64, and its inputs."""
    torch.manual_seed(0)
    model, inputs = MODELS[name](**options)
    model = model.to(F64).train()
    with torch.no_grad():  # what begins at 0, too, is random
        for p in model.parameters():
            p.add_(0.05 * draw_normal(*p.shape))
    return model, inputs
