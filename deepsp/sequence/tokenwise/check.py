"""Checks that a model works on each token alone, except for attention through deepsp.

The dry runs replace attention by a function that works on each token, so in a right model no token
may affect another. A batch holds one row, the row with another token in a few places, and the row
with NaN for these tokens' embeddings: NaN reaches everything that depends on it. If a token affects
another one, a further run finds the innermost module with token-wise inputs and other outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from deepsp.ranks.agreement import first_difference
from deepsp.sequence.attention.layer import SequenceParallelAttention
from deepsp.sequence.attention.module import DistributedAttention
from deepsp.sequence.recurrence.module import DistributedRecurrence
from deepsp.sequence.tokenwise.probe import (
    Buffers,
    Probe,
    as_it_was,
    name_in,
    restored,
    stand_in,
    tensors_in,
)

_LEAST = 4  # tokens in an example


def check(model: nn.Module, example: Tensor | Sequence[Any] | Mapping[str, Any]) -> None:
    """Raises unless ``model`` computes the same on sharded sequences as in one process: it must
    work on each token alone, except for attention and recurrences through deepsp
    (:class:`deepsp.DistributedAttention`, :class:`deepsp.SequenceParallelAttention`,
    :func:`deepsp.distributed_attention`, :class:`deepsp.DistributedRecurrence`), and for tokens
    that it got from :func:`deepsp.previous_tokens`. ::

        deepsp.check(model, (batch["input_ids"], batch["position_ids"], seq_lens))

    Runs the model on one row of the example, two to five times: without gradients, dropout and
    attention, but with its hooks and the collectives that its weights need. So every rank calls it.
    A model with buffers runs once more, in its mode, on the whole example.
    Random number generators, buffers and modes are restored. Call it once, before training.

    Args:
        model: a module; ``example`` says how to call it.
        example: the arguments of a call: a tuple, a mapping of keyword arguments, or one tensor.
            Tensors [B, S_r, ...], [1, S_r, ...] and [S_r], of the first one's batch and length, are
            per token. Leave labels out, since a loss depends on all tokens. A short example costs
            less.

    Raises:
        ValueError: a module mixes tokens (by name and type); an output is computed from several
            tokens, such as a pooled one; outputs depend on a rank's number of tokens, or on their
            positions, as when a model makes its own positions; ranks write different values into a
            buffer; the model couldn't be run, or the example has fewer than four tokens.
    """
    model = getattr(model, "_orig_mod", model)  # inside torch.compile
    _Check(model, *_arguments(example)).check()


def _arguments(example) -> tuple[tuple, dict[str, Any]]:
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    raise ValueError(
        "expected example to be the arguments of a call: a tuple, a mapping of keyword arguments "
        f"or a tensor, got {type(example).__name__}"
    )


class _Check(Probe):
    def __init__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]):
        self.names = [*range(len(args)), *kwargs]
        self.values = [*args, *kwargs.values()]
        shapes = [x.shape[:2] for x in self.values if isinstance(x, Tensor) and x.dim() >= 2]
        if not shapes or shapes[0][0] < 1 or shapes[0][1] < _LEAST:
            raise ValueError(
                "expected example to have a tensor [B, S, ...] of this rank's tokens, at least "
                f"{_LEAST} of a row, got {[list(shape) for shape in shapes[:1]] or 'none'}"
            )
        self.shape = shapes[0]
        length = self.shape[1]
        super().__init__(model, length, (0, length // 2, length - 1))
        self.tokens = next(
            i for i, x in enumerate(self.values) if isinstance(x, Tensor) and x.dim() >= 2
        )
        members = (m.member for m in model.modules() if isinstance(m, _KINDS))
        default = (
            (dist.get_rank(), dist.get_world_size(), "") if dist.is_initialized() else (0, 1, "")
        )
        self.rank, self.size, _ = next(members, default)

    def _token_dim(self, x: Any) -> int | None:
        """The token dimension of an argument with a batch, or with one row for all."""
        if not isinstance(x, Tensor) or x.dim() == 0:
            return None
        batch, length = self.shape
        if x.dim() == 1:
            return 0 if x.size(0) == length else None
        return 1 if x.size(1) == length and x.size(0) in (1, batch) else None

    def check(self) -> None:
        first = self.values[self.tokens][:1]
        rows = first.repeat(self.count, *[1] * (first.dim() - 1))
        for row, place in enumerate(self.places, 1):
            others = (first[0] != first[0, place]).reshape(self.length, -1).any(1).nonzero()
            if len(others):
                rows[row, place] = first[0, others[-1, 0]]
        ids = rows.clone()
        if rows.is_floating_point():
            rows = self.poison(rows)
        values = [self._of_row(x) for x in self.values]
        values[self.tokens] = rows
        self.check_batch_norms()
        self.before = _TokensBefore()
        with as_it_was(self.model), _without_attention(self.model), self.before:
            try:
                output = self._call(values, ids)
            except Exception:  # the model may not take NaN
                values[self.tokens], ids = ids, None
                output = self._call(values, ids)
            inputs = self.before.inputs
            outputs = self.outputs(
                output, lambda hooks: self._call(values, ids, hooks), bool(inputs)
            )
            for name, x, of_tokens in outputs:
                if of_tokens is None:
                    raise ValueError(
                        self.pooled(name, x) + ". Leave labels out of the example: a loss is made "
                        "of all tokens, by deepsp.cross_entropy. A model that returns its loss "
                        "only is checked by deepsp.prove, with a step of yours"
                    )
            names, full = [name for name, _, _ in outputs], [x for _, _, x in outputs]
            half, end = self.length // 2, self.length
            parts = [(half, end)] if not inputs else [(half, end), (end // 3, end), (0, half)]
            for part in parts:
                self.before.of_part(inputs, part[0])
                self._check_part(part, names, full)
        self._check_buffers()

    def _check_part(self, part: tuple[int, int], names: list[str], full: list[Tensor]) -> None:
        """Runs some of the row's tokens alone, with their arguments."""
        (begin, end), length = part, self.length
        values = []
        for x in self.values:
            if (dim := self._token_dim(x)) is not None:
                x = self._of_row(x).narrow(dim, begin, end - begin)
            elif isinstance(x, (tuple, list)) and len(x) == self.size and self._is_mine(x):
                x = [end - begin if p == self.rank else n for p, n in enumerate(x)]
            values.append(x)
        self.length = end - begin
        results = [self.by_token(x) for _, x in tensors_in(self._call(values, None))]
        self.length = length
        for name, then, now in zip(names, full, results, strict=True):
            if now is None or now.shape[2:] != then.shape[2:]:
                continue
            differs = self.mostly_differ
            if self.before.inputs:  # a layer may read a token too few
                differs = self.some_differ
            if differs(then[0, begin:end], now[0]):
                raise ValueError(
                    f"{self.of} returns another {name} for some of the tokens alone than for all "
                    "of them: it makes positions itself (torch.arange(S), say), which begin at 0 "
                    "on every rank, or depends on other tokens, or on their number; take "
                    'position_ids, pass batch["position_ids"] of deepsp.shard_batch, and put them '
                    "into the example"
                )

    def _check_buffers(self) -> None:
        """Runs the example as it is, and compares the buffers that the model writes from it."""
        members = [m.member for m in self.model.modules() if isinstance(m, _KINDS)]
        if self.size == 1 or not dist.is_initialized() or not list(self.model.buffers()):
            return
        with restored(self.model), torch.no_grad(), _without_attention(self.model), _TokensBefore():
            buffers = Buffers(self.model)
            self._call(self.values, None)
            written = [
                (f"{name_in(self.model, owner)}.{name}".removeprefix("forward."), x)
                for owner, name in buffers.written()
                if (x := owner._buffers[name]) is not None
            ]
            differs = first_difference(written, members[0] if members else None)
        if differs is not None:
            raise ValueError(
                f"expected {self.of} to write the same into buffer {differs.name} on every "
                f"rank, got different values on ranks {differs.rank} and {differs.other}, each "
                "from its own tokens; write it from the sum of all ranks' numbers, "
                "deepsp.sum_over_ranks(x, group)"
            )

    def _is_mine(self, x: Sequence) -> bool:
        return all(isinstance(n, int) for n in x) and x[self.rank] == self.length

    def _of_row(self, x: Any) -> Any:
        """An argument, repeated for the batch of the dry run."""
        if not isinstance(x, Tensor) or x.dim() < 2 or x.size(0) != self.shape[0]:
            return x
        return x[:1].repeat(self.count, *[1] * (x.dim() - 1))

    def _call(self, values: list, ids: Tensor | None, hooks: Sequence = ()) -> Any:
        """Calls the model. ``ids``: poisons the embeddings of these; None: none."""
        args = [x for n, x in zip(self.names, values, strict=True) if isinstance(n, int)]
        kwargs = {n: x for n, x in zip(self.names, values, strict=True) if isinstance(n, str)}
        embeddings = [m for m in self.model.modules() if isinstance(m, nn.Embedding)]
        if ids is None or ids.is_floating_point():
            embeddings = []
        with torch.compiler.set_stance("force_eager"):
            return self.run(
                lambda: self.model(*args, **kwargs),
                hooks,
                embeddings,
                lambda args, _: (
                    bool(args) and isinstance(args[0], Tensor) and torch.equal(args[0], ids)
                ),
            )


