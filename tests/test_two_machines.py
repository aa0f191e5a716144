"""Groups that span machines: ranks of one share memory, all others send messages. What sums send;
and two machines of two ranks each, started by torchrun on both, as users do: network namespaces."""

import os
import shutil
import signal
import socket
import struct
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import Workers, on_ranks
from reference import attention, draw
from test_gather import summed
from test_layer import compare, make_layer

import deepsp

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import netlink

op = torch.ops.deepsp
SECONDS = 240  # an import of torch takes seconds where other tests run beside it
MIB = 1 << 20


# ------------------------------------------------------------------------------ sums


def _received() -> int:
    """The bytes that this process has received by TCP, through the sockets that it has now."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        if not Path("/proc/self/fd", name).is_socket():
            continue
        with socket.socket(fileno=os.dup(int(name))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, 128)[0]  # tcpi_bytes_received
    return total


def _group(machines):
    """Its ranks run on these machines, a letter for each rank."""
    before = os.environ["DEEPSP_TEST_MACHINE"]
    os.environ["DEEPSP_TEST_MACHINE"] = machines[dist.get_rank()]
    try:
        group = dist.new_group()
        found = deepsp.transport(group).machines
    finally:
        os.environ["DEEPSP_TEST_MACHINE"] = before
    assert [[machines[p] for p in ranks] for ranks in found] == [
        [name] * machines.count(name) for name in sorted(set(machines))
    ]
    return group, found


def _sums(machines, dtype, sums):
    """Values and gradients. sums: whether machines sum first."""
    group, ranks = _group(machines)
    rank, size, name = dist.get_rank(), dist.get_world_size(), group.group_name
    for lens in ([2] * size, [3, 0, 5, 1, 2][:size]):
        for shape, dim in (((sum(lens), 3), 0), ((2, sum(lens), 3), 1)):
            each = [draw(*shape, seed=p).to(dtype) for p in range(size)]
            total = summed(each, dtype, machines=ranks if sums else ())
            exact = sum(x.double() for x in each)
            torch.testing.assert_close(total.double(), exact, rtol=1e-2, atol=1e-2)
            y = deepsp.collectives.reduce_scatter(each[rank], dim, group, lens)
            assert torch.equal(y, total.split(lens, dim)[rank])
            mine = each[0].split(lens, dim)[rank].clone().requires_grad_()
            whole = deepsp.collectives.all_gather(mine, dim, group, lens, grad="partial")
            (gradient,) = torch.autograd.grad(whole, mine, each[rank])
            assert torch.equal(gradient, y)
        # Several at once, of several dtypes.
        shards = [draw(lens[rank], n).float().requires_grad_() for n in (3, 1, 7)]
        dtypes = [dtype, torch.float64, torch.float32]
        full = op.gather_cast_coalesced(shards, lens * 3, dtypes, rank, name)
        each = [[draw(*x.shape, seed=9 * p).to(x.dtype) for p in range(size)] for x in full]
        gradients = torch.autograd.grad(full, shards, [x[rank] for x in each])
        for x, gradient in zip(each, gradients, strict=True):
            total = summed(x, torch.float32, machines=ranks)
            assert torch.equal(gradient, total.split(lens)[rank])


@pytest.mark.parametrize(
    ("machines", "dtype", "sums"),
    [
        ("aabb", torch.float32, True),
        ("aab", torch.bfloat16, False),
        ("abab", torch.float64, True),
        ("aaaab", torch.bfloat16, True),
    ],
)
def test_sums(machines, dtype, sums):
    on_ranks(len(machines), _sums, machines, dtype, sums, apart="machines")


def _whoever_waits_first():
    """A start sends all that it has to, whoever waits when, and if anybody does."""
    group, _ = _group("aabb")
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.ones(1001 * size)
    starts = [deepsp.collectives.reduce_scatter_start(x * n, 0, group) for n in range(1, 5)]
    del starts[0]
    if rank == 1:
        dist.barrier()  # the others have waited
    for n, start in sorted(enumerate(starts, 2), key=lambda pair: (pair[0] + rank) % 3):
        assert torch.equal(start.wait(), torch.full((1001,), float(n * size)))
    if rank != 1:
        dist.barrier()


def test_whoever_waits_first():
    on_ranks(4, _whoever_waits_first, apart="machines")


def _what_sums_send():
    """A machine sends each block once: half of what its two ranks have."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group, _ = _group("abab")
    x = torch.ones(size << 18, 1)  # blocks of 1 MiB
    part = x[: 1 << 18].clone().requires_grad_()
    torch.manual_seed(0)
    linear = torch.nn.Linear(512, 512 * size, bias=False)
    sharded = deepsp.shard_parameters(linear, group, torch.float32, reshard_after_forward=False)
    gathered = op.gather_cast(part, [1 << 18] * size, torch.float32, rank, group.group_name)
    outputs = sharded(torch.ones(1, 512))
    for call in (
        lambda: deepsp.collectives.reduce_scatter(x, 0, group),
        lambda: torch.autograd.backward(gathered, x),
        lambda: torch.autograd.backward(outputs, outputs),
    ):
        dist.barrier()
        before = _received()
        call()
        dist.barrier()
        assert MIB <= _received() - before < 1.05 * MIB


def test_what_sums_send():
    on_ranks(4, _what_sums_send, apart="machines")


# ------------------------------------------------------------------------------ shared kv heads


