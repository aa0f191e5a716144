"""The compile pass on every rank of a group, in one process and without one.

``lockstep(model, ranks)`` is ``torch.compile`` with a backend that shards the captured graph once
for each rank, and evaluates the ranks' graphs together: each runs until it meets a collective, and
what it returns is computed here, in plain torch, of what all of them pass. So a graph is judged by
what its ops are documented to do (csrc/library.cpp), not by the kernels that do it: other tests
hold those against the same definitions on real ranks. Autograd goes through all ranks' graphs as
one, and what a rank may assume of another's gradients is asserted.
"""

from __future__ import annotations

import contextlib
import copy
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx
from torch._functorch.autograd_function import autograd_function_apply
from torch.testing._internal.distributed.fake_pg import FakeStore
from zoo import batch, total

import deepsp
from deepsp.compile import parallelize
from deepsp.compile.sharding.boundary import without_caches

ours = torch.ops.deepsp
BACKEND = {"backend": "deepsp", "fullgraph": True}


class _Sum(torch.autograd.Function):
    """The sum on every rank. Its gradient is the same on every rank, and each input's."""

    @staticmethod
    def forward(ctx, *inputs):
        total = sum(inputs)
        return tuple(total.clone() for _ in inputs)

    @staticmethod
    def backward(ctx, *gradients):
        _assert_alike(gradients, "the gradient of an all_reduce")
        return gradients


class _Gather(torch.autograd.Function):
    """All parts on every rank. Each rank has the gradient of the whole, or a part of its sum."""

    @staticmethod
    def forward(ctx, dim, partial, *inputs):
        ctx.dim, ctx.partial = dim, partial
        ctx.sizes = [x.size(dim) for x in inputs]
        whole = torch.cat(inputs, dim)
        return tuple(whole.clone() for _ in inputs)

    @staticmethod
    def backward(ctx, *gradients):
        if ctx.partial:
            gradients = [sum(gradients)] * len(gradients)
        else:
            _assert_alike(gradients, "the gradient of a replicated all_gather")
        parts = [g.split(ctx.sizes, ctx.dim)[r] for r, g in enumerate(gradients)]
        return None, None, *parts


