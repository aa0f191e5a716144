"""Makes modules tiled."""

from __future__ import annotations

import functools
import re
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from deepsp.memory.tiling.check import check
from deepsp.memory.tiling.run import Settings, TiledCall, run_tiled
from deepsp.weights import partitioned

_SETTINGS, _IS_TILED = "_deepsp_tile", "_deepsp_is_tiled"
# Names of the token-wise part of a layer in models of transformers.
_MLPS = ("*.mlp", "*.feed_forward", "*.ffn", "*.ff", "*.block_sparse_moe", "*.moe")
_OTHER_TOWERS = re.compile(r"(^|[._])(vision|visual|audio|image)")


def tile(module: nn.Module, tokens: int | str = "auto", dim: int = 1) -> nn.Module:
    """Makes a module that works on each token alone run a tile of tokens at a time.

    Activations inside the module exist for one tile only: backward computes each tile again. The
    module is changed in place; names, parameters and ``isinstance`` stay. Each parameter's gradient
    is summed over the tiles in float32 (float64 for float64), and accumulated once for a call;
    ranks issue the same collectives for any number of tiles. So DDP, FSDP2, DeepSpeed's ZeRO, and
    :func:`deepsp.shard_parameters` work as without tiles. For ZeRO 3, tile before
    ``deepspeed.initialize``: the module becomes a leaf module, gathered once for all tiles. The
    gradient of a parameter that no token has used is zero, not None.

    The first call in each mode checks the module on a few tokens.

    Args:
        module: an MLP, a norm, experts, or an LM head. Its first tensor argument has the tokens.
            Tensor arguments with the same sizes (or 1) up to the tokens and as many tokens are cut
            like it; the others are passed in full. Each output must have the tokens, too: in a
            separate dimension, or merged with the dimensions before them (``[B * S, E]``).
        tokens: tokens of a tile; "auto": a tile has as many rows, over the batch, as the first
            tensor has features, and at least 512. The largest activation of a tile is then about
            as large as one of the module's weights.
        dim: the dimension of the tokens in the first tensor argument.

    Returns:
        ``module``.

    Raises:
        ValueError: tokens or dim is invalid; the module has no forward, or is tiled, or contains a
            tiled one. When the module is called: it mixes tokens, has an output without tokens,
            writes to its input or its buffers, communicates, or uses a tensor that requires
            gradients and is neither a parameter nor an argument; ZeRO 3 gathers its submodules one
            by one.
    """
    _check_arguments(tokens, dim)
    return _tile(module, type(module).__name__, tokens, dim)


def tile_(model: nn.Module, *patterns: str, tokens: int | str = "auto", dim: int = 1) -> list[str]:
    """Tiles submodules of a model, by :func:`tile`. ::

        deepsp.tile_(model)  # every MLP of a model of transformers
        deepsp.tile_(model, "*.mlp", "lm_head", tokens=2048)

    Args:
        model: the model.
        patterns: patterns of names in ``model.named_modules()``, for ``fnmatch``; none: the MLPs
            of models of transformers, by their names, except in vision and audio towers.
        tokens: tokens of a tile, as in :func:`tile`.
        dim: the dimension of the tokens in the first tensor argument.

    Returns:
        The names of the modules that were tiled.

    Raises:
        ValueError: a pattern matches nothing, or :func:`tile` refuses a module; none is changed.
    """
    _check_arguments(tokens, dim)
    modules = {name: m for name, m in model.named_modules() if name}
    if patterns:
        chosen = [name for name in modules if any(fnmatchcase(name, p) for p in patterns)]
        missing = [p for p in patterns if not any(fnmatchcase(name, p) for name in modules)]
    else:
        chosen = [
            name
            for name in modules
            if any(fnmatchcase(f".{name}", p) for p in _MLPS) and not _OTHER_TOWERS.search(name)
        ]
        missing = [] if chosen else list(_MLPS)
    if missing:
        names = {re.sub(r"\.\d+(?=\.|$)", ".*", n) for n, m in modules.items() if _has_forward(m)}
        raise ValueError(
            f"expected patterns to match submodules of {type(model).__name__}, but nothing matches "
            f"{', '.join(map(repr, missing))}; its submodules are {', '.join(sorted(names))}"
        )
    for name in chosen:
        _check_module(modules[name], _full(name, modules[name]))
        outer = next((n for n in chosen if name.startswith(f"{n}.")), None)
        if outer is not None:
            raise ValueError(
                f"expected patterns to match modules that don't contain each other, got {outer} "
                f"and {name} in it; tile one of them"
            )
    for name in chosen:
        _tile(modules[name], _full(name, modules[name]), tokens, dim)
    return chosen


def _full(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__})"


def _check_arguments(tokens: int | str, dim: int) -> None:
    fine = tokens == "auto" if isinstance(tokens, str) else type(tokens) is int and tokens >= 1
    if not fine:
        raise ValueError(f'expected tokens to be "auto" or an int >= 1, got {tokens!r}')
    if type(dim) is not int:
        raise ValueError(f"expected dim to be an int, got {dim!r}")


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _check_module(module: nn.Module, name: str) -> None:
    if not _has_forward(module):
        raise ValueError(
            f"expected module to have a forward, got {name}, which is a container: tile what is in "
            "it"
        )
    if "forward" in vars(module):
        raise ValueError(
            f"expected the forward of {name} to be that of its class, but it was set on the module "
            "itself, and would run instead of the tiles: tile the module before"
        )
    for inner_name, inner in module.named_modules():
        if _SETTINGS in vars(inner):
            where = f"contains {inner_name}, which is" if inner_name else "is"
            raise ValueError(f"{name} {where} tiled already")


def _tile(module: nn.Module, name: str, tokens: int | str, dim: int) -> nn.Module:
    _check_module(module, name)
    vars(module)[_SETTINGS] = Settings(name, tokens, dim)
    partitioned.gather_as_a_whole(module)
    module.__class__ = _tiled_class(type(module))
    return module


def untiled(cls: type[nn.Module]) -> type[nn.Module]:
    """The class before a module was tiled."""
    return cls.__base__ if _IS_TILED in vars(cls) else cls


def _tiled_class(cls: type[nn.Module]) -> type[nn.Module]:
    @torch.compiler.disable(reason="deepsp.tile: a tiled module runs outside of compiled graphs")
    def run(self: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        forward = super(tiled, self).forward
        return run_tiled(TiledCall(self, forward, vars(self)[_SETTINGS], args, kwargs), check)

    @functools.wraps(cls.forward)
    def forward(self, *args, **kwargs):
        return run(self, args, kwargs)

    def reduce(self, protocol):
        return _rebuilt, (cls,), super(tiled, self).__reduce_ex__(protocol)[2]

    members = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": cls.__module__,
        _IS_TILED: True,
        "_get_name": lambda self: cls.__name__,  # for printing
    }
    tiled = type(f"Tiled{cls.__name__}", (cls,), members)
    return tiled


def _rebuilt(cls: type[nn.Module]) -> nn.Module:
    tiled = _tiled_class(cls)
    return tiled.__new__(tiled)
