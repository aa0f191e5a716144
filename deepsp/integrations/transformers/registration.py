"""Registers deepsp's attention with transformers, and sets it in a model."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator

from deepsp.integrations.transformers import calls, multimodal
from deepsp.integrations.transformers.attention import attention
from deepsp.integrations.transformers.check import check
from deepsp.integrations.transformers.cores import check_core, required_by
from deepsp.integrations.transformers.forward import REGISTRATIONS, Registration
from deepsp.integrations.transformers.masks import mask_of, ours
from deepsp.integrations.transformers.own_loss import OwnLoss
from deepsp.ranks.groups import Group, member_of
from deepsp.sequence.attention import parts
from deepsp.weights.partitioned import is_away


def register(
    group: Group = None,
    chunks: int = 1,
    name: str = "deepsp",
    average_gradients: bool = False,
    core: str = "auto",
    kv_chunk: int | None = None,
    query_parts: int | str = "auto",
    state: str | None = None,
    deal_images: bool = False,
) -> None:
    """Makes ``attn_implementation=name`` (or ``model.set_attn_implementation(name)``) attention
    over sequences that are sharded over ``group``.

    The model gets this rank's ``input_ids`` and ``position_ids`` and the full ``attention_mask``,
    as :func:`deepsp.shard_batch` returns them, at least one token on every rank, and no ``labels``.
    With ``shift_labels``, a causal language model returns its loss: that of the full sequence, the
    same on every rank (:func:`deepsp.cross_entropy`). The ranks may have different numbers of
    tokens. The result is this rank's part of what one process computes with ``"sdpa"``: causal or
    not, with grouped heads, sliding windows or chunks, padding ([B, S], or a mask [B, 1, S, S]),
    documents in one row that restart ``position_ids`` (in causal attention without
    ``attention_mask``, as there), softcap and sinks. Attention of padding itself is 0.

    A vision-language model is sharded where its decoder begins: it gets full ids, pixels and grids,
    and local ``shift_labels``, as ``shard_batch(batch, shard_at="decoder")`` returns them, and its
    logits are those of this rank's tokens. Its towers keep an implementation of transformers.

    Windows, documents and padding at the ends of rows take time and memory only for the tokens that
    are attended to. S x S bools are made for padding between tokens, for masks [B, 1, S, S], and
    for windows, documents or padding with dropout in attention.

    Args:
        group: the sequence group; None: the default group at the time of a forward.
        chunks: as in :func:`deepsp.distributed_attention`.
        name: the name of the attention implementation; use another one for each further group. The
            same name again replaces the earlier one, also for models that have it already.
        average_gradients: as in :func:`deepsp.cross_entropy`, for the loss that a model returns for
            ``shift_labels``.
        core: the function that computes attention on the full sequence of a rank's heads. "auto":
            deepsp's, as described here, by torch's kernels. Or the name of an attention
            implementation of transformers: "sdpa", "flex_attention", "flash_attention_2", or one
            that was registered with its ``AttentionInterface``. It gets the arguments that it would
            get in one process: its mask, the full ``position_ids``, and sinks of its heads.
        kv_chunk: as in :func:`deepsp.distributed_attention`; for "auto" only.
        query_parts: as in :func:`deepsp.distributed_attention`; other cores than "auto" and "sdpa"
            have whole heads.
        state: how recurrent layers run, as in :class:`deepsp.DistributedRecurrence`; None: by heads
            if there is one for each rank, else by state.
        deal_images: each rank encodes its share of a vision-language model's images and videos, and
            gets the features of the others; False: all ranks encode all of them.

    Raises:
        ValueError: ``chunks`` or ``kv_chunk`` isn't an int >= 1, ``core`` isn't known, or this
            process isn't in ``group``. The model's forward raises the errors of
            :func:`deepsp.integrations.transformers.check`, and for
            ``labels``; ``position_ids`` that start from 0 on every rank (left out, or documents
            that all end where a rank's tokens do); an ``attention_mask`` of this rank's tokens
            only; a cache; masks made by a model's own functions; arguments that the core doesn't
            take (softcap and sinks in "sdpa", relative biases, ...); cross-attention of other
            lengths; models that don't make masks by the mask interface or don't pass on
            ``position_ids``.
        RuntimeError: transformers isn't version 5.
    """
    import transformers
    from transformers import masking_utils

    if "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise RuntimeError(
            f"expected transformers 5, got {transformers.__version__}, which makes masks in "
            "another way; install transformers 5"
        )
    if not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"expected chunks to be an int >= 1, got {chunks!r}")
    if kv_chunk is not None and (not isinstance(kv_chunk, int) or kv_chunk < 1):
        raise ValueError(f"expected kv_chunk to be an int >= 1 or None, got {kv_chunk!r}")
    if kv_chunk is not None and (core != "auto" or chunks != 1):
        raise ValueError(
            f"expected core='auto' and chunks=1 with kv_chunk, got core={core!r} and "
            f"chunks={chunks}"
        )
    check_core(core)
    query_parts = parts.validate(query_parts, group)
    member = None if group is None else member_of(group)
    loss = OwnLoss(member, average_gradients)
    registration = Registration(
        name,
        member,
        loss,
        chunks,
        core,
        kv_chunk,
        query_parts,
        state,
        deal_images,
        required_by(core),
    )
    attend = functools.partial(attention, registration=registration)
    transformers.AttentionInterface.register(name, attend)
    transformers.AttentionMaskInterface.register(name, mask_of)
    REGISTRATIONS[name] = registration
    calls.install()


def base_of(model):
    """The model of transformers inside PEFT's adapters, or ``model`` itself.

    Raises:
        ValueError: PEFT adds tokens before each rank's (prompt tuning).
    """
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(
            "expected adapters within the model's layers, such as LoRA, got "
            f"{type(config).__name__}: prompt tuning puts tokens of its own before the tokens of "
            "each rank, instead of once before the sequence; use LoRA"
        )
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_classifier(model) -> bool:
    """Whether a model of transformers is a decoder with a linear head that is called on each
    token."""
    from transformers import modeling_layers

    kinds = (
        modeling_layers.GenericForSequenceClassification,
        modeling_layers.GenericForTokenClassification,
    )
    # Another forward may read the decoder's output, of this rank's tokens, elsewhere.
    is_theirs = type(model).forward.__module__.startswith("transformers.")
    return isinstance(model, kinds) and is_theirs


_BY_THE_PASS = (
    "The compile pass may take it: in a trainer, pass compiled=True; in a loop of your own, "
    "torch.compile(model, backend='deepsp')"
)


def use_in(
    model,
    group: Group,
    chunks: int = 1,
    query_parts: int | str = "auto",
    deal_images: bool = False,
    decoder=None,
) -> dict[str, str]:
    """Sets a causal language model's attention over ``group`` and the loss of full sequences, for
    wrappers that average gradients over all ranks, and checks the model. Attention other than
    "sdpa" and "eager" becomes the core. ``decoder``: the part of a classifier that gets this rank's
    tokens; None: the model does. Returns the attention that the model had, as
    ``set_attn_implementation`` takes it.

    Raises:
        ValueError: it isn't a causal language model, or :func:`check` refuses it.
    """
    from transformers import PreTrainedModel
    from transformers.loss.loss_utils import ForCausalLMLoss

    is_model = isinstance(model, PreTrainedModel)
    if not is_model or (decoder is None and model.loss_function is not ForCausalLMLoss):
        raise ValueError(
            "expected model to be a causal language model of transformers, got "
            f"{type(model).__name__}. {_BY_THE_PASS}"
        )
    calls.check_layerdrop(model)
    # The model's present implementation keeps computing its attention, and that of its towers.
    before = implementations_of(model)
    implementation = next(iter(before.values()))
    core = "auto" if implementation in ("sdpa", "eager", *ours()) else implementation
    options = {"query_parts": query_parts, "deal_images": deal_images}
    register(group, chunks, average_gradients=True, core=core, **options)
    model.set_attn_implementation(dict.fromkeys(before, "deepsp"))
    if not any(map(is_away, model.parameters())):
        # Else on its first forward, in which DeepSpeed gathers them.
        try:
            check(model if decoder is None else decoder)
        except ValueError as error:
            model.set_attn_implementation(before)
            raise ValueError(f"{error}. {_BY_THE_PASS}") from error
    return {name: "sdpa" if x in ours() else x for name, x in before.items()}


def implementations_of(model) -> dict[str, str]:
    """The attention of a model of transformers, or of its decoder, by the name of the decoder's
    configuration, as ``set_attn_implementation`` takes it; and of the model around a decoder, if
    it is deepsp's."""
    decoder = multimodal.decoder_of(model)
    if decoder is None:
        return {"": model.config._attn_implementation}
    config = decoder.config
    names = [n for n in model.config.sub_configs if getattr(model.config, n) is config]
    if model.config._attn_implementation in ours():
        names.append("")
    return dict.fromkeys(names, config._attn_implementation)


@contextlib.contextmanager
def attending_by(model, implementations: dict[str, str]) -> Iterator[None]:
    """In this context a model has other attention, named as by :func:`implementations_of`."""
    now = implementations_of(model)
    model.set_attn_implementation(implementations)
    try:
        yield
    finally:
        model.set_attn_implementation(now)
