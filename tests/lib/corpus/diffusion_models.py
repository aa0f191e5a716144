"""Diffusion transformers: image, video and audio tokens; text where a model concatenates both."""

import functools

from diffusion import MODELS, make_diffusion_model

from corpus.step import Case, Entry

_JOINT = {"hidden_states": 1, "encoder_hidden_states": 1}
_SD3 = {"hidden_states": 2, "encoder_hidden_states": 1}
_LTX = {"hidden_states": 1}
_LTX2 = {"hidden_states": 1, "audio_hidden_states": 1}
SEQ_DIMS = {
    "Flux": _JOINT, "Flux, control": _JOINT, "Flux 2": _JOINT, "QwenImage": _JOINT,
    "QwenImage, control": _JOINT, "SD3": _SD3, "SD3, control": _SD3, "Wan": {"hidden_states": 2},
    "LTX": _LTX, "LTX, times": {**_LTX, "timestep": 1}, "LTX 2": _LTX2,
    "LTX 2, split": {**_LTX2, "timestep": 1},
}  # fmt: skip


def _make(name: str, length: int) -> Case:
    model, inputs = make_diffusion_model(name)
    return Case(model, {**inputs, "return_dict": False}, SEQ_DIMS[name])


DIFFUSION = {
    f"diffusers {n}": Entry("diffusers", functools.partial(_make, n), 1e-6) for n in MODELS
}
