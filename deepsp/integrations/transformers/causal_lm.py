"""The loss of a causal language model of transformers, without its logits.

The model is called unchanged, by its wrappers (DDP, FSDP, PEFT), except that its head has another
forward, which computes the loss from the hidden states and returns no logits. So the code before
the head is the model's own, and weights that are gathered for a forward are gathered. What the
model does after the head, a cap or a factor, must be known: see :func:`_after_head`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from deepsp.integrations.transformers import calls
from deepsp.integrations.transformers.check import model_in
from deepsp.integrations.transformers.forward import calling
from deepsp.loss.cross_entropy import linear_cross_entropy
from deepsp.memory.tiling.tile import untiled
from deepsp.ranks.groups import Group, is_dtensor, member_of
from deepsp.weights.partitioned import full_shape

_AFTER_HEAD = "_deepsp_after_head"
"""The attribute of a model with what it does to its logits."""

_CAPS = ("final_logit_softcapping",)
_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier")
"""Names in configurations. A model may multiply by a factor, divide by it, or not use it."""


def causal_lm_loss(
    model: nn.Module,
    batch: Mapping[str, Any],
    group: Group = None,
    *,
    reduction: str = "mean",
    num_valid_tokens: int | Tensor | None = None,
    average_gradients: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """The next-token loss of a causal language model of transformers on a sharded batch, without
    its logits: :func:`deepsp.linear_cross_entropy` in place of the model's head.

    The head is ``model.get_output_embeddings()``: its weight may be tied or frozen (then no
    gradient is computed for it) and it may have a bias. Softcaps and factors of logits (Gemma,
    Cohere, Granite) are part of the loss. They are read from the model's configuration and tried
    out on its first call: the model's forward, with given logits in place of the head's, must
    return what the loss computes from them. Layers don't run for that.

    Args:
        model: a causal language model of transformers, or PEFT, DDP, FSDP or
            :func:`deepsp.shard_parameters` around one.
        batch: the local batch of :func:`deepsp.shard_batch`, with ``shift_labels``. Everything else
            is passed to the model.
        group: the sequence group.
        reduction: "mean" over the valid tokens of all ranks, or their "sum".
        num_valid_tokens: the divisor of the mean, if not the number of valid tokens of this batch:
            the number in all micro-batches of a step, over the group.
        average_gradients: as in :func:`deepsp.cross_entropy`.
        label_smoothing: 0 to 1.
        z_loss: as in :func:`deepsp.cross_entropy`.
        token_weights: [B, S_r], as in :func:`deepsp.cross_entropy`.
        chunk_tokens: as in :func:`deepsp.linear_cross_entropy`.

    Returns:
        A scalar, the same on every rank: float32, or float64 for float64. Gradients are partial, as
        those of :func:`deepsp.cross_entropy`.

    Raises:
        ValueError: the batch has no ``shift_labels``, or has ``labels``; the model isn't one of
            transformers, has no head or another one than ``nn.Linear`` (with LoRA, quantized), adds
            a loss of its own (``output_router_logits``), attends to this rank's tokens only, or
            changes its logits in an unknown way; arguments that
            :func:`deepsp.linear_cross_entropy` refuses.
    """
    labels = _labels(batch)
    if num_valid_tokens is not None:
        if reduction != "mean":
            raise ValueError(
                f"expected num_valid_tokens with reduction='mean' only, got {reduction!r}; leave "
                "it out, and divide the sum yourself"
            )
        if not isinstance(num_valid_tokens, Tensor) and not num_valid_tokens > 0:
            raise ValueError(f"expected num_valid_tokens > 0, got {num_valid_tokens}")
        reduction = "sum"
    inner = _causal_lm(model, batch)
    inputs = {name: x for name, x in batch.items() if name != "shift_labels"}
    if _takes(inner, "use_cache"):
        inputs.setdefault("use_cache", False)  # it would hold this rank's tokens only
    if member_of(group)[1] > 1 and _is_attention_of_theirs(inner):
        calls.check_alone(inner, inputs)
    with LossInHead(
        inner,
        labels,
        group=group,
        reduction=reduction,
        label_smoothing=label_smoothing,
        average_gradients=average_gradients,
        chunk_tokens=chunk_tokens,
        z_loss=z_loss,
        token_weights=token_weights,
    ) as in_head:
        output = model(**inputs)
    loss = in_head.of(output)
    return loss if num_valid_tokens is None else loss / num_valid_tokens


class LossInHead:
    """A context in which a model's head computes the loss in place of logits.

    Args:
        model: the model of transformers.
        labels: [B, S_r], shifted.
        loss: takes hidden states, weight, labels, bias, and ``how`` with softcap and scale.
        how: further arguments of :func:`deepsp.linear_cross_entropy`, or of ``loss``.

    Raises:
        ValueError: the head isn't a plain ``nn.Linear``, or what the model does to its logits isn't
            known.
    """

    def __init__(
        self, model: nn.Module, labels: Tensor, loss: Callable = linear_cross_entropy, **how: Any
    ):
        self.model, self.labels, self.loss, self.how = model, labels, loss, how
        self.head = _head(model)
        self.how["softcap"], self.how["scale"] = _after_head(model, self.head)
        self.losses: list[Tensor] = []

    def __enter__(self) -> LossInHead:
        self.context = _in_place_of(self.head, self._forward)
        self.context.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.context.__exit__(*error)

    def _forward(self, hidden: Tensor) -> Tensor:
        head, labels = self.head, self.labels.to(hidden.device)
        if is_dtensor(head.weight):
            raise ValueError(
                f"expected the head of {type(self.model).__name__} to have its full weight in "
                "forward, got a DTensor, as tensor parallelism makes it; leave the head out of the "
                "plan, or shard it with fully_shard or deepsp.shard_parameters"
            )
        loss = self.loss(hidden, head.weight, labels, head.bias, **self.how)
        self.losses.append(loss)
        # Logits without classes. They depend on the loss, so that wrappers which search a model's
        # output for its part in backward (DDP, FSDP) find all of it. A clone, because FSDP's hook
        # on a view would be lost if the model writes in place.
        return loss.to(hidden.dtype).expand(*hidden.shape[:-1], 1)[..., :0].clone()

    def of(self, output: Any) -> Tensor:
        """The loss, from what the model returned."""
        if len(self.losses) != 1:
            raise ValueError(
                f"expected {type(self.model).__name__} to call its head once in a forward, got "
                f"{len(self.losses)} calls; use deepsp.cross_entropy on its logits"
            )
        return self.losses[0] + _logits(output).sum().to(self.losses[0].dtype)  # an empty sum: 0


def _labels(batch: Mapping[str, Any]) -> Tensor:
    if not isinstance(batch, Mapping):
        raise ValueError(
            "expected batch to be what deepsp.shard_batch returned first, a dictionary, got "
            f"{type(batch).__name__}"
        )
    labels = batch.get("shift_labels")
    if batch.get("labels") is not None or not isinstance(labels, Tensor):
        raise ValueError(
            "expected batch to have shift_labels and no labels, as deepsp.shard_batch returns it, "
            f"got {sorted(batch)}; pass the full batch, with labels, to deepsp.shard_batch"
        )
    return labels


def _causal_lm(model: nn.Module, batch: Mapping[str, Any]) -> nn.Module:
    """The model of transformers in its wrappers. Raises if it adds a loss of its own."""
    base = model_in(model)
    configs = (base.config, base.config.get_text_config())
    wanted = batch.get("output_router_logits")
    if wanted or (wanted is None and any(getattr(c, "output_router_logits", 0) for c in configs)):
        raise ValueError(
            f"expected output_router_logits of {type(base).__name__} to be False, got True: the "
            "auxiliary loss would be that of this rank's tokens only, and isn't part of this loss; "
            "set model.config.get_text_config().output_router_logits = False"
        )
    return base


def _head(model: nn.Module) -> nn.Linear:
    cls, head = type(model).__name__, model.get_output_embeddings()
    if head is None:
        raise ValueError(
            f"expected {cls} to have a head, model.get_output_embeddings(), got None; pass a model "
            "for causal language modeling, such as AutoModelForCausalLM makes"
        )
    # Sharded parameters give the head a subclass, with nn.Linear's forward.
    plain = isinstance(head, nn.Linear) and untiled(type(head)).forward is nn.Linear.forward
    if not plain or "forward" in vars(head):
        name = f"{type(head).__module__}.{type(head).__qualname__}"
        what = name if not plain else "one whose forward was replaced"
        raise ValueError(
            f"expected the head of {cls} to be a plain nn.Linear, got {what}: its logits aren't "
            "those of its weight alone; leave the head without adapters and quantization, or use "
            "deepsp.cross_entropy on the model's logits"
        )
    return head


def _takes(model: nn.Module, name: str) -> bool:
    declared = inspect.signature(model.forward).parameters
    return name in declared or any(p.kind == p.VAR_KEYWORD for p in declared.values())


def _is_attention_of_theirs(model: nn.Module) -> bool:
    """Whether attention is known to see this rank's tokens only; users may register functions."""
    name = model.config._attn_implementation
    return name in (None, "eager", "sdpa", "flex_attention") or "flash" in name


