"""Hours of use in minutes: attention, exchanges and collectives of random shapes, dtypes, layouts,
chunks, transports and groups, each compared with one process, while memory and descriptors are
watched. Now and then other processes run the same until one of them is killed: the others must
notice, go on without it, and have nothing left open or mapped.

A case's shapes follow from its number alone, so that every rank runs the same; `--first` repeats
one, and a kill, but for when it strikes. Ends with an error when a result is wrong, when memory or
descriptors keep growing, or when a kill leaves more than it should.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import gc
import multiprocessing
import os
import random
import re
import resource
import tempfile
import time

import bench
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mapped import mapped_files, shared_mib
from tqdm import tqdm

import deepsp

CASES_A_CALL = 20
WARM = 5  # calls before memory is compared: by then pools and caches are full
MOST_GROUPS = 3  # beside the default one
groups: list = []  # of this process: None where it isn't a member

KILLED = 3  # processes of a group of which one is killed
TIMEOUT = 10  # of that group, in seconds
BUSY = 10  # seconds that a case may take on a busy machine


def whole(shape, dtype, seed: int) -> torch.Tensor:
    """The same numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def part(x: torch.Tensor, lens: list[int], dim: int, rank: int, strided: bool) -> torch.Tensor:
    x = x.split(lens, dim)[rank].clone()
    if strided:  # the same values, in memory of another order
        x = x.transpose(0, -2).contiguous().transpose(0, -2)
    return x.requires_grad_()


def lens_of(rng: random.Random, size: int, most: int) -> list[int]:
    lens = [rng.choice([0, 1, rng.randint(1, most), most]) for _ in range(size)]
    return lens if sum(lens) else [1] * size


def close(result, expected, dtype) -> None:
    tolerance = {torch.float64: 1e-4, torch.float32: 2e-3, torch.bfloat16: 6e-2}[dtype]
    torch.testing.assert_close(result.double(), expected.double(), rtol=tolerance, atol=tolerance)


def attention(rng, group, rank, size, seed) -> None:
    kv_heads = rng.choice([1, 2, 4])
    heads = kv_heads * rng.choice([n for n in (1, 2, 3, 4, 6) if n * kv_heads >= size])
    # PyTorch's own CPU attention keeps kernels for each shape in bfloat16: memory would grow.
    dtype = rng.choice([torch.float64, torch.float32])
    batch, head_dim = rng.choice([1, 2, 3]), rng.choice([4, 8, 16])
    lens = lens_of(rng, size, rng.choice([5, 40, 160]))
    causal, chunks, strided = rng.random() < 0.5, rng.choice([1, 1, 2, 3]), rng.random() < 0.5
    full = [
        whole((batch, sum(lens), h, head_dim), dtype, seed + i).double().requires_grad_()
        for i, h in enumerate((heads, kv_heads, kv_heads))
    ]
    mine = [part(x.detach().to(dtype), lens, 1, rank, strided) for x in full]
    q, k, v = (x.transpose(1, 2) for x in full)
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
    ours = deepsp.distributed_attention(
        *mine, is_causal=causal, enable_gqa=True, chunks=chunks, seq_lens=lens, group=group
    )
    grad = whole(expected.shape, dtype, seed + 9)
    close(ours, expected.split(lens, 1)[rank], dtype)
    gradients = torch.autograd.grad(ours, mine, grad.split(lens, 1)[rank])
    for a, b in zip(gradients, torch.autograd.grad(expected, full, grad.double()), strict=True):
        close(a, b.split(lens, 1)[rank], dtype)


