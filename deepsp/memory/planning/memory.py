"""Plans the memory of a training step on each rank, before it runs.

A step of the model with few layers runs on fake tensors, which have sizes and no data, so every op
of the model and of autograd is counted. The plan is for rank 0, which has the most tokens and
heads. The live bytes of each phase (forward, the loss, backward of the last and of the first layer)
grow linearly with the number of layers, and with the tokens where these are many; two runs give
each line. The peak is the largest phase."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
from torch import nn

from deepsp.memory.planning.fake_step import peaks_of_step

PARTS = ("parameters", "gradients", "optimizer states", "activations", "logits", "exchange buffers")
LEVERS = ("without_logits", "sharded", "tiled", "checkpoint", "offload")
"""By their cost in time: the head's product once more; gathers of weights, which can hide behind
compute; one more forward of the MLPs; one more forward of all, which includes that; transfers of
every layer's input."""

_TRACED = ("without_logits", "tiled", "checkpoint", "keep_attention")
"""What changes a step on fake tensors; what the others change is computed."""

_UNITS = {
    "": 1,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


@dataclass
class MemoryPlan:
    """What :func:`plan_memory` returns; ``print`` shows it as a table.

    Args:
        parts: bytes by part, at the peak.
        levers: by name, whether a lever is on.
        seq_len: the number of tokens of the full sequence.
        ranks: the number of ranks.
        phase: the phase of the peak.
        limit: in bytes, or None.
        longest: with a limit, the longest sequence that fits, in tokens.
        alternatives: with a limit, the plans of all settings that were tried, the cheapest first.
    """

    parts: dict[str, int]
    levers: dict[str, bool]
    seq_len: int
    ranks: int
    phase: str
    limit: int | None = None
    longest: int | None = None
    alternatives: list[MemoryPlan] = field(default_factory=list, repr=False)

    @property
    def total(self) -> int:
        """The peak in bytes."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the peak is within the limit; without a limit, True."""
        return self.limit is None or self.total <= self.limit

    def __str__(self) -> str:
        on = [name for name, used in self.levers.items() if used]
        lines = [
            f"{self.seq_len} tokens on {self.ranks} ranks, with {', '.join(on) or 'no levers'}; "
            f"the peak is in {self.phase}"
        ]
        lines += [f"  {name:<18}{n / 2**20:>12.1f} MiB" for name, n in self.parts.items()]
        lines.append(f"  {'total':<18}{self.total / 2**20:>12.1f} MiB")
        if self.limit is not None:
            fits = "fits in" if self.fits else "does not fit in"
            lines.append(f"  {fits} {self.limit / 2**20:.1f} MiB; longest: {self.longest} tokens")
        for plan in self.alternatives:
            on = [name for name, used in plan.levers.items() if used]
            lines.append(
                f"  {', '.join(on) or 'no levers'}: {plan.total / 2**20:.1f} MiB, at most "
                f"{plan.longest} tokens"
            )
        return "\n".join(lines)

    def plot(self, path) -> None:
        """Draws the parts of this plan, and of the alternatives, as stacked bars (matplotlib).

        Args:
            path: the file of the picture.
        """
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        plans = self.alternatives or [self]
        names = ["\n".join(n for n, used in p.levers.items() if used) or "none" for p in plans]
        figure, axes = pyplot.subplots(figsize=(1.6 * len(plans) + 3, 4), layout="constrained")
        bottom = [0.0] * len(plans)
        for part in PARTS:
            heights = [p.parts[part] / 2**30 for p in plans]
            axes.bar(names, heights, 0.6, bottom, label=part)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        if self.limit is not None:
            axes.axhline(self.limit / 2**30, color="black", linestyle="--", label="limit")
        axes.set(ylabel="peak memory of a rank, GiB", xlabel="levers")
        axes.legend(fontsize="small")
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def plan_memory(
    model: nn.Module | object,
    seq_len: int,
    ranks: int = 1,
    *,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
    without_logits: bool = False,
    sharded: bool = False,
    tiled: bool = False,
    checkpoint: bool = False,
    keep_attention: bool = False,
    offload: bool = False,
    kv_chunk: int | None = None,
    world: int | None = None,
    shard_dtype: torch.dtype | None = None,
    limit: int | str | None = None,
) -> MemoryPlan:
    """Predicts the peak memory of a training step with AdamW on each rank of a sequence group, for
    a causal language model of transformers with causal attention and no padding.

    Nothing is sent, and no weights are made. Tensors are counted, but not the idle memory of an
    allocator or NCCL. The AdamW is the one that updates one parameter at a time. With a limit it
    takes seconds, ten or so for a model of 8B parameters; a terminal shows a progress bar.

    Args:
        model: the model, or its configuration.
        seq_len: the number of tokens of the full sequence.
        ranks: the number of ranks of the sequence group.
        batch_size: the number of sequences.
        dtype: of parameters, gradients and optimizer states; None: the model's.
        without_logits: the loss is :func:`deepsp.causal_lm_loss`.
        sharded: parameters, gradients and optimizer states are sharded over ``world`` ranks (ZeRO
            3, FSDP); one layer's (or the largest parameter) is gathered at a time, in ``dtype``.
        tiled: the MLPs run in tiles (:func:`deepsp.tile_`).
        checkpoint: ``model.activation_checkpointing_enable()``.
        keep_attention: checkpoints keep attention's output (:func:`deepsp.checkpoint_policy`).
            Needs ``checkpoint``.
        offload: the layers' inputs, which checkpoints save, are offloaded
            (:class:`deepsp.offload`). Needs ``checkpoint``.
        kv_chunk: as in :func:`deepsp.distributed_attention`.
        world: where ``sharded``, the number of ranks that shards are spread over, a multiple of
            ``ranks``; None: ``ranks``.
        shard_dtype: where ``sharded``, the dtype of shards, their gradients and optimizer states,
            such as float32 with ``dtype=torch.bfloat16`` (FSDP2's mixed precision); None:
            ``dtype``.
        limit: bytes, or a string such as "80 GB". Levers are switched on until the step fits, in
            the order without_logits, sharded, tiled, checkpoint, offload. Those that are on stay
            on.

    Returns:
        A :class:`MemoryPlan`; with a limit, the cheapest setting that fits, or the last one, whose
        ``fits`` is False.

    Raises:
        ValueError: the model isn't a causal language model of transformers, ``offload`` or
            ``keep_attention`` without ``checkpoint`` or a limit, numbers that don't fit.
    """
    numbers = {"seq_len": seq_len, "ranks": ranks, "batch_size": batch_size}
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"expected {name} to be an int >= 1, got {value!r}")
    if seq_len < ranks:
        raise ValueError(f"expected seq_len >= {ranks}, a token for each rank, got {seq_len}")
    world = ranks if world is None else world
    if not isinstance(world, int) or isinstance(world, bool) or world < 1 or world % ranks:
        raise ValueError(f"expected world to be a multiple of ranks = {ranks}, got {world!r}")
    for name, used in (("offload", offload), ("keep_attention", keep_attention)):
        if used and not checkpoint and limit is None:
            raise ValueError(
                f"expected {name} with checkpoint=True, since it changes what checkpoints keep, "
                "got checkpoint=False; pass checkpoint=True"
            )
    config = _config_of(model)
    heads = getattr(config.get_text_config(), "num_attention_heads", None)
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    for what, number in (("num_attention_heads", heads), ("num_hidden_layers", layers)):
        if not isinstance(number, int) or number < 1:
            raise ValueError(
                f"expected {what} of {type(config).__name__} to be an int >= 1, got {number!r}; "
                "only models whose layers have attention can be planned"
            )
    if config.is_encoder_decoder:
        raise ValueError(
            f"expected a decoder alone, got {type(config).__name__} of an encoder and a decoder; "
            "its memory can't be planned"
        )
    if dtype is None:
        dtype = getattr(model, "dtype", None) or getattr(config, "dtype", None) or torch.float32
    wanted = {
        "without_logits": without_logits,
        "sharded": sharded,
        "tiled": tiled,
        "checkpoint": checkpoint,
        "keep_attention": keep_attention,
        "offload": offload,
    }
    runs = _Runs(config, dtype, ranks, batch_size, kv_chunk, world, shard_dtype or dtype)
    if limit is None:
        return runs.plan(seq_len, wanted)
    allowed, tried, on = _bytes(limit), [], dict(wanted)
    for name in _with_progress((None, *LEVERS)):
        if name is not None and (on[name] or (name == "sharded" and world == 1)):
            continue
        on = on if name is None else on | {name: True}
        if on["offload"] and not on["checkpoint"]:
            continue
        try:
            plan = runs.plan(seq_len, on, exact=False)
            if plan.total <= allowed and not any(p.fits for p in tried):
                plan = runs.plan(seq_len, on)
        except ValueError:
            if name != "tiled":
                raise
            on = on | {"tiled": False}  # the model has no MLPs that deepsp.tile_ finds
            continue
        plan.limit, plan.longest = allowed, runs.longest(seq_len, on, allowed)
        tried.append(plan)
    chosen = next((p for p in tried if p.fits), tried[-1])
    if chosen.longest and not runs.fits(chosen.longest, chosen.levers, allowed):
        chosen.longest = runs.longest(seq_len, chosen.levers, allowed)  # with one more run
    return MemoryPlan(**{**vars(chosen), "alternatives": tried})


