"""Dry runs in which a token is changed, or NaN, to find outputs of other tokens that depend on it,
and writes to inputs and buffers.

For models (:func:`deepsp.check`, and the check of transformers' models) and for tiled modules. All
state is restored afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from deepsp.ranks.randomness import draws_kept


class Probe:
    """Runs a model on a batch of changed rows.

    Args:
        model: the model.
        length: the number of tokens of a row.
        places: the changed tokens: row ``1 + i`` has another token in ``places[i]``, row
            ``1 + len(places) + i`` NaN.
    """

    def __init__(self, model: nn.Module, length: int, places: Sequence[int]):
        self.model, self.length, self.places = model, length, tuple(places)
        self.of = type(model).__name__
        self.count = 1 + 2 * len(self.places)
        self.dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}

    def check_batch_norms(self) -> None:
        """Raises for batch norms that mix tokens: the probes run in evaluation, where none do."""
        for name, m in self.model.named_modules():
            alone = isinstance(m, SyncBatchNorm) or not isinstance(m, _BatchNorm)
            if not alone and (m.training or m.running_mean is None):
                raise ValueError(
                    f"{name or 'forward'} ({type(m).__name__}) of {self.of} mixes tokens: in "
                    "training it normalizes by the statistics of a batch, and a rank would take "
                    "those of its own tokens; call its eval(), or use another norm"
                )

    def by_token(self, tensor: Tensor) -> Tensor | None:
        """The tensor as [rows, tokens, ...]; None if it doesn't have these dimensions."""
        shape, b, t = list(tensor.shape), self.count, self.length
        if b in shape and t in shape and (b != t or shape.count(b) > 1):
            rows = shape.index(b)
            tokens = shape.index(t, rows + 1 if b == t else 0)
            return tensor.movedim((rows, tokens), (0, 1)).reshape(b, t, -1)
        if b * t in shape:
            return tensor.movedim(shape.index(b * t), 0).reshape(b, t, -1)
        return None

    def mixed(self, rows: Tensor) -> bool:
        """Whether a row differs from the first one in other tokens than the changed one."""
        places = enumerate(self.places * 2, 1)
        return any(others_differ(rows[0], rows[row], place, self.dtypes) for row, place in places)

    def mostly_differ(self, then: Tensor, now: Tensor, feature_dims: Sequence[int] = (-1,)) -> bool:
        """Whether most tokens differ. A few may: rounding may send them to other experts."""
        return bool(differ(then, now, self.dtypes).any(feature_dims).double().mean() > 0.5)

    def some_differ(self, then: Tensor, now: Tensor) -> bool:
        """Whether a token differs."""
        return bool(differ(then, now, self.dtypes).any())

    def poison(self, x: Tensor) -> Tensor:
        """A copy of a batch, with NaN for the changed tokens in its last rows."""
        x = x.clone()
        for row, place in enumerate(self.places, 1 + len(self.places)):
            x[row, place] = torch.nan
        return x

    def run(
        self,
        call: Callable[[], Any],
        hooks: Sequence = (),
        embeddings: Sequence[nn.Module] = (),
        is_batch: Callable[[tuple, Any], bool] = lambda args, output: True,
    ) -> Any:
        """Runs ``call`` and returns its result. Hooks put NaN into the outputs of ``embeddings``
        for the changed tokens, if ``is_batch(arguments, output)`` is true. Removes all hooks."""

        def poison(module, args, output):
            return self.poison(output) if is_batch(args, output) else None

        handles = [*hooks, *(m.register_forward_hook(poison, prepend=True) for m in embeddings)]
        try:
            return call()
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(self.not_run(error)) from error
        finally:
            for handle in handles:
                handle.remove()

    def outputs(
        self, output: Any, call: Callable[[list], Any], may_mix: bool = False
    ) -> list[tuple[str, Tensor, Tensor | None]]:
        """Names, tensors, and tensors by token of an output. ``call(hooks)`` runs the model again.

        Raises:
            ValueError: an output mixes tokens, and may not.
        """
        outputs = [(name, x, self.by_token(x)) for name, x in tensors_in(output)]
        for name, _, rows in outputs:
            if rows is not None and not may_mix and self.mixed(rows):
                raise ValueError(self.who(call, name))
        return outputs

    def who(self, call: Callable[[list], Any], output: str) -> str:
        """A text that names the module that mixes tokens. ``call(hooks)`` runs the model, and
        removes the hooks."""
        mixing: list[str] = []

        def after(module, args, kwargs, result):
            inputs = [
                rows
                for _, x in tensors_in((args, kwargs))
                if (rows := self.by_token(x)) is not None
            ]
            returned = [
                rows for _, x in tensors_in(result) if (rows := self.by_token(x)) is not None
            ]
            if not mixing and not any(map(self.mixed, inputs)) and any(map(self.mixed, returned)):
                mixing.append(f"{name_in(self.model, module)} ({type(module).__name__})")

        call([m.register_forward_hook(after, with_kwargs=True) for m in self.model.modules()])
        who = mixing[0] if mixing else "something"
        return (
            f"{who} of {self.of} mixes tokens, and isn't attention that goes through deepsp: a "
            f"change of one token changes the {output} of others, which a rank with its own tokens "
            "only can't compute; such layers aren't supported"
        )

    def pooled(self, name: str, tensor: Tensor) -> str:
        return (
            f"expected {name} of {self.of} to have shape [B, S, ...], each token's own, got "
            f"{list(tensor.shape)}: a rank would compute it from its own tokens only; leave it "
            "out, or compute it from hidden states yourself"
        )

    def not_run(self, error: Exception) -> str:
        return (
            f"{self._raising(error)} couldn't be run on {self.length} tokens to check that it "
            f"works on each token alone: {type(error).__name__}: {error}"
        )

    def _raising(self, error: Exception) -> str:
        """The innermost module whose forward raised an error."""
        inner, trace = self.model, error.__traceback__
        while trace is not None:
            if isinstance(module := trace.tb_frame.f_locals.get("self"), nn.Module):
                inner = module
            trace = trace.tb_next
        name = name_in(self.model, inner)
        return self.of if inner is self.model else f"{name} ({type(inner).__name__}) of {self.of}"


