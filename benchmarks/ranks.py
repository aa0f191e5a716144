"""Processes of a group, on a link of a set speed or the loopback, that run what they are told."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import sys
import tempfile

import torch
import torch.distributed as dist
from netlink import Netlink


def about_machine(load: float, note: str) -> dict:
    """The command, what it ran on, and the load at its start and now, for the results."""
    return {
        "command": shlex.join(
            ["python", f"benchmarks/{os.path.basename(sys.argv[0])}", *sys.argv[1:]]
        ),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "load": [load, os.getloadavg()[0]],
        "note": note,
    }


def serve(rank: int, size: int, link: Netlink | None, path: str, pipe) -> None:
    init = f"file://{path}"
    if link is not None:
        link.enter(rank * len(link.addresses) // size)
        os.environ["GLOO_SOCKET_IFNAME"] = link.interface
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size)
    while (task := pipe.recv()) is not None:
        function, args = task
        pipe.send(function(*args))
    dist.barrier()
    dist.destroy_process_group()


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

    def __call__(self, function, *args):
        for pipe in self.pipes:
            pipe.send((function, args))
        try:
            first, *_ = [pipe.recv() for pipe in self.pipes]
            return first
        except EOFError:
            raise SystemExit("a rank died; its message is above") from None

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
