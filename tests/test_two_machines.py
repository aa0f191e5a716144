"""Two machines of two ranks each, started by torchrun on both, as users do: network namespaces.
Ranks of one machine share memory, all others send messages."""

import os
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from reference import attention, draw

import deepsp

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import netlink

SECONDS = 240  # an import of torch takes seconds where other tests run beside it
MIB = 1 << 20


@pytest.mark.nightly
def test_two_machines(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        pytest.skip(f"network namespaces need {' and '.join(missing)}, of iproute2")
    with netlink.Netlink(2, None) as link:
        running = []
        for node, address in enumerate(link.addresses):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
            command += ["--nproc-per-node", "2", "--node-rank", str(node)]
            command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{link.addresses[0]}:29500"]
            # What this machine's name stands for is no address of the namespace.
            command += ["--rdzv-conf", f"is_host={int(node == 0)}", "--local-addr", address]
            settings = {"GLOO_SOCKET_IFNAME": link.interface, "OMP_NUM_THREADS": "1"}
            settings["PYTHONPATH"] = os.pathsep.join(sys.path)
            env = {k: v for k, v in os.environ.items() if not k.startswith("DEEPSP_")} | settings
            with open(tmp_path / str(node), "w") as file:
                running.append(
                    link.popen(node, [*command, __file__], env=env, stdout=file, stderr=file)
                )
        end = time.monotonic() + SECONDS
        while any(p.poll() is None for p in running) and not any(p.returncode for p in running):
            if time.monotonic() > end:
                break
            time.sleep(0.05)
    said = [(tmp_path / str(node)).read_text() for node in range(2)]
    # Those that still ran have been terminated.
    assert [p.returncode for p in running] == [0, 0], "\n".join(text[-5000:] for text in said)
    assert sum(text.count("all right") for text in said) == 4, said


# ------------------------------------------------------------------------------ on every rank


def _close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def _who_reaches_whom():
    found = deepsp.transport()
    assert found.machines == ((0, 1), (2, 3)), found
    assert str(found).endswith("all other pairs: messages"), found
    with pytest.raises(ValueError, match="ranks 0 and 2 don't"):
        deepsp.transport(dist.new_group(), use="mapped")


def _attention(rank, lens, heads, kv_heads, chunks):
    full = [draw(2, sum(lens), h, 8, seed=h) for h in (heads, kv_heads, kv_heads + 1)]
    full[2] = full[2][:, :, :kv_heads].contiguous()
    mine = [x.split(lens, 1)[rank].clone().requires_grad_() for x in full]
    full = [x.requires_grad_() for x in full]
    expected = attention(*full, is_causal=True)
    ours = deepsp.distributed_attention(
        *mine, is_causal=True, enable_gqa=True, chunks=chunks, seq_lens=lens
    )
    _close(ours, expected.split(lens, 1)[rank])
    grad = draw(*expected.shape, seed=5)
    gradients = torch.autograd.grad(ours, mine, grad.split(lens, 1)[rank])
    for a, b in zip(gradients, torch.autograd.grad(expected, full, grad), strict=True):
        _close(a, b.split(lens, 1)[rank])


def _exchange(rank, size, lens):
    x = draw(2, sum(lens), 6, 8)
    mine = x.split(lens, 1)[rank].contiguous()
    (held,) = deepsp.seq_to_heads([mine], seq_lens=lens)
    assert torch.equal(held, x[:, :, torch.arange(6).tensor_split(size)[rank]])
    (back,) = deepsp.heads_to_seq([held], [6], seq_lens=lens)
    assert torch.equal(back, mine)


def _along_a_dim(rank, size, sizes, dim):
    shape = [3, 5, 2]
    shape[dim] = sum(sizes)
    x = draw(*shape).mul(8).round()  # whole numbers: sums are exact
    mine = x.split(sizes, dim)[rank].contiguous()
    assert torch.equal(deepsp.collectives.all_gather(mine, dim, sizes=sizes, grad="replicated"), x)
    y = deepsp.collectives.reduce_scatter(x * (rank + 1), dim, sizes=sizes)
    assert torch.equal(y, mine * (size * (size + 1) // 2))


def _sent() -> dict[str, int]:
    """Bytes that each interface of this network namespace has sent."""
    with open("/proc/self/net/dev") as file:
        rows = [line.replace(":", " ").split() for line in file if ":" in line]
    return {row[0]: int(row[9]) for row in rows}


def _what_the_network_carries(size):
    """What crosses between the machines, and nothing of what stays in one."""
    x = torch.ones(1, 4096, 8, 64)  # 8 MiB: 2 for each rank
    dist.barrier()
    before = _sent()
    dist.barrier()  # nobody sends before all have looked
    deepsp.seq_to_heads([x])
    dist.barrier()
    sent = {name: (count - before[name]) / MIB for name, count in _sent().items()}
    assert sent["lo"] < 1, sent
    assert 8 <= sent[netlink.Netlink.interface] < 12, sent
    before = _sent()
    dist.barrier()
    deepsp.collectives.reduce_scatter(x.flatten(), 0)  # 4 blocks of 2 MiB leave each machine
    dist.barrier()
    sent = {name: (count - before[name]) / MIB for name, count in _sent().items()}
    assert sent["lo"] < 1, sent
    assert 8 <= sent[netlink.Netlink.interface] < 12, sent


def _main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    _who_reaches_whom()
    _attention(rank, [5, 0, 9, 2], 8, 2, 1)
    _attention(rank, [1, 7, 3, 6], 8, 4, 2)
    _exchange(rank, size, [4, 1, 0, 6])
    for dim in (0, 1, -1):
        _along_a_dim(rank, size, [3, 0, 4, 1], dim)
    _what_the_network_carries(size)
    dist.barrier()
    dist.destroy_process_group()
    print("all right")


if __name__ == "__main__":
    torch.set_num_threads(1)
    _main()
