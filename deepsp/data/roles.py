"""What each entry of a batch is. It is said once, and every door shards by it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

Path = tuple[str | int, ...]
"""The names and indices that lead to a value in a batch."""

ROLES = {
    "tokens": "an entry for each token; sharded",
    "labels": "the class of each token; shifted by one token, then sharded",
    "label_weights": "an entry for each label; shifted with the labels, then sharded",
    "positions": "the position of each token; sharded along the last dimension",
    "documents": "where packed documents begin; becomes positions",
    "mask": "which tokens are attended to; every rank has it in full",
    "row": "a value for each row; every rank has it in full",
    "other": "passed on as it is",
}

TOKENS = ("input_ids", "inputs_embeds")
LABELS = ("labels", "shift_labels")
DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keys that collators of packed batches add for kernels (DataCollatorWithFlattening)."""

NAMED = {
    **dict.fromkeys(TOKENS, "tokens"),
    **dict.fromkeys(
        ("token_type_ids", "mm_token_type_ids", "segment_ids", "decoder_input_ids"), "tokens"
    ),
    **dict.fromkeys(LABELS, "labels"),
    **dict.fromkeys(DOCUMENTS, "documents"),
    "position_ids": "positions",
    "attention_mask": "mask",
}
"""The roles of names that models and collators of transformers share."""

_IMAGES = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "image_sizes")
"""Inputs of vision-language models that have no entry for each token."""


def map_leaves(
    function: Callable[[Path, Any], Any], value: Any, kind: type = Tensor, path: Path = ()
) -> Any:
    """``value`` with each ``x`` of a kind replaced by ``function(path, x)``, at any depth of
    mappings, lists and tuples."""
    if isinstance(value, kind):
        return function(path, value)
    if isinstance(value, Mapping):
        return {k: map_leaves(function, x, kind, (*path, k)) for k, x in value.items()}
    if isinstance(value, (list, tuple)):
        items = [map_leaves(function, x, kind, (*path, i)) for i, x in enumerate(value)]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def table_of(batch: Mapping[str, Any]) -> str:
    """The names and shapes of a batch's tensors, for messages."""
    return "; ".join(f"{name_of(path)} {list(x.shape)}" for path, x in leaves_of(batch))


def leaves_of(batch: Mapping[str, Any], kind: type = Tensor) -> list[tuple[Path, Any]]:
    """The values that :func:`map_leaves` replaces, in the same order."""
    leaves: list[tuple[Path, Any]] = []
    map_leaves(lambda path, x: leaves.append((path, x)), batch, kind)
    return leaves


def name_of(path: Path) -> str:
    """The name of a value in a batch, for messages."""
    return "batch" + "".join(f"[{key!r}]" for key in path)


@dataclass
class Roles:
    """The roles of a batch's tensors.

    Attributes:
        tokens: the name of the tensor that has the sequence.
        rows: its number of rows.
        length: its number of tokens.
        dim: the dimension of the sequence.
        of: by path, the role and the shape of each tensor.
        shard_at: as in :func:`deepsp.shard_batch`.
    """

    tokens: str
    rows: int
    length: int
    dim: int
    of: dict[Path, tuple[str, tuple[int, ...]]]
    shard_at: str = "inputs"

    def dim_of(self, path: Path) -> int | None:
        """The dimension along which a tensor is sharded; None: it stays full."""
        role, _ = self.of[path]
        if self.shard_at == "decoder" and role not in ("labels", "label_weights"):
            return None
        if role == "positions":
            return -1
        return self.dim if role in ("tokens", "labels", "label_weights") else None

    def is_full(self, path: Path) -> bool:
        """Whether a tensor has no entry for each token; labels may have been renamed."""
        role, _ = self.of.get(path, ("tokens", ()))
        return role in ("row", "other", "mask")

    def after_shift(self, batch: Mapping[str, Any]) -> Roles:
        """The roles of a batch with shifted labels and positions in the place of labels and
        documents, maybe padded."""
        of = {}
        for path, x in leaves_of(batch):
            role = self.of[path][0] if path in self.of else NAMED[path[-1]]
            of[path] = role, tuple(x.shape)
        return replace(self, of=of, length=batch[self.tokens].size(self.dim))

    def names(self, role: str) -> list[str]:
        """The names of the batch's own entries with a role."""
        return [path[0] for path, (r, _) in self.of.items() if r == role and len(path) == 1]

    def table(self) -> str:
        """What each entry was taken for, for messages."""
        return "; ".join(
            f"{name_of(path)} {list(shape)}: {role}" for path, (role, shape) in self.of.items()
        )