class _Replicate(torch.autograd.Function):
    """Each rank's own; its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx, *inputs):
        # The same memory, as the op's: what is written there is the parameter's. Not a view, which
        # autograd wouldn't have written to.
        return tuple(x.new_empty(0).set_(x.detach()) for x in inputs)

    @staticmethod
    def backward(ctx, *gradients):
        return (sum(gradients),) * len(gradients)


def _assert_alike(tensors, what: str) -> None:
    for rank, x in enumerate(tensors):
        torch.testing.assert_close(
            x,
            tensors[0],
            rtol=1e-9,
            atol=1e-12,
            equal_nan=True,
            msg=lambda m, r=rank: f"{what}, rank {r}: {m}",
        )


def _all_reduce(ranks):
    assert {a["grad"] for a in ranks} == {"replicated"}
    return _Sum.apply(*(a["input"] for a in ranks))


def _all_gather(ranks):
    (dim,), (grad,) = {a["dim"] for a in ranks}, {a["grad"] for a in ranks}
    sizes = [a["input"].size(dim) for a in ranks]
    assert all(list(a["sizes"]) == sizes for a in ranks), (sizes, ranks[0]["sizes"])
    return _Gather.apply(dim, grad == "partial", *(a["input"] for a in ranks))


def _replicate_start(ranks):
    return [(a["tensors"], torch.empty(0)) for a in ranks]


def _replicate_wait(ranks):
    columns = zip(*(a["tensors"] for a in ranks), strict=True)
    return list(zip(*(_Replicate.apply(*column) for column in columns), strict=True))


def _whole(parts, seq_lens):
    assert [x.size(1) for x in parts] == list(seq_lens), seq_lens
    return torch.cat(parts, 1)


def _distributed_attention(ranks):
    first = ranks[0]
    assert not first["dropout_p"] and first["layout"] == "bshd"
    assert first["documents"] is first["softcap"] is first["sinks"] is first["kv_chunk"] is None
    for name in ("is_causal", "scale", "enable_gqa", "chunks", "query_parts"):
        assert len({a[name] for a in ranks}) == 1, name
    q, k, v = (
        _whole([a[name] for a in ranks], first["seq_lens"]).transpose(1, 2) for name in "qkv"
    )
    mask = first["attn_mask"]
    if mask is not None:
        masks = [a["attn_mask"] for a in ranks]
        _assert_alike([m.detach() for m in masks], "attn_mask")
        if mask.is_floating_point():  # each rank has a part of its gradient
            mask = sum(m / len(masks) for m in masks)
    out = F.scaled_dot_product_attention(
        q, k, v, mask, 0.0, first["is_causal"], scale=first["scale"], enable_gqa=first["enable_gqa"]
    )
    return out.transpose(1, 2).split(list(first["seq_lens"]), 1)


def _heads(rank, size, num_heads):
    """This rank's range of heads of q, and of those that each other tensor has for them."""
    heads = num_heads[0]
    lens = [heads // size + (r < heads % size) for r in range(size)]
    begin = sum(lens[:rank])
    end = begin + lens[rank]
    for n in num_heads:
        group = heads // n
        yield begin // group, -(-end // group)


def _seq_to_heads(ranks):
    size, found = len(ranks), []
    whole = [
        _whole(parts, ranks[0]["seq_lens"])
        for parts in zip(*(a["inputs"] for a in ranks), strict=True)
    ]
    num_heads = [x.size(2) for x in whole]
    for rank in range(size):
        ranges = _heads(rank, size, num_heads)
        found.append([x[:, :, b:e] for x, (b, e) in zip(whole, ranges, strict=True)])
    return found


def _seq_to_heads_start(ranks):
    """Each buffer is what was passed: the wait computes what it holds."""
    assert {(a["chunks"], a["query_parts"]) for a in ranks} == {(1, 1)}
    return [[a] for a in ranks]


def _seq_to_heads_wait(ranks):
    return _seq_to_heads([a["buffer"] for a in ranks])


def _fold_states(ranks):
    state, found = torch.zeros_like(ranks[0]["update"]), []
    for a in ranks:
        assert list(a["rows"]) == [a["update"].size(0)] * len(ranks)
        found.append(state)
        scale = a["transition"]
        state = scale @ state if scale.dim() == 4 else scale[..., None, None] * state
        state = state + a["update"]
    return found


def _heads_to_seq(ranks):
    size, lens = len(ranks), list(ranks[0]["seq_lens"])
    num_heads = ranks[0]["num_heads"]
    whole = []
    for i, n in enumerate(num_heads):
        total = 0
        for rank, a in enumerate(ranks):
            begin, end = list(_heads(rank, size, num_heads))[i]
            total = total + F.pad(a["inputs"][i], (0, 0, begin, n - end))
        whole.append(total.split(lens, 1))
    return [list(x) for x in zip(*whole, strict=True)]


def _previous_tokens(ranks):
    """Of the tokens before each rank's own, the last n; zeros before the first one."""
    (dim,), (n,) = {a["dim"] for a in ranks}, {a["n"] for a in ranks}
    lens = [a["input"].size(dim) for a in ranks]
    assert all(list(a["seq_lens"]) == lens for a in ranks), (lens, ranks[0]["seq_lens"])
    zeros = ranks[0]["input"].new_zeros(
        [n if d == dim else m for d, m in enumerate(ranks[0]["input"].shape)]
    )
    whole = torch.cat([zeros, *(a["input"] for a in ranks)], dim)
    return [whole.narrow(dim, sum(lens[:r]), n) for r in range(len(ranks))]


def _rows_start(ranks):
    """rows by the rank that they are for; what each rank is sent, by the rank that sends it."""
    counts = torch.tensor(ranks[0]["counts"]).view(len(ranks), -1)
    assert all(list(a["counts"]) == list(ranks[0]["counts"]) and not a["home"] for a in ranks)
    sent = [a["rows"].split(counts[r].tolist()) for r, a in enumerate(ranks)]
    return [torch.cat(got) for got in zip(*sent, strict=True)]


def _rows_wait(ranks):
    return [a["buffer"].clone() for a in ranks]


_COLLECTIVES = {
    ours._rows_start.default: _rows_start,
    ours._rows_wait.default: _rows_wait,
    ours.all_gather.default: _all_gather,
    ours.all_reduce.default: _all_reduce,
    ours.distributed_attention.default: _distributed_attention,
    ours.heads_to_seq.default: _heads_to_seq,
    ours.previous_tokens.default: _previous_tokens,
    ours.replicate_start.default: _replicate_start,
    ours.replicate_wait.default: _replicate_wait,
    ours.seq_to_heads.default: _seq_to_heads,
    ours.seq_to_heads_start.default: _seq_to_heads_start,
    ours.seq_to_heads_wait.default: _seq_to_heads_wait,
    ours._fold_states.default: _fold_states,
}


def _named(op, args, kwargs) -> dict:
    """The arguments of a call by name, and what the schema has for those that it lacks."""
    names = [x.name for x in op._schema.arguments]
    found = {x.name: x.default_value for x in op._schema.arguments if x.has_default_value()}
    return found | dict(zip(names, args, strict=False)) | kwargs


def _steps(gm: fx.GraphModule, inputs):
    """Evaluates a graph, and yields what it doesn't know by itself: (op, arguments)."""
    env, given = {}, iter(inputs)
    last = {}
    for node in gm.graph.nodes:
        for used in node.all_input_nodes:
            last[used] = node
    for node in gm.graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.op == "placeholder":
            env[node] = next(given)
        elif node.op == "get_attr":
            value = gm
            for name in node.target.split("."):
                value = getattr(value, name)
            env[node] = value
        elif node.op == "output":
            return args[0]
        elif node.target is autograd_function_apply or "group_name" in _arguments(node.target):
            env[node] = yield node.target, args, kwargs
        else:
            env[node] = node.target(*args, **kwargs)


def _arguments(target) -> list[str]:
    schema = getattr(target, "_schema", None)
    return [x.name for x in schema.arguments] if schema else []


def evaluate(graphs: list[fx.GraphModule], inputs: list) -> list:
    """What each rank's graph returns, of each rank's inputs."""
    running = [_steps(gm, args) for gm, args in zip(graphs, inputs, strict=True)]
    answers: list = [None] * len(running)
    modes = [torch.is_grad_enabled()] * len(running)
    while True:
        asked, done = [], []
        for rank, (steps, answer) in enumerate(zip(running, answers, strict=True)):
            with torch.set_grad_enabled(modes[rank]):
                try:
                    asked.append(steps.send(answer))
                except StopIteration as end:
                    done.append(end.value)
                modes[rank] = torch.is_grad_enabled()
        if done:
            assert not asked, f"some ranks are done, others wait for {asked[0][0]}"
            return done
        (op,) = {op for op, _, _ in asked}
        with torch.set_grad_enabled(modes[0]):
            if op is autograd_function_apply:
                answers = _apply(asked)
            else:
                assert [a["rank"] for a in (_named(*x) for x in asked)] == list(range(len(asked)))
                answers = list(_COLLECTIVES[op]([_named(*x) for x in asked]))


def _apply(asked):
    """A function of one's own, each rank's with a forward and a backward that may communicate."""
    forwards, backwards = ([args[i] for _, args, _ in asked] for i in range(2))
    ranks, count = len(asked), len(asked[0][1]) - 2
    several = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *flat):
            given = [flat[r * count : (r + 1) * count] for r in range(ranks)]
            results = evaluate(forwards, given)
            ctx.rest = [saved for _, saved in results]
            several.append(isinstance(results[0][0], (tuple, list)))
            return tuple(x for outs, _ in results for x in (outs if several[0] else [outs]))

        @staticmethod
        def backward(ctx, *gradients):
            each = len(gradients) // ranks
            given = [(*gradients[r * each : (r + 1) * each], *ctx.rest[r]) for r in range(ranks)]
            return tuple(x for found in evaluate(backwards, given) for x in found)

    flat = Function.apply(*(x for _, args, _ in asked for x in args[2:]))
    each = len(flat) // ranks
    found = [flat[r * each : (r + 1) * each] for r in range(ranks)]
    return found if several[0] else [x[0] for x in found]


