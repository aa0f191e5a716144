"""The longest sequence that trains under a memory limit, lever by lever.

A small Llama whose sizes have the proportions of Llama 3 8B, float32, one row: forward, backward
and AdamW. A rank's memory is the most that its process takes, from before the model is made
(VmHWM - VmRSS), code aside; malloc is told to give freed tensors back to the system. Each lever is
added to those before it. The losses of all ways are compared on one sequence. The slope is a rank's
bytes for each token of the sequence more, from the shortest to the longest one that was tried.

The machine's memory is what plays the device, so offloading to it isn't among the levers.

    python benchmarks/longest.py              the table and the plot
    python benchmarks/longest.py --mlp        tiled MLPs alone: slope and time, next to DeepSpeed's
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time

import bench
import torch
import torch.distributed as dist
from tqdm import tqdm

MIB = 2**20

# Name: number of ranks, and what is on.
LEVERS = {
    "PyTorch, 1 process": (1, ""),
    "2 ranks": (2, "sp"),
    "+ checkpoints": (2, "sp checkpoint"),
    "+ loss without logits": (2, "sp checkpoint loss"),
    "+ tiled MLPs": (2, "sp checkpoint loss tile"),
    "+ keys in parts": (2, "sp checkpoint loss tile parts"),
    "all, on 4 ranks": (4, "sp checkpoint loss tile parts"),
}
# DeepSpeed's: attention on 2 ranks, and what its users put around it.
DEEPSPEED = {
    "DeepSpeed UlyssesSPAttentionHF, 2 ranks": (2, "ulysses"),
    "  + checkpoints, TiledMLP": (2, "ulysses checkpoint ds-tile"),
}


def config_of(args: argparse.Namespace, attention: str):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=32 * args.hidden,
        hidden_size=args.hidden,
        intermediate_size=7 * args.hidden // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2**20,
        attn_implementation=attention,
        use_cache=False,
    )


class Way:
    """A model and its training step, with what is on."""

    def __init__(self, args: argparse.Namespace, on: set[str]):
        import transformers

        import deepsp
        from deepsp.integrations.transformers import register

        self.on, self.deepsp = on, deepsp
        torch.manual_seed(0)
        attention = "deepsp" if "sp" in on else "sdpa"
        if "sp" in on:
            register(kv_chunk=args.kv_chunk if "parts" in on else None)
        config = config_of(args, attention)
        if "ulysses" in on:
            self._register_ulysses(config)
        self.model = transformers.LlamaForCausalLM(config)
        if "checkpoint" in on:
            self.model.activation_checkpointing_enable({"use_reentrant": False})
        if "tile" in on:
            deepsp.tile_(self.model, "*.mlp", *(["*norm"] if "norms" in on else []))
        if "ds-tile" in on:
            _tile_as_deepspeed(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def _register_ulysses(self, config) -> None:
        import deepspeed
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        deepspeed.init_distributed(dist_backend="gloo")
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            UlyssesSPAttentionHF.register_with_transformers(
                model_name_or_path=folder,
                core_attn_implementation="sdpa",
                sequence_parallel_size=dist.get_world_size(),
                micro_batch_size=1,
                seq_length_is_variable=True,
            )

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        deepsp = self.deepsp
        if not self.on & {"sp", "ulysses"}:
            return self.model(input_ids=ids, labels=ids).loss
        batch, _ = deepsp.shard_batch({"input_ids": ids, "labels": ids})
        if "loss" in self.on:
            return deepsp.causal_lm_loss(self.model, batch)
        if "sp" in self.on:
            return self.model(**batch).loss
        labels = batch.pop("shift_labels")
        return deepsp.cross_entropy(self.model(**batch).logits, labels)

    def step(self, length: int) -> float:
        ids = torch.randint(
            self.model.config.vocab_size,
            (1, length),
            generator=torch.Generator().manual_seed(length),
        )
        loss = self.loss(ids)
        loss.backward()
        if self.on & {"sp", "ulysses"}:
            self.deepsp.sync_gradients(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def _tile_as_deepspeed(model) -> None:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    def tiled(mlp, x):
        inner = type(mlp).forward
        parameters = [p for p in mlp.parameters()]
        shards = -(-x.size(1) // mlp.hidden_size)  # as in its documentation
        return TiledMLP.apply(inner, mlp, x, shards, parameters)

    for layer in model.model.layers:
        layer.mlp.forward = tiled.__get__(layer.mlp)


def taken_by_libraries(args: argparse.Namespace, on: set[str]) -> float:
    """Return the MiB of this process once a model has been trained and dropped: code, and what
    libraries keep."""
    if "ulysses" in on:  # which can be registered once only
        import deepspeed.runtime.sequence_parallel.ulysses_sp  # noqa: F401
    small = argparse.Namespace(**vars(args) | {"hidden": 64, "layers": 1})
    Way(small, on - {"ulysses"}).step(64)
    bench.trim()
    return bench.status_mib("VmRSS")


_way: list = []  # of this rank: the memory that libraries take, and a Way


def set_up(args: argparse.Namespace, on: str) -> None:
    """Make a rank's way."""
    import transformers

    transformers.logging.set_verbosity_error()
    _way.append(taken_by_libraries(args, set(on.split())))
    _way.append(Way(args, set(on.split())))
    _way[1].step(64)


