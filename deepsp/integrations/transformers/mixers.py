"""Recurrent layers of transformers' models: short convolutions, gated delta rules, state spaces.

Such a layer (a mixer) calls a function of its modeling file, one of a few names. While a mixer of a
model with deepsp's attention runs, that function works on the sharded sequence: a convolution gets
the tokens before this rank's own, and a recurrence runs by :class:`DistributedRecurrence`, around
the original function, so that kernels which transformers takes from fla, mamba-ssm or
causal-conv1d are still used. A mixer gets the sequence, and its part of the padding, in the place
of the mask that transformers makes for it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from deepsp.data import last_batch
from deepsp.data.fold import Fold
from deepsp.integrations.transformers import balance
from deepsp.integrations.transformers.forward import REGISTRATIONS, running
from deepsp.integrations.transformers.masks import check_padding, check_positions, count_on
from deepsp.integrations.transformers.patterns import Pattern, document_ranges
from deepsp.ranks.groups import member_of, on_all_ranks
from deepsp.sequence.recurrence.functions import FUNCTIONS, Sharded, unfused

_MASK = "create_recurrent_attention_mask"


class Sequence:
    """The sequence that a rank's tokens belong to, in one forward. It takes the place of the mask
    of recurrent layers, so that a checkpoint's second forward finds it, too."""

    lens: list[int] | None = None
    documents: Tensor | None = None
    """[N, 2], or None if each row is one."""

    def __init__(self, member, state: str | None, padding: Tensor | None, positions: Tensor | None):
        self.member, self.state = member, state
        self.padding, self.positions = padding, positions

    @_disable_dynamo
    def exchange(self, hidden: Tensor) -> None:
        """Finds every rank's number of tokens, and where documents begin."""
        if self.lens is not None:
            return
        rank, _, name = self.member = member_of(self.member)
        width = -1 if self.padding is None else self.padding.size(1)
        makes_positions = int(self.positions is None or last_batch.has_positions(self.positions))
        first = last_batch.first_of(self.positions)
        everyone = on_all_ranks(
            [hidden.size(1), width, makes_positions, first], self.member, hidden.device
        )
        lens, widths, makes_positions, firsts = map(list, zip(*everyone, strict=True))
        check_padding(widths, sum(lens))
        if self.positions is not None and self.padding is None and not count_on(firsts, lens):
            positions = torch.ops.deepsp.all_gather(
                self.positions.contiguous(), 1, lens, "replicated", rank, name
            )
            if not all(makes_positions):
                check_positions(positions, lens)
            self.documents = document_ranges(Pattern(right=0), positions, None, hidden.size(0))
        self.lens = lens

    def bool(self) -> Sequence:
        """GLM-5.3 wants its mask to be one of bools."""
        return self

    @property
    def first(self) -> int:
        return sum(self.lens[: self.member[0]])

    def mask(self, hidden: Tensor) -> Tensor | None:
        """This rank's part of the padding."""
        if self.padding is None or bool(self.padding.all()):
            return None
        return self.padding[:, self.first : self.first + hidden.size(1)].contiguous()


_PREPARED, _KNOWN = "_deepsp_prepared", "_deepsp_recurrence"
"""Attributes of models and mixers."""
_times = [0]
"""How often functions have been put back: models are prepared once more after that."""
_replaced: dict[tuple[int, str], tuple[dict, Any]] = {}
"""While installed: by a modeling file's globals and a name there, both and the original."""


REPLACED = (_MASK, *FUNCTIONS, balance.NAME)


# ------------------------------------------------------------------- stand-ins of a check


def _alone(name: str, function: Callable) -> Callable:
    """A function of each token alone, in a check's dry run."""

    def stand_in(*args, **kwargs):
        x = inspect.signature(inspect.unwrap(function)).bind(*args, **kwargs).arguments
        if name == "causal_conv1d_fn":  # [B, C, S]
            return x["hidden_states"] * x["weight"].sum(1)[:, None]
        if "value" in x:  # [B, S, H, V]
            mixed = sum(x[n].flatten(2).mean(2) for n in ("query", "key", "g", "beta"))
            return x["value"] * mixed[..., None, None], None
        if name == "mamba2_chunk_scan":  # [B, S, H, V]
            mixed = sum(x[n].flatten(2).mean(2) for n in ("dt", "B", "C"))
            return x["hidden_states"] * mixed[..., None, None]
        mixed = sum(x[n].mean(1, keepdim=True) for n in ("dt", "B", "C"))  # [B, C, S]
        out = x["hidden_states"] * mixed
        return (out, None) if x.get("return_last_state") else out

    return (lambda *_, **__: None) if FUNCTIONS[name] is unfused else stand_in


# ------------------------------------------------------------------- in a model


def mixers_in(model: nn.Module) -> Iterator[nn.Module]:
    """The modules whose forward calls one of the functions, whatever their class."""
    for module in model.modules():
        if _names_in(module) & set(FUNCTIONS):
            yield module


def _forward(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward)


def _names_in(module: nn.Module) -> set[str]:
    return set(getattr(getattr(_forward(module), "__code__", None), "co_names", ()))