def _logits(output: Any) -> Tensor:
    return output.logits if hasattr(output, "logits") else output[0]


@contextlib.contextmanager
def _in_place_of(module: nn.Module, forward: Callable) -> Iterator[None]:
    """Replaces the module's forward; its hooks run around the new one."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


# ------------------------------------------------------------------------------ after the head


class _Hidden:
    """A base model's output with hidden states only."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index):
        return (self.last_hidden_state,)[index]


def _after_head(model: nn.Module, head: nn.Linear) -> tuple[float | None, float]:
    """The softcap and the scale that the model applies to its head's output.

    Runs the model's forward with hidden states in place of its base model's and with given numbers
    in place of its head's. No attention runs: two tokens are enough, the same on every rank,
    however attention is sharded. All classes are used, since some models treat some of them
    differently.

    Raises:
        ValueError: no softcap or factor in the configuration explains the model's logits.
    """
    config = model.config.get_text_config()
    named = {n: getattr(config, n, None) for n in (*_CAPS, *_FACTORS)}
    numbers = {n: float(x) for n, x in named.items() if isinstance(x, (int, float)) and x}
    key = (numbers, full_shape(head.weight))
    if getattr(model, _AFTER_HEAD, (None, None))[0] == key:
        return getattr(model, _AFTER_HEAD)[1]
    raw, logits = _tried(model, head)
    eps = max(torch.finfo(x.dtype).eps for x in (raw, logits))
    caps = [None, *(numbers[n] for n in _CAPS if n in numbers)]
    factors = {n: (numbers[n], 1 / numbers[n]) for n in _FACTORS if n in numbers}
    for cap, scale in product(caps, (1.0, *(f for both in factors.values() for f in both))):
        expected = raw.double() * scale
        if cap is not None:
            expected = cap * (expected / cap).tanh()
        if torch.allclose(logits.double(), expected, rtol=8 * eps, atol=8 * eps):
            setattr(model, _AFTER_HEAD, (key, (cap, scale)))
            return cap, scale
    raise ValueError(
        f"{type(model).__name__} changes its logits in a way that isn't known: not by a softcap or "
        f"a factor that its configuration names ({numbers or 'none'}); use deepsp.cross_entropy on "
        "its logits"
    )


