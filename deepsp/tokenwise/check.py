"""Whether a model works on each token alone, but for attention through deepsp.

Dry runs of one row say so, without attention: what stands in for it works on each token, so in a
right model nothing that one token has may be seen in another. A batch holds the row, the row with
another token in a few places, and the row with NaN for these tokens' embeddings: NaN passes through
whatever depends on it, however little. Where something shows, a further run finds the innermost
module that got what is each token's own, and returned what isn't.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.overrides import TorchFunctionMode

from deepsp.attention.layer import SequenceParallelAttention
from deepsp.attention.module import DistributedAttention

_LEAST = 4  # tokens of an example


def check(model: nn.Module, example: Tensor | Sequence[Any] | Mapping[str, Any]) -> None:
    """Raises unless ``model`` computes the same on sharded sequences as in one process: all of it
    must work on each token alone, but for attention through deepsp
    (:class:`deepsp.DistributedAttention`, :class:`deepsp.SequenceParallelAttention`,
    :func:`deepsp.distributed_attention`). ::

        deepsp.check(model, (batch["input_ids"], batch["position_ids"], seq_lens))

    Runs the model on one row of the example, two to four times: without gradients, without dropout
    and attention, with its hooks and the collectives that its weights need, so every rank calls it.
    Random number generators, buffers and modes are restored. Call it once, before training.

    Args:
        model: a module; how it is called is ``example``'s business.
        example: the arguments of a call: a tuple, a mapping of keyword arguments, or one tensor.
            Tensors [B, S_r, ...], [1, S_r, ...] and [S_r], of the first one's batch and length, are
            per token. Leave labels out: a loss is made of all tokens. A short example costs less.

    Raises:
        ValueError: a module mixes tokens (by name and type); an output is computed from several
            tokens, such as a pooled one; outputs depend on how many tokens a rank has, or on their
            places, as where a model makes its own positions; the model couldn't be run, or the
            example has fewer than four tokens.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    _Check(model, *_arguments(example)).run()


class Probe:
    """A model on a batch of changed rows.

    Args:
        model: whose forward is run.
        length: the number of tokens of a row.
        places: the tokens that are changed: row ``1 + i`` has another token in ``places[i]``, row
            ``1 + len(places) + i`` NaN.
    """

    def __init__(self, model: nn.Module, length: int, places: Sequence[int]):
        self.model, self.length, self.places = model, length, tuple(places)
        self.of = type(model).__name__
        self.count = 1 + 2 * len(self.places)
        self.dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}

    def check_batch_norms(self) -> None:
        """In evaluation, as the probes run, they work on each token alone."""
        for name, m in self.model.named_modules():
            alone = isinstance(m, SyncBatchNorm) or not isinstance(m, _BatchNorm)
            if not alone and (m.training or m.running_mean is None):
                raise ValueError(
                    f"{name or 'forward'} ({type(m).__name__}) of {self.of} mixes tokens: in "
                    "training it normalizes by the statistics of a batch, and a rank would take "
                    "those of its own tokens; call its eval(), or use another norm"
                )

    def by_token(self, tensor: Tensor) -> Tensor | None:
        """[rows, tokens, ...]; None if that isn't what it is of."""
        shape, b, t = list(tensor.shape), self.count, self.length
        if b in shape and t in shape and (b != t or shape.count(b) > 1):
            rows = shape.index(b)
            tokens = shape.index(t, rows + 1 if b == t else 0)
            return tensor.movedim((rows, tokens), (0, 1)).reshape(b, t, -1)
        if b * t in shape:
            return tensor.movedim(shape.index(b * t), 0).reshape(b, t, -1)
        return None

    def mixed(self, rows: Tensor) -> bool:
        """Whether other tokens than the one that was changed are others in a row than in the
        first."""
        rows = rows if rows.is_floating_point() else rows.double()
        border = self.tolerance(rows[0])
        for row, place in enumerate(self.places * 2, 1):
            clean, changed = (torch.cat([x[:place], x[place + 1 :]]) for x in (rows[0], rows[row]))
            if bool((changed.isnan() & ~clean.isnan()).any()):
                return True
            # Without NaN: what was chosen by comparing tokens, or follows from their ids.
            if bool(((changed - clean).abs() > border).any()):
                return True
        return False

    def tolerance(self, x: Tensor) -> float:
        """What may be rounding, which differs with the sizes of products (of experts, say)."""
        rough = any(torch.finfo(t).eps > 1e-6 for t in self.dtypes)
        finite = x[x.isfinite()].abs()
        most = finite.max().item() if finite.numel() else 0.0
        return most * (0.1 if rough else 5e-3)

    def who(self, call: Callable[[list], Any], output: str) -> str:
        """Which module mixes tokens. ``call(hooks)`` runs the model, and removes the hooks."""
        mixing: list[str] = []

        def after(module, args, kwargs, result):
            given = [rows for _, x in tensors_in((args, kwargs))
                     if (rows := self.by_token(x)) is not None]  # fmt: skip
            returned = [
                rows for _, x in tensors_in(result) if (rows := self.by_token(x)) is not None
            ]
            if not mixing and not any(map(self.mixed, given)) and any(map(self.mixed, returned)):
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
        """The innermost module in whose forward an error was raised."""
        inner, trace = self.model, error.__traceback__
        while trace is not None:
            if isinstance(module := trace.tb_frame.f_locals.get("self"), nn.Module):
                inner = module
            trace = trace.tb_next
        name = name_in(self.model, inner)
        return self.of if inner is self.model else f"{name} ({type(inner).__name__}) of {self.of}"