def _shared_heads(machines, heads, kv_heads, chunks, query_parts):
    """A kv head that several ranks of a machine read crosses once; values and gradients."""
    group, _ = _group(machines)
    rank, size = dist.get_rank(), dist.get_world_size()
    for lens in ([2] * size, [3, 0, 9, 1, 2][:size]):
        full = [draw(2, sum(lens), h, 8, seed=n) for n, h in enumerate([heads, kv_heads, kv_heads])]
        mine = [x.split(lens, 1)[rank].clone().requires_grad_() for x in full]
        full = [x.requires_grad_() for x in full]
        expected = attention(*full, is_causal=True)
        options = {"seq_lens": lens, "group": group}
        ours = deepsp.distributed_attention(
            *mine,
            is_causal=True,
            enable_gqa=True,
            chunks=chunks,
            query_parts=query_parts,
            **options,
        )
        _close(ours, expected.split(lens, 1)[rank])
        grad = draw(*expected.shape, seed=5)
        gradients = torch.autograd.grad(ours, mine, grad.split(lens, 1)[rank])
        for a, b in zip(gradients, torch.autograd.grad(expected, full, grad), strict=True):
            _close(a, b.split(lens, 1)[rank])
        layer = make_layer(
            6, heads, kv_heads, head_dim=8, chunks=chunks, query_parts=query_parts, group=group
        )
        for watched in (False, True):
            with torch.autograd.set_detect_anomaly(watched, check_nan=watched):
                compare(layer, draw(2, sum(lens), 6), lens)


@pytest.mark.parametrize(
    ("machines", "heads", "kv_heads", "chunks", "query_parts"),
    [
        ("aabb", 4, 1, 1, 1),
        ("aaaab", 5, 1, 1, 1),
        ("abab", 12, 2, 3, 1),  # a head's readers read it with other chunks, too
        ("aabab", 10, 5, 2, 1),
        ("aabb", 2, 2, 1, 2),
        ("aaaab", 3, 1, 2, "auto"),
    ],
)
def test_shared_heads(machines, heads, kv_heads, chunks, query_parts):
    on_ranks(
        len(machines),
        _shared_heads,
        machines,
        heads,
        kv_heads,
        chunks,
        query_parts,
        apart="machines",
    )


def _sixteen_bits():
    """The ranks of a machine sum in float32, and one rounding more than one machine's sum."""
    group, _ = _group("aaabbb")
    rank, size = dist.get_rank(), dist.get_world_size()
    each = [draw(1, 2 * size, 1, 4, seed=p).bfloat16() for p in range(size)]
    q = draw(1, 2 * size, 1, 4).bfloat16()
    _, dk = deepsp.heads_to_seq([q, each[rank]], [size, 1], group)
    machines = [sum(x.float() for x in each[m : m + 3]) for m in (0, 3)]
    near, far = (machines[rank // 3], machines[1 - rank // 3])
    exact = near + far.bfloat16().float()
    torch.testing.assert_close(
        dk.float(), exact[:, 2 * rank : 2 * rank + 2], rtol=2**-8, atol=2**-9
    )


def test_sixteen_bits():
    on_ranks(6, _sixteen_bits, apart="machines")


def _what_shared_heads_send(query_parts):
    """k and v cross once to each machine, and what its ranks have for dk and dv is summed there."""
    group, _ = _group("aabb")
    rank, size = dist.get_rank(), dist.get_world_size()
    lens, heads = [4096] * size, [size // query_parts, 1, 1]
    mine = [torch.ones(1, lens[rank], h, 64) for h in heads]
    about, options = (rank, group.group_name), {"query_parts": query_parts}

    def exchange():
        (buffer,) = op.seq_to_heads_start(mine, lens, 1, False, *about, **options)
        return op.seq_to_heads_wait(buffer, heads, [64] * 3, 1, lens, 0, 1, *about, **options)

    held = exchange()

    def exchange_back():
        buffer = op.heads_to_seq_start(held, heads, lens, 0, 1, *about, **options)
        return op.heads_to_seq_wait([buffer], heads, [64] * 3, 1, lens, *about, **options)

    for call in (exchange, exchange_back):
        dist.barrier()
        before = _received()
        out = call()
        dist.barrier()
        each = [None] * size
        dist.all_gather_object(each, _received() - before)
        # Half of the queries of the other machine's ranks, and k and v of one of them.
        q, k, v = (x.nbytes for x in mine)
        received = each[rank] if query_parts == 1 else sum(each) / size
        assert 1 <= received / (q / 2 + k + v) < 1.02
    for i, x in enumerate(out):
        assert torch.equal(x, mine[i] * (1 if i == 0 else size))


@pytest.mark.parametrize("query_parts", [1, 2])
def test_what_shared_heads_send(query_parts):
    on_ranks(4, _what_shared_heads_send, query_parts, apart="machines")


def _without_a_rank():
    """Rank 0 waits for what rank 1 can't pass on, since the rank that sends it has died."""
    q, k = torch.zeros(1, 64, 4, 8), torch.zeros(1, 64, 1, 8)
    deepsp.seq_to_heads([q, k])
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        for _ in range(2):
            deepsp.seq_to_heads([q, k])
    return time.monotonic() - begin, str(caught.value)


def test_without_a_rank():
    workers = Workers(4, timeout=10, apart="machines")
    try:
        answers = workers.call(_without_a_rank)
    finally:
        workers.stop()
    assert all(fine for fine, _ in answers[:3]), answers
    said = [message for _, (_, message) in answers[:3]]
    assert max(waited for _, (waited, _) in answers[:3]) < 5, answers
    # One of them relays what rank 3 sends, and the other waits for it.
    assert any("failed: rank 3: " in message for message in said[:2]), said


# ------------------------------------------------------------------------------ namespaces


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
    deepsp.collectives.reduce_scatter(x.flatten(), 0)  # two blocks of 2 MiB leave each machine
    dist.barrier()
    sent = {name: (count - before[name]) / MIB for name, count in _sent().items()}
    assert sent["lo"] < 1, sent
    assert 4 <= sent[netlink.Netlink.interface] < 6, sent


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
