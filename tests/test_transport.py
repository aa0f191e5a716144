"""Ranks of one machine write into each other's memory: who reaches whom, and that results are one
process's whoever is early, whatever is mixed, and whoever dies."""

import contextlib
import datetime
import gc
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from attentions import LAYERS, check_attention, check_layer, check_shares
from exchanges import EXCHANGES, check_along_dim, check_exchange, check_matmuls
from harness import Workers, on_ranks
from reference import draw
from shards import GATHERS, check_gather

import deepsp

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from mapped import mapped_files, shared_mib

op = torch.ops.deepsp
bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64


# ------------------------------------------------------------------------------ who reaches whom


def _reports():
    rank, size = dist.get_rank(), dist.get_world_size()
    before = os.environ.get("DEEPSP_TRANSPORT")
    os.environ.pop("DEEPSP_TRANSPORT", None)
    try:
        found = deepsp.transport(dist.new_group())
        everybody = tuple(range(size))
        assert found.machines == (everybody,) and found.reasons == ("",) * size
        assert found.mapped(0, size - 1)
        assert str(found) == f"ranks {', '.join(map(str, everybody))}: shared memory"
        assert deepsp.transport(device="cpu:0") == deepsp.transport()

        group = dist.new_group()
        found = deepsp.transport(group, use="messages")
        assert found.machines == tuple((p,) for p in range(size)) and not found.mapped(0, 1)
        assert str(found).startswith("rank 0: messages, since messages are asked for\nrank 1:")
        assert deepsp.transport(group) == deepsp.transport(group, use="messages") == found
        with pytest.raises(ValueError, match='has used since its first exchange, got "auto"'):
            deepsp.transport(group, use="auto")

        os.environ["DEEPSP_TRANSPORT"] = "messages"
        assert not deepsp.transport(dist.new_group()).mapped(0, 1)
        assert deepsp.transport(dist.new_group(), use="mapped").mapped(0, 1)
        # A wrong word on one rank: an error on every rank, and the group works once it is right.
        group = dist.new_group()
        for word in ("pigeons", "", "x" * 100):
            os.environ["DEEPSP_TRANSPORT"] = "auto" if rank < size - 1 else word
            says = f'DEEPSP_TRANSPORT to be "auto".*got "{word[:30]}.*" on rank {size - 1}'
            with pytest.raises(ValueError, match=says):
                deepsp.transport(group)
        assert deepsp.transport(group, use="mapped").mapped(0, 1)

        # Different on one rank: said on every rank, naming who.
        os.environ["DEEPSP_TRANSPORT"] = "auto" if rank < size - 1 else "messages"
        x = draw(1, 4, size, 2)
        with pytest.raises(ValueError, match=f"auto on rank 0 and messages on rank {size - 1}"):
            deepsp.seq_to_heads([x], group=dist.new_group())

        del os.environ["DEEPSP_TRANSPORT"]
        os.environ["DEEPSP_TEST_MACHINE"] = str(rank)
        group = dist.new_group()
        with pytest.raises(ValueError, match=r"ranks 0 and 1 don't \(no other rank"):
            deepsp.transport(group, use="mapped")
        assert not deepsp.transport(group, use="auto").mapped(0, 1)
    finally:
        os.environ.pop("DEEPSP_TEST_MACHINE", None)
        if before is not None:
            os.environ["DEEPSP_TRANSPORT"] = before
    with pytest.raises(ValueError, match='use to be "auto", "mapped" or "messages", got "ram"'):
        deepsp.transport(use="ram")


@pytest.mark.parametrize("ranks", [2, 3])
def test_who_reaches_whom(ranks):
    on_ranks(ranks, _reports)


def _alone():
    group = [dist.new_group([p]) for p in range(dist.get_world_size())][dist.get_rank()]
    assert str(deepsp.transport(group)) == "rank 0: messages, since the group has one rank"


def test_a_group_of_one():
    on_ranks(2, _alone)


def _cannot_map():
    """A rank that can't map memory: all of its machine send messages, and say whose fault it is."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, limit[1]))
    try:
        group = dist.new_group()
        found = deepsp.transport(group)
        x = draw(1, 4, 4, 2)
        (y,) = deepsp.seq_to_heads([x], group=group)
        assert torch.equal(deepsp.heads_to_seq([y], [4], group=group)[0], x)
        assert deepsp.ranks.buffers.limit() == (2 << 30) // 2, "of all ranks of a machine together"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert not found.mapped(0, 1)
    assert "mmap of shared memory: Cannot allocate memory" in found.reasons[1]


def test_a_rank_that_cannot_map_memory():
    on_ranks(2, _cannot_map, apart="limited")


STRANGER = """
import array, os, socket, struct, sys, time

