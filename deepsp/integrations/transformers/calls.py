"""Checks before a model of transformers is called.

A model may not call deepsp's attention: it has none, computes it itself, or was left on "sdpa". So
in a process that called :func:`register`, calls of ``PreTrainedModel`` go through :func:`_call`,
and models that can't use deepsp's attention raise when they are made. Both are attributes of that
class; :mod:`deepsp.patches` removes them."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable would import Dynamo now

from deepsp.data import last_batch
from deepsp.data.fold import Fold
from deepsp.integrations.transformers import caches, mixers, multimodal
from deepsp.integrations.transformers.check import (
    CALLED,
    CHECKED,
    check,
    implementation_of,
    implementations,
)
from deepsp.integrations.transformers.forward import (
    FULL_ROWS,
    REGISTRATIONS,
    Forward,
    Registration,
    calling,
    running,
)
from deepsp.integrations.transformers.masks import Masks
from deepsp.integrations.transformers.own_loss import computing
from deepsp.ranks.groups import member_of
from deepsp.ranks.randomness import randomness_of_a_model

REPLACED = ("PreTrainedModel.__call__", "PreTrainedModel.get_correct_attn_implementation")

_originals: list[tuple[type, Any]] = []
"""While installed: the class, and the original of the second entry; the first is inherited."""

_KNOWN = {
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "num_items_in_batch",
    "shift_labels",
    "cache_position",
}
"""Tensors that a model may get: the check covers them, or attention uses them, or nothing does."""


def install() -> None:
    """Replaces the attributes in :data:`REPLACED`, if deepsp's attention is registered."""
    if not REGISTRATIONS or _originals:
        return
    from transformers import PreTrainedModel

    original = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(original)
    def get_correct_attn_implementation(self, requested_attention, *args, **kwargs):
        # Called while a model is made.
        takes = self._supports_attention_backend or self._can_set_attn_implementation()
        if requested_attention in REGISTRATIONS and not takes:
            raise ValueError(
                f"expected attn_implementation to be one of transformers' own, since "
                f"{type(self).__name__} computes its attention itself, without the "
                f"AttentionInterface of transformers, got {requested_attention!r}; try the compile "
                "pass, torch.compile(backend='deepsp'), with 'sdpa'"
            )
        if requested_attention in REGISTRATIONS and multimodal.is_tower(self):
            requested_attention = None  # each rank has its images in full
        return original(self, requested_attention, *args, **kwargs)

    _originals.append((PreTrainedModel, original))
    PreTrainedModel.__call__ = _call
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation


def uninstall() -> None:
    """Undoes :func:`install`: no call is checked."""
    while _originals:
        cls, original = _originals.pop()
        del cls.__call__
        cls.get_correct_attn_implementation = original


def registration_of(model: nn.Module) -> Registration | None:
    """That of a model of transformers, if its attention is deepsp's."""
    return REGISTRATIONS.get(implementation_of(model.config, REGISTRATIONS))


def _call(self, *args, **kwargs):
    # Once this function has broken a graph without an op, Dynamo skips it forever, and compiles
    # each function that it calls: a generator here would be an error.
    registration, rows = registration_of(self), vars(self).get(FULL_ROWS)
    if running.forward.prepared is self:  # within PEFT
        pass
    elif registration is not None and rows is not None and rows.takes_calls():
        checked = self if rows.decoder is None else rows.decoder()
        ensure_checked(checked)  # before hooks, such as FSDP's, which a dry run runs, too
    elif registration is not None:
        deal = kwargs.pop("deal", running.forward.deal)
        with calling(registration=registration, loss=registration.loss, deal=deal) as call:
            args, kwargs = _prepared(self, call, args, kwargs)
            if torch.compiler.is_compiling():
                return _run(self, call, args, kwargs)
            with randomness_of_a_model(member_of(registration.member)):
                return _run(self, call, args, kwargs)
    elif not torch.compiler.is_compiling():
        _check_alone(self, args, kwargs)
    return nn.Module.__call__(self, *args, **kwargs)


def enter(
    model: nn.Module, kwargs: dict[str, Any], stack: contextlib.ExitStack, **changes: Any
) -> dict[str, Any]:
    """Enters the contexts of a call with this rank's tokens, as :func:`_call` does, for a model
    whose forward runs in them.

    Args:
        model: the model of transformers.
        kwargs: the arguments of the call, all by name.
        stack: gets the contexts.
        changes: of the :class:`Forward`.

    Returns:
        The arguments of the forward.
    """
    deal = kwargs.pop("deal", None)
    call = stack.enter_context(calling(deal=deal, prepared=model, **changes))
    _, kwargs = _prepared(model, call, (), kwargs)
    stack.enter_context(randomness_of_a_model(member_of(call.registration.member)))
    _check_and_complete(model, (), kwargs)
    if kwargs.get("shift_labels") is not None and not kwargs.get("fused_lm_head"):
        kwargs["labels"] = kwargs["shift_labels"]
        stack.enter_context(computing(model, call.loss, is_expected=True))
    return kwargs


