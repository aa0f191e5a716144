"""transformers' own code as a reference in float64, also where it computes in float32."""

import importlib.abc
import importlib.machinery
import re
import sys

import torch


class _Wide(importlib.machinery.SourceFileLoader):
    """Float64 in the place of float32, in which recurrences and norms compute."""

    def get_code(self, fullname):
        path = self.get_filename(fullname)
        source = self.get_data(path).decode()
        source = source.replace("torch.float32", "torch.float64").replace(".float()", ".double()")
        source = source.replace("torch.float)", "torch.float64)")
        return compile(source, path, "exec", dont_inherit=True)


class _Float64(importlib.abc.MetaPathFinder):
    """Imports transformers' modeling files so that they are a reference."""

    files = r"transformers\.(models\..*\.modeling_|modeling_rope_utils|activations$)"

    def find_spec(self, name, path, target=None):
        if not re.match(self.files, name):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Wide(name, spec.origin)
        return spec


def in_float64():
    if not any(isinstance(finder, _Float64) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Float64())
    torch.set_default_dtype(torch.float64)