_KINDS = (DistributedAttention, DistributedRecurrence, SequenceParallelAttention)


@contextlib.contextmanager
def _without_attention(model: nn.Module) -> Iterator[None]:
    """Replaces deepsp's attention and recurrences by stand-ins."""

    def of_module(module: DistributedAttention):
        return lambda q, k, v, *args, return_lse=False, **kwargs: stand_in(
            q, k, v, module.layout.index("h"), return_lse
        )

    def of_recurrence(module: DistributedRecurrence):
        def forward(documents=None, seq_lens=None, **arguments):
            tokens, _, _ = module.sort(arguments)
            mixed = sum(x.flatten(2).mean(2) for x in tokens.values())
            return tokens[module.value] + mixed[..., None, None]

        return forward

    def of_layer(layer: SequenceParallelAttention):
        def forward(x, *args, **kwargs):
            q_proj, k_proj, v_proj, o_proj, _, _ = layer._used()
            q = q_proj(x).unflatten(-1, (layer.num_heads, -1))
            k, v = (p(x).unflatten(-1, (layer.num_kv_heads, -1)) for p in (k_proj, v_proj))
            return o_proj(stand_in(q, k, v, 2).flatten(2))

        return forward

    makes = dict(zip(_KINDS, (of_module, of_recurrence, of_layer), strict=True))
    replaced = []
    try:
        for m in model.modules():
            if isinstance(m, _KINDS):
                replaced.append((m, vars(m).get("forward")))
                (make,) = (make for kind, make in makes.items() if isinstance(m, kind))
                vars(m)["forward"] = make(m)
        with _InPlaceOfTheOp():
            yield
    finally:
        for m, forward in replaced:
            del vars(m)["forward"]
            if forward is not None:
                vars(m)["forward"] = forward


