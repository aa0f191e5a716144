"""The training step that benchmarks/collectives.py measures: a transformers Llama, tensor parallel
with sequence parallel, by deepsp's ready plan and by torch.distributed.tensor.parallel."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import bench
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import deepsp
from deepsp.schedule.ready import tensor_sequence_parallel


def make_model(shape: dict) -> nn.Module:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape["hidden"],
        intermediate_size=4 * shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["heads"],
        vocab_size=shape["vocab"],
        max_position_embeddings=shape["seq"],
        use_cache=False,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).train()


def as_dtensors(model: nn.Module) -> nn.Module:
    """Shard a model by the same plan in PyTorch's own words."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole, tokens = Replicate(), Shard(1)
    for i, layer in enumerate(model.model.layers):
        plan = {
            "input_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": tokens},
                desired_input_kwarg_layouts={"hidden_states": whole},
            ),
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(output_layouts=tokens),
            "post_attention_layernorm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(whole,)),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=tokens),
        }
        parallelize_module(layer, mesh, plan)
        if i == 0:
            first = PrepareModuleInput(
                input_layouts=(whole,), desired_input_layouts=(tokens,), use_local_output=True
            )
            parallelize_module(layer, mesh, first)
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=whole),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=tokens, output_layouts=whole),
    }
    return parallelize_module(model, mesh, plan)


def stepper(model: nn.Module, shape: dict) -> Callable[[], float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)

    def step() -> float:
        ids = torch.randint(shape["vocab"], (shape["batch"], shape["seq"]), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()

    return step


def measure_step(shape: dict, repeats: int) -> dict[str, dict]:
    """Return losses, and ms of the slowest rank, by name: whole on each rank, PyTorch's plan, and
    deepsp's."""
    model = make_model(shape)
    models = {
        "torch tensor.parallel": as_dtensors(copy.deepcopy(model)),
        "deepsp": deepsp.build(tensor_sequence_parallel(copy.deepcopy(model)))[0],
        "deepsp, overlap": deepsp.build(
            tensor_sequence_parallel(copy.deepcopy(model), overlap=True)
        )[0],
    }
    losses: dict[str, list[float]] = {name: [] for name in [*models, "one process"]}
    models["one process"] = model

    def noted(name: str, step: Callable[[], float]) -> Callable[[], None]:
        return lambda: losses[name].append(step())

    calls = {name: noted(name, stepper(m, shape)) for name, m in models.items()}
    times = bench.timed(calls, repeats, warmups=2)
    return {name: {"ms": times[name], "losses": losses[name]} for name in models}
