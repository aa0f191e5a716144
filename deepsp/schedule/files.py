"""Checkpoints that are read in parts."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class Source:
    """Full tensors by name, read in parts."""

    names: set[str]

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def shape(self, name: str) -> tuple[int, ...]:
        raise NotImplementedError

    def read(self, name: str, axis: int = 0, begin: int = 0, end: int | None = None) -> Tensor:
        """Elements begin to end along an axis; end None: all of them."""
        raise NotImplementedError


class _Tensors(Source):
    """A state_dict. The tensors of a file are memory-mapped: a slice reads only its own part."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.tensors, self.names = tensors, set(tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str, axis: int = 0, begin: int = 0, end: int | None = None) -> Tensor:
        tensor = self.tensors[name]
        return tensor if end is None else tensor.narrow(axis, begin, end - begin)


class _Safetensors(Source):
    def __init__(self, files: dict[str, Path], stack: contextlib.ExitStack):
        self.files, self.names, self.stack = files, set(files), stack
        self.open: dict[Path, object] = {}

    def _slice(self, name: str):
        path = self.files[name]
        if path not in self.open:
            self.open[path] = self.stack.enter_context(_safe_open(path))
        return self.open[path].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, axis: int = 0, begin: int = 0, end: int | None = None) -> Tensor:
        tensor = self._slice(name)
        if len(tensor.get_shape()) == 0:  # a scalar has no slices
            return self.open[self.files[name]].get_tensor(name)
        if end is None:
            return tensor[:]
        return tensor[(slice(None),) * axis + (slice(begin, end),)]


def _safe_open(path: Path):
    try:
        from safetensors import safe_open
    except ImportError:
        raise ValueError(
            f"checkpoint {path} needs the package safetensors; pip install safetensors"
        ) from None
    return safe_open(path, framework="pt", device="cpu")


@contextlib.contextmanager
def source_of(checkpoint: Mapping[str, Tensor] | str | os.PathLike) -> Iterator[Source]:
    """Opens a state_dict, a file or a directory.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(checkpoint, Mapping):
        yield _Tensors(_checked(checkpoint))
        return
    if not isinstance(checkpoint, (str, os.PathLike)):
        raise ValueError(
            "expected checkpoint to be a state_dict or the path of a file or directory, got "
            f"{type(checkpoint).__name__}"
        )
    path = Path(checkpoint)
    with contextlib.ExitStack() as stack:
        if path.is_dir():
            yield _Safetensors(_directory(path), stack)
        elif not path.is_file():
            raise ValueError(
                f"expected checkpoint to be the path of a file or directory, got {path}, where "
                "there is neither; check the path"
            )
        elif path.suffix == ".safetensors":
            yield _Safetensors(_names_in(path), stack)
        else:
            yield _Tensors(_checked(torch.load(path, "cpu", mmap=True, weights_only=True)))


def _checked(tensors) -> Mapping[str, Tensor]:
    if not isinstance(tensors, Mapping):
        raise ValueError(f"expected checkpoint to hold a state_dict, got {type(tensors).__name__}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(
                "expected checkpoint to map names of the model's state_dict to tensors, got "
                f"{type(tensor).__name__} for {name!r}"
            )
    return tensors


def _names_in(path: Path) -> dict[str, Path]:
    with _safe_open(path) as file:
        return dict.fromkeys(file.keys(), path)


def _directory(path: Path) -> dict[str, Path]:
    if (path / _INDEX).is_file():
        files = json.loads((path / _INDEX).read_text())["weight_map"]
        return {name: path / file for name, file in files.items()}
    if (path / _SINGLE).is_file():
        return _names_in(path / _SINGLE)
    raise ValueError(
        f"expected checkpoint to be a directory with {_INDEX} or {_SINGLE}, got {path}, which has "
        "neither; pass the path of the file"
    )
