"""Vision-language models, sharded where their decoder begins.

Images become tokens inside of such a model, so it gets full ids, pixels and grids. Every rank
merges all of them into embeddings and computes all positions; then the model calls its decoder,
which gets this rank's tokens of both. What comes after the decoder (the head, the loss) works on
them, as in a text model. Gradients of embeddings and towers are those of a rank's tokens, so their
sum over the group is the full gradient, as for any other parameter.

With dealt images, a rank encodes its share of them, and the features are gathered."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepsp.data import last_batch
from deepsp.data.same_batch import ADVICE, carried, compare_batches, compare_carried
from deepsp.ranks.groups import Group, Member, member_of, on_all_ranks
from deepsp.ranks.lengths import seq_lens

_TOWERS = {
    "image": ("pixel_values", "image_grid_thw", "get_image_features"),
    "video": ("pixel_values_videos", "video_grid_thw", "get_video_features"),
}
"""By modality: the names of its pixels, of its grids of patches, and the method that encodes it."""

_FIELDS = {
    "last_hidden_state",
    "pooler_output",
    "deepstack_features",
    "hidden_states",
    "attentions",
}
"""What an encoder returns. Models read the features only."""

_PASSED_ON = {"labels", "shift_labels", "num_items_in_batch"}
"""Tensors that a decoder may get and doesn't use."""


@dataclass
class Door:
    """A call of a vision-language model: what its decoder is to get."""

    base: nn.Module
    """The model that encodes images and calls the decoder."""
    decoder: nn.Module
    member: Member
    lens: list[int]
    """The number of tokens of each rank."""
    deals_images: bool

    @property
    def part(self) -> slice:
        """This rank's tokens."""
        rank = self.member[0]
        return slice(sum(self.lens[:rank]), sum(self.lens[: rank + 1]))


def decoder_of(model: nn.Module) -> nn.Module | None:
    """The decoder at which a model of transformers is sharded; None: where the model begins."""
    config = getattr(model, "config", None)
    if not getattr(config, "sub_configs", None) or config.is_encoder_decoder or is_tower(model):
        return None
    declared = model.input_modalities
    modalities = {declared} if isinstance(declared, str) else set(declared)
    decoder = model.get_decoder()
    inside = decoder is not model and getattr(decoder, "config", config) is not config
    return decoder if inside and "text" in modalities and len(modalities) > 1 else None


def shard_at(model: nn.Module) -> str:
    """Where a model of transformers shards its sequence, as in :func:`deepsp.shard_batch`."""
    return "inputs" if decoder_of(model) is None else "decoder"


def is_tower(model: nn.Module) -> bool:
    """Whether a model of transformers encodes images, videos or sounds for another one."""
    key = getattr(model.config, "base_config_key", "")
    return key in ("vision_config", "audio_config")


def open_door(
    model: nn.Module, group: Group | Member, deals: bool, arguments: dict[str, Any]
) -> Door:
    """Checks a call of a vision-language model, on every rank, and compares its arguments over the
    group.

    Args:
        model: the model.
        group: the sequence group.
        deals: whether images are dealt out.
        arguments: those of the call, by name.

    Raises:
        ValueError: the ids or labels aren't those that the model expects, image tokens have no
            images, or the ranks have different arguments.
    """
    member, cls, decoder = member_of(group), type(model).__name__, decoder_of(model)
    tokens = arguments.get("input_ids")
    tokens = arguments.get("inputs_embeds") if tokens is None else tokens
    if tokens is None:
        raise ValueError(f"expected input_ids or inputs_embeds in the call of {cls}, got none")
    # All ranks raise, or none: what one rank was handed out before may look like full ids.
    numbers = on_all_ranks([int(last_batch.has_tokens(tokens))], member, tokens.device)
    if any(n for (n,) in numbers):
        raise ValueError(
            f"expected the full input_ids in the call of {cls}, which is sharded where its decoder "
            f"begins, got this rank's {tokens.size(1)} tokens; pass shard_at='decoder' to "
            "deepsp.shard_batch or SequenceLoader"
        )
    rank, size, _ = member
    if tokens.size(1) < size:
        raise ValueError(
            f"expected input_ids of at least {size} tokens, one for each rank of the group, got "
            f"{tokens.size(1)}; pad them"
        )
    lens = seq_lens(tokens.size(1), member)
    labels = arguments.get("shift_labels")
    if labels is not None and labels.size(1) != lens[rank]:
        raise ValueError(
            f"expected shift_labels of this rank's {lens[rank]} tokens out of {tokens.size(1)}, as "
            "deepsp.shard_batch(batch, shard_at='decoder') returns them, got "
            f"{labels.size(1)}; pass it the full batch, with labels"
        )
    _check_images(model, arguments)
    full = [(n, x) for n, x in arguments.items() if isinstance(x, Tensor) and n != "shift_labels"]
    compare_batches(full, member, ADVICE)
    # Now, and not in the decoder: a rank with other images might not get there.
    numbers = on_all_ranks([carried(member)], member, tokens.device)
    compare_carried([n for (n,) in numbers], member)
    return Door(model.base_model, decoder, member, lens, deals)