def _tried(model: nn.Module, head: nn.Linear) -> tuple[Tensor, Tensor]:
    """Numbers in place of the head's output, and the logits that the model returns for them."""
    calls.ensure_checked(model)  # the check runs the layers, which are replaced below
    cls, outputs = type(model).__name__, []
    weight = head.weight  # only its dtype and device; it may be sharded
    generator = torch.Generator().manual_seed(0)

    def forward_of_head(hidden: Tensor) -> Tensor:
        # Small and large numbers, on either side of any cap.
        numbers = torch.randn(*hidden.shape[:-1], head.out_features, generator=generator)
        numbers = numbers * torch.tensor([3.0, 60.0])[:, None]
        outputs.append(numbers.to(hidden.device, hidden.dtype))
        return outputs[-1].clone()

    hidden = torch.randn(1, 2, head.in_features, generator=generator)
    hidden = hidden.to(weight.device, weight.dtype)
    base = {model.base_model, getattr(model, "get_decoder", lambda: None)()} - {model, None}
    arguments = {"input_ids": torch.zeros(1, 2, dtype=torch.int64, device=weight.device)}
    if _takes(model, "use_cache"):
        arguments["use_cache"] = False
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        # A check's call: no decoder's tokens are cut.
        stack.enter_context(calling(inherits=False, is_check=True))
        stack.enter_context(_in_place_of(head, forward_of_head))
        for module in base:
            stack.enter_context(_in_place_of(module, lambda *_, **__: _Hidden(hidden)))
        try:
            logits = _logits(model._call_impl(**arguments))
        except Exception as error:
            raise ValueError(
                f"{cls} couldn't be run with given hidden states and logits, to see what it does "
                f"to them: {type(error).__name__}: {error}; use deepsp.cross_entropy on its logits"
            ) from error
    if len(outputs) != 1 or outputs[0].shape != logits.shape:
        raise ValueError(
            f"expected {cls} to return what its head made of its base model's hidden states, got "
            f"{len(outputs)} calls of the head, and logits of shape {list(logits.shape)}; use "
            "deepsp.cross_entropy on its logits"
        )
    return outputs[0], logits
