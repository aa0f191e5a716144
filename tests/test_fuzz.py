"""Wrong arguments of every op: an exception with a message or a result, never a crash or a hang.

Each call has right arguments of which one or two are edited, alike on every rank. It runs in a
process of its own kind, which writes down what it is about to call: a crash is reported with it.
"""

import os
import resource
import signal
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from calls import arguments
from harness import on_ranks
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves, tree_map_only

import deepsp  # noqa: F401  (registers the ops)

SECONDS_A_CALL = 30
FORMLESS = ("INTERNAL ASSERT", "vector::", "basic_string", "std::", "bad_alloc")

OPS = sorted(
    n.split("::")[1] for n in torch._C._dispatch_get_all_op_names() if n.startswith("deepsp::")
)
# Nothing is sent, and nothing is wrong with any argument but the limit's.
POOL = {"_pool_idle_bytes": (), "_pool_limit": (), "_pool_set_limit": (1 << 20,), "_pool_clear": ()}

# ------------------------------------------------------------------- edits, as plain data

INTS = [-(2**63), -(2**62), -(2**31), -1, 0, 1, 2, 3, 5, 7, 100, 2**31, 2**40, 2**62, 2**63 - 1]
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
]
integers = st.sampled_from(INTS)
shapes = st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 8, 12]), max_size=5)
tensors = st.one_of(
    st.tuples(st.just("shape"), shapes),
    st.tuples(st.just("dtype"), st.sampled_from(DTYPES)),
    st.tuples(st.just("size"), st.integers(0, 4), st.sampled_from([0, 1, 3, 9, 2**40, 2**62])),
    st.tuples(st.sampled_from(["first", "unsqueeze", "transpose", "meta", "sparse", "strided"])),
)
lists = st.one_of(
    st.tuples(st.sampled_from(["empty", "drop", "twice", "reverse", "many"])),
    st.tuples(st.just("append"), integers),
    st.tuples(st.just("set"), st.integers(0, 8), integers),
)
tensor_lists = st.one_of(
    st.tuples(st.sampled_from(["empty", "drop", "twice", "reverse"])),
    st.tuples(st.just("edit"), st.integers(0, 3), tensors),
)
VALUES = {
    "Tensor": tensors,
    "Tensor[]": tensor_lists,
    "int": st.tuples(st.just("is"), integers),
    "int[]": lists,
    "str": st.tuples(
        st.just("is"), st.sampled_from(["", "nobody", "partial", "replicated", "é" * 300])
    ),
    "str[]": st.tuples(st.sampled_from(["empty", "drop", "twice", "reverse"])),
    "float": st.tuples(
        st.just("is"), st.sampled_from([float("nan"), float("inf"), -1.0, 0.0, 0.5, 2.0, 1e300])
    ),
    "float[]": lists,
    "bool": st.tuples(st.just("is"), st.booleans()),
    "Device": st.tuples(
        st.just("is"), st.sampled_from([torch.device(name) for name in ("cpu", "meta", "cuda:0")])
    ),
    "ScalarType": st.tuples(st.just("is"), st.sampled_from([*DTYPES, 99, -1])),
    "ScalarType[]": st.one_of(
        st.tuples(st.sampled_from(["empty", "drop", "twice", "reverse"])),
        st.tuples(st.just("set"), st.integers(0, 3), st.sampled_from([*DTYPES, 99])),
    ),
}


def _kind(argument):
    kind = str(argument.real_type)
    for name in ("Optional[", "]"):
        kind = kind.removeprefix(name) if name != "]" else kind
    kind = kind[:-1] if str(argument.real_type).startswith("Optional[") else kind
    if kind.startswith("List["):
        kind = kind[5:-1] + "[]"
    return kind.replace("SymInt", "int")


def calls_of(name):
    """Calls of an op, each one or two edits: (position of the argument, edit)."""
    schema = getattr(torch.ops.deepsp, name).default._schema
    given_ = [(i, _kind(a)) for i, a in enumerate(schema.arguments) if not a.kwarg_only]
    if not given_:
        return st.just([])
    edit = st.one_of([st.tuples(st.just(i), VALUES[kind]) for i, kind in given_])
    optional = [i for i, a in enumerate(schema.arguments) if "Optional" in str(a.real_type)]
    if optional:
        edit |= st.tuples(st.sampled_from(optional), st.just(("is", None)))
    return st.lists(edit, min_size=1, max_size=2)


def _edited_tensor(x, edit):
    what, *how = edit
    if what == "shape":
        return torch.ones(how[0], dtype=x.dtype)
    if what == "dtype":
        return x.detach().to(how[0])
    if what == "size" and x.dim() > 0:
        sizes = list(x.shape)
        sizes[how[0] % x.dim()] = how[1]
        return torch.ones([], dtype=x.dtype).expand(sizes)
    if what == "first":
        return x[0] if x.dim() and len(x) else x
    if what == "unsqueeze":
        return x[None]
    if what == "transpose":
        return x.transpose(0, -1) if x.dim() else x
    if what == "meta":
        return x.to("meta")
    if what == "sparse":
        return x.detach().to_sparse()
    if what == "strided":
        return x.repeat_interleave(2, -1)[..., ::2] if x.dim() else x
    return x