def describe(
    batch: Mapping[str, Any],
    roles: Mapping[str, str] | None = None,
    *,
    dim: int = 1,
    shard_at: str = "inputs",
    inputs: Collection[str] = (),
) -> Roles:
    """Finds the role of each tensor in a full batch.

    Args:
        batch: the batch, with ``input_ids`` or ``inputs_embeds``.
        roles: by name, the roles that aren't as found here, among :data:`ROLES`.
        dim: the dimension of the sequence.
        shard_at: "inputs", or "decoder" for a vision-language model.
        inputs: names of arguments of the model's forward. Those with an entry for each token are
            "tokens".

    Raises:
        ValueError: there is no sequence; ``roles`` has an unknown role, or a name with a known one;
            a tensor's shape doesn't fit its role, or it has none.
    """
    named = next((name for name in TOKENS if name in batch), None)
    if named is None:
        raise ValueError(
            "expected batch to have input_ids or inputs_embeds, whose length is that of the "
            f"sequence, got {sorted(batch)}"
        )
    tokens = batch[named]
    if not isinstance(tokens, Tensor) or tokens.dim() <= dim:
        shape = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(
            f"expected batch[{named!r}] to be a tensor [B, S] or [B, S, E] with the sequence in "
            f"dimension {dim}, got {shape}"
        )
    _check_overrides(roles)
    rows = tokens.size(0) if dim > 0 else 1
    described = Roles(named, rows, tokens.size(dim), dim, {}, shard_at)
    for path, x in leaves_of(batch):
        role = _role_of(path, x, described, roles or {}, inputs, "labels" in batch)
        described.of[path] = role, tuple(x.shape)
    for path, x in leaves_of(batch):
        _check(path, x, described)
    return described


def _check_overrides(roles: Mapping[str, str] | None) -> None:
    if not isinstance(roles, Mapping | None):
        raise ValueError(f"expected roles to map names to roles, got {roles!r}")
    for name, role in (roles or {}).items():
        if role not in ROLES:
            raise ValueError(
                f"expected roles[{name!r}] to be one of {', '.join(ROLES)}, got {role!r}"
            )
        if name in NAMED:
            raise ValueError(
                f"expected roles of names that don't say what they are, got {name!r}, which is "
                f"{NAMED[name]!r} everywhere; leave it out"
            )


def _role_of(
    path: Path,
    x: Tensor,
    batch: Roles,
    roles: Mapping[str, str],
    inputs: Collection[str],
    has_labels: bool,
) -> str:
    override = next((roles[key] for key in reversed(path) if key in roles), None)
    if override is not None:
        return override
    if path[-1] in NAMED:
        return NAMED[path[-1]]
    if batch.shard_at == "decoder" and path[-1] in (*inputs, *_IMAGES):
        return "other"
    if x.dim() == 0:
        return "other"
    if batch.dim == 1 and tuple(x.shape) == (batch.rows,):
        return "row"
    if path[-1] in inputs or not has_labels or not _is_by_token(x, batch):
        return "tokens" if batch.shard_at == "inputs" else "other"
    shape = tuple(x.shape)
    raise ValueError(
        f"expected a role for {name_of(path)} of shape {shape}, which has an entry for each token "
        "beside labels, since labels are shifted by one token, got none; pass "
        f"roles={{{path[-1]!r}: 'label_weights'}} if it belongs to the labels, 'tokens' if it "
        f"belongs to the inputs. (Known: {batch.table() or 'nothing'})"
    )


def _is_by_token(x: Tensor, batch: Roles) -> bool:
    return x.dim() > batch.dim and x.size(batch.dim) == batch.length


def _check(path: Path, x: Tensor, batch: Roles) -> None:
    """Raises unless a tensor's shape fits its role."""
    role, shape = batch.of[path]
    if role == "labels" and path[-1] == "labels" and len(path) > 1:
        raise ValueError(
            f"expected labels as batch['labels'], which is shifted, got {name_of(path)}; shift "
            "it yourself, and call it shift_labels"
        )
    if role == "row" and (not shape or shape[0] != batch.rows):
        raise ValueError(
            f"expected {name_of(path)}, a value for each of {batch.rows} rows, to have as many, "
            f"got shape {shape}; pass another role"
        )
    place = batch.dim_of(path)
    if place is None or (-x.dim() <= place < x.dim() and x.size(place) == batch.length):
        return
    advice = ""
    if path[-1] not in NAMED:
        advice = f"; if it hasn't one for each token, pass roles={{{path[-1]!r}: 'row'}} or 'other'"
    if path[-1] in _IMAGES:
        advice = (
            "; for a vision-language model, whose images become tokens inside of it, pass "
            "shard_at='decoder'"
        )
    raise ValueError(
        f"expected {name_of(path)} to have size {batch.length} in dimension {place}, the sequence "
        f"length of {batch.tokens}, got shape {shape}{advice}"
    )


def check_dim(dim: int) -> None:
    if dim < 0:
        raise ValueError(
            f"expected dim >= 0, got {dim}; count it from the front, since the tensors of a batch "
            "may have different numbers of dimensions"
        )


def check_shard_at(shard_at: str) -> None:
    if shard_at not in ("inputs", "decoder"):
        raise ValueError(f"expected shard_at to be 'inputs' or 'decoder', got {shard_at!r}")


def named_values(batch: Mapping[str, Any], dim: int) -> dict[str, Any]:
    """A batch's values by name, without those that count as absent."""
    if not isinstance(batch, Mapping):
        shape = f" of shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else ""
        raise ValueError(
            "expected batch to map names to tensors, such as {'input_ids': ids, ...}, got "
            f"{type(batch).__name__}{shape}"
        )
    check_dim(dim)
    values = {name: x for name, x in batch.items() if x is not None or name not in NAMED}
    for name, x in values.items():
        if name in (*LABELS, "position_ids", "attention_mask") and not isinstance(x, Tensor):
            raise ValueError(
                f"expected batch[{name!r}] to be a tensor or None, got {type(x).__name__}"
            )
    return values
