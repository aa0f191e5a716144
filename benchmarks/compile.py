"""A Llama on a sharded sequence, by compilers: ours, DeepSpeed's AutoSP, and no sharding at all.

The model is transformers' LlamaForCausalLM (float32, SDPA), trained with AdamW for some steps on
random tokens; ranks are processes of one thread over gloo. Contenders, one after the other, each in
fresh processes with compile caches of its own:

  one process, 1 thread      plain torch.compile
  one process, 2 threads     the same: what the ranks together have; the ceiling
  deepsp                     torch.compile(model, backend="deepsp") on the ranks
  deepsp in DeepSpeed        DeepSpeed's config: "passes": ["deepsp"], ZeRO 0
  AutoSP                     DeepSpeed's config: "passes": ["autosp"], ZeRO 0

"memory_budget 0": with that option; AutoSP has torch compute more again in backward by default.

speed: the labels are shifted and the loss computed outside of the model, which is how AutoSP wants
it. Step: median, without the first two. Compile: the first step, less that median. Peak: of a rank,
over the whole run, and from the second step on (the peak is set back once the first is over). Loss:
the largest relative difference to one process; AutoSP returns the loss of a rank's own tokens, so
what is compared is its mean over the ranks.

right: losses and gradients of one step, next to one process without torch.compile. The largest
differences: of losses, relative (AutoSP's as above); of gradients, relative to the largest entry of
the parameter's, for the parameter that is worst, of what DeepSpeed's average makes of them (SGD, lr
1). Cases: labels shifted outside; shifted inside the model; half of the labels masked at random;
all of rank 0's masked.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
from pathlib import Path

import bench
from tqdm import tqdm

ONE, TWO = "one process, 1 thread", "one process, 2 threads"
OURS, INSIDE, AUTOSP = "deepsp", "deepsp in DeepSpeed", "AutoSP"
LEAST = ", memory_budget 0"
PASSES = {INSIDE: "deepsp", INSIDE + LEAST: "deepsp", AUTOSP: "autosp"}
SPEED = (ONE, TWO, OURS, OURS + LEAST, INSIDE, INSIDE + LEAST, AUTOSP)
CASES = {
    "shifted outside": "labels shifted outside",
    "shifted inside": "labels shifted inside",
    "half masked": "half masked at random",
    "rank 0 masked": "all of rank 0's masked",
}


def make_model(shape: dict, seq: int, inside: bool):
    import torch
    import torch.nn.functional as F
    from transformers import LlamaConfig, LlamaForCausalLM

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.llama = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=shape["vocab"],
                    hidden_size=shape["dim"],
                    intermediate_size=4 * shape["dim"],
                    num_hidden_layers=shape["layers"],
                    num_attention_heads=shape["heads"],
                    num_key_value_heads=shape["heads"],
                    max_position_embeddings=seq,
                    use_cache=False,
                    attn_implementation="sdpa",
                )
            )

        def forward(self, ids, labels, position_ids, attention_mask):
            more = {"position_ids": position_ids, "attention_mask": attention_mask}
            if inside:
                return self.llama(ids, labels=labels, **more).loss
            return F.cross_entropy(self.llama(ids, **more).logits.flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    return Model()


def batch_of(shape: dict, seq: int, case: str, step: int, ranks: int):
    import torch

    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(shape["vocab"], (1, seq + 1), generator=generator)
    inside = case == "shifted inside"
    ids, labels = tokens[:, :-1].clone(), (tokens[:, :-1] if inside else tokens[:, 1:]).clone()
    if case == "half masked":
        labels[torch.rand(1, seq, generator=generator) < 0.5] = -100
    if case == "rank 0 masked":
        labels[:, : seq // ranks] = -100
    return ids, labels, torch.arange(seq)[None], torch.ones_like(ids)


def start(name: str, model, args: argparse.Namespace, sgd: bool):
    """Return what computes the loss, and what does the rest of a step."""
    import torch

    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1.0) if sgd else torch.optim.AdamW(parameters, 1e-3)
    if name in PASSES:
        import deepspeed

        import deepsp  # before initialize: it makes the pass's name known

        assert deepsp
        deepspeed.utils.logger.setLevel(logging.WARNING)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "sequence_parallel_size": args.ranks,
            "compile": {"deepcompile": True, "passes": [PASSES[name]]},
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        compile_kwargs = {"dynamic": True}
        if name.endswith(LEAST):
            compile_kwargs["options"] = {"memory_budget": 0}
        engine.compile(backend=args.inner, compile_kwargs=compile_kwargs)

        def finish(loss):
            engine.backward(loss)
            engine.step()

        return engine, finish

    if name in (OURS, OURS + LEAST):
        options = {"inner": args.inner} | ({"memory_budget": 0} if name.endswith(LEAST) else {})
        compiled = torch.compile(model, backend="deepsp", dynamic=True, options=options)
    else:
        # One process has one length, so that no symbols are in the way of its speed.
        plain = sgd or args.inner == "eager"
        compiled = model if plain else torch.compile(model, backend=args.inner)

    def finish(loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return compiled, finish


def train(name: str, args: argparse.Namespace, seq: int, case: str) -> dict:
    """Return what was measured on the ranks of a group: of one step with SGD if a case is given,
    the gradients of all parameters among it."""
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size()
    torch.set_num_threads(2 if name == TWO else 1)
    model = make_model(vars(args), seq, case == "shifted inside")
    before = {n: p.detach().clone() for n, p in model.named_parameters()} if case else {}
    compute, finish = start(name, model, args, bool(case))

    def prepare(*tensors):
        if name == AUTOSP:
            from deepspeed.compile.passes.sp_compile import prepare_autosp_inputs

            return prepare_autosp_inputs(*tensors, seq_dim=1)
        if ranks > 1:
            from deepsp import prepare_inputs

            return prepare_inputs(*tensors)
        return tensors

    losses, times, peak_of_first = [], [], 0.0
    for step in range(1 if case else args.steps):
        tensors = batch_of(vars(args), seq, case, step, args.ranks)
        dist.barrier()
        begin = time.perf_counter()
        loss = compute(*prepare(*tensors))
        finish(loss)
        times.append(time.perf_counter() - begin)
        value = loss.item()
        losses.append(bench.summed(value) / ranks if name == AUTOSP else value)
        if step == 0:
            peak_of_first = bench.status_mib("VmHWM")
            bench.reset_peak()
    gradients = {n: (before[n] - p.detach()).numpy() for n, p in model.named_parameters() if case}
    median, peak = statistics.median(times[2:] or times), bench.status_mib("VmHWM")
    names = ("step_ms", "compile_s", "peak_mib", "later_peak_mib")
    values = bench.largest(1e3 * median, times[0] - median, max(peak_of_first, peak), peak)
    report = dict(zip(names, values, strict=True))
    report |= {"losses": losses, "ms": [1e3 * t for t in times]}
    return report | ({"gradients": gradients} if case and dist.get_rank() == 0 else {})


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def measure(name: str, args: argparse.Namespace, seq: int, case: str = "") -> dict:
    """Train in fresh processes, with compile caches of their own; {"error": ...} if one died."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ.update(
            TORCHINDUCTOR_CACHE_DIR=cache,
            DS_ACCELERATOR="cpu",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
            OMP_NUM_THREADS="2" if name == TWO else "1",
        )
        try:
            with bench.Ranks(None, 1 if name in (ONE, TWO) else args.ranks) as ranks:
                return ranks(train, name, args, seq, case)
        except bench.RankDied as error:
            return {"error": str(error)}