def exchange(rng, group, rank, size, seed) -> None:
    kv_heads = rng.choice([1, 2, 4])
    heads = kv_heads * rng.choice([n for n in (1, 3, 4, 6) if n * kv_heads >= size])
    dtype = rng.choice([torch.float64, torch.float32, torch.bfloat16])
    lens = lens_of(rng, size, rng.choice([7, 100, 1500]))
    x = whole((rng.choice([1, 2]), sum(lens), heads, 16), dtype, seed)
    mine = part(x, lens, 1, rank, rng.random() < 0.5)
    kv = part(x[:, :, :kv_heads], lens, 1, rank, False)
    if rng.random() < 0.2:  # started and dropped: nobody waits
        deepsp.seq_to_heads_start([mine.detach(), kv.detach()], seq_lens=lens, group=group)
    whole_heads, kv_heads_read = deepsp.seq_to_heads([mine, kv], seq_lens=lens, group=group)
    owned = torch.arange(heads).tensor_split(size)[rank]
    assert torch.equal(whole_heads, x[:, :, owned]), "seq_to_heads"
    read = torch.unique(owned // (heads // kv_heads))
    assert torch.equal(kv_heads_read, x[:, :, read]), "seq_to_heads of a kv head"
    (back,) = deepsp.heads_to_seq([whole_heads], [heads], seq_lens=lens, group=group)
    assert torch.equal(back, mine), "heads_to_seq"
    (gradient,) = torch.autograd.grad(back, mine, back)
    assert torch.equal(gradient, mine), "the gradient of both"


def collectives(rng, group, rank, size, seed) -> None:
    dtype = rng.choice([torch.float64, torch.float32, torch.bfloat16, torch.int64])
    dim = rng.choice([0, 1, 2, -1])
    sizes = lens_of(rng, size, rng.choice([3, 50, 300]))
    shape = [rng.choice([1, 3, 40]) for _ in range(3)]
    shape[dim] = sum(sizes)
    x = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    gathered = deepsp.collectives.all_gather(
        x.split(sizes, dim)[rank].contiguous(), dim, group, sizes, grad="replicated"
    )
    assert torch.equal(gathered, x), "all_gather"
    if dtype == torch.int64:
        return
    scattered = deepsp.collectives.reduce_scatter(x * (rank + 1), dim, group, sizes)
    factor = size * (size + 1) // 2
    assert torch.equal(scattered, x.split(sizes, dim)[rank] * factor), "reduce_scatter"
    total = deepsp.collectives.all_reduce(x * (rank + 1), group, grad="replicated")
    assert torch.equal(total, x * factor), "all_reduce"


def loss(rng, group, rank, size, seed) -> None:
    lens = lens_of(rng, size, rng.choice([5, 200]))
    classes, smoothing = rng.choice([2, 50, 1000]), rng.choice([0.0, 0.1])
    hidden = whole((sum(lens), 16), torch.float32, seed).requires_grad_()
    weight = whole((classes, 16), torch.float32, seed + 1).requires_grad_()
    labels = torch.arange(sum(lens)) * 7 % classes
    expected = F.cross_entropy(hidden @ weight.T, labels, label_smoothing=smoothing)
    mine = part(hidden.detach(), lens, 0, rank, False)
    ours = deepsp.linear_cross_entropy(
        mine,
        weight,
        labels.split(lens)[rank],
        group=group,
        label_smoothing=smoothing,
        chunk_tokens=rng.choice([None, 1, 13]),
    )
    close(ours, expected, torch.float32)
    close(
        torch.autograd.grad(ours, mine)[0],
        torch.autograd.grad(expected, hidden)[0].split(lens)[rank],
        torch.float32,
    )


def compare(rng, group, number: int) -> None:
    """Something that ranks do together, with one process."""
    kind = rng.choice([attention, attention, exchange, collectives, loss])
    try:
        kind(rng, group, dist.get_rank(group), dist.get_world_size(group), number)
    except Exception as error:
        error.add_note(f"case {number}: {kind.__name__} in a group of {group.size()}")
        raise


def case(number: int) -> None:
    rng = random.Random(number)
    world, rank = dist.get_world_size(), dist.get_rank()
    if rng.random() < 0.1:
        members = sorted(rng.sample(range(world), rng.randint(1, world)))
        made = dist.new_group(members)
        by_messages = rng.random() < 0.5  # else memory is shared
        groups.append(made if rank in members else None)
        if rank in members and by_messages:
            deepsp.transport(made, use="messages")
        if len(groups) > MOST_GROUPS and (oldest := groups.pop(0)) is not None:
            dist.destroy_process_group(oldest)
    at = rng.randint(-1, MOST_GROUPS - 1)
    group = dist.group.WORLD if at < 0 or at >= len(groups) else groups[at]
    if group is not None:
        compare(rng, group, number)
    assert deepsp.ranks.buffers.idle_bytes() <= deepsp.ranks.buffers.limit(), (
        "the pool passed its limit"
    )


class Heap(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def memory() -> tuple[int, int]:
    """Bytes that this process holds on the heap, and those resident once the holes between them are
    given back: each thread, of every group too, leaves holes of its own, which are no leak."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Heap
    heap = libc.mallinfo2()
    libc.malloc_trim(0)
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    return heap.uordblks + heap.hblkhd, resident


def run(first: int, pool_mib: int) -> list[int]:
    """Some cases; then the largest of all ranks: MiB on the heap and MiB resident, both without
    what the pool keeps, MiB in the pool, open descriptors, pieces of shared memory, and MiB of
    theirs in this process's pages."""
    deepsp.ranks.buffers.set_limit(pool_mib << 20)
    for number in range(first, first + CASES_A_CALL):
        case(number)
    gc.collect()
    descriptors, pool = len(os.listdir("/proc/self/fd")), deepsp.ranks.buffers.idle_bytes()
    heap, resident = memory()
    seen = [heap - pool >> 20, resident - pool >> 20, pool >> 20, descriptors]
    seen = torch.tensor([*seen, mapped_files(), round(shared_mib())])
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    return seen.tolist()


# ------------------------------------------------------------------------------ kills


def open_and_mapped() -> tuple[int, int]:
    """Descriptors, and pieces of shared memory, of this process once nobody needs them."""
    gc.collect()
    deepsp.ranks.buffers.clear()
    return len(os.listdir("/proc/self/fd")), mapped_files()


def join(path: str, rank: int, size: int, timeout: float) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )


def until_one_dies(rank: int, number: int, victim: int, transport: str, folder: str, pipe) -> None:
    """A process of a group of which one is killed. Says when it noticed, by what error, and what
    was open and mapped before and afterwards."""
    # Whoever hangs says where.
    faulthandler.dump_traceback_later(4 * TIMEOUT + 6 * BUSY, exit=True)
    torch.set_num_threads(1)
    os.environ["DEEPSP_TRANSPORT"] = "auto" if transport == "machines" else transport
    if transport == "machines":  # ranks 0 and 1 on one, rank 2 on another
        os.environ["DEEPSP_TEST_MACHINE"] = str(rank // 2)
    before = open_and_mapped()
    join(f"{folder}/all", rank, KILLED, TIMEOUT)
    pipe.send("ready")
    try:
        while True:
            compare(random.Random(number), dist.group.WORLD, number)
            number += 1
    except RuntimeError as error:
        noticed, message = time.monotonic(), str(error)
    dist.destroy_process_group()
    # Another that is left may have waited for longer.
    rest = [p for p in range(KILLED) if p != victim]
    join(f"{folder}/rest", rest.index(rank), len(rest), 2 * TIMEOUT + BUSY)
    shares = transport == "auto" or (transport == "machines" and victim == 2)
    assert deepsp.transport().mapped(0, 1) == shares, deepsp.transport()
    for n in range(CASES_A_CALL):
        compare(random.Random(n), dist.group.WORLD, n)
    dist.barrier()
    dist.destroy_process_group()
    pipe.send((noticed, message, before, open_and_mapped()))


def kill(number: int) -> float:
    """Kills one of a group's processes. How long the others took to notice, in seconds."""
    rng = random.Random(number)
    victim, transport = rng.randrange(KILLED), rng.choice(["auto", "machines", "messages"])
    # At once: ranks find out whom they reach.
    seconds = rng.choice([0.0, 0.1 * rng.random(), 2 * rng.random()])
    name = f"kill {number}, of rank {victim} after {seconds:.3f} s, transport {transport}"
    files = set(os.listdir("/dev/shm"))
    # Forked off a process that has only imported this: an import takes longer than all the rest.
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["deepsp"])
    pipes, processes = [], []

    def hear(rank: int):
        try:
            return pipes[rank].recv()
        except EOFError:
            raise SystemExit(f"{name}: rank {rank} died; its message is above") from None

    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(KILLED):
                ours, theirs = server.Pipe()
                args = rank, number * 1000, victim, transport, folder, theirs
                process = server.Process(target=until_one_dies, args=args, daemon=True)
                process.start()
                processes.append(process)
                theirs.close()
                pipes.append(ours)
            for rank in range(KILLED):
                hear(rank)
            time.sleep(seconds)
            processes[victim].kill()
            killed = time.monotonic()
            rest = [p for p in range(KILLED) if p != victim]
            said = [hear(rank) for rank in rest]
        finally:
            for process in processes:
                process.kill()
                process.join()
    # Other programs' files come and go.
    ours = ["deepsp", *(str(process.pid) for process in processes)]
    left = [f for f in os.listdir("/dev/shm") if f not in files and any(w in f for w in ours)]
    if left:
        raise SystemExit(f"{name}: left in /dev/shm: {', '.join(left)}")
    for rank, (noticed, message, before, after) in zip(rest, said, strict=True):
        if not killed <= noticed < killed + TIMEOUT + BUSY:
            raise SystemExit(
                f"{name}: rank {rank} raised {noticed - killed:.1f} s later: {message}"
            )
        if not re.search(rf"\w+ of rank {rank} in group '.*' of {KILLED} failed", message):
            raise SystemExit(f"{name}: rank {rank} doesn't say what it waited for: {message}")
        if after != before:
            raise SystemExit(
                f"{name}: rank {rank} had {before} descriptors and pieces of shared memory, then "
                f"{after}"
            )
    return max(noticed for noticed, *_ in said) - killed


# ------------------------------------------------------------------------------ the whole


def slope(seconds: list[float], values: list[float]) -> float:
    """Least squares, per minute."""
    x, y = torch.tensor(seconds).double() / 60, torch.tensor(values).double()
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / x.square().sum().clamp(min=1e-9))