def _check_images(model: nn.Module, arguments: dict[str, Any]) -> None:
    """Raises for image tokens without images."""
    ids, config = arguments.get("input_ids"), model.config
    if ids is None or arguments.get("mm_encoder_outputs") is not None:
        return
    for kind, (pixels, _, _) in _TOWERS.items():
        token = next(
            (x for n in ("_token_id", "_token_index") if (x := getattr(config, kind + n, None))),
            None,
        )
        if token is None or arguments.get(pixels) is not None:
            continue
        if count := int((ids == token).sum()):
            raise ValueError(
                f"expected {pixels} for the {count} {kind} tokens in input_ids of "
                f"{type(model).__name__}, got none: a tokenizer alone makes no images; use the "
                "model's processor"
            )


def text_tokens(model: nn.Module, arguments: Mapping[str, Any]) -> Tensor | None:
    """The tokens of a batch [B, S] that aren't placeholders of images, videos and sounds; None: the
    model isn't sharded at its decoder, or gets no ids."""
    ids = arguments.get("input_ids")
    if decoder_of(model) is None or ids is None:
        return None
    config, text = model.config, torch.ones_like(ids, dtype=torch.bool)
    for name in (f"{kind}_token_{x}" for kind in (*_TOWERS, "audio") for x in ("id", "index")):
        if isinstance(token := getattr(config, name, None), int):
            text &= ids != token
    return text