class _Bridge(torch.autograd.Function):
    """From the model's own inputs to each rank's, and back from the ranks' outputs, which are
    alike, to what the model returns."""

    @staticmethod
    def forward(ctx, graphs, gradients, *inputs):
        ranks = len(graphs)
        ctx.inputs = [
            [
                x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
                for x in inputs
            ]
            for _ in range(ranks)
        ]
        with torch.enable_grad():
            ctx.outputs = evaluate(graphs, ctx.inputs)
        ctx.gradients = gradients
        for column in zip(*ctx.outputs, strict=True):
            if isinstance(column[0], Tensor):
                _assert_alike([x.detach() for x in column], "an output")
        results = [x.detach() if isinstance(x, Tensor) else x for x in ctx.outputs[0]]
        still = [
            x
            for x, y in zip(results, ctx.outputs[0], strict=True)
            if isinstance(y, Tensor) and not y.requires_grad
        ]
        ctx.mark_non_differentiable(*still)
        return tuple(results)

    @staticmethod
    def backward(ctx, *gradients):
        pairs = [
            (x, g)
            for outputs in ctx.outputs
            for x, g in zip(outputs, gradients, strict=True)
            if isinstance(x, Tensor) and x.requires_grad and g is not None
        ]
        torch.autograd.backward(*zip(*pairs, strict=True))
        found = []
        for column in zip(*ctx.inputs, strict=True):
            mine = [getattr(x, "grad", None) for x in column]
            if mine[0] is None or ctx.gradients != "sum":
                assert all((x is None) == (mine[0] is None) for x in mine)
                scale = 1 / len(mine) if ctx.gradients == "mean" else 1
                found.append(None if mine[0] is None else sum(mine) * scale)
                continue
            _assert_alike(mine, "the gradient of an input")
            found.append(mine[0])
        return None, None, *found


