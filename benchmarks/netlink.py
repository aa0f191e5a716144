"""Network namespaces joined by links of a set speed: several nodes on one machine.

Each node is a namespace with one interface, veth0; two nodes share a veth pair, more a bridge in a
namespace of its own. What a node sends is limited by tbf; what it receives is not, so with more
than two nodes a node can receive from several at the full rate each. The rate counts Ethernet, IP
and TCP headers: at an MTU of 1500 a program sees about 95% of it.

Nothing is made outside these namespaces, and all of them are removed at the end, also after an
error, Ctrl-C, SIGTERM or SIGHUP. After SIGKILL they stay; `ip netns del` removes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

CLONE_NEWNET = 0x40000000
CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
FATAL = (signal.SIGTERM, signal.SIGHUP)  # by default they end Python without any clean-up
GRACE = 5.0  # seconds between SIGTERM and SIGKILL


def _run(*argv: str) -> None:
    # In a session of its own, so that a Ctrl-C at the terminal does not stop it halfway.
    done = subprocess.run(argv, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        message = f"netlink: `{' '.join(argv)}` failed: {(done.stderr or done.stdout).strip()}"
        if "not permitted" in message:
            message += "\nIn a container, start it with --privileged."
        raise SystemExit(message)


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """Holds signals back, so that none comes between making something and noting it."""
    if threading.current_thread() is not threading.main_thread():  # where none is handled
        yield
        return
    pending: list[int] = []
    numbers = (signal.SIGINT, *FATAL)
    old = {s: signal.signal(s, lambda number, _: pending.append(number)) for s in numbers}
    try:
        yield
    finally:
        for s, handler in old.items():
            signal.signal(s, handler)
        for number in pending:
            signal.raise_signal(number)


class Netlink:
    """`nodes` namespaces, joined at `rate` as tc writes it ("500mbit"); None: not limited."""

    interface = "veth0"

    def __init__(self, nodes: int, rate: str | None) -> None:
        if not 2 <= nodes <= 254:
            raise ValueError(f"nodes must be 2 to 254, not {nodes}")
        self.rate = rate
        self.addresses = [f"10.77.0.{i + 1}" for i in range(nodes)]
        # The pid says whose they are; the rest keeps apart several links of one process.
        prefix = f"deepsp-{os.getpid()}-{secrets.token_hex(2)}"
        self._names = [f"{prefix}-{i}" for i in range(nodes)]
        self._bridge = f"{prefix}-bridge"
        self._pid = os.getpid()
        self._made: list[str] = []
        self._processes: list[subprocess.Popen[Any]] = []
        self._handled: list[int] = []

    def __getstate__(self) -> dict[str, Any]:  # for `enter` in a spawned child
        return {**self.__dict__, "_processes": [], "_handled": []}

    def __enter__(self) -> Netlink:
        if sys.platform != "linux" or os.geteuid() != 0:
            raise SystemExit("netlink: needs Linux and root: run it as root, or with sudo")
        if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
            raise SystemExit(f"netlink: {' and '.join(missing)} not found: apt install iproute2")
        try:
            if threading.current_thread() is threading.main_thread():
                for number in FATAL:
                    if signal.getsignal(number) is signal.SIG_DFL:
                        signal.signal(number, lambda number, _: sys.exit(128 + number))
                        self._handled.append(number)
            with _signals_later():
                self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _make(self) -> None:
        bridged = len(self._names) > 2
        for name in self._names + [self._bridge] * bridged:
            _run("ip", "netns", "add", name)
            self._made.append(name)
        veth = ("type", "veth", "peer", "name", self.interface, "netns")
        if bridged:
            _run("ip", "-n", self._bridge, "link", "add", "bridge", "up", "type", "bridge")
            for i, name in enumerate(self._names):
                _run("ip", "-n", self._bridge, "link", "add", f"port{i}", *veth, name)
                _run("ip", "-n", self._bridge, "link", "set", f"port{i}", "up", "master", "bridge")
        else:
            _run("ip", "-n", self._names[0], "link", "add", self.interface, *veth, self._names[1])
        for name, address in zip(self._names, self.addresses, strict=True):
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", self.interface)
            _run("ip", "-n", name, "link", "set", self.interface, "up")
            # bbr paces itself by what it measures; reno is plain, and in every kernel.
            _run("ip", "netns", "exec", name, "sh", "-c", f"echo reno >{CONGESTION} || true")
        if self.rate is not None:
            self.set_rate(self.rate)

    def _remove(self) -> None:
        if os.getpid() != self._pid:  # a forked child
            return
        try:
            with _signals_later():
                self._stop()
                while self._made:
                    try:
                        _run("ip", "netns", "del", self._made.pop())
                    except SystemExit as error:  # on to the others
                        print(error, file=sys.stderr)
        finally:
            while self._handled:
                signal.signal(self._handled.pop(), signal.SIG_DFL)

    def _stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            end = time.monotonic() + GRACE
            for process in self._processes:
                if process.poll() is None:  # not yet reaped: the pid is still its own
                    os.killpg(process.pid, number)
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))
        for name in self._made:  # what those have started, and left in process groups of its own
            left = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for pid in left.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def set_rate(self, rate: str | None) -> None:
        """Sets the rate of all links, also while they are in use."""
        tbf = ("tbf", "rate", str(rate), "burst", "256kb", "latency", "50ms")
        for name in self._names:
            where = ("dev", self.interface, "root")
            if rate is not None:
                _run("tc", "-n", name, "qdisc", "replace", *where, *tbf)
            elif self.rate is not None:
                _run("tc", "-n", name, "qdisc", "del", *where)
        self.rate = rate

    def popen(self, node: int, argv: list[str], **kwargs: Any) -> subprocess.Popen[Any]:
        """Starts `argv` in a node, in a process group of its own; stopped with the link."""
        argv = ["ip", "netns", "exec", self._names[node], *argv]
        with _signals_later():
            process = subprocess.Popen(argv, process_group=0, **kwargs)
            self._processes.append(process)
        return process

    def enter(self, node: int) -> None:
        """Moves a forked or spawned child into a node, before it opens sockets or has threads."""
        if os.getpid() != self._pid:
            for number in self._handled:
                signal.signal(number, signal.SIG_DFL)
        with open(f"/var/run/netns/{self._names[node]}") as file:
            libc = ctypes.CDLL(None, use_errno=True)  # os.setns is there from Python 3.12
            if libc.setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns failed", file.name)