def prepare(model: nn.Module) -> bool:
    """Makes the mixers of a model that has deepsp's attention work on sharded sequences. Returns
    whether it has mixers.

    Raises:
        ValueError: a mixer gets no mask from transformers, which would say where its tokens are.
    """
    times, has_mixers = getattr(model, _PREPARED, (None, False))
    if times == _times[0]:
        return has_mixers
    for module in model.modules():
        if balance.NAME in _names_in(module) and _balances(module):
            _replace(_forward(module).__globals__, balance.NAME)
    for mixer in mixers_in(model):
        has_mixers = True
        space = _forward(mixer).__globals__
        if _MASK not in space:
            raise ValueError(
                f"expected {type(mixer).__name__} of {type(model).__name__} to get its mask from "
                f"transformers' {_MASK}, through which deepsp tells it where its tokens are; it "
                "doesn't. Use deepsp.DistributedRecurrence in a layer of your own"
            )
        for name in {*REPLACED} & space.keys():
            _replace(space, name)
        if not hasattr(mixer, _PREPARED):
            mixer.register_forward_pre_hook(_enter, with_kwargs=True)
            mixer.register_forward_hook(_leave, always_call=True)
            object.__setattr__(mixer, _PREPARED, (None, True))
    object.__setattr__(model, _PREPARED, (_times[0], has_mixers))
    return has_mixers


def _balances(module: nn.Module) -> bool:
    return balance.is_known(inspect.unwrap(_forward(module).__globals__[balance.NAME]))


def is_balanced(model: nn.Module) -> bool:
    """Whether the loss that balances a model's experts is that of the full sequence."""
    return balance.NAME in _names_in(model) and _balances(model)


def balance_of_mixtral() -> None:
    """Makes Mixtral's balancing loss that of the full sequence, where a model with deepsp's
    attention runs."""
    from transformers.models.mixtral import modeling_mixtral

    _replace(vars(modeling_mixtral), balance.NAME)


def positions_of(model: nn.Module, kwargs: dict[str, Any]) -> Tensor | None:
    """The position_ids of a call of a model with mixers, which are left out of the call where the
    model doesn't take them."""
    if "position_ids" in inspect.signature(model.forward).parameters:
        return kwargs.get("position_ids")
    return kwargs.pop("position_ids", None)


def _replace(space: dict, name: str) -> None:
    if (id(space), name) in _replaced:
        return
    original = space[name]
    _replaced[id(space), name] = space, original

    @functools.wraps(original)
    def replacement(*args, **kwargs):
        if name == _MASK:
            return _sequence_of(original, *args, **kwargs)
        if name == balance.NAME:
            return _balanced(original, *args, **kwargs)
        if not running.mixers:
            return original(*args, **kwargs)
        mixer, sequence = running.mixers[-1]
        if sequence is None:
            return _alone(name, original)(*args, **kwargs)
        return FUNCTIONS[name](original, _sharded(mixer, sequence))(*args, **kwargs)

    space[name] = replacement


def _balanced(original: Callable, *args, **kwargs) -> Tensor | int:
    call = running.forward
    if call.is_check:
        return 0  # which is no tensor, and isn't looked at
    if call.loss is None:
        return original(*args, **kwargs)
    return balance.balancing_loss(
        *args,
        **kwargs,
        member=member_of(call.registration.member),
        over=member_of(call.loss.group),
        average_gradients=call.loss.average_gradients,
        real_rows=call.real_rows,
        fold=call.deal if isinstance(call.deal, Fold) else None,
    )


def _sharded(mixer: nn.Module, sequence: Sequence) -> Sharded:
    """What was compared and found out in a mixer's first call, the mixer keeps."""
    key = sequence.member, sequence.state
    cache = getattr(mixer, _KNOWN, (None, {}))
    cache = cache[1] if cache[0] == key else {}
    object.__setattr__(mixer, _KNOWN, (key, cache))
    return Sharded(
        type(mixer).__name__,
        sequence.member,
        sequence.lens,
        sequence.documents,
        sequence.state,
        cache,
    )


def _sequence_of(original: Callable, config, inputs_embeds, attention_mask=None, *args, **kwargs):
    """What a model makes as its mask for recurrent layers."""
    registration, call = REGISTRATIONS.get(config._attn_implementation), running.forward
    if registration is None or call.is_check:
        return original(config, inputs_embeds, attention_mask, *args, **kwargs)
    if call.deal is not None:
        raise ValueError(
            "expected no batch of deal_batch, and no folded prefixes, in a model with recurrent "
            "layers, whose tokens must be in order on the ranks; use shard_batch, or leave "
            "fold_prefixes out"
        )
    padding = attention_mask if isinstance(attention_mask, Tensor) else None
    padding = padding if padding is not None and padding.dim() == 2 else None
    return Sequence(registration.member, registration.state, padding, call.positions)


def _enter(mixer: nn.Module, args: tuple, kwargs: dict[str, Any]):
    if running.forward.is_check:
        running.mixers.append((mixer, None))
        return None
    sequences = [x for x in (*args, *kwargs.values()) if isinstance(x, Sequence)]
    if not sequences and running.forward.has_mixers:
        raise ValueError(
            f"expected {type(mixer).__name__} to get the mask that transformers' {_MASK} makes, "
            "through which deepsp tells it where its tokens are, got none; use "
            "deepsp.DistributedRecurrence in a layer of your own"
        )
    if not sequences:
        return None
    sequence = sequences[0]
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    sequence.exchange(hidden)
    mask = sequence.mask(hidden)
    running.mixers.append((mixer, sequence))
    replaced = [mask if x is sequence else x for x in args]
    return tuple(replaced), {n: mask if x is sequence else x for n, x in kwargs.items()}


def _leave(mixer: nn.Module, args: tuple, output: Any) -> None:
    if running.mixers and running.mixers[-1][0] is mixer:
        running.mixers.pop()


def install() -> None:
    """Does nothing: :func:`prepare` replaces functions, for a model."""


def uninstall() -> None:
    """Puts the functions of modeling files back."""
    _times[0] += 1
    for (_, name), (space, original) in _replaced.items():
        space[name] = original
    _replaced.clear()