def lockstep(model, ranks: int, gradients: str = "sum", **options):
    """``model``, compiled for ``ranks`` ranks; what it returns is every rank's, and gradients are
    in full: every rank's ("sum"), their sum ("local") or their mean ("mean")."""

    def backend(gm, example_inputs):
        name, graphs = dist.group.WORLD.group_name, []
        for rank in range(ranks):
            # Each rank's pass makes anew the sizes that depend on data: Dynamo finds none left.
            context = torch._guards.TracingContext.try_get()
            context.fake_mode.shape_env.pending_fresh_unbacked_symbols.clear()
            member = rank, ranks, name
            graphs.append(
                parallelize(gm, example_inputs, member, gradients, drop_caches=True, **options)
            )

        def run(*args):
            return _Bridge.apply(graphs, gradients, *args)

        return without_caches(run, graphs[0].meta.get("absent", ()))

    compiled = torch.compile(model, backend=backend, fullgraph=True)

    def call(*args, **kwargs):
        with alone(ranks):
            return compiled(*args, **kwargs)

    return call


@contextlib.contextmanager
def alone(size: int):
    """A group of ``size`` ranks, of which this process is the first, and which sends nothing: for
    what is refused before anything is sent, and for lock step."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def gradients_of(model, kind):
    """Full gradients, whatever each rank of this group was asked to have."""
    result = {}
    for name, p in model.named_parameters():
        if p.grad is None:
            continue
        gradient = p.grad.clone()
        if kind != "sum":
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size() if kind == "mean" else 1
        result[name] = gradient
    return result


def compare(
    make, lengths, name="", ranks=None, inner="eager", kind="sum", tolerance=1e-9, static=False
):
    """A model's loss and gradients against one process's: of ``ranks`` in lock step, or (None) as
    one rank of this process's group, compiled by ``inner``. ``static``: the number of tokens is a
    constant in the graph, which takes a fifth of the time. How many graphs there are after each
    length."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = []
    torch.manual_seed(0)
    reference = make().double()
    model = copy.deepcopy(reference)
    if ranks is None:
        options = {"inner": inner, "gradients": kind}
        compiled = torch.compile(model, backend="deepsp", fullgraph=True, options=options)
    else:
        compiled = lockstep(model, ranks, kind)
    for length in lengths:
        inputs = batch(length, name)
        expected = reference(**inputs)
        total(expected, inputs["labels"]).backward()
        with static_lengths() if static else contextlib.nullcontext():
            marked = deepsp.prepare_inputs(inputs)
        out = compiled(**marked)
        total(out, inputs["labels"]).backward()
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
        mine = gradients_of(model, "sum" if ranks else kind)
        for n, p in reference.named_parameters():
            assert (p.grad is None) == (n not in mine), n
            if p.grad is not None:
                scale = p.grad.abs().max().clamp(min=1e-6).item()
                torch.testing.assert_close(
                    mine[n], p.grad, rtol=0, atol=tolerance * scale, msg=lambda m, n=n: f"{n}: {m}"
                )
        if ranks is None:  # in lock step, buffers are copies
            for (n, x), y in zip(model.named_buffers(), reference.buffers(), strict=True):
                torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=n)
        model.zero_grad()
        reference.zero_grad()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return graphs


def on_two_and_three(make, length=13, name=""):
    """Two ranks and any length; three, of which one has both borders, and a constant one."""
    compare(make, (length,), name, 2)
    compare(make, (length,), name, 3, static=True)


def static_lengths():
    return mock.patch.object(torch._dynamo, "maybe_mark_dynamic", lambda *args: None)