def _prepared(
    model: nn.Module, call: Forward, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a call with this rank's tokens. Checks the model, the first time."""
    # A graph break in compiled code, once; attention breaks the graph anyway.
    if getattr(model, CHECKED, None) != call.registration.name:
        _first(model)
    places, door = None, call.door
    if model.config.sub_configs or door is not None:
        args, kwargs, places = _at_door(model, call, args, kwargs)
    if door is None and call.door is None and not torch.compiler.is_compiling():
        _check_each_rank_has_tokens(model, call, args, kwargs)
    if places is not None:
        call.positions = places
    # PaliGemma's decoder gets a mask, and asks transformers for one of its own.
    if isinstance(kwargs.get("attention_mask"), Masks):
        call.mask = kwargs.pop("attention_mask")
    if call.door is not None:
        return args, kwargs
    caches.prepare(model)
    if mixers.prepare(model):
        positions = mixers.positions_of(model, kwargs)
        call.has_mixers = True
        if places is None and positions is not None:
            call.positions = positions
    return args, kwargs


def _check_each_rank_has_tokens(
    model: nn.Module, call: Forward, args: tuple, kwargs: dict[str, Any]
) -> None:
    """Raises on every rank if one has no token: there, the model would fail before it takes part in
    an exchange."""
    lens = [] if call.deal is None else call.deal.seq_lens
    if call.deal is None:
        tokens = args[0] if args else kwargs.get("input_ids")
        lens = last_batch.lens_with(kwargs.get("inputs_embeds") if tokens is None else tokens)
    if 0 in lens:
        raise ValueError(
            f"expected each rank to have a token in the call of {type(model).__name__}, got "
            f"{list(lens)} by rank; pad the batch, or put more documents into it"
        )


@_disable_dynamo
def _at_door(
    model: nn.Module, call: Forward, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any], Tensor | None]:
    """The arguments of a call, and the places of a decoder's tokens, for a vision-language model
    and its parts."""
    door = call.door
    if door is None:
        if call.is_check or multimodal.decoder_of(model) is None:
            return args, kwargs, None
        args, kwargs = (), named_arguments(model, args, kwargs)
        if call.deal is not None:
            raise ValueError(
                "expected no batch of deal_batch or fold in the call of "
                f"{type(model).__name__}, which is sharded where its decoder begins, got one; use "
                "shard_batch with shard_at='decoder'"
            )
        if getattr(model, CALLED, False):
            check_arguments(model, args, kwargs)
        registration = call.registration
        door = call.door = multimodal.open_door(
            model, registration.member, registration.deal_images, kwargs
        )
    if model is door.decoder:
        named = named_arguments(model, args, kwargs)
        call.door, call.has_own_positions = None, named.get("position_ids") is not None
        return (), *multimodal.local_arguments(door, named)
    if door.deals_images and model is door.base:
        return (), multimodal.deal_images(model, door, named_arguments(model, args, kwargs)), None
    return args, kwargs, None