def speed(args: argparse.Namespace, seq: int) -> dict:
    return {name: measure(name, args, seq) for name in tqdm(SPEED, desc=f"S {seq}")}


def right(args: argparse.Namespace, seq: int) -> dict:
    results: dict = {}
    for case in args.cases:
        results[case] = {}
        reference = measure(ONE, args, seq, case)
        for name in tqdm((OURS, INSIDE, AUTOSP), desc=case):
            of = measure(name, args, seq, case)
            if "error" not in of:
                worst = max(
                    (float(abs(of["gradients"][n] - g).max() / abs(g).max()), n)
                    for n, g in reference["gradients"].items()
                )
                of = {
                    "loss": bench.relative(of["losses"], reference["losses"]),
                    "gradient": worst[0],
                    "parameter": worst[1],
                }
            results[case][name] = of
    return results


def speed_table(seq: int, of: dict) -> bench.Table:
    def share(ms: float, base: dict, parts: int = 1) -> str:
        return f"{ms / (base['step_ms'] / parts):.2f}" if "error" not in base else "–"

    columns = ["", "step, ms", "× AutoSP", "× 2 threads", "× half of 1 thread", "compile, s"]
    columns += ["peak MiB", "after compile", "loss, largest difference"]
    rows = []
    for name, x in of.items():
        if "error" in x:
            rows.append([name, x["error"], *[""] * (len(columns) - 2)])
            continue
        ms = x["step_ms"]
        rows.append(
            [
                name,
                f"{ms:.1f}",
                share(ms, of[AUTOSP]),
                share(ms, of[TWO]),
                share(ms, of[ONE], 2),
                f"{x['compile_s']:.1f}",
                f"{x['peak_mib']:.0f}",
                f"{x['later_peak_mib']:.0f}",
                f"{bench.relative(x['losses'], of[ONE]['losses']):.1e}",
            ]
        )
    return bench.Table(f"S {seq}", columns, rows)


def right_table(results: dict) -> bench.Table:
    rows = []
    for case, of in results.items():
        for name, x in of.items():
            if "error" in x:
                rows.append([CASES[case], name, x["error"], "", ""])
            else:
                numbers = [f"{x['loss']:.1e}", f"{x['gradient']:.1e}", x["parameter"]]
                rows.append([CASES[case], name, *numbers])
    columns = ["case", "", "loss", "gradient", "of"]
    return bench.Table("right: differences to one process", columns, rows)


def main() -> None:
    args = bench.parser_of(
        __doc__,
        parts=(["speed", "right"], "what to measure", ("speed", "right")),
        seqs=([2048, 8192], "tokens"),
        right_seq=(256, "tokens, for right"),
        cases=(list(CASES), "of right", CASES),
        ranks=(2, "that share a sequence"),
        layers=(4, "the model's layers"),
        dim=(256, "its features"),
        heads=(8, "its heads"),
        vocab=(1024, "its vocabulary"),
        steps=(8, "of each contender"),
        inner=("inductor", "compiler behind each pass"),
        results=(Path, "folder for compile_(parts).md and .json"),
    ).parse_args()
    tables, results = [], {"settings": vars(args), "speed": {}, "right": {}}
    if "speed" in args.parts:
        results["speed"] = {seq: speed(args, seq) for seq in args.seqs}
        tables += [speed_table(seq, of) for seq, of in results["speed"].items()]
    if "right" in args.parts:
        results["right"] = right(args, args.right_seq)
        tables.append(right_table(results["right"]))
    about = "What the contenders are, and what is counted: `--help`."
    name = "_".join(["compile", *args.parts])
    bench.report(args, name, "Sharded by a compiler", [about], tables, results)


if __name__ == "__main__":
    main()