def local_arguments(door: Door, arguments: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """The decoder's arguments for this rank's tokens, and their places in the sequence or in their
    documents, [B, S_r]. ``position_ids`` are among them if the model has made any.

    Raises:
        ValueError: the decoder gets a tensor whose meaning isn't known.
    """
    part, local = door.part, dict(arguments)
    for name in ("input_ids", "inputs_embeds"):
        if (tokens := arguments.get(name)) is not None:
            # A clone lets the full embeddings be freed.
            local[name] = tokens[:, part].clone(memory_format=torch.contiguous_format)
            rows, length = tokens.shape[:2]
            device = tokens.device
    places = torch.arange(length, device=device).expand(rows, -1)
    positions = arguments.get("position_ids")
    if positions is None:
        local["position_ids"] = places[:, part]
    else:
        local["position_ids"] = positions[..., part]
        if positions.dim() == 3 and positions.size(0) == 4:
            places = positions[0]
        elif positions.dim() == 2 and not _has_sections(door.decoder):
            places = positions
    visual = arguments.get("visual_pos_masks")
    if visual is not None:
        here = torch.zeros_like(visual)
        here[:, part] = True
        local["visual_pos_masks"] = visual[:, part]
        local["deepstack_visual_embeds"] = [
            x[here[visual]] for x in arguments["deepstack_visual_embeds"]
        ]
    if (inputs := arguments.get("per_layer_inputs")) is not None:  # [B, S, layers, E], of Gemma 4
        local["per_layer_inputs"] = inputs[:, part]
    cut = {
        "input_ids",
        "inputs_embeds",
        "position_ids",
        "attention_mask",
        "visual_pos_masks",
        "per_layer_inputs",
    }
    for name, x in arguments.items():
        if isinstance(x, Tensor) and name not in cut | _PASSED_ON:
            raise ValueError(
                f"expected no {name} for {type(door.decoder).__name__}, of whose shape "
                f"{tuple(x.shape)} deepsp doesn't know which dimension is the sequence; use "
                "another model, or a call without it"
            )
    return local, places[:, part]


def _has_sections(decoder: nn.Module) -> bool:
    """Whether positions have rows for time, height and width. Such decoders don't read documents
    from positions [B, S]."""
    rope = getattr(decoder.config, "rope_parameters", None) or {}
    return "mrope_section" in rope


# ------------------------------------------------------------------------------- dealt images


def deal_images(base: nn.Module, door: Door, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a model with features in the place of its images. Each rank encodes its
    share of the images; gradients go back to the rank that has encoded an image.

    Args:
        base: the model whose ``get_image_features`` encodes images.
        door: of the call.
        arguments: those of ``base``, by name.

    Raises:
        ValueError: an argument of the encoder can't be split by image.
    """
    outputs = {}
    for kind, (pixels, grids, method) in _TOWERS.items():
        if arguments.get(pixels) is not None:
            outputs[kind] = _encoded(base, door.member, arguments, pixels, grids, method)
    if not outputs:
        return arguments
    left = {n: x for n, x in arguments.items() if n not in {t[0] for t in _TOWERS.values()}}
    return {**left, "mm_encoder_outputs": outputs}


def shares_of(weights: list[int], size: int) -> list[list[int]]:
    """The images of each rank: the heaviest first, each to the rank with the least so far."""
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        r = min(range(size), key=lambda r: (loads[r], r))
        shares[r].append(i)
        loads[r] += weights[i]
    return [sorted(share) for share in shares]


def _encoded(base: nn.Module, member: Member, given, pixels: str, grids: str, method: str) -> Any:
    rank, size, name = member
    encode = getattr(base, method, None)
    if encode is None:
        raise ValueError(
            f"expected {type(base).__name__} to have {method}, by which each rank encodes its "
            "share of the images; it doesn't: pass deal_images=False"
        )
    declared = inspect.signature(encode).parameters
    arguments = {n: x for n, x in given.items() if n in declared and x is not None}
    grid = given.get(grids)
    counts = None if grid is None else grid.prod(-1).tolist()
    images = len(given[pixels]) if counts is None else len(counts)
    _check_by_image(arguments, None if counts is None else pixels, images)
    shares = shares_of([1] * images if counts is None else counts, size)
    mine = shares[rank]
    # A rank without images encodes the smallest one, too, and drops it: wrappers (FSDP, DDP) need
    # the tower's forward and backward on every rank.
    encoded = mine or [min(range(images), key=lambda i: 0 if counts is None else counts[i])]
    index = torch.tensor(encoded)
    for n, x in arguments.items():
        if n == pixels and counts is not None:
            blocks = x.split(counts)
            arguments[n] = torch.cat([blocks[i] for i in encoded])
        elif isinstance(x, Tensor):
            arguments[n] = x[index.to(x.device)]
    error, rows = None, [0] * images
    try:
        output = encode(**arguments, return_dict=True)
        beside, widths = _features(output, len(encoded))
        for i, x in zip(mine, beside, strict=False):
            rows[i] = x.numel() // sum(widths)
    except Exception as failure:  # the other ranks wait for the features
        error = failure
    everyone = on_all_ranks([int(error is not None), *rows], member, given[pixels].device)
    if failed := [r for r, (status, *_) in enumerate(everyone) if status]:
        raise ValueError(
            f"expected every rank to encode its share of the images by {method}, but rank "
            f"{failed[0]} failed{f': {error}' if error else ''}; pass deal_images=False, which "
            "encodes all of them on each rank"
        ) from error
    features = torch.cat([x.flatten(0, -2) for x in beside])
    if not mine:
        features = features[:0]
    rows = [max(n) for n in zip(*(of_rank[1:] for of_rank in everyone), strict=True)]
    sizes = [sum(rows[i] for i in share) for share in shares]
    gathered = torch.ops.deepsp.all_gather(features, 0, sizes, "partial", rank, name)
    order = [i for share in shares for i in share]
    blocks = dict(zip(order, gathered.split([rows[i] for i in order]), strict=True))
    pooled, *deeper = (
        [blocks[i].split(widths, -1)[level] for i in range(images)] for level in range(len(widths))
    )
    if isinstance(output.pooler_output, Tensor):  # images of one shape
        pooled = torch.stack(pooled).unflatten(1, beside[0].shape[:-1])
    result = type(output)(last_hidden_state=None, pooler_output=pooled)
    if deeper:
        result.deepstack_features = deeper
    return result


def _check_by_image(arguments: dict[str, Any], by_patch: str | None, images: int) -> None:
    """Raises unless an encoder's tensors, but for the one ``by_patch``, have an entry for each
    image."""
    for n, x in arguments.items():
        if n == by_patch or not isinstance(x, Tensor):
            continue
        # LLaVA-OneVision: images of each sample; those of one image are encoded otherwise.
        if len(x) != images or (n == "batch_num_images" and bool((x != 1).any())):
            raise ValueError(
                f"expected an entry of {n} for each of {images} images, to deal them out, got "
                f"shape {tuple(x.shape)}; pass deal_images=False"
            )


def _features(output: Any, images: int) -> tuple[list[Tensor], list[int]]:
    """By image: its features, and those of deeper layers beside them; and the width of each."""
    levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
    unknown = {n for n, x in output.items() if x is not None} - _FIELDS
    if unknown or any(len(level) != images for level in levels):
        raise ValueError(
            f"expected features of {images} images, got {len(levels[0])} and "
            f"{', '.join(sorted(unknown)) or 'nothing else'}"
        )
    widths = [level[0].size(-1) for level in levels]
    return [torch.cat(parts, -1) for parts in zip(*levels, strict=True)], widths
