"""Checks that a model of transformers works on each token alone, except for attention through
deepsp.

The dry runs use a few tokens, in one process, and replace attention by a function that works on
each token, so in a right model no token may affect another.

- The first has a batch: a row of ids, the row with another token in one of a few places, and the
  row with NaN for that token's embedding. NaN reaches everything that depends on it.
- The second has the row's last tokens alone, with their positions. If queries or keys differ from
  those of the full row, they depend on the number of tokens, or on their places, and not on
  ``position_ids`` alone.

If a token affects another one, a further run finds the innermost module with token-wise inputs and
other outputs. A last run, without ``position_ids``, tells whether the model's own positions are 0,
1, 2, ..., like those of :func:`deepsp.shard_batch`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from deepsp.integrations.transformers import caches, mixers, multimodal
from deepsp.integrations.transformers.arguments import COUNTS_OTHERWISE, masks_of
from deepsp.integrations.transformers.forward import calling
from deepsp.integrations.transformers.indexers import CHOSEN
from deepsp.integrations.transformers.masks import ours
from deepsp.sequence.tokenwise import probe
from deepsp.sequence.tokenwise.probe import Probe, as_it_was, name_in
from deepsp.weights.partitioned import full_shape, is_away, is_gathered_when_called

CHECKED, CALLED = "_deepsp_checked", "_deepsp_called"
"""Attributes of a model and its parts: the attention with which they were checked, and, on the
model only, that it was checked."""

_TAKEN = ("dropout", "scaling", "is_causal", "sliding_window", "softcap", "s_aux")
"""Arguments that deepsp's attention takes."""
_PLACES = (0, 4, 10)  # the changed tokens: the first, and often the last
_ROWS = 1 + 2 * len(_PLACES)
_TAIL = 5  # where the last tokens begin


def check(model: nn.Module) -> None:
    """Raises unless ``model`` computes the same on sharded sequences with
    ``attn_implementation="deepsp"``: each of its modules must work on each token alone, or be
    attention that goes through deepsp.

    Runs the model on a few tokens, two to four times: in evaluation mode, without gradients, with
    its hooks and the collectives that its weights need, so every rank calls it. Random number
    generators, buffers and modes are restored. A model's first forward calls it, too (and the first
    after its attention was changed).

    Args:
        model: a model of transformers whose attention is one that :func:`register` registered, or
            a module around one.

    Raises:
        ValueError: a module mixes tokens (by name and type); a forward takes no ``position_ids`` or
            ignores them; outputs are computed from several tokens, such as a pooled one; attention
            has something that deepsp doesn't support; weights have no data.
    """
    from transformers import PreTrainedModel

    base = model_in(model)
    names = implementations(base)
    if not names:
        raise ValueError(
            f"expected attention of {type(base).__name__} to be 'deepsp', got "
            f"{base.config._attn_implementation!r}; call "
            "model.set_attn_implementation('deepsp'), or make the model with "
            "attn_implementation='deepsp'"
        )
    if any(p.is_meta or is_lazy(p) for p in base.parameters()):
        raise ValueError(
            f"expected parameters of {type(base).__name__} with data, but some have no data; load "
            "them first"
        )
    if any(map(is_away, base.parameters())) and not is_gathered_when_called(base):
        raise ValueError(
            f"expected parameters of {type(base).__name__} with data, but DeepSpeed's ZeRO 3 has "
            "partitioned them and nothing gathers them yet; pass the model to "
            "deepspeed.initialize: it is checked in the engine's first forward"
        )
    parts = [m for m in base.modules() if isinstance(m, PreTrainedModel)]
    before = [getattr(m, CHECKED, None) for m in parts]
    for m in parts:
        # Set before the run, which calls the parts.
        setattr(m, CHECKED, implementation_of(m.config, names))
    try:
        _Check(base, names).check()
        setattr(base, CALLED, True)
    except BaseException:
        for m, value in zip(parts, before, strict=True):
            setattr(m, CHECKED, value)
        raise