def _edited(value, edit, name):
    what, *how = edit
    if what == "is":
        if name == "rank" and how[0] in range(dist.get_world_size()):
            # Wrong on every rank, or right on every rank.
            return (how[0] + dist.get_rank()) % dist.get_world_size()
        return how[0]
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return _edited_tensor(value, edit)
    values = list(value)
    if what == "empty":
        values = []
    elif what == "drop":
        values = values[:-1]
    elif what == "twice":
        values = values * 2
    elif what == "reverse":
        values = values[::-1]
    elif what == "many":
        values = values * 200
    elif what == "append":
        values = [*values, how[0]]
    elif what == "set" and values:
        values[how[0] % len(values)] = how[1]
    elif what == "edit" and values:
        at = how[0] % len(values)
        values[at] = _edited_tensor(values[at], how[1])
    return values


# ---------------------------------------------------------------------------- in the processes


def _outcome(call):
    """None and what a call returns, or its error's text, and None."""
    try:
        return None, call()
    except (RuntimeError, ValueError, IndexError, TypeError, MemoryError) as error:
        text = f"{type(error).__name__}: {error}"
        assert str(error).strip() or isinstance(error, MemoryError), "an error without a message"
        found = [word for word in FORMLESS if word in text.split("\n")[0]]
        assert not found, f"not a message for users: {text[:300]}"
        return text, None


def _described(x):
    return (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x


def _alike(flag):
    """Whether `flag` is true on every rank; None where they differ."""
    count = torch.tensor([int(flag)])
    dist.all_reduce(count)
    return {0: False, dist.get_world_size(): True}.get(count.item())


def _run(name, calls, folder):
    rank = dist.get_rank()
    # What can't be allocated is refused rather than swapped for.
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (4 << 30), resource.RLIM_INFINITY))
    others = POOL | {"_transport": (rank, dist.get_world_size(), "0", None, torch.device("cpu"))}
    right = others[name] if name in others else arguments("split")[name]
    op = getattr(torch.ops.deepsp, name).default
    names = [a.name for a in op._schema.arguments]
    differentiable = not name.endswith("_")
    ran = 0
    for edits in [[], *calls]:
        args = list(tree_map_only(torch.Tensor, lambda x: x.detach().clone(), right))
        for i, edit in edits:
            if i < len(args):
                with suppress(RuntimeError):  # a tensor that can't be
                    args[i] = _edited(args[i], edit, names[i])
        args = tree_map_only(
            torch.Tensor,
            lambda x: x.requires_grad_() if differentiable and x.is_floating_point() else x,
            args,
        )
        with open(os.path.join(folder, str(rank)), "w") as file:
            print(f"{name}: {edits}\n{tree_map_only(torch.Tensor, _described, args)}", file=file)
        signal.alarm(SECONDS_A_CALL)  # whose default is to end the process
        # The meta kernel checks the same, and sends nothing: where the ranks' arguments are right
        # on one and wrong on another, calling would wait for the one that raised.
        meta = tree_map_only(torch.Tensor, lambda x: x.detach().to("meta"), args)
        wrong, expected = _outcome(lambda meta=meta: op(*meta))
        if _alike(wrong is None) is None:
            continue
        error, result = _outcome(lambda args=args: op(*args))
        fine = _alike(error is None)
        assert fine is not None, f"the ranks differ: here {error or 'a result'}"
        assert edits or fine, error
        ran += 1
        if not fine:
            continue
        assert wrong is None, f"only the meta kernel raises: {wrong}"
        if not name.startswith("pool"):
            assert tree_map_only(torch.Tensor, _described, result) == tree_map_only(
                torch.Tensor, _described, expected
            )
        if name.endswith("_start"):
            continue  # on its way
        outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.grad_fn]
        outputs = [x for x in outputs if x.numel() and x.is_floating_point()]
        if _alike(bool(outputs)):  # of an exchange, one rank may receive nothing
            error, _ = _outcome(
                lambda outputs=outputs: sum(x.float().sum() for x in outputs).backward()
            )
            assert _alike(error is None) is not None, f"the ranks differ in backward: {error}"
    signal.alarm(0)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return ran


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_wrong_arguments(ranks, name, tmp_path):
    @settings(
        max_examples=max(1, settings.default.max_examples // 20),
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(calls_of(name), min_size=20, max_size=30))
    def fuzz(calls):
        try:
            ran = on_ranks(ranks, _run, name, calls, str(tmp_path), apart="fuzz")
        except AssertionError as error:
            written = []
            for rank in range(ranks):
                with suppress(FileNotFoundError):
                    written.append(f"rank {rank}: {(tmp_path / str(rank)).read_text()}")
            raise AssertionError("\n".join([str(error)[:1500], *written])) from None
        assert min(ran) > 0, "no call was made"

    fuzz()
