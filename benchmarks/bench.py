"""Run, time and report what the benchmarks compare.

A benchmark declares its options (:func:`parser_of`), its contenders and its tables. Ranks are
processes of one thread over gloo (:class:`Ranks`), on this machine's loopback or on links of a set
speed (:func:`ranks_on`). Contenders take turns (:func:`timed`).

torch is imported where it is used: simulate.py needs none.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import itertools
import json
import math
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from netlink import Netlink

RESULTS = Path(__file__).parent / "results"
LOOPBACK = "loopback"
VERSIONS = ("torch", "deepspeed")  # that results name
LOAD = os.getloadavg()[0]  # at the start
# Options of benchmarks that also run on a link, if they can.
LINK_OPTIONS = {
    "rate": ("500mbit", "of the link, as tc writes it; '': no link"),
    "note": ("with nothing else running", "on the load, for the results"),
}
PLACES = {"memory": "Shared memory", "messages": "Messages", "link": "Messages on the link"}


def parser_of(doc: str, **options: tuple) -> argparse.ArgumentParser:
    """Return a parser of options ``name=(default, help)`` or ``name=(default, help, choices)``.

    The type is the default's. A list takes several values, and False makes a switch. A type, or
    any function of a text, in place of a default means that there is none.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, (default, text, *choices) in options.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
        elif callable(default):
            parser.add_argument(flag, type=default, help=text)
        else:
            several = isinstance(default, list)
            shown = " ".join(map(str, default)) if several else str(default)
            parser.add_argument(
                flag,
                type=type((default or [""])[0] if several else default),
                nargs="+" if several else None,
                choices=choices[0] if choices else None,
                default=default,
                help=f"{text} (default: {shown or 'none'})",
            )
    return parser


# -------------------------------------------------------------------------- processes of ranks


def serve(rank: int, size: int, link: Netlink | None, path: str, pipe) -> None:
    """Run the functions that the pipe brings, as one rank of a group."""
    init = f"file://{path}"
    if link is not None:
        link.enter(rank * len(link.addresses) // size)
        os.environ["GLOO_SOCKET_IFNAME"] = link.interface
    for name, number in (("RANK", rank), ("WORLD_SIZE", size)):  # as torchrun does
        os.environ[name] = os.environ[f"LOCAL_{name}"] = str(number)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size)
    while (task := pipe.recv()) is not None:
        function, args = task
        pipe.send(function(*args))
    dist.barrier()
    dist.destroy_process_group()


class RankDied(SystemExit):
    """A rank ended early; the program does, too, unless this is caught."""


class Ranks:
    """Processes on a link (None: the loopback); called like a function."""

    def __init__(self, link: Netlink | None, size: int = 2):
        self.link, self.size = link, size

    def __enter__(self) -> Ranks:
        spawn = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        path = os.path.join(self.folder.name, "store")
        self.pipes, self.processes = [], []
        for rank in range(self.size):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=serve, args=(rank, self.size, self.link, path, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        return self

    def __call__(self, function: Callable, *args):
        """Call a function on every rank, and return what rank 0 returns."""
        try:
            for pipe in self.pipes:
                pipe.send((function, args))
            first, *_ = [pipe.recv() for pipe in self.pipes]
            return first
        except (EOFError, ConnectionError):
            raise RankDied("a rank died; its message is above") from None

    def __exit__(self, *error) -> None:
        for pipe in self.pipes:
            if error[0] is None:
                pipe.send(None)
        for process in self.processes:
            if error[0] is None:
                process.join(timeout=20)
            if process.is_alive():
                process.terminate()
                process.join()
        self.folder.cleanup()


@contextlib.contextmanager
def ranks_on(rate: str | None, size: int = 2) -> Iterator[Ranks]:
    """Start ranks on the loopback, or on a link of their own each: at a rate, or unlimited (None)
    until :meth:`Netlink.set_rate`."""
    if rate == LOOPBACK:
        with Ranks(None, size) as ranks:
            yield ranks
        return
    with Netlink(size, rate) as link, Ranks(link, size) as ranks:
        yield ranks
        link.set_rate(None)  # the ranks' last barrier need not wait


def in_places(args: argparse.Namespace) -> Iterator[tuple[Ranks, str]]:
    """Give ranks in each of :data:`PLACES`; on the link only as root, and with a rate."""
    with ranks_on(LOOPBACK, args.ranks) as ranks:
        yield ranks, "memory"
        yield ranks, "messages"
    if args.rate and os.geteuid() == 0:
        with ranks_on(args.rate, args.ranks) as ranks:
            yield ranks, "link"


@functools.cache
def group_of(place: str):
    """Return a group of all ranks that shares memory if it can, or one that sends messages."""
    import torch.distributed as dist

    import deepsp

    group = dist.new_group()
    deepsp.transport(group, use="auto" if place == "memory" else "messages")
    return group


def bare_messages(bytes_each: int) -> Callable[[], list]:
    """Return a call that sends so many bytes to every other rank, on warm buffers: a floor."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    # From the next rank on, so that not all send to the same one.
    peers = [(rank + i) % size for i in range(1, size)]
    sent, received = (
        {p: torch.ones(bytes_each, dtype=torch.uint8) for p in peers} for _ in range(2)
    )

    def run() -> list:
        works = [dist.irecv(received[p], p) for p in reversed(peers)]
        works += [dist.isend(sent[p], p) for p in peers]
        for work in works:
            work.wait()
        return []

    return run


# ----------------------------------------------------------- on ranks: clocks, memory, bytes


def largest(*values: float) -> list[float]:
    """Return each value's largest over the ranks."""
    return _reduced(values, "MAX")


def summed(value: float) -> float:
    """Return the sum of a value over the ranks."""
    return _reduced([value], "SUM")[0]


def _reduced(values, how: str) -> list[float]:
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, getattr(dist.ReduceOp, how))
    return tensor.tolist()