kind, met, parent, first = sys.argv[1], set(), os.getppid(), []
if kind == "another user":
    os.setuid(65534)
print(flush=True)
while os.getppid() == parent:
    time.sleep(0.005)
    for line in open("/proc/net/unix"):
        fields = line.split()
        name = fields[-1]
        if not name.startswith("@deepsp-") or fields[3] != "00010000" or name in met:
            continue
        met.add(name)
        try:
            for n in range(4):
                caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                caller.setblocking(False)
                caller.connect("\\0" + name[1:])
                first.append(caller)
                if kind == "garbage":
                    forged = struct.pack("<q32s32s", 2, b"a rank, but not its secret", b"")
                    said = [b"", forged, b"hi", b"\\xff" * 4096][n]
                    files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1][:n]))]
                    caller.sendmsg([said], files if n else [])
        except BlockingIOError:
            pass  # as many wait already as the socket takes
        except OSError:
            continue  # the group has formed by then
        print(name, flush=True)
"""


def _strangers(kinds):
    """The last rank comes when every stranger has called one that waits for it."""
    last = dist.get_rank() == dist.get_world_size() - 1
    command = [sys.executable, "-uc", STRANGER]
    pipe = {"stdout": subprocess.PIPE, "text": True}
    callers = [subprocess.Popen([*command, kind], **pipe) for kind in kinds if last]
    try:
        for caller in callers:
            assert caller.stdout.readline() == "\n"
        for _ in range(3):
            group = dist.new_group()
            called = {caller.stdout.readline()[:8] for caller in callers}
            assert called <= {"@deepsp-"}, called
            begin = time.monotonic()
            found = deepsp.transport(group)
            assert found.mapped(0, 1) and found.mapped(0, 2), str(found)
            assert not last or time.monotonic() - begin < 8
    finally:
        for caller in callers:
            caller.kill()
            caller.wait()
            caller.stdout.close()


def test_strangers_that_call():
    """Any process can connect to a rank's socket: the group forms as if it hadn't."""
    kinds = ["garbage", "silence", *(["another user"] if os.getuid() == 0 else [])]
    on_ranks(3, _strangers, kinds)


def _missing():
    rank, x = dist.get_rank(), draw(1, 4, 4, 2)
    names = []
    for absent, call in (
        ([1, 2], lambda group: deepsp.transport(group)),
        ([0], lambda group: deepsp.seq_to_heads([x], group=group)),
        ([2], lambda group: deepsp.DistributedAttention(group=group)(x, x, x)),
    ):
        group = dist.new_group(timeout=datetime.timedelta(seconds=1))
        if rank not in absent:
            with pytest.raises(RuntimeError) as caught:
                call(group)
            names.append(str(caught.value))
            numbers = " and ".join(map(str, absent))
            assert f"failed waiting for rank{'s' * (len(absent) > 1)} {numbers}: " in names[-1]
        dist.barrier()
    return names


def test_a_first_exchange_names_who_is_missing():
    on_ranks(3, _missing)


def _connections():
    """The local sockets of this process, by inode."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{name}").removeprefix("socket:[").rstrip("]"))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {fields[6] for fields in lines if fields[4] == "0005"} & inodes


def _many_groups():
    """Two processes need one connection, whatever the number of groups; a rank that leaves a group
    is missed at once all the same."""
    rank, size = dist.get_rank(), dist.get_world_size()
    deepsp.transport()
    dist.barrier()
    before = _connections()
    assert len(before) == size - 1
    x = draw(1, 4, size, 2)
    groups = [dist.new_group() for _ in range(4)]
    for group in groups:
        deepsp.seq_to_heads([x], group=group)
    dist.barrier()
    assert _connections() == before
    left, kept = groups[:2]
    if rank == 1:
        dist.destroy_process_group(left)
        del groups, left, group
        deepsp.ranks.buffers.clear()  # closes what it shared
        dist.barrier()
    else:
        dist.barrier()
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1: it has left the group, or died"):
            deepsp.seq_to_heads([x], group=left)
        assert time.monotonic() - begin < 5
    dist.barrier()
    deepsp.seq_to_heads([x], group=kept)
    assert _connections() == before