def main() -> None:
    args = bench.parser_of(
        __doc__,
        minutes=(10.0, "how long"),
        ranks=(3, "processes"),
        memory_mib=(32, "growth of a rank's memory, warm, that is an error"),
        pool_mib=(32, "limit of the buffer pool"),
        kills=(1.0, "a minute, the first one at once; 0: none"),
        first=(0, "number of the first case, and of the first kill"),
    ).parse_args()
    seconds, seen, noticed = [], [], []
    begin, total = time.monotonic(), args.minutes * 60
    with (
        bench.ranks_on(bench.LOOPBACK, args.ranks) as ranks,
        tqdm(total=round(total), unit="s", bar_format="{l_bar}{bar}| {elapsed}{postfix}") as bar,
    ):
        while len(seconds) < 2 * WARM or time.monotonic() - begin < total:
            seen.append(ranks(run, args.first + len(seconds) * CASES_A_CALL, args.pool_mib))
            if len(noticed) < args.kills * (time.monotonic() - begin) / 60:
                noticed.append(kill(args.first + len(noticed)))
            seconds.append(time.monotonic() - begin)
            bar.n = min(round(seconds[-1]), bar.total)
            cases = len(seconds) * CASES_A_CALL
            heap, resident, _, descriptors, *_ = seen[-1]
            bar.set_postfix_str(f"{cases} cases, {heap} and {resident} MiB, {descriptors} open")
    half = (len(seconds) + WARM) // 2
    print(f"{cases} cases on {args.ranks} ranks in {seconds[-1]:.0f} s: all right")
    if noticed:
        print(f"{len(noticed)} killed: the others noticed within {max(noticed):.1f} s and went on")
    allowed = {"heap, MiB": args.memory_mib, "resident, MiB": args.memory_mib}
    allowed |= {"idle in the pool, MiB": args.pool_mib, "open descriptors": 16}
    allowed |= {"pieces of shared memory": 16, "shared memory, MiB": args.memory_mib}
    growing = []
    for (name, most), values in zip(allowed.items(), zip(*seen, strict=True), strict=True):
        growth = max(values[half:]) - max(values[WARM:half])
        print(
            f"{name}: {values[WARM]} warm, {values[-1]} at the end, at most {max(values)}; in the "
            f"second half {slope(seconds[half:], values[half:]):+.2f} a minute, its largest "
            f"{growth:+d} over the first half's"
        )
        if growth > most:
            growing.append(name)
    if growing:
        raise SystemExit(f"keeps growing: {', '.join(growing)}")


if __name__ == "__main__":
    main()