class _TokensBefore(TorchFunctionMode):
    """Stands in for :func:`deepsp.previous_tokens`. A run of the first tokens gets zeros; one of
    later tokens those of the run of all."""

    def __init__(self):
        super().__init__()
        self.inputs: list[Tensor] = []
        """The tokens that each call got."""
        self.of_all: list[Tensor] = []
        self.begin = 0

    def of_part(self, of_all: list[Tensor], begin: int) -> None:
        self.inputs, self.of_all, self.begin = [], of_all, begin

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "").removesuffix(".default")
        if not name.startswith("previous_tokens"):
            return func(*args, **(kwargs or {}))
        if name.endswith("wait"):
            return args[0]
        x, n, dim = args[:3]
        call, first = len(self.inputs), max(0, self.begin - n)
        self.inputs.append(x)
        shape = list(x.shape)
        shape[dim] = n
        before = x.new_zeros(shape)
        if self.begin > 0:
            recorded = self.of_all[call].narrow(dim, first, self.begin - first)
            before.narrow(dim, n - recorded.size(dim), recorded.size(dim)).copy_(recorded)
        return before


class _InPlaceOfTheOp(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        ops = torch.ops.deepsp
        plain, with_lse = (
            (op, op.default)
            for op in (ops.distributed_attention, ops.distributed_attention_with_lse)
        )
        if func not in (*plain, *with_lse):
            return func(*args, **kwargs)
        out = stand_in(*args[:3], kwargs["layout"].index("h"), return_lse=True)
        out, lse = (x.contiguous() for x in out)
        return (out, lse) if func in with_lse else out