def _with_progress(settings):
    """Shows a progress bar after two seconds, in a terminal."""
    from tqdm import tqdm  # which transformers requires

    return tqdm(settings, "plan_memory", unit="setting", leave=False, disable=None, delay=2)


def _config_of(model):
    config = model.config if isinstance(model, nn.Module) and hasattr(model, "config") else model
    try:
        from transformers import AutoModelForCausalLM, PretrainedConfig
    except ImportError:
        PretrainedConfig = ()
    if not isinstance(config, PretrainedConfig) or (
        type(config) not in AutoModelForCausalLM._model_mapping
    ):
        raise ValueError(
            "expected model to be a causal language model of transformers or its configuration, "
            f"got {type(model).__name__}; pass model.config, such as LlamaConfig(...)"
        )
    return config


def _bytes(limit: int | str) -> int:
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]i?B)?\s*", str(limit), re.IGNORECASE)
    if match is None or isinstance(limit, bool) or not float(match[1]) > 0:
        raise ValueError(f'expected limit to be bytes or a string such as "80 GB", got {limit!r}')
    return int(float(match[1]) * _UNITS[(match[2] or "").upper()])


class _Runs:
    """Runs steps on fake tensors, each once."""

    def __init__(self, config, dtype, ranks, batch, kv_chunk, world, shard_dtype):
        self.config, self.dtype, self.ranks, self.batch = config, dtype, ranks, batch
        self.kv_chunk, self.world, self.shard_dtype = kv_chunk, world, shard_dtype
        self.seen: dict[tuple, tuple] = {}
        self.lengths: dict[tuple, set[int]] = {}
        """By traced levers: those of the runs that lines go through."""

    def phases(
        self, seq_len: int, levers: dict[str, bool], exact: bool = False
    ) -> dict[str, dict[str, float]]:
        """Bytes by part in each phase, for the model with all its layers. Unless ``exact``, those
        of many tokens are estimated by a line through two runs."""
        # From here on, tiles and chunks of logits don't grow any more.
        tile = max(1024, self.config.get_text_config().hidden_size)
        few = self.ranks * max(2 * tile, self._tokens_of_a_chunk())
        lengths = self.lengths.setdefault(tuple(levers[n] for n in _TRACED), {few, 2 * few})
        if exact or seq_len <= 2 * few or seq_len in lengths:
            if seq_len > few:
                lengths.add(seq_len)
            return self._phases(seq_len, levers)
        above = min((n for n in lengths if n >= seq_len), default=max(lengths))
        below = max(n for n in lengths if n < above)
        first, second = (self._phases(n, levers) for n in (below, above))
        part = (seq_len - below) / (above - below)
        return {
            phase: {n: x + (second[phase][n] - x) * part for n, x in parts.items()}
            for phase, parts in first.items()
        }

    def _phases(self, seq_len: int, levers: dict[str, bool]) -> dict[str, dict[str, float]]:
        text = self.config.get_text_config()
        count = text.num_hidden_layers
        kinds = getattr(text, "layer_types", None) or [None]
        period = next(
            n
            for n in range(1, len(kinds) + 1)
            if all(kinds[i] == kinds[i % n] for i in range(len(kinds)))
        )
        few, more = (count, count) if count <= 3 * period else (2 * period, 3 * period)
        runs = []
        for layers in dict.fromkeys((few, more)):
            on = (levers[name] for name in _TRACED)
            key = (layers, seq_len, *on)
            if key not in self.seen:
                self.seen[key] = self._peaks(layers, *key[1:])
            runs.append(self.seen[key])
        (first, sizes, block, kept), (second, more_sizes, _, _) = runs[0], runs[-1]
        slope = (count - few) / (more - few) if more > few else 0.0

        def at_full_depth(a: float, b: float) -> float:
            return a + (b - a) * slope

        parameters = at_full_depth(sum(sizes), sum(more_sizes))
        shards = self.world if levers["sharded"] else 1
        gathered = max(block, *sizes) if shards > 1 else 0
        wider = self.shard_dtype.itemsize / self.dtype.itemsize if shards > 1 else 1
        sharded = parameters * wider / shards
        phases = {}
        for phase, peak in first.items():
            if phase == "set-up" or phase not in second:
                continue
            parts = {n: at_full_depth(peak[n], second[phase][n]) for n in PARTS}
            # The same bytes may count as logits with few layers, as activations with more.
            parts["activations"] += min(0.0, parts["logits"])
            parts["logits"] = max(0.0, parts["logits"])
            parts["parameters"] = sharded + gathered
            parts["gradients"] = parts["gradients"] * wider / shards
            if shards > 1 and parts["gradients"]:
                parts["gradients"] += gathered
            parts["optimizer states"] = 2 * sharded
            if levers["without_logits"] and phase == "the loss":
                parts["logits"] += self._chunk_of_logits(seq_len)
            if levers["offload"]:
                # In its backward, one layer's input is on the device.
                parts["activations"] -= (count - 1) * kept if phase != list(first)[-1] else 0
                parts["activations"] = max(parts["activations"], kept)
            phases[phase] = parts
        # The update of a parameter makes two temporary tensors.
        phases["the optimizer"] = dict.fromkeys(PARTS, 0.0) | {
            "parameters": sharded,
            "gradients": sharded,
            "optimizer states": 2 * sharded,
            "activations": 2 * max(sizes) * wider / shards,
        }
        buffers = max(parts["exchange buffers"] for parts in phases.values())
        for parts in phases.values():
            parts["exchange buffers"] = buffers  # the pool keeps them
        return phases

    def _peaks(self, layers: int, *how) -> tuple:
        try:
            return peaks_of_step(
                self.config, layers, self.dtype, self.ranks, self.batch, *how, self.kv_chunk
            )
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(
                f"expected a step of {type(self.config).__name__} in {self.dtype} to run on "
                "tensors without data, from whose sizes memory is planned, got "
                f"{type(error).__name__}: {error}; this model can't be planned"
            ) from error

    def _tokens_of_a_chunk(self) -> int:
        """By kChunkBytes of csrc/loss/logits.h."""
        vocabulary = self.config.get_text_config().vocab_size
        return max(1, 2**25 // (max(4, self.dtype.itemsize) * vocabulary))

    def _chunk_of_logits(self, seq_len: int) -> int:
        """The loss's temporary memory."""
        wide = max(4, self.dtype.itemsize)
        vocabulary = self.config.get_text_config().vocab_size
        tokens = min(self.batch * -(-seq_len // self.ranks), self._tokens_of_a_chunk())
        narrow = self.dtype.itemsize if self.dtype.itemsize < wide else 0
        # In a narrow dtype, a chunk's gradient of the weight exists beside the sum.
        part = narrow * self.config.get_text_config().hidden_size
        return vocabulary * (tokens * (wide + narrow) + part)

    def plan(self, seq_len: int, levers: dict[str, bool], exact: bool = True) -> MemoryPlan:
        phases = self.phases(seq_len, levers, exact)
        phase = max(phases, key=lambda name: sum(phases[name].values()))
        parts = {name: round(phases[phase][name]) for name in PARTS}
        return MemoryPlan(parts, dict(levers), seq_len, self.ranks, phase)

    def fits(self, seq_len: int, levers: dict[str, bool], limit: int) -> bool:
        return self.plan(seq_len, levers).total <= limit

    def longest(self, seq_len: int, levers: dict[str, bool], limit: int) -> int:
        """Approximately the longest sequence that fits, a multiple of the ranks. Bytes grow almost
        linearly with the tokens; each run improves the estimate."""
        tried: list[tuple[int, float]] = []
        best, tokens = 0, max(1, seq_len // self.ranks)
        for _ in range(8):
            phases = self.phases(tokens * self.ranks, levers)
            total = max(sum(parts.values()) for parts in phases.values())
            best = max(best, tokens) if total <= limit else best
            tried.append((tokens, total))
            nearest = sorted(tried, key=lambda at: abs(at[1] - limit))[:2]
            (a, x), (b, y) = nearest if len(tried) > 1 else ((0, 0.0), tried[0])
            if x == y:
                break
            guess = int(a + (limit - x) * (b - a) / (y - x))
            near = [n for n, _ in tried if abs(guess - n) <= n // 100]
            if guess < 1 or any(n <= best for n in near):
                break
            tokens = max(1, min(49 * min(near) // 50 if near else guess, 16 * tokens, 2**26))
        return best * self.ranks