def stand_in(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """In place of attention: on each token alone, it keeps all that the token's query, key and
    value have. heads: their dimension."""
    readers = query.size(heads) // key.size(heads)
    key, value = (x.repeat_interleave(readers, heads) for x in (key, value))
    return value + (query.mean(-1, keepdim=True) + key.mean(-1, keepdim=True))


def tensors_in(value: Any, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    """The tensors of what a module takes or returns, by name."""
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
    """Evaluation without gradients; modes, random numbers, buffers and what modules remember in
    numbers and tensors (the longest sequence, say) are as before then."""
    modules = list(model.modules())
    # Not by eval(), which some modules do more in.
    modes = [m.training for m in modules]
    buffers = [{n: (b, b._version, b.clone()) for n, b in m._buffers.items() if b is not None}
               for m in modules]  # fmt: skip
    remembered = [{n: v for n, v in vars(m).items()
                   if isinstance(v, (bool, int, float, str, Tensor))} for m in modules]  # fmt: skip
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    try:
        for m in modules:
            m.training = False
        with torch.no_grad(), torch.random.fork_rng(list(devices)):
            yield
    finally:
        for m, mode, of_module, known in zip(modules, modes, buffers, remembered, strict=True):
            for name, (buffer, version, content) in of_module.items():
                if buffer._version != version:
                    with torch.no_grad():
                        buffer.copy_(content)
                m._buffers[name] = buffer
            vars(m).update(known)
            m.training = mode


# ---- a model of the user's own


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
        """Of an argument: of a batch, or the same for all its rows."""
        if not isinstance(x, Tensor) or x.dim() == 0:
            return None
        batch, length = self.shape
        if x.dim() == 1:
            return 0 if x.size(0) == length else None
        return 1 if x.size(1) == length and x.size(0) in (1, batch) else None

    def run(self) -> None:
        first = self.values[self.tokens][:1]
        rows = first.repeat(self.count, *[1] * (first.dim() - 1))
        for row, place in enumerate(self.places, 1):
            others = (first[0] != first[0, place]).reshape(self.length, -1).any(1).nonzero()
            if len(others):
                rows[row, place] = first[0, others[-1, 0]]
        ids = rows.clone()
        if rows.is_floating_point():
            self._poison(rows)
        values = [self._of_row(x) for x in self.values]
        values[self.tokens] = rows
        self.check_batch_norms()
        with as_it_was(self.model), _without_attention(self.model):
            try:
                output = self._call(values, ids)
            except Exception:  # NaN may be what it can't take
                values[self.tokens], ids = ids, None
                output = self._call(values, ids)
            outputs = [(name, x, self.by_token(x)) for name, x in tensors_in(output)]
            for name, _, of_tokens in outputs:
                if of_tokens is not None and self.mixed(of_tokens):
                    raise ValueError(self.who(lambda h: self._call(values, ids, h), name))
            for name, x, of_tokens in outputs:
                if of_tokens is None:
                    raise ValueError(
                        self.pooled(name, x) + ". Leave labels out of the example: a loss is made "
                        "of all tokens, by deepsp.cross_entropy"
                    )
            self._check_tail([name for name, _, _ in outputs], [x for _, _, x in outputs])

    def _check_tail(self, names: list[str], full: list[Tensor]) -> None:
        """The row's last tokens alone, with whatever was passed for them."""
        begin = self.length // 2
        values = []
        for x in self.values:
            if (dim := self._token_dim(x)) is not None:
                x = self._of_row(x).narrow(dim, begin, self.length - begin)
            elif isinstance(x, (tuple, list)) and len(x) == self.size and self._is_mine(x):
                x = [n - begin if p == self.rank else n for p, n in enumerate(x)]
            values.append(x)
        self.length -= begin
        tail = [self.by_token(x) for _, x in tensors_in(self._call(values, None))]
        for name, then, now in zip(names, full, tail, strict=True):
            if now is None or now.shape[2:] != then.shape[2:]:
                continue
            then = then[0, begin:].double()
            off = (now[0].double() - then).abs() > self.tolerance(then)
            # Of most tokens: a few may have been sent to other experts, by rounding.
            if off.any(-1).double().mean() > 0.5:
                raise ValueError(
                    f"{self.of} returns another {name} for some of the tokens alone than for all "
                    "of them: it makes positions itself (torch.arange(S), say), which begin at 0 "
                    "on every rank, or depends on the number of tokens in another way; take "
                    'position_ids, pass batch["position_ids"] of deepsp.shard_batch, and put them '
                    "into the example"
                )

    def _is_mine(self, x: Sequence) -> bool:
        return all(isinstance(n, int) for n in x) and x[self.rank] == self.length

    def _of_row(self, x: Any) -> Any:
        """An argument for as many rows as are run."""
        if not isinstance(x, Tensor) or x.dim() < 2 or x.size(0) != self.shape[0]:
            return x
        return x[:1].repeat(self.count, *[1] * (x.dim() - 1))

    def _poison(self, x: Tensor) -> None:
        for row, place in enumerate(self.places, 1 + len(self.places)):
            x[row, place] = torch.nan

    def _call(self, values: list, ids: Tensor | None, hooks: Sequence = ()) -> Any:
        """ids: embeddings of these are poisoned."""

        def poison(module, args, output):
            if args and isinstance(args[0], Tensor) and torch.equal(args[0], ids):
                output = output.clone()
                self._poison(output)
                return output

        handles = list(hooks)
        if ids is not None and not ids.is_floating_point():
            handles += [
                m.register_forward_hook(poison, prepend=True)
                for m in self.model.modules()
                if isinstance(m, nn.Embedding)
            ]
        args = [x for n, x in zip(self.names, values, strict=True) if isinstance(n, int)]
        kwargs = {n: x for n, x in zip(self.names, values, strict=True) if isinstance(n, str)}
        try:
            with torch.compiler.set_stance("force_eager"):
                return self.model(*args, **kwargs)
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(self.not_run(error)) from error
        finally:
            for handle in handles:
                handle.remove()


_KINDS = (DistributedAttention, SequenceParallelAttention)


@contextlib.contextmanager
def _without_attention(model: nn.Module) -> Iterator[None]:
    """The stand-in in place of deepsp's modules and its function."""

    def of_module(module: DistributedAttention):
        return lambda q, k, v, *args, **kwargs: stand_in(q, k, v, module.layout.index("h"))

    def of_layer(layer: SequenceParallelAttention):
        def forward(x, *args, **kwargs):
            q_proj, k_proj, v_proj, o_proj, _, _ = layer._used()
            q = q_proj(x).unflatten(-1, (layer.num_heads, -1))
            k, v = (p(x).unflatten(-1, (layer.num_kv_heads, -1)) for p in (k_proj, v_proj))
            return o_proj(stand_in(q, k, v, 2).flatten(2))

        return forward

    replaced = []
    try:
        for m in model.modules():
            if isinstance(m, _KINDS):
                replaced.append((m, vars(m).get("forward")))
                of = of_module if isinstance(m, DistributedAttention) else of_layer
                vars(m)["forward"] = of(m)
        with _InPlaceOfTheOp():
            yield
    finally:
        for m, forward in replaced:
            del vars(m)["forward"]
            if forward is not None:
                vars(m)["forward"] = forward


class _InPlaceOfTheOp(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        op = torch.ops.deepsp.distributed_attention
        if func in (op, op.default):
            return stand_in(*args[:3], kwargs["layout"].index("h")).contiguous()
        return func(*args, **kwargs)
