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
import json
import logging
import multiprocessing
import os
import resource
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

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


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    """Since the last reset; ru_maxrss knows none."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


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
            given = {"position_ids": position_ids, "attention_mask": attention_mask}
            if inside:
                return self.llama(ids, labels=labels, **given).loss
            return F.cross_entropy(self.llama(ids, **given).logits.flatten(0, 1), labels.flatten())

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
    """What computes the loss, and what does the rest of a step."""
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


def worker(rank: int, name: str, args: argparse.Namespace, seq: int, case: str, pipe) -> None:
    """Trains, and sends what was measured: of one step with SGD if a case is given, the gradients
    of all parameters among it."""
    import torch
    import torch.distributed as dist

    ranks = 1 if name in (ONE, TWO) else args.ranks
    torch.set_num_threads(2 if name == TWO else 1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    if ranks > 1:
        dist.init_process_group("gloo")
    model = make_model(vars(args), seq, case == "shifted inside")
    before = {n: p.detach().clone() for n, p in model.named_parameters()} if case else {}
    compute, finish = start(name, model, args, bool(case))
    if name == AUTOSP:
        from deepspeed.compile.passes.sp_compile import prepare_autosp_inputs

        def prepare(*tensors):
            return prepare_autosp_inputs(*tensors, seq_dim=1)
    elif ranks > 1:
        from deepsp import prepare_inputs as prepare
    else:

        def prepare(*tensors):
            return tensors

    losses, times, whole_peak = [], [], 0.0
    for step in range(1 if case else args.steps):
        tensors = batch_of(vars(args), seq, case, step, args.ranks)
        if ranks > 1:
            dist.barrier()
        begin = time.perf_counter()
        loss = compute(*prepare(*tensors))
        finish(loss)
        times.append(time.perf_counter() - begin)
        value = loss.detach().double().clone()
        if name == AUTOSP:
            dist.all_reduce(value)
            value /= ranks
        losses.append(value.item())
        if step == 0:
            whole_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            reset_peak()
    gradients = {n: (before[n] - p.detach()).numpy() for n, p in model.named_parameters() if case}
    median = statistics.median(times[2:] or times)
    pipe.send(
        {
            "losses": losses,
            "ms": [1e3 * t for t in times],
            "step_ms": 1e3 * median,
            "compile_s": times[0] - median,
            "peak_mib": max(whole_peak, peak_mib()),
            "later_peak_mib": peak_mib(),
            "gradients": gradients if rank == 0 else None,
        }
    )
    pipe.recv()  # until all have been heard: then good-bye
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def measure(name: str, args: argparse.Namespace, seq: int, case: str = "") -> dict:
    """Slowest and largest over the ranks; {"error": ...} if one died."""
    spawn = multiprocessing.get_context("spawn")
    ranks = 1 if name in (ONE, TWO) else args.ranks
    with tempfile.TemporaryDirectory() as cache:
        os.environ.update(
            TORCHINDUCTOR_CACHE_DIR=cache,
            DS_ACCELERATOR="cpu",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
            OMP_NUM_THREADS="2" if name == TWO else "1",
        )
        pipes, processes = [], []
        for rank in range(ranks):
            ours, theirs = spawn.Pipe()
            job = (rank, name, args, seq, case, theirs)
            processes.append(spawn.Process(target=worker, args=job, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            found = [pipe.recv() for pipe in pipes]
            for pipe in pipes:
                pipe.send(None)
        except (EOFError, ConnectionResetError):
            return {"error": "a rank died; its message is above"}
        finally:
            for process in processes:
                process.join(timeout=20)
                if process.is_alive():
                    process.terminate()
                    process.join()
    largest = ("step_ms", "compile_s", "peak_mib", "later_peak_mib")
    return found[0] | {key: max(f[key] for f in found) for key in largest}


def relative(losses: list[float], reference: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def speed(args: argparse.Namespace, seq: int, bar) -> dict:
    found = {}
    for name in SPEED:
        bar.set_postfix_str(f"S {seq}, {name}")
        found[name] = measure(name, args, seq)
        found[name].pop("gradients", None)
        bar.update()
    return found


def right(args: argparse.Namespace, seq: int, bar) -> dict:
    found = {}
    for case in args.cases:
        reference = measure(ONE, args, seq, case)
        found[case] = {}
        bar.update()
        for name in (OURS, INSIDE, AUTOSP):
            bar.set_postfix_str(f"{case}, {name}")
            of = measure(name, args, seq, case)
            if "error" not in of:
                worst = max(
                    (float(abs(of["gradients"][n] - g).max() / abs(g).max()), n)
                    for n, g in reference["gradients"].items()
                )
                of = {
                    "loss": relative(of["losses"], reference["losses"]),
                    "gradient": worst[0],
                    "parameter": worst[1],
                }
            found[case][name] = of
            bar.update()
    return found


def speed_rows(of: dict) -> tuple[list[str], list[list[str]]]:
    columns = [
        "",
        "step, ms",
        "× AutoSP",
        "× 2 threads",
        "× half of 1 thread",
        "compile, s",
        "peak MiB",
        "after compile",
        "loss, largest difference",
    ]

    def share(ms: float, base: dict, parts: int = 1) -> str:
        return f"{ms / (base['step_ms'] / parts):.2f}" if "error" not in base else "–"

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
                f"{relative(x['losses'], of[ONE]['losses']):.1e}",
            ]
        )
    return columns, rows


def right_rows(found: dict) -> tuple[list[str], list[list[str]]]:
    rows = []
    for case, of in found.items():
        for name, x in of.items():
            if "error" in x:
                rows.append([CASES[case], name, x["error"], "", ""])
            else:
                numbers = [f"{x['loss']:.1e}", f"{x['gradient']:.1e}", x["parameter"]]
                rows.append([CASES[case], name, *numbers])
    return ["case", "", "loss", "gradient", "of"], rows


def tables(found: dict) -> list[tuple[str, list[str], list[list[str]]]]:
    made = [(f"S {seq}", *speed_rows(of)) for seq, of in found["speed"].items()]
    if found["right"]:
        made.append(("right: differences to one process", *right_rows(found["right"])))
    return made


def markdown(found: dict) -> str:
    machine = found["machine"]
    lines = [
        "# Sharded by a compiler",
        "",
        f"`{found['command']}`",
        "",
        f"{machine['cpus']} cores, load {machine['load'][0]:.2f} at the start, torch "
        f"{machine['torch']}, deepspeed {machine['deepspeed']}; {found['minutes']:.1f} minutes in "
        "all. What the contenders are, and what is counted: `--help`.",
        "",
    ]
    for title, columns, rows in tables(found):
        lines += [f"## {title}", ""]
        lines += [f"| {' | '.join(x)} |" for x in (columns, ["---"] * len(columns), *rows)]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--parts",
        nargs="+",
        default=["speed", "right"],
        choices=["speed", "right"],
        help="what to measure (default: both)",
    )
    add("--seqs", type=int, nargs="+", default=[2048, 8192], help="tokens (default: 2048 8192)")
    add("--right-seq", type=int, default=256, help="tokens, for right (default: 256)")
    add("--cases", nargs="+", default=list(CASES), choices=CASES, help="of right (default: all)")
    add("--ranks", type=int, default=2, help="that share a sequence (default: 2)")
    add("--layers", type=int, default=4, help="the model's layers (default: 4)")
    add("--dim", type=int, default=256, help="its features (default: 256)")
    add("--heads", type=int, default=8, help="its heads (default: 8)")
    add("--vocab", type=int, default=1024, help="its vocabulary (default: 1024)")
    add("--steps", type=int, default=8, help="of each contender (default: 8)")
    add("--inner", default="inductor", help="compiler behind each pass (default: inductor)")
    add("--quick", action="store_true", help="one layer, S 128, 3 steps, eager: does it run?")
    add("--results", type=Path, metavar="FOLDER", help="writes compile_(parts).md and .json")
    args = parser.parse_args()
    if args.quick:
        args.layers, args.seqs, args.right_seq, args.steps = 1, [128], 64, 3
        args.inner = "eager"

    from importlib.metadata import version

    from rich.console import Console
    from rich.table import Table
    from tqdm import tqdm

    begin, load = time.perf_counter(), os.getloadavg()
    total = len(SPEED) * len(args.seqs) * ("speed" in args.parts)
    total += 4 * len(args.cases) * ("right" in args.parts)
    with tqdm(total=total, unit="run") as bar:
        measured = {
            "speed": {s: speed(args, s, bar) for s in args.seqs} if "speed" in args.parts else {},
            "right": right(args, args.right_seq, bar) if "right" in args.parts else {},
        }
    found = {
        "command": shlex.join(["python", *sys.argv]),
        "settings": vars(args),
        "machine": {
            "cpus": os.cpu_count(),
            "load": load,
            "torch": version("torch"),
            "deepspeed": version("deepspeed"),
        },
        "minutes": (time.perf_counter() - begin) / 60,
    } | measured
    console = Console(width=140)
    for title, columns, rows in tables(found):
        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if args.results:
        args.results.mkdir(parents=True, exist_ok=True)
        file = args.results / "_".join(["compile", *args.parts])
        file.with_suffix(".json").write_text(json.dumps(found, indent=1, default=str) + "\n")
        file.with_suffix(".md").write_text(markdown(found))
        console.print(f"written: {file}.*")


if __name__ == "__main__":
    main()
