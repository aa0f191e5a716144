import os
import tempfile

import harness
from hypothesis import settings

# A graph that was compiled before would hide what the code does now: Inductor keeps none. What g++
# makes of a kernel's text is kept for this run, in a folder of its own, where all ranks find it.
_built = tempfile.TemporaryDirectory(prefix="deepsp_tests_")
os.environ.update(
    TORCHINDUCTOR_CACHE_DIR=_built.name,
    TORCHINDUCTOR_FX_GRAPH_CACHE="0",
    TORCHINDUCTOR_AUTOGRAD_CACHE="0",
    TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO="0",
)
# Kernels without vector instructions, which compile in less time; who needs them turns them on.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

settings.register_profile("deepsp", deadline=None, max_examples=40, derandomize=True)
# pytest --hypothesis-profile=long tests/test_fuzz.py
settings.register_profile("long", deadline=None, max_examples=4000)
settings.load_profile("deepsp")


def pytest_sessionfinish():
    harness.stop_all()
    _built.cleanup()
