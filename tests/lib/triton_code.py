"""Generates the Triton code of a compiled model, as one rank of a group has it, without a GPU.

The model has fake CUDA tensors, and what Inductor asks the GPU is answered by constants. Nothing
is compiled by Triton or run, so Triton needn't be installed. Run as a program (:func:`generate`
does), since the device that isn't there (tests/cpp/pretended_gpu.cpp) is loaded before torch.
"""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

TESTS = Path(__file__).parents[1]
H100 = {
    "name": "H100",
    "type": "cuda",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "total_memory": 80 << 30,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472,
    "L2_cache_size": 50 << 20,
    "gcnArchName": "",
}


class CannotRun(Exception):
    """Raised by the code that was generated, when it is called."""


def build_device(folder) -> Path:
    """Compiles the device that isn't there; takes some seconds."""
    torch = Path(find_spec("torch").origin).parent
    library = Path(folder) / "pretended_gpu.so"
    subprocess.run(
        [
            *("g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch}/include"),
            *(str(TESTS / "cpp/pretended_gpu.cpp"), "-o", str(library), f"-L{torch}/lib"),
            *("-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"),
        ],
        check=True,
    )
    return library


def generate(device: Path, ranks: int, cases: list) -> dict:
    """Generates code for cases (model of zoo.MODELS, lengths, dtype), on every rank.

    Returns:
        By rank and case, the number of Triton kernels of each graph, or the error's last line.
    """
    paths = os.pathsep.join([str(TESTS / "lib"), *sys.path])
    program = subprocess.run(
        [sys.executable, __file__, str(device), str(ranks), json.dumps(cases)],
        env={**os.environ, "PYTHONPATH": paths, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert program.returncode == 0, program.stderr[-3000:]
    return json.loads(program.stdout.splitlines()[-1])


@contextlib.contextmanager
def _pretended(codes: list[str]):
    """Answers what Inductor asks the GPU, and collects the code instead of running it."""
    import torch
    import torch._inductor.config
    import torch._inductor.graph
    import torch._inductor.runtime.hints
    import torch._inductor.scheduler
    import torch.utils._triton
    from torch._dynamo.device_interface import CudaInterface

    hints = torch._inductor.runtime.hints.DeviceProperties
    fields = {n: x for n, x in H100.items() if n in hints._fields} | {"index": 0, "cc": 90}

    def taken(_, code):
        codes.append(code.value)

        def call(args):
            raise CannotRun

        return types.SimpleNamespace(call=call, __file__=os.devnull, key="", path="")

    answers = {
        "get_device_properties": lambda *_: types.SimpleNamespace(**H100),
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "H100",
        "current_device": lambda: 0,
        "device_count": lambda: 1,
    }
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (torch._inductor.graph.GraphLowering, "_compile_to_module_lines", taken),
            (hints, "create", lambda *_: hints(**fields)),
            (torch._inductor.scheduler, "has_triton", lambda *_: True),
            (torch.utils._triton, "triton_hash_with_backend", lambda *_: ""),
            *((torch.cuda, name, value) for name, value in answers.items()),
            (CudaInterface, "is_bf16_supported", staticmethod(lambda *_, **__: True)),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(
            torch._inductor.config.patch(
                force_disable_caches=True, joint_graph_constant_folding=False
            )
        )
        yield


def _on_gpu(model, dtype, mode):
    """The model with fake parameters and buffers on a GPU."""
    import torch

    def moved(x):
        kind = dtype if x.is_floating_point() else x.dtype
        return torch.empty_strided(x.shape, x.stride(), dtype=kind, device="cuda")

    with mode:
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    module._parameters[name] = torch.nn.Parameter(moved(p))
            for name, x in module._buffers.items():
                if x is not None:
                    module._buffers[name] = moved(x)
    return model


def _kernels(name: str, lengths: list[int], dtype: str, member) -> list[int]:
    import torch
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx
    from torch._subclasses.fake_tensor import FakeTensorMode
    from zoo import MODELS, batch

    import deepsp
    from deepsp.compile import parallelize

    torch._dynamo.reset()
    codes: list[str] = []
    mode = FakeTensorMode()
    model = _on_gpu(MODELS[name](), getattr(torch, dtype), mode)

    def backend(gm, example_inputs):
        new = parallelize(gm, example_inputs, member, drop_caches=True)
        with functorch_config.patch(force_non_lazy_backward_lowering=True):
            return compile_fx(new, example_inputs)

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with _pretended(codes):
        for length in lengths:
            inputs = batch(length, name)
            with mode:
                inputs = {
                    n: torch.empty(x.shape, dtype=x.dtype, device="cuda")
                    if isinstance(x, torch.Tensor)
                    else x
                    for n, x in inputs.items()
                }
            with contextlib.suppress(CannotRun):
                compiled(**deepsp.prepare_inputs(inputs))
    return [code.count("@triton.jit") for code in codes]


def main() -> None:
    device, ranks, cases = sys.argv[1:]
    ctypes.CDLL(device, mode=ctypes.RTLD_GLOBAL)
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    results = {}
    for rank in range(int(ranks)):
        dist.init_process_group("fake", rank=rank, world_size=int(ranks), store=FakeStore())
        member = rank, int(ranks), dist.group.WORLD.group_name
        for case in json.loads(cases):
            try:
                result = _kernels(*case, member)
            except Exception as error:
                result = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            results[f"rank {rank}: {json.dumps(case)}"] = result
        dist.destroy_process_group()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