def _check_and_complete(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    check_arguments(model, args, kwargs)
    if getattr(model.config, "use_cache", False):
        kwargs.setdefault("use_cache", False)  # it would hold this rank's tokens only


def _run(model: nn.Module, call: Forward, args: tuple, kwargs: dict[str, Any]) -> Any:
    if getattr(model, CALLED, False):
        _check_and_complete(model, args, kwargs)
        if kwargs.get("shift_labels") is not None:
            # Models compute a loss only with labels, and pass shift_labels on to it.
            kwargs["labels"] = kwargs["shift_labels"]
            with computing(model, call.loss, is_expected=True):
                return nn.Module.__call__(model, *args, **kwargs)
    return nn.Module.__call__(model, *args, **kwargs)


def ensure_checked(model: nn.Module) -> None:
    """Checks a model now, unless it has been checked."""
    name = implementation_of(model.config, REGISTRATIONS)
    if REGISTRATIONS and getattr(model, CHECKED, None) != name:
        _first(model)


def check_layerdrop(model: nn.Module) -> None:
    """Raises if a model skips layers at random: ranks would skip different ones, and hang."""
    for name, module in model.named_modules():
        rate = getattr(module, "layerdrop", 0)
        if isinstance(rate, (int, float)) and rate > 0:
            raise ValueError(
                f"expected layerdrop of {type(model).__name__} to be 0, since each rank draws its "
                f"own random numbers and would skip other layers, got {rate} in "
                f"{name or type(module).__name__}; set {name + '.' if name else ''}layerdrop = 0 "
                "on the model"
            )


@_disable_dynamo
def _first(model: nn.Module) -> None:
    check_layerdrop(model)
    if implementations(model) and not any(p.is_meta for p in model.parameters()):
        check(model)


def named_arguments(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    # Compiled code can't read the signature; its only positional argument is input_ids.
    ask = len(args) > 0 and not torch.compiler.is_compiling()
    names = inspect.signature(model.forward).parameters if ask else ("input_ids",)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def check_arguments(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    arguments = named_arguments(model, args, kwargs)
    cls = type(model).__name__
    _check_fold(cls, arguments)
    if arguments.get("labels") is not None:
        raise ValueError(
            f"expected no labels in the call of {cls}, whose loss would be that of this rank's "
            "tokens only; pass the shift_labels that deepsp.shard_batch returns in their place"
        )
    if arguments.get("use_cache"):
        raise ValueError(
            "expected use_cache to be False, got True: a cache would hold this rank's tokens only; "
            "set model.config.use_cache = False for training, or call "
            "model.set_attn_implementation('sdpa') for generate()"
        )
    routes = arguments.get("output_router_logits")
    if routes is None:
        routes = getattr(model.config.get_text_config(), "output_router_logits", False)
    if routes and not mixers.is_balanced(model):
        raise ValueError(
            "expected output_router_logits to be False, got True: aux_loss of "
            f"{cls} would be that of this rank's tokens only; leave it out"
        )
    if arguments.get("logits_to_keep"):
        raise ValueError(
            "expected no logits_to_keep, since the last tokens of this rank are not those of the "
            "sequence; leave it out, or call model.set_attn_implementation('sdpa') for generate()"
        )
    registration = registration_of(model)
    names = _KNOWN if registration is None else _KNOWN | registration.required
    if multimodal.decoder_of(model) is not None:
        names = names | set(inspect.signature(model.forward).parameters)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and name not in names:
            raise ValueError(
                f"expected no {name} in the call of {cls}, got shape {tuple(value.shape)}: {cls} "
                "was checked to work on each token alone without it. Put other modalities into "
                "inputs_embeds before deepsp.shard_batch"
            )


def _check_fold(cls: str, arguments: dict[str, Any]) -> None:
    """Raises where a folded batch isn't passed on in full, or the model would compute its loss."""
    if not isinstance(running.forward.deal, Fold):
        tokens = arguments.get("input_ids")
        tokens = arguments.get("inputs_embeds") if tokens is None else tokens
        if not torch.compiler.is_compiling() and last_batch.is_folded(tokens):
            raise ValueError(
                f"expected deal in the call of {cls} with the tokens of deepsp.fold, since each "
                "sequence would be cut where others leave it, got none; pass local['deal'] on"
            )
        return
    if arguments.get("position_ids") is None:
        raise ValueError(
            f"expected position_ids in the call of {cls} with a batch of deepsp.fold, whose "
            "tokens don't stand in the order of their sequences, got none; pass the batch's"
        )
    if arguments.get("shift_labels") is not None and not arguments.get("fused_lm_head"):
        raise ValueError(
            f"expected no shift_labels in the call of {cls} with a batch of deepsp.fold, since "
            "its loss would count tokens that rows share once, got some; take them out, and "
            "compute the loss of fold.unfold(deepsp.token_log_probs(hidden, weight, shift_labels))"
        )


@_disable_dynamo
def _check_alone(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    check_alone(model, named_arguments(model, args, kwargs))


def check_alone(model: nn.Module, arguments: dict[str, Any]) -> None:
    """Raises if a model with other attention than deepsp's gets one rank's tokens."""
    tokens = (arguments.get(name) for name in ("input_ids", "inputs_embeds"))
    if any(map(last_batch.has_tokens, tokens)) and not implementations(model):
        from deepsp.sequence.attention.layer import SequenceParallelAttention
        from deepsp.sequence.attention.module import DistributedAttention
        from deepsp.sequence.recurrence.module import DistributedRecurrence
        from deepsp.weights.rows import shards_of

        ours = (DistributedAttention, DistributedRecurrence, SequenceParallelAttention)
        if any(isinstance(m, ours) or shards_of(m) for m in model.modules()):
            return
        name = min(REGISTRATIONS, default="deepsp")
        advice = f"call model.set_attn_implementation({name!r})"
        if not model._can_set_attn_implementation():
            advice = (
                "deepsp doesn't support this model, whose layers mix tokens in ways of their own"
            )
        raise ValueError(
            f"expected attention of {type(model).__name__} to be {name!r}, since it is called with "
            "the tokens that deepsp.shard_batch gave this rank, got "
            f"{model.config._attn_implementation!r}, with which each rank would attend to its own "
            f"tokens only; {advice}"
        )