def test_connections_of_many_groups():
    on_ranks(3, _many_groups)


def _core_dump():
    deepsp.transport()
    mappings = Path("/proc/self/smaps").read_text().split("VmFlags:")
    flags = [after.split("\n", 1)[0].split() for after in mappings[1:]]
    ours = [f for text, f in zip(mappings, flags, strict=False) if "memfd:deepsp" in text]
    assert len(ours) >= dist.get_world_size()
    assert all("dd" in f for f in ours), ours


def test_core_dumps_leave_shared_memory_out():
    on_ranks(2, _core_dump)


# ------------------------------------------------------------------------------ results

MIXED = pytest.mark.parametrize("ranks", [3, 4])


def _all(calls):
    for function, *args in calls:
        function(*args)


def _is_mixed():
    size = dist.get_world_size()
    found = deepsp.transport()
    assert found.machines == (((0, 1), (2, 3)) if size == 4 else ((0, 1), (2,)))
    assert str(found).endswith("all other pairs: messages")


@MIXED
def test_machines_mixed(ranks):
    """Ranks 0 and 1 share memory, so do 2 and 3; between them go messages."""
    specs = [*GATHERS, ((90000, 1, 70000, 5), (2,), bf16, f64, "plain")]
    calls = [
        (_is_mixed,),
        *EXCHANGES,
        (check_exchange, 1, 64, 8, 8, (8, 8, 8), f64, "bshd", "split"),
        (check_attention, 2, 13, 8, 2, (8, 8), True, 1, "skewed", None),
        (check_attention, 2, 13, 8, 2, (8, 8), True, 2, "empty", None),
        (check_attention, 1, 32, 8, 8, (8, 8), True, 1, "even", None),
        (check_shares, 2, 1, "skewed", "auto", 1, "causal", (8, 8)),
        (check_shares, 8, 2, "empty", ranks, 2, "mask", (4, 6)),
        *((check_layer, case) for case in LAYERS),
        (check_gather, specs, None, False),
        (check_along_dim, f64, [0, 1, -1], ["even", "split"]),
        (check_matmuls, f64),
    ]
    on_ranks(ranks, _all, calls, apart="machines")


