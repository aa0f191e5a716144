"""What packages need before they are imported."""

from importlib.util import find_spec

import torch


def declare_ops_of_torchvision() -> None:
    """Declare ops that torchvision registers fakes for, where its library doesn't load.

    PyPI's torchvision is built for CUDA, and its library doesn't load beside a torch for the CPU.
    The corpus needs none of these ops, but transformers and timm import torchvision.
    """
    if find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