def clock(call: Callable[[], object]) -> float:
    """Return the seconds of a call that all ranks start together."""
    import torch.distributed as dist

    dist.barrier()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def timed(
    calls: dict, rounds: float, *, warmups: int = 1, seconds=math.inf, least=0, clock=clock
) -> dict:
    """Return the milliseconds of the slowest rank, by contender. Contenders take turns, in so many
    rounds, or fewer (but ``least``) if the seconds are over."""
    import torch
    import torch.distributed as dist

    times = {name: [] for name in calls}
    begin = time.perf_counter()
    for turn in itertools.count(-warmups):
        late = turn >= least and time.perf_counter() - begin > seconds
        done = torch.tensor([late or turn >= rounds])
        dist.broadcast(done, 0)  # every rank stops at the same turn
        if done:
            break
        for name, call in calls.items():
            took = clock(call)
            if turn >= 0:
                times[name].append(1e3 * took)
    return {name: largest(*ms) for name, ms in times.items()}


def profiled(call: Callable[[], object]) -> list:
    """Return the profiler's events of one call."""
    import torch

    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, record_shapes=True) as profile:
        call()
    return profile.events()


def gloo_elements(events: list, what: str = "send") -> int:
    """Return the elements (of a message: bytes) that a rank hands to gloo."""
    return sum(e.input_shapes[0][0] for e in events if e.name == f"gloo:{what}")


def status_mib(field: str) -> float:
    """Return a field of this process's status: VmRSS is what is resident, VmHWM the most since
    :func:`reset_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


def reset_peak() -> None:
    """Let VmHWM start again from what is resident."""
    Path("/proc/self/clear_refs").write_text("5")


def trim() -> None:
    """Give idle memory back, so that what comes next is counted from the start."""
    import deepsp

    deepsp.ranks.buffers.clear()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def growth(call: Callable[[], object]) -> tuple[object, float]:
    """Return a call's result, and by how many MiB this process's memory grew at most."""
    import torch.distributed as dist

    trim()
    dist.barrier()
    reset_peak()
    before = status_mib("VmRSS")
    result = call()
    return result, status_mib("VmHWM") - before


def return_freed_memory() -> None:
    """Let malloc, in ranks that start from now on, give freed tensors back to the system, so that
    a peak is that of a step."""
    os.environ |= {f"MALLOC_{name}_THRESHOLD_": str(2**16) for name in ("MMAP", "TRIM")}


# ------------------------------------------------------------------------ tables and result files


class Table(NamedTuple):
    title: str
    columns: list[str]
    rows: list[list]  # of what str() formats


def min_median(values: list[float], form: str = ".1f") -> str:
    return f"{min(values):{form}} / {statistics.median(values):{form}}"


def ratio(a: list[float], b: list[float]) -> str:
    """Format min and median of ``a``, divided by those of ``b``."""
    return f"{min(a) / min(b):.2f} / {statistics.median(a) / statistics.median(b):.2f}"


def relative(values: list[float], reference: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(values, reference, strict=True))


def about_machine(note: str = "") -> dict:
    """Return the command, what it ran on, and the load at its start and now."""
    versions = {}
    for package in VERSIONS:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    script = f"benchmarks/{os.path.basename(sys.argv[0])}"
    return {
        "command": shlex.join(["python", script, *sys.argv[1:]]),
        "cpus": os.cpu_count(),
        **versions,
        "load": [LOAD, os.getloadavg()[0]],
        "note": note,
    }


def show(tables: list[Table], width: int = 140) -> None:
    """Print tables on the terminal."""
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(width=width)
    for title, columns, rows in tables:
        table = RichTable(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*map(str, row))
        console.print(table)


def in_markdown(columns: list[str], rows: list[list[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(map(str, line))} |" for line in lines]


def report(
    args: argparse.Namespace,
    name: str,
    title: str,
    paragraphs: list[str],
    tables: list[Table],
    results: dict,
    pictures: tuple[str, ...] = (),
) -> None:
    """Print the tables. If there is a folder for results, write ``name.json`` and a page,
    ``name.md``: the machine, what was measured, the tables, and pictures of that folder."""
    machine = about_machine(getattr(args, "note", ""))
    show(tables)
    if args.results is None:
        return
    load = "{:.1f} at the start and {:.1f} at the end".format(*machine["load"])
    libraries = ", ".join(f"{x} {machine[x]}" for x in VERSIONS if x in machine)
    about = f"`{machine['command']}` on {machine['cpus']} cores, {libraries}; the load was {load}"
    about += f", {machine['note']}. " if machine["note"] else ". "
    lines = [f"# {title}", "", about + paragraphs[0]]
    for paragraph in paragraphs[1:]:
        lines += ["", paragraph]
    for picture in pictures:
        lines += ["", f"![{picture}]({picture})"]
    for heading, columns, rows in tables:
        lines += ["", f"## {heading}", "", *in_markdown(columns, rows)]
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / f"{name}.md").write_text("\n".join(lines) + "\n")
    record = json.dumps({"machine": machine} | results, indent=1, default=str)
    (args.results / f"{name}.json").write_text(record + "\n")


@contextlib.contextmanager
def picture(file: Path, *shape: int, dpi: int = 110, **options):
    """Give a figure and its axes, and save it in the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(*shape, layout="constrained", **options)
    yield figure, axes
    figure.savefig(file, dpi=dpi)
    plt.close(figure)