def _large():
    """Of one sequence, large enough that ranks which reach nobody send tensor by tensor."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = [draw(1, 8192 // size + rank, 6, d, seed=d, dtype=f32) for d in (64, 32, 96)]
    lens = [8192 // size + p for p in range(size)]
    y = deepsp.seq_to_heads(x, seq_lens=lens)
    for a, b in zip(deepsp.heads_to_seq(y, [6] * 3, seq_lens=lens), x, strict=True):
        assert torch.equal(a, b)


def test_large_gradients_of_mixed_machines():
    on_ranks(3, _large, apart="machines")


def _other_orders():
    """The order of the result decides where others write: one rank wants another."""
    group = dist.new_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    x = draw(2, 4, 2, 3)
    lens, where = [2] * size, (rank, group.group_name)
    with pytest.raises(RuntimeError, match=r"another call|its own exchange failed"):
        buffer = op.heads_to_seq_start([x], [2 * size], lens, 0, 1, *where, tokens_first=rank == 0)
        op.heads_to_seq_wait([buffer], [2 * size], [3], 2, lens, *where, tokens_first=rank == 0)


def test_ranks_that_want_other_orders():
    on_ranks(2, _other_orders, apart="mapped")


def _wait_for_rows():
    """A buffer ordered for heads_to_seq_wait is none for heads_to_output_wait."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, weight = draw(2, 4, 2, 3), draw(5, 6 * size)
    lens, where = [4 // size] * size, (rank, dist.group.WORLD.group_name)
    buffer = op.heads_to_seq_start([x], [2 * size], lens, 0, 1, *where, tokens_first=False)
    with pytest.raises(ValueError, match="leave tokens_first out"):
        op._heads_to_output_wait([buffer], weight, None, 2 * size, 2, lens, *where)


def test_a_wait_for_rows():
    on_ranks(2, _wait_for_rows, apart="mapped")


def _sum_by_rank():
    """A sum adds the ranks' tensors in their order, in float32 if they have 16 bits."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16):
        of_ranks = [draw(1001, seed=p).to(dtype) for p in range(size)]
        expected = of_ranks[0].float()
        for x in of_ranks[1:]:
            expected = expected + x.float()
        if dtype == torch.float32:  # another order has other bits
            assert not torch.equal(expected, sum(of_ranks[::-1]))
        found = deepsp.collectives.all_reduce(of_ranks[rank], grad="replicated")
        assert torch.equal(found, expected.to(dtype))


def test_sums_are_by_rank():
    on_ranks(3, _sum_by_rank, apart="mapped")


def _sums_in_another_order():
    """Sums have two exchanges each: waits in another order are an error, and no wrong number."""
    group = dist.new_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.ones(1000) * (rank + 1)
    started = [
        deepsp.collectives.all_reduce_start(x * n, group, grad="replicated") for n in (1, 10)
    ]
    with pytest.raises(RuntimeError, match=r"another call|its own exchange failed"):
        for one in started if rank == 0 else started[::-1]:
            one.wait()
    group = dist.new_group()
    started = [
        deepsp.collectives.all_reduce_start(x * n, group, grad="replicated") for n in (1, 10)
    ]
    for n, one in reversed([*zip((1, 10), started, strict=True)]):
        assert torch.equal(one.wait(), torch.full((1000,), n * size * (size + 1) / 2))


def test_sums_waited_for_in_another_order():
    on_ranks(2, _sums_in_another_order, apart="mapped")


def _late(late):
    """One rank comes late to everything: others bring its buffers, and start waits for nobody."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    deepsp.transport(group)
    x = [draw(1, 5 + p, 8, 4, seed=p) for p in range(size)]
    lens = [len(t[0]) for t in x]
    expected = torch.cat(x, 1)
    owned = torch.arange(8).tensor_split(size)[rank]
    for _ in range(3):
        if rank == late:
            dist.barrier()  # the others have started
        starts = [
            deepsp.seq_to_heads_start([x[rank] * n], seq_lens=lens, group=group) for n in range(3)
        ]
        if rank != late:
            dist.barrier()
        for n, start in reversed(list(enumerate(starts))):
            (y,) = start.wait()
            assert torch.equal(y, expected[:, :, owned] * n)
            (back,) = deepsp.heads_to_seq([y], [8], seq_lens=lens, group=group)
            assert torch.equal(back, x[rank] * n)


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank(late):
    for ranks in (2, 3):
        on_ranks(ranks, _late, late)


def _inputs_may_be_written():
    """After a wait, inputs are the user's again, though others may not have read theirs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((1, 1000, 4, 8), float(rank))
    for _ in range(20):
        (y,) = deepsp.seq_to_heads([x.clone()])
        expected = torch.arange(size).repeat_interleave(1000)[None, :, None, None].expand_as(y)
        if rank == 0:
            time.sleep(0.002)
        (z,) = deepsp.heads_to_seq([y], [4])
        y.fill_(-1.0)
        assert torch.equal(z, x)
        z.fill_(-2.0)
        (y,) = deepsp.seq_to_heads([x])
        assert torch.equal(y, expected.to(y.dtype))


def test_buffers_are_not_shared_between_calls():
    on_ranks(2, _inputs_may_be_written)


def _many():
    """More exchanges than a group has slots; and many in flight."""
    rank, size = dist.get_rank(), dist.get_world_size()
    where = rank, dist.group.WORLD.group_name
    x = torch.full((1, 2, size, 1), float(rank))
    for n in range(2300):
        (y,) = op.seq_to_heads([x + n], [2] * size, *where)
        if n % 100 == 0:
            assert torch.equal(y.flatten(), torch.arange(size).repeat_interleave(2) + float(n))
    started = [op.seq_to_heads_start([x + n], [2] * size, 1, False, *where)[0] for n in range(300)]
    dist.barrier()
    for n, buffer in enumerate(started):
        (y,) = op.seq_to_heads_wait(buffer, [size], [1], 1, [2] * size, 0, 1, *where)
        assert torch.equal(y.flatten(), torch.arange(size).repeat_interleave(2) + float(n))


def test_many_exchanges():
    on_ranks(2, _many)


def _outputs():
    """Outputs have storage of their own: written, resized or saved, they show nothing else."""
    x = [draw(1, 6, h, 4, seed=h).requires_grad_() for h in (8, 4, 2)]
    y = deepsp.seq_to_heads(x)
    gradients = torch.autograd.grad([t.sum() for t in y], x)
    for g, t in zip(gradients, x, strict=True):
        assert g.is_contiguous() and g.storage_offset() == 0
        assert g.untyped_storage().nbytes() == t.nbytes
        assert torch.equal(g, torch.ones_like(g))
    gradients[0].zero_()
    assert all(torch.equal(g, torch.ones_like(g)) for g in gradients[1:])
    kept = gradients[2]
    del gradients, y
    gc.collect()
    for _ in range(3):  # the memory of the others isn't used again while one lives
        deepsp.seq_to_heads(x)
    assert torch.equal(kept, torch.ones_like(kept))


def test_outputs_are_ordinary_tensors():
    on_ranks(2, _outputs, apart="mapped")


# ------------------------------------------------------------------------------ memory


def _memory():
    """Buffers are used again; idle ones obey the pool's limit; a dropped group leaves nothing."""
    rank, size = dist.get_rank(), dist.get_world_size()
    before = mapped_files()
    group = dist.new_group()
    x = torch.ones(1, 4096, 8, 64)  # 8 MiB
    for _ in range(30):
        (y,) = deepsp.seq_to_heads([x], group=group)
        (z,) = deepsp.heads_to_seq([y], [8], group=group)
        del y
        if rank == 0:
            time.sleep(0.001)
    assert torch.equal(z, x)
    assert mapped_files() == before + size, "each rank's, once"
    dist.barrier()
    assert shared_mib() < 100, shared_mib()  # each rank's four or so, and the peer's
    assert 0 < deepsp.ranks.buffers.idle_bytes() <= deepsp.ranks.buffers.limit()
    dist.barrier()
    deepsp.ranks.buffers.set_limit(1 << 20)
    dist.barrier()
    assert deepsp.ranks.buffers.idle_bytes() <= 1 << 20
    dist.barrier()
    assert shared_mib() < 24, shared_mib()  # z, and what this rank wrote of the peer's
    deepsp.ranks.buffers.set_limit(2 << 30)
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    deepsp.ranks.buffers.clear()
    dist.barrier()
    assert torch.equal(z, x)  # a tensor outlives its group
    assert mapped_files() == before + size, "as long as the tensor"
    del z
    gc.collect()
    assert mapped_files() == before


def test_memory():
    on_ranks(2, _memory, apart="memory")


def _steady():
    """A training loop's memory stays what it was after the first steps."""
    x = draw(1, 256, 8, 64, dtype=f32).requires_grad_()
    levels = []
    for step in range(40):
        out = deepsp.distributed_attention(x, x, x, is_causal=True, chunks=2)
        out.sum().backward()
        del out
        if step % 7 == dist.get_rank():
            time.sleep(0.003)  # now this one, now that one is late
        if step % 4 == 3:
            dist.barrier()
            levels.append(deepsp.ranks.buffers.idle_bytes())
            dist.barrier()
    # A step holds five or six blocks of at most 384 KiB at once, and a rank may be steps ahead.
    assert max(levels) < 24 * (384 << 10) * 8 // 7, levels
    assert max(levels[5:]) <= 2 * max(levels[:3]), levels


def test_training_memory():
    on_ranks(2, _steady, apart="memory")


def _forks():
    """A child reads its parent's tensors, and can't harm them."""
    x = torch.ones(1, 4096, 4, 16)
    (y,) = deepsp.seq_to_heads([x])
    dist.barrier()
    child = os.fork()
    if child == 0:
        fine = bool((y == 1).all())
        try:
            deepsp.seq_to_heads([x])
            fine = False
        except RuntimeError as error:
            fine = fine and "forked" in str(error)
        del y
        deepsp.ranks.buffers.clear()
        os._exit(0 if fine else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(y, torch.ones_like(y))
    (z,) = deepsp.heads_to_seq([y], [4])
    assert torch.equal(z, x)


def test_a_forked_child():
    on_ranks(2, _forks)


# ------------------------------------------------------------------------------ errors


def _other_calls():
    group = dist.new_group()
    deepsp.transport(group)
    x = draw(1, 4 + dist.get_rank(), 4, 2)
    with pytest.raises(RuntimeError, match=r"seq_to_heads of rank . in group .*(makes another call|its own exchange failed)"):  # fmt: skip # noqa: E501
        deepsp.seq_to_heads([x], seq_lens=[len(x[0])] * 2, group=group)
    with pytest.raises(RuntimeError, match="has failed before"):
        deepsp.seq_to_heads([x], group=group)
    group = dist.new_group()
    x = draw(1, 4, 4, 2)
    (y,) = deepsp.seq_to_heads([x], group=group)
    assert torch.equal(deepsp.heads_to_seq([y], [4], group=group)[0], x)


def test_ranks_that_make_other_calls():
    """Messages would bring each other's data, or abort the process."""
    on_ranks(2, _other_calls)


TIMEOUT = 5.0


def _fate(fate):
    x = torch.zeros(1, 64, 8, 8)
    deepsp.distributed_attention(x, x, x)
    call, rank = lambda: deepsp.seq_to_heads([x]), dist.get_rank()
    if fate == "dies, compiled":
        call = torch.compile(lambda: deepsp.distributed_attention(x, x, x))
        call()
    if rank == 1:
        if fate.startswith("dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        if fate == "stops":
            later = f"sleep {2 * TIMEOUT}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", later])
            os.kill(os.getpid(), signal.SIGSTOP)
        if fate == "raises":
            deepsp.seq_to_heads_start([x])
            return None
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        for _ in range(2):
            call()
    waited = time.monotonic() - begin
    # The process goes on, in a group of those that are left.
    store = dist.FileStore(f"/tmp/deepsp-{os.getppid()}-{fate}", 2)
    if rank in (0, 2):
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank // 2,
            world_size=2,
            timeout=datetime.timedelta(seconds=20),
        )
        x = draw(1, 6, 4, 4)
        (y,) = deepsp.seq_to_heads([x])
        assert torch.equal(deepsp.heads_to_seq([y], [4])[0], x)
        assert deepsp.transport().mapped(0, 1)
    return waited, str(caught.value)