def measure(length: int) -> tuple[float, float, float]:
    """Return the bytes that a step takes, its seconds, and its loss."""
    before, way = _way
    length -= length % 4  # DeepSpeed wants ranks to have as many tokens
    bench.trim()
    bench.reset_peak()
    began = time.perf_counter()
    torch.manual_seed(0)
    loss = way.step(length)
    seconds = time.perf_counter() - began
    return MIB * bench.largest(bench.status_mib("VmHWM") - before)[0], seconds, loss


@contextlib.contextmanager
def ranks_of(args: argparse.Namespace, count: int, on: str):
    """Give a function that measures a step of so many tokens, on ranks that hold one way."""
    with bench.ranks_on(bench.LOOPBACK, count) as ranks:
        ranks(set_up, args, on)
        yield lambda length: ranks(measure, length)


def longest(step, limit: int, first: int, precision: float, say) -> dict:
    """Return the most tokens whose step stays under the limit, to within ``precision``: lengths are
    tried where a line through the nearest ones says that the limit is, then beside them."""
    tried: dict[int, tuple[int, float]] = {}
    fits, above, length = 0, None, first
    while above is None or above > max(64, fits * (1 + precision)):
        memory, seconds, _ = step(length)
        tried[length] = memory, seconds
        say(f"{length} tokens: {memory / MIB:.0f} MiB, {seconds:.1f} s")
        if memory <= limit:
            fits = length
        else:
            above = length
        if len(tried) == 1 or not fits:
            length = above // 2 if above else 2 * first
            continue
        low, high = (fits, above) if above else sorted(tried)[-2:]
        slope = (tried[high][0] - tried[low][0]) / (high - low)
        guess = low + (limit - tried[low][0]) / max(slope, 1)
        near = 1 + 0.9 * precision
        bounds = fits * near, above / near if above else 8 * fits
        length = int(
            min(max(guess, bounds[0]), max(bounds)) if bounds[0] < bounds[1] else sum(bounds) / 2
        )
    least = min(tried)
    slope = (tried[fits][0] - tried[least][0]) / (fits - least)
    return {"tokens": fits, "seconds": tried[fits][1], "slope": slope}