def model_in(module: nn.Module) -> nn.Module:
    """The model of transformers in a module, or the module itself.

    Raises:
        ValueError: there is none.
    """
    from transformers import PreTrainedModel

    base = next((m for m in module.modules() if isinstance(m, PreTrainedModel)), None)
    if base is None:
        raise ValueError(f"expected model to be one of transformers, got {type(module).__name__}")
    return base


def implementation_of(config, names: Iterable[str]) -> str:
    """Which of ``names`` a configuration has, or one of its parts; if none, its own."""
    parts = [config, *(getattr(config, key, None) for key in config.sub_configs)]
    names_used = (x._attn_implementation for x in parts if x is not None)
    return next((name for name in names_used if name in names), config._attn_implementation)


def implementations(model: nn.Module) -> set[str]:
    """The names of deepsp's attention in the configurations of a model of transformers."""
    from transformers import PreTrainedModel

    used, configs = set(), [m.config for m in model.modules() if isinstance(m, PreTrainedModel)]
    while configs:
        config = configs.pop()
        used.add(config._attn_implementation)
        configs += [c for c in (getattr(config, n, None) for n in config.sub_configs) if c]
    return used & ours()


class _Check(Probe):
    def __init__(self, model: nn.Module, names: set[str]):
        self.names = names
        config = model.config.to_dict()
        taken = {n for p in model.parameters() for n in full_shape(p)}
        taken |= {n for b in model.buffers() for n in b.shape}
        taken |= {n for n in config.values() if isinstance(n, int)}
        # Modules' inputs and outputs are recognized by this size, so it must be unique.
        length = next(
            n
            for n in (11, 13, 17, 19, 23, 29, 31, 37, 41, 43)
            if not {n, _ROWS * n} & taken or n == 43
        )
        super().__init__(model, length, _PLACES)
        self.refusal: ValueError | None = None  # raised by the attention
        self.queries: list[tuple[nn.Module, Tensor, Tensor]] = []

    def check(self) -> None:
        self.has_mixers = mixers.prepare(self.model)
        caches.prepare(self.model)
        self.has_door = multimodal.decoder_of(self.model) is not None
        arguments = self._arguments()
        self.check_batch_norms()
        alone = calling(inherits=False, is_check=True)
        with as_it_was(self.model), self._without_attention(), alone:
            output = self._call(arguments)
            queries, self.queries = self.queries, []
            outputs = self.outputs(output, lambda hooks: self._call(arguments, hooks=hooks))
            if self.refusal is not None:
                raise self.refusal
            for name, x, rows in outputs:
                if rows is None:
                    raise ValueError(self.pooled(name, x))
            tail = {k: v[:, _TAIL:] if isinstance(v, Tensor) else v for k, v in arguments.items()}
            self._call(tail, poisoned=False)
            if (module := self._differs(queries)) is not None:
                raise ValueError(
                    f"{name_in(self.model, module)} ({type(module).__name__}) of {self.of} gets "
                    "other queries or keys for some of the tokens with their position_ids than for "
                    "all of them: the model depends on the number or place of the tokens on a rank"
                )
            otherwise = self._counts_otherwise(arguments, queries)
            for module, _, _ in queries:
                setattr(module, COUNTS_OTHERWISE, otherwise)

    def _counts_otherwise(self, arguments: dict[str, Any], queries: list) -> bool:
        """Whether the model's own positions, with padding at the beginning, are not 0, 1, 2, ..."""
        shifted = {n: x for n, x in arguments.items() if n != "position_ids"}
        if "attention_mask" in inspect.signature(self.model.forward).parameters:
            shifted["attention_mask"] = torch.ones_like(shifted["input_ids"])
            shifted["attention_mask"][:, :2] = 0
        self.queries = []
        try:
            self._call(shifted, poisoned=False)
        except ValueError:  # it makes no positions
            return False
        return self._differs(queries) is not None

    def _arguments(self) -> dict[str, Any]:
        declared = inspect.signature(self.model.forward).parameters
        if self.model.config.is_encoder_decoder:
            raise ValueError(
                f"{self.of} has an encoder and a decoder, so its attention reads another sequence; "
                "deepsp supports self-attention only"
            )
        for name in ("input_ids", "position_ids"):
            if name not in declared and not (name == "position_ids" and self.has_mixers):
                raise ValueError(
                    f"expected {self.of}.forward to take {name}, which says where this rank's "
                    "tokens are in the full sequence; it doesn't"
                )
        config = self.model.config.get_text_config()
        both = [*config.to_dict().items(), *self.model.config.to_dict().items()]
        special = {v for k, v in both if k.endswith(("_id", "_index")) and isinstance(v, int)}
        words = [i for i in range(min(config.vocab_size, 500)) if i not in special]
        row = [words[5 * i % len(words)] for i in range(self.length)]
        rows = [
            [words[(5 * i + (i == place)) % len(words)] for i in range(self.length)]
            for place in _PLACES
        ]
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        arguments = {
            "input_ids": torch.tensor([row, *rows, *[row] * len(_PLACES)], device=device),
            "position_ids": torch.arange(self.length, device=device).expand(_ROWS, -1),
        }
        if "use_cache" in declared or any(p.kind == p.VAR_KEYWORD for p in declared.values()):
            arguments["use_cache"] = False
        return arguments

    def _call(self, arguments: dict[str, Any], poisoned: bool = True, hooks=()) -> Any:
        embeddings = []
        with contextlib.suppress(NotImplementedError):
            embeddings += [self.model.get_input_embeddings()] * poisoned
        return self.run(
            lambda: self._forward(dict(arguments)),
            hooks,
            embeddings,
            lambda _, out: isinstance(out, Tensor) and out.shape[:2] == (_ROWS, self.length),
        )

    def _forward(self, arguments: dict[str, Any]) -> Any:
        positions = None
        if self.has_door:
            positions = arguments.get("position_ids")
        elif self.has_mixers:
            positions = mixers.positions_of(self.model, arguments)
        with calling(positions=positions):
            return nn.Module.__call__(self.model, **arguments)

    @contextlib.contextmanager
    def _without_attention(self) -> Iterator[None]:
        """Replaces deepsp's attention by a function of each token alone that depends on the token's
        query, key and value."""
        from transformers import AttentionInterface

        def stand_in(module, query, key, value, attention_mask, position_ids=None, **kwargs):
            keys = caches.cache_in(module)
            for n in _TAKEN if keys is None else (*_TAKEN, *CHOSEN):
                kwargs.pop(n, None)
            if keys is not None:
                attention_mask, position_ids = keys.sequence, keys.positions
                value = value + keys.by_token()
            try:
                masks_of(module, query, attention_mask, position_ids, kwargs)
            except ValueError as error:
                self.refusal = self.refusal or error
            if query.size(2) != key.size(2):
                raise ValueError(
                    f"expected key of {type(module).__name__} to have as many tokens as query "
                    f"({query.size(2)}), got {key.size(2)}; deepsp supports self-attention only"
                )
            self.dtypes |= {query.dtype}
            self.queries.append((module, query[0].clone(), key[0].clone()))
            return probe.stand_in(query, key, value, 1).transpose(1, 2).contiguous(), None

        registered = {name: AttentionInterface._global_mapping[name] for name in self.names}
        try:
            AttentionInterface._global_mapping.update(dict.fromkeys(self.names, stand_in))
            yield
        finally:
            AttentionInterface._global_mapping.update(registered)

    # ---- comparing

    def _differs(self, before: list) -> nn.Module | None:
        """The first attention whose queries or keys for the row's last tokens alone differ from
        those for the full row."""
        if [m for m, _, _ in before] != [m for m, _, _ in self.queries]:
            raise ValueError(
                f"expected {self.of} to call the same attention for fewer tokens, got other calls"
            )
        for (module, *then), (_, *now) in zip(before, self.queries, strict=True):
            for expected, output in zip(then, now, strict=True):
                expected = expected[:, _TAIL:]  # [H, S, D]
                if self.mostly_differ(expected, output[:, -expected.size(1) :], (0, -1)):
                    return module
        return None
