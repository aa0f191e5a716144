"""Builds the C++ (and, where torch has CUDA, the CUDA) extension against the torch installed."""

import copy
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import torch
from setuptools import setup
from torch.utils import cpp_extension
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

CSRC = Path("csrc")
PREFIX = CSRC / "prefix.h"
SECONDS_PER_FILE = 4  # of one core, without CUDA
# The oldest Python: the extension uses only what every Python since then has.
cpp_extension.min_supported_cpython = "0x030B0000"


def has_headers(home: str | None) -> bool:
    return home is not None and Path(home, "include", "cuda_runtime.h").exists()


def find_cuda() -> str | None:
    """The folder of CUDA's headers. torch takes the parent of the folder that nvcc lies in; where
    that nvcc is a script which calls another one, the other one knows."""
    home = cpp_extension.CUDA_HOME
    if torch.version.cuda is None or home is None or has_headers(home):
        return home
    nvcc = shutil.which("nvcc") or str(Path(home, "bin", "nvcc"))
    if not Path(nvcc).exists():
        return None
    plan = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True, check=False)
    top = re.search(r"^#\$ TOP=(.*)$", plan.stdout + plan.stderr, re.MULTILINE)
    if top is None or not has_headers(top[1]):
        raise RuntimeError(
            f"expected CUDA's headers in {home}/include or where {nvcc} looks for them, got no "
            "cuda_runtime.h there; set CUDA_HOME to the folder of a CUDA toolkit"
        )
    return os.path.realpath(top[1])


cpp_extension.CUDA_HOME = find_cuda()
WITH_CUDA = torch.version.cuda is not None and cpp_extension.CUDA_HOME is not None


def sources(suffix: str) -> list[str]:
    return sorted(str(path) for path in CSRC.rglob(f"*{suffix}"))


def extension():
    # -fopenmp for the header-only parallel_for; nothing of OpenMP is linked, so
    # that torch's own runtime, with its thread count, serves us too.
    # -g0 -O2: half the build time and a tenth of the size of the defaults. By itself, gcc's -O2
    # vectorises next to nothing: sums of float32 were 7 times slower.
    cxx = ["-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-g0", "-fopenmp"]
    cxx += ["-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas", "-Wno-sign-compare"]
    cxx += ["-DAT_PER_OPERATOR_HEADERS"]
    if not WITH_CUDA:
        return CppExtension(
            "deepsp._C", sources(".cpp"), py_limited_api=True, extra_compile_args={"cxx": cxx}
        )
    return CUDAExtension(
        "deepsp._C",
        sources(".cpp") + sources(".cu"),
        py_limited_api=True,
        extra_compile_args={
            "cxx": [*cxx, "-DDEEPSP_CUDA"],
            "nvcc": ["-O3", "-DDEEPSP_CUDA", "--expt-relaxed-constexpr"],
        },
    )


class Build(BuildExtension):
    """Reads torch's headers once for all files, and notes what the extension was built for."""

    def finalize_options(self):
        super().finalize_options()
        if self.editable_mode:  # kept, so that what hasn't changed isn't compiled again
            self.build_temp = str(Path("build", f"{self.plat_name}-torch-{torch.__version__}"))

    def build_extension(self, ext):
        self.precompile(ext)
        super().build_extension(ext)

    def precompile(self, ext):
        """Compiles PREFIX, as any source is compiled, to where gcc finds it instead of the text."""
        folder = Path(self.build_temp).absolute()
        self.compiler.src_extensions += [".h"]
        (compiled,) = self.compiler.compile(
            [str(PREFIX)],
            output_dir=str(folder / "prefix"),
            include_dirs=ext.include_dirs,
            extra_postargs=copy.deepcopy(ext.extra_compile_args),
            depends=ext.depends,
        )
        link = folder / f"{PREFIX.name}.gch"
        link.unlink(missing_ok=True)
        link.symlink_to(compiled)
        shutil.copy(PREFIX, folder)  # for compilers that take no gch
        ext.extra_compile_args["cxx"] += ["-include", str(folder / PREFIX.name)]

    def run(self):
        files = sum(len(ext.sources) for ext in self.extensions)
        jobs = min(files, int(os.environ["MAX_JOBS"])) if self.use_ninja else 1
        minutes = files * SECONDS_PER_FILE / jobs / 60
        cores = "one core" if jobs == 1 else f"{jobs} cores"
        some = "what has changed of " if Path(self.build_temp, "build.ninja").exists() else ""
        print(
            f"deepsp: compiles {some}{files} files, about {minutes:.1f} minutes on {cores}"
            f"{' for all' if some else ''}",
            flush=True,
        )
        start = time.monotonic()
        super().run()
        self.finish(Path("." if self.inplace else self.build_lib, "deepsp"))
        print(f"deepsp: built in {(time.monotonic() - start) / 60:.1f} minutes", flush=True)

    def finish(self, package):
        """Notes what the extension was built for. Removes extensions that older builds named for
        one Python: Python would load them instead."""
        package.mkdir(parents=True, exist_ok=True)
        for extension in package.glob("_C*.so"):
            if extension.name != "_C.abi3.so":
                extension.unlink()
        (package / "_built_for.py").write_text(
            f"VERSION = {self.distribution.get_version()!r}\n"
            f"TORCH = {str(torch.__version__)!r}\n"
            f"CUDA = {torch.version.cuda!r}\n"
        )


if not int(os.environ.get("MAX_JOBS") or 0):
    os.environ["MAX_JOBS"] = str(len(os.sched_getaffinity(0)))
minor = ".".join(torch.__version__.split(".")[:2])
setup(
    ext_modules=[extension()],
    cmdclass={"build_ext": Build},
    install_requires=[f"torch=={minor}.*"],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