def table(args: argparse.Namespace) -> None:
    ways = LEVERS | (DEEPSPEED if args.peers else {})
    results = {}
    for name, (count, on) in (bar := tqdm(ways.items(), desc="ways")):
        with ranks_of(args, count, on) as step:
            loss = step(args.compare)[2]  # the same weights for all: after one step

            def say(text: str, name: str = name) -> None:
                bar.set_postfix_str(f"{name}, {text}")

            result = longest(step, args.limit * MIB, args.compare, args.precision, say)
        results[name] = {"ranks": count, "loss": loss} | result
    plain = results["PyTorch, 1 process"]
    rows = [
        [
            name,
            x["tokens"],
            f"{x['tokens'] / plain['tokens']:.1f}",
            f"{x['slope']:.0f}",
            f"{plain['slope'] / x['slope']:.2f}",
            f"{x['seconds']:.1f}",
            f"{abs(x['loss'] - plain['loss']) / plain['loss']:.1e}",
        ]
        for name, x in results.items()
    ]
    columns = ["", "tokens", "times", "bytes a token", "times lower", "step, s", "loss off"]
    title = f"Limit {args.limit} MiB a rank; hidden {args.hidden}, {args.layers} layers."
    text = "\n".join([title, "", *bench.in_markdown(columns, rows)])
    print(text)
    (bench.RESULTS / "longest.md").write_text(f"# The longest sequence\n\n{text}\n")
    (bench.RESULTS / "longest.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results)


def plot(results: dict) -> None:
    names = list(results)[::-1]
    tokens = [results[name]["tokens"] for name in names]
    others = {*DEEPSPEED, names[-1]}
    colors = ["#999999" if name in others else "#33658a" for name in names]
    file, shape = bench.RESULTS / "longest.png", (8, 0.5 + 0.45 * len(names))
    with bench.picture(file, figsize=shape, dpi=120) as (_, axes):
        bars = axes.barh(names, tokens, color=colors)
        axes.bar_label(bars, [f"{n:,}  ({n / tokens[-1]:.1f} x)" for n in tokens], padding=3)
        axes.set_xlabel("longest sequence that trains under the limit, tokens")
        axes.set_xlim(0, 1.35 * max(tokens))  # room for the labels
        axes.spines[["top", "right"]].set_visible(False)


def slopes(args: argparse.Namespace) -> None:
    """Print bytes a token on 1, 2 and 4 ranks, with nothing else on."""
    by_count = {}
    for count in tqdm((1, 2, 4), desc="ranks"):
        with ranks_of(args, count, "sp" if count > 1 else "") as step:
            low, high = (step(n * args.compare)[0] for n in (8, 24))
        by_count[count] = (high - low) / (16 * args.compare)
    for count, slope in by_count.items():
        print(f"{count} ranks: {slope:.0f} bytes a token, {by_count[1] / slope:.2f} times fewer")


def mlp(args: argparse.Namespace) -> None:
    """Print what tiles add to checkpoints and a loss without logits: slope and time, in turns."""
    ways = {
        "checkpoints": "sp checkpoint loss",
        "tiled": "sp checkpoint loss tile",
        "tiled, norms, too": "sp checkpoint loss tile norms",
        "DeepSpeed's TiledMLP": "sp checkpoint loss ds-tile",
    }
    low, high = 16 * args.compare, 48 * args.compare  # from where the loss takes all that it may
    times, losses = {name: [] for name in ways}, {}
    memory = {(name, length): [] for name in ways for length in (low, high)}
    with contextlib.ExitStack() as stack:
        steps = {n: stack.enter_context(ranks_of(args, 1, on)) for n, on in ways.items()}
        for _ in tqdm(range(args.rounds), desc="rounds"):
            for name, length in memory:
                peak, seconds, losses[name] = steps[name](length)
                memory[name, length].append(peak)
                if length == high:
                    times[name].append(seconds)
    slopes = {n: (max(memory[n, high]) - max(memory[n, low])) / (high - low) for n in ways}
    first, *_ = ways
    for name in ways:
        least, middle = min(times[name]), statistics.median(times[name])
        print(
            f"{name:22}{slopes[name]:8.0f} bytes a token "
            f"({slopes[first] / slopes[name]:.2f} times fewer) {least:7.2f} s min, {middle:7.2f} s "
            f"median ({bench.ratio(times[name], times[first])} times) loss {losses[name]:.6f}"
        )


def main() -> None:
    args = bench.parser_of(
        __doc__,
        limit=(128, "MiB a rank"),
        hidden=(128, "features of a token"),
        layers=(4, "of the model"),
        kv_chunk=(2048, "tokens whose keys come at a time"),
        compare=(256, "tokens on which losses are compared"),
        precision=(0.03, "of the longest length"),
        rounds=(5, "of --mlp"),
        peers=(False, "DeepSpeed's attention and tiles, too"),
        slopes=(False, "bytes a token on 1, 2 and 4 ranks alone"),
        mlp=(False, "tiled MLPs alone: slope and time"),
    ).parse_args()
    bench.return_freed_memory()
    if args.mlp:
        mlp(args)
    elif args.slopes:
        slopes(args)
    else:
        table(args)


if __name__ == "__main__":
    main()