def stand_in(query: Tensor, key: Tensor, value: Tensor, heads: int, return_lse: bool = False):
    """A function of each token alone, in place of attention. It depends on the token's query, key
    and value. heads: their dimension. return_lse: with a number for each query and head."""
    readers = query.size(heads) // key.size(heads)
    key, value = (x.repeat_interleave(readers, heads) for x in (key, value))
    out = value + (query.mean(-1, keepdim=True) + key.mean(-1, keepdim=True))
    return (out, (query * key).mean(-1)) if return_lse else out


def tensors_in(value: Any, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    """The tensors in a module's inputs or outputs, by name."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors_in(inner, str(key))
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from tensors_in(inner, name)


def name_in(model: nn.Module, module: nn.Module) -> str:
    name = next((n for n, m in model.named_modules() if m is module), "")
    return name or "forward"


@contextlib.contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Evaluation without gradients, after which all is as before: :func:`restored`."""
    with restored(model), torch.no_grad(), evaluation(model):
        yield


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restores random numbers, buffers, and numbers, tensors and lists in modules' attributes (the
    longest sequence so far, say, or the states of metrics), and attributes that are None."""
    modules, buffers = list(model.modules()), Buffers(model)
    kinds = (type(None), bool, int, float, str, Tensor, list)
    remembered = [{n: v for n, v in vars(m).items() if isinstance(v, kinds)} for m in modules]
    values = [v for of_module in remembered for v in of_module.values()]
    lists = [(v, list(v)) for v in values if isinstance(v, list)]
    tensors = [(v, version(v), v.clone()) for v in values if isinstance(v, Tensor)]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    try:
        with draws_kept(list(devices)):
            yield
    finally:
        buffers.restore()
        for m, attributes in zip(modules, remembered, strict=True):
            vars(m).update(attributes)
        for value, content in lists:
            value[:] = content
        with torch.no_grad():
            for x, then, content in tensors:
                if _is_written(x, then, content):
                    x.copy_(content)


@contextlib.contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode. Doesn't call ``eval()``, which some modules override."""
    modes = [(m, m.training) for m in model.modules()]
    try:
        for m, _ in modes:
            m.training = False
        yield
    finally:
        for m, mode in modes:
            m.training = mode


class Buffers:
    """A copy of a model's buffers, to find and undo writes."""

    def __init__(self, model: nn.Module):
        self._remembered = [
            (owner, name, x, version(x), x.clone())
            for owner in model.modules()
            for name, x in owner._buffers.items()
            if x is not None
        ]

    def written(self) -> list[tuple[nn.Module, str]]:
        """The owners and names of the buffers that were written."""
        return [
            (owner, name)
            for owner, name, x, then, content in self._remembered
            if owner._buffers[name] is not x or _is_written(x, then, content)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        for owner, name, x, then, content in self._remembered:
            if _is_written(x, then, content):
                x.copy_(content)
            owner._buffers[name] = x


def version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _is_written(x: Tensor, then: int, content: Tensor) -> bool:
    """Compares contents, too: batch_norm changes no version."""
    if version(x) != then:
        return True
    return not (
        x.is_meta
        or isinstance(x, FakeTensor)
        or torch.allclose(x, content, rtol=0, atol=0, equal_nan=True)
    )


def is_rough(dtypes: Iterable[torch.dtype]) -> bool:
    """Whether rounding may send a few tokens to other experts."""
    return any(d.is_floating_point and torch.finfo(d).eps > 1e-6 for d in dtypes)


def differ(then: Tensor, now: Tensor, dtypes: Iterable[torch.dtype]) -> Tensor:
    """Where two outputs differ by more than rounding, or only the second one has NaN. Rounding
    depends on the sizes of products. ``dtypes``: of inputs and weights."""
    then, now = then.double(), now.double()
    finite = then[then.isfinite()].abs()
    border = (0.1 if is_rough(dtypes) else 5e-3) * (finite.max() if finite.numel() else 0.0)
    return (now.isnan() & ~then.isnan()) | ((now - then).abs() > border)


def others_differ(then: Tensor, now: Tensor, place: int, dtypes: Iterable[torch.dtype]) -> bool:
    """Whether tokens (dimension 0) other than the one in ``place`` differ. NaN shows what depends
    on a token; another token shows choices that compare tokens, or depend on their ids."""
    off = differ(then, now, dtypes)
    off[place] = False
    return bool(off.any())