@pytest.mark.parametrize(
    "fate, says, most",
    [
        ("dies", "waiting for rank 1: it has left the group, or died", 4),
        ("dies, compiled", "waiting for rank 1: it has left the group, or died", 4),
        ("stops", "waiting for rank 1: nothing came within the group's timeout of 5000 ms", 9),
        ("raises", "waiting for rank 1: nothing came within the group's timeout", 9),
    ],
)
def test_a_peer_that(fate, says, most):
    workers = Workers(3, timeout=TIMEOUT)
    try:
        answers = workers.call(_fate, fate)
    finally:
        workers.stop()
    for rank in (0, 2):
        assert answers[rank][0], answers[rank][1]
    messages = [answers[rank][1][1] for rank in (0, 2)]
    waited = [answers[rank][1][0] for rank in (0, 2)]
    assert any(says in message for message in messages), messages
    # The one that waited for a rank which had failed itself names that one.
    other = r"its own exchange failed"
    assert all(says in message or other in message for message in messages), messages
    assert max(waited) < most, waited


def _names():
    """The names of what this process has mapped and opened, after an exchange by shared memory."""
    x = draw(1, 64, 4, 8)
    deepsp.seq_to_heads([x])
    opened = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            opened.append(os.readlink(f"/proc/self/fd/{number}"))
    return [*Path("/proc/self/maps").read_text().splitlines(), *opened]


def test_nothing_is_left():
    """Shared memory has no name, so that processes that are killed leave nothing."""
    for names in on_ranks(2, _names, apart="mapped"):
        assert any("/memfd:deepsp" in name for name in names)
        # But for those of torch's tensors in pipes, and of Python's semaphores.
        assert not re.findall(r"/dev/shm/(?!torch_|sem\.).*", "\n".join(names))


# ------------------------------------------------------------------------------ floors


def test_no_include_goes_up():
    """The header that callers include lists the transport's floors, the highest first."""
    folder = Path(__file__).parent.parent / "csrc" / "transport"
    (header,) = (f for f in folder.glob("*.h") if "three floors" in f.read_text())
    lines = re.findall(r"^//   (?:agree|move|wait) +(.*)$", header.read_text(), re.MULTILINE)
    floors = {name: floor for floor, line in enumerate(lines) for name in line.split(", ")}
    assert set(floors) == {path.stem for path in folder.iterdir()} and len(lines) == 3
    for path in sorted(folder.iterdir()):
        for name in re.findall(r'^#include "(\w+)\.h"', path.read_text(), re.MULTILINE):
            assert floors[name] >= floors[path.stem], f"{path.name} includes {name}.h"
