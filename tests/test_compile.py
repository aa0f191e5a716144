"""What tracing sees is what eager does: opcheck, fullgraph, dynamic lengths, Inductor's graph."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from attentions import check_compiled_layer
from calls import arguments, leaf
from graphs import marks_of
from harness import on_ranks
from reference import attention, draw
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

import deepsp
from deepsp.compile.graphs import target_of
from deepsp.compile.lowering import inductor_table
from deepsp.compile.lowering.overlap import keep_overlap, raise_starts

op = torch.ops.deepsp


_LISTS_OF_DTYPES = {
    "gather_cast", "gather_cast_start", "gather_cast_wait", "gather_cast_coalesced",
    "_gather_cast_coalesced_start", "_gather_cast_coalesced_wait", "reduce_scatter_cast",
    "_reduce_scatter_cast_coalesced", "_reduce_scatter_cast_coalesced_wait",
}  # fmt: skip


def _opcheck(name):
    form, _, plain = name.rpartition(":")
    args = arguments("skewed")[plain if form in ("backend", "keys") else name]
    keywords = {
        "backend": {"backend_sums": torch.float32},
        "cut": {"query_parts": dist.get_world_size()},
        "halo": {"halo": 1},
        "keys": {"exchange": "keys"},
        "lse": {"return_lse": True},
    }
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        overload = getattr(op, "distributed_attention" if name == "chunked" else plain).default
        utils = ["test_schema", "test_autograd_registration", "test_faketensor"]
        utils.append("test_aot_dispatch_dynamic")
        # PyTorch's schema check can't read lists of dtypes: test_gather_memory.py looks at aliases.
        # Compiled, a seed is another draw.
        opcheck(
            overload,
            args,
            keywords.get(form, {}),
            test_utils=utils[plain in _LISTS_OF_DTYPES : -1 if name == "_dropout_seed" else None],
        )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "name",
    ["seq_to_heads", "heads_to_seq", "seq_to_heads_start", "seq_to_heads_wait",
     "heads_to_seq_start", "heads_to_seq_wait", "previous_tokens", "previous_tokens_start",
     "previous_tokens_wait", "expert_dispatch", "expert_combine", "_rows_start", "_rows_wait",
     "halo:_rows_start", "halo:_rows_wait", "_fold_states", "project_to_heads",
     "heads_to_output",
     "_project_to_heads_start", "_project_to_heads_backward", "_heads_to_output_wait",
     "_heads_to_output_weight_grad", "distributed_attention", "chunked",
     "keys:distributed_attention",
     "_kv_of_cell", "_attention_of_cell", "_dropout_seed", "_attention_with_dropout",
     "_attention_with_dropout_backward", "_blockwise_attention", "_blockwise_attention_backward",
     "_streamed_attention", "_streamed_attention_backward", "_check_attention",
     "distributed_attention_with_lse", "merge_attention", "_join_log_sum", "_split_log_sum",
     "both:_blockwise_attention_backward", "lse:_streamed_attention",
     "lse:_streamed_attention_backward",
     "all_reduce", "all_reduce_start",
     "all_reduce_wait", "all_gather", "all_gather_start", "all_gather_wait", "reduce_scatter",
     "reduce_scatter_start", "reduce_scatter_wait", "scatter", "scatter_start", "scatter_wait",
     "all_gather_matmul", "_all_gather_matmul_backward", "matmul_reduce_scatter",
     "_matmul_reduce_scatter_backward", "_sum_gradients_",
     "gather_cast", "gather_cast_start", "gather_cast_wait",
     "gather_cast_coalesced", "_gather_cast_coalesced_start", "_gather_cast_coalesced_wait",
     "reduce_scatter_cast", "_reduce_scatter_cast_coalesced",
     "_reduce_scatter_cast_coalesced_start", "_reduce_scatter_cast_coalesced_wait",
     "backend:gather_cast_coalesced", "backend:_gather_cast_coalesced_wait",
     "backend:_reduce_scatter_cast_coalesced", "backend:_reduce_scatter_cast_coalesced_start",
     "gather_cast_float8", "_gather_cast_float8_coalesced", "gather_through_float8",
     "replicate_start", "replicate_wait", "_scale_gradient", "replicated",
     "linear_cross_entropy", "_linear_cross_entropy_gradients", "token_log_probs",
     "_token_log_probs_backward", "linear_kl", "_linear_kl_gradients",
     "cut:seq_to_heads_start", "cut:seq_to_heads_wait", "cut:heads_to_seq_start",
     "cut:heads_to_seq_wait", "cut:_streamed_attention", "_cells", "token_split", "head_split",
     "deal_documents", "_indices_in",
     "_chunks_in_force", "_dense_tokens", "_check_agreement"],
)  # fmt: skip
def test_opcheck(ranks, name):
    on_ranks(ranks, _opcheck, name)


def test_every_op_is_checked():
    names = set(test_opcheck.pytestmark[0].args[1]) - {"chunked"}
    checked = {name.rpartition(":")[2] for name in names}
    pool = {"_pool_idle_bytes", "_pool_limit", "_pool_set_limit", "_pool_clear"}  # and the like
    pool |= {"_transport"}
    ours = {
        n.split("::")[1] for n in torch._C._dispatch_get_all_op_names() if n.startswith("deepsp::")
    }
    assert ours == checked | pool


# ------------------------------------------------------------------------------ whole layers


def _causal(q, k, v):
    return attention(q, k, v, is_causal=True)


OFFSETS = {"even": (0, 0, 0), "uneven": (0, 3, 1)}  # tokens of rank r over those of rank 0


def _compiled(backend, lengths, heads, kv_heads, chunks, kind, local):
    """lengths "marked": S is dynamic from the start, seq_lens come from shapes. "listed": seq_lens
    are a list of ints, which Dynamo takes for constants until they change."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch._dynamo.reset()
    offsets = OFFSETS[kind][:size]
    module = deepsp.DistributedAttention(_causal if local else None, chunks=chunks)
    causal = {} if local else {"is_causal": True, "enable_gqa": True}

    def layer(q, k, v, lens=None):
        if lens is None and kind == "uneven":
            lens = [q.size(1) + offsets[p] - offsets[rank] for p in range(size)]
        return module((q * 1.5).cos(), k + 1, v * 2, seq_lens=lens, **causal).sin()

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for base in (40, 33, 61, 50):
        lens = [base + offset for offset in offsets]
        whole = [
            draw(2, sum(lens), h, 8, seed=i) for i, h in enumerate((heads, kv_heads, kv_heads))
        ]
        full = [x.clone().requires_grad_() for x in whole]
        mine = [x.split(lens, 1)[rank].clone().requires_grad_() for x in whole]
        expected = _causal((full[0] * 1.5).cos(), full[1] + 1, full[2] * 2).sin()
        grad = draw(*expected.shape, seed=5)
        gradients = torch.autograd.grad(expected, full, grad)
        if lengths == "marked":
            for x in mine:
                torch._dynamo.mark_dynamic(x, 1)
            out = compiled(*mine)
        else:
            out = compiled(*mine, lens)
        ours = torch.autograd.grad(out, mine, grad.split(lens, 1)[rank])
        for a, b in zip([out, *ours], [expected, *gradients], strict=True):
            torch.testing.assert_close(a, b.split(lens, 1)[rank], rtol=1e-10, atol=1e-11)
        if lengths == "static":
            break
    assert counter.frame_count == {"static": 1, "marked": 1, "listed": 2}[lengths]


CASES = [(8, 2, 1, "even"), (9, 3, 2, "uneven")]
SHARED = (8, 1, 1, "uneven")  # both ranks read the kv head, whose gradients are summed


# Under Inductor each way of giving lengths once: a list's first graph is static.
@pytest.mark.parametrize(
    ("backend", "lengths", "case", "apart"),
    [*(("aot_eager", way, case, "") for way in ("static", "marked", "listed") for case in CASES),
     ("inductor", "marked", CASES[0], "mapped"), ("inductor", "listed", CASES[1], "messages"),
     ("inductor", "marked", SHARED, "messages"),
     pytest.param("inductor", "listed", CASES[1], "mapped", marks=pytest.mark.nightly)],
)  # fmt: skip
def test_fullgraph(backend, lengths, case, apart):
    on_ranks(2, _compiled, backend, lengths, *case, False, apart=apart)


def _no_tokens():
    """The rank without tokens makes the calls whose results are empty for it, too."""
    torch._dynamo.reset()
    rank, lens = dist.get_rank(), [6, 0]
    full = [draw(1, 6, 4, 8, seed=i).requires_grad_() for i in range(3)]
    mine = [x.detach().split(lens, 1)[rank].clone().requires_grad_() for x in full]

    def layer(q, k, v):
        out = deepsp.distributed_attention(q * 2, k * 2, v, is_causal=True, seq_lens=lens)
        return out.sin() * 2

    expected = _causal(full[0] * 2, full[1] * 2, full[2]).sin() * 2
    gradients = torch.autograd.grad(expected.sum(), full)
    out = torch.compile(layer, fullgraph=True)(*mine)
    ours = torch.autograd.grad(out.sum(), mine)
    for a, b in zip([out, *ours], [expected, *gradients], strict=True):
        torch.testing.assert_close(a, b.split(lens, 1)[rank], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("apart", ["mapped", "messages"])
def test_a_rank_without_tokens(apart):
    on_ranks(2, _no_tokens, apart=apart)


def test_fullgraph_on_three_ranks_around_a_users_attention():
    on_ranks(3, _compiled, "aot_eager", "static", 8, 4, 2, "uneven", True)


def test_fullgraph_in_a_group_of_one():
    on_ranks(1, _compiled, "inductor", "static", 8, 4, 2, "even", False)


def _functions():
    """The functions, with a group to resolve, under fullgraph; layout functions, too."""
    torch._dynamo.reset()
    group = dist.group.WORLD

    def step(q, k, labels):
        there = deepsp.seq_to_heads([q, k], group=group)
        back = deepsp.heads_to_seq(there, [q.size(2), k.size(2)], group=group)
        pending = deepsp.seq_to_heads_start([q])
        extra = (q * 2).sum()
        (again,) = pending.wait()
        heads = deepsp.sequence.attention.local_heads(q.size(2))
        loss = deepsp.cross_entropy(back[0].flatten(2), labels, group=group)
        return loss + again.square().sum() * 1e-3 + extra * 0.1 + heads.start

    rank = dist.get_rank()
    q, k = leaf(2, 4, 8, 6), leaf(2, 4, 2, 6, seed=1)
    labels = torch.arange(8).view(2, 4) + rank
    expected = step(q, k, labels)
    g_expected = torch.autograd.grad(expected, [q])
    for backend in ("aot_eager", "inductor"):
        out = torch.compile(step, fullgraph=True, backend=backend)(q, k, labels)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(torch.autograd.grad(out, [q]), g_expected)


def test_functions_compile():
    on_ranks(2, _functions)


def _compiled_autograd():
    """torch's compiled autograd takes backward, with whatever each op keeps for it."""
    from torch._dynamo import compiled_autograd

    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    weight, labels = leaf(11, 8).detach(), torch.arange(2 * 4 * 8).view(2, 4, 8) % 11
    for function in (
        lambda x: deepsp.distributed_attention(x, x, x, is_causal=True, dropout_p=0.0),
        lambda x: deepsp.collectives.all_gather(x, 1, grad="partial"),
        lambda x: deepsp.linear_cross_entropy(x, weight, labels),
        lambda x: deepsp.linear_kl(x, weight, x.detach().cos(), weight, labels, top_k=3),
        # Rows of no dimension: a list that is empty.
        lambda x: op.gather_cast(x.flatten(), [x.numel()] * size, torch.bfloat16, rank, group),
    ):
        x = leaf(2, 4, 8, 8, seed=rank)
        (expected,) = torch.autograd.grad(function(x).square().sum(), x)
        out = function(x).square().sum()
        torch._dynamo.reset()
        with compiled_autograd._enable(lambda gm: torch.compile(gm, backend="eager")):
            out.backward()
        torch.testing.assert_close(x.grad, expected, rtol=0, atol=0)


def test_compiled_autograd():
    on_ranks(2, _compiled_autograd)


def _views_escape():
    """A compiled function may return the views; writing to one leaves the others alone."""
    torch._dynamo.reset()
    x = [draw(2, 4, h, 6, seed=h) for h in (8, 2)]

    def function(q, k):
        a, b = deepsp.seq_to_heads([q, k])
        a.mul_(2)
        return a, b, b + 1

    expected = function(*x)
    for backend in ("aot_eager", "inductor"):
        for a, b in zip(
            torch.compile(function, fullgraph=True, backend=backend)(*x), expected, strict=True
        ):
            assert torch.equal(a, b)


def test_views_that_leave_the_graph():
    on_ranks(2, _views_escape)


def _post_grad(called):
    """Inductor's own graph: asynchronous collectives, or calls of kernels, launched, then compute,
    then waited for."""
    torch._dynamo.reset()
    graphs = []
    x = [leaf(1, 16, 8, 8, seed=i) for i in range(3)]

    def layer(q, k, v):
        return deepsp.distributed_attention(q, k, v, is_causal=True, chunks=2)

    with torch._inductor.config.patch(
        post_grad_custom_post_pass=lambda graph: graphs.append(
            [str(n.target) for n in graph.nodes if n.op == "call_function"]
        )
    ):
        torch.compile(layer, fullgraph=True)(*x).sum().backward()
    assert len(graphs) == 2  # forward, backward
    for graph in graphs:
        # Both chunks' exchanges are launched before anything is waited for; the first chunk's
        # attention runs before the second's arrival is waited for, and so on. A call launches or
        # waits for both.
        if called:
            assert not any("c10d" in target for target in graph), graph
            assert marks_of(graph) == "xwAxwAxw"
        else:
            assert not any("deepsp" in target for target in graph), graph
            assert marks_of(graph) == "xxwAxwAxww"


@pytest.mark.parametrize("apart", ["messages", "collectives"])
def test_inductors_graph(apart):
    on_ranks(2, _post_grad, apart == "messages", apart=apart)


# What Inductor's schedule must be of collectives, as for CUDA tensors, forward and backward, two
# chunks on two ranks.
_FORWARD = "mxmxwAxwAxwwm"
_BACKWARDS = "mxmxAmwAxAwAxwwmmxmxAmmmmwAxAwAxwwmmmm"


class _Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.attention = deepsp.SequenceParallelAttention(
            32, 8, 4, bias=True, rope_theta=1e4, chunks=2
        )

    def forward(self, x):
        return x + self.attention(self.norm(x), is_causal=True)


def _schedule():
    """The order of the code that Inductor writes, not only of the graph that it is given."""
    from torch._inductor.utils import run_fw_bw_and_get_code

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[_Block() for _ in range(2)])
    x = leaf(1, 16, 32)
    compiled = torch.compile(model, fullgraph=True)
    _, codes = run_fw_bw_and_get_code(lambda: compiled(x))
    calls = [code[code.index("def call") :].splitlines() for code in codes]
    # Comments and assertions mention kernels, too; attention has a line before its call.
    calls = [[x for x in lines if "(" in x.split("#")[0] and "assert_" not in x] for lines in calls]
    forwards, backwards = (marks_of(lines).replace("AA", "A") for lines in calls)
    assert forwards == _FORWARD * 2, forwards
    assert backwards == _BACKWARDS, backwards
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    ours = torch.autograd.grad(compiled(x).sum(), [x, *model.parameters()])
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_inductors_schedule_keeps_the_overlap():
    on_ranks(2, _schedule, apart="collectives")


def test_products_pass_an_exchange_and_sums_stay():
    """Only what can hide an exchange goes behind its start. A sum stays with what it is made of, so
    that one kernel computes both."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")

    def add(target, *args):
        node = graph.call_function(target, args)
        node.meta["val"] = torch.zeros(4, 4)
        return node

    aten = torch.ops.aten
    cheap = add(aten.relu.default, x)
    product = add(aten.mm.default, x, x)
    of_product = add(aten.neg.default, product)
    total = add(aten.sum.default, cheap)
    start = add(torch.ops._c10d_functional.all_to_all_single.default, cheap, [4], [4], "0")
    start.meta["original_aten"] = torch.ops.deepsp.seq_to_heads.default
    graph.output((of_product, total, start))
    raise_starts(graph)
    graph.lint()
    assert list(graph.nodes)[1:-1] == [cheap, total, start, product, of_product]


def test_what_hides_an_exchange():
    from deepsp.compile.graphs import computes

    custom = torch.library.custom_op("deepsp_test::flash_attn_forward", mutates_args=())

    @custom
    def forward(q: torch.Tensor) -> torch.Tensor:
        return q.clone()

    backward = torch.library.custom_op("deepsp_test::flash_attn_back", mutates_args=("dq",))

    @backward
    def back(q: torch.Tensor, dq: torch.Tensor) -> None:
        dq.copy_(q)

    aten, ours = torch.ops.aten, torch.ops.deepsp
    hides = [
        aten.mm.default, aten.bmm.default, aten._scaled_mm.default, aten._grouped_mm.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward,
        torch.ops.deepsp_test.flash_attn_forward.default, ours._attention_with_dropout.default,
        ours._blockwise_attention_backward.default,
    ]  # fmt: skip
    not_these = [aten.add.Tensor, aten.clone.default, ours._streamed_attention.default]
    graph = torch.fx.Graph()
    for targets, expected in ((hides, True), (not_these, False)):
        for target in targets:
            node = graph.call_function(target)
            node.meta["val"] = torch.zeros(1)
            assert computes(node) is expected, target
    written = torch.ops.higher_order.auto_functionalized_v2
    node = graph.call_function(written, (torch.ops.deepsp_test.flash_attn_back.default,))
    node.meta["val"] = (None, torch.zeros(1))
    assert computes(node)
    check = graph.call_function(ours._check_attention.default)
    check.meta["val"] = None
    assert not computes(check)


def _compiled_checkpoint(launches):
    """What is computed again is exchanged again: moved up, in the same order, with the same
    results."""
    from torch.utils.checkpoint import checkpoint

    torch._dynamo.reset()
    torch.manual_seed(0)
    block, x = _Block(), leaf(1, 16, 32)
    graphs = {}

    def note(name):
        def take(graph):
            graphs.setdefault(name, []).append(
                [str(target_of(n)) for n in graph.nodes if n.op == "call_function"]
            )

        return take

    def both(graph):
        note("before")(graph)
        keep_overlap(graph)
        note("after")(graph)

    compiled = torch.compile(lambda x: checkpoint(block, x, use_reentrant=False), fullgraph=True)
    with torch._inductor.config.patch(post_grad_custom_post_pass=both):
        ours = torch.autograd.grad(compiled(x).square().sum(), [x, *block.parameters()])
    expected = torch.autograd.grad(block(x).square().sum(), [x, *block.parameters()])
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    before, after = (marks_of(graphs[name][1]) for name in ("before", "after"))
    assert before.count("x") == after.count("x") == launches, (before, after)
    assert after.count("xw") <= before.count("xw"), (before, after)


@pytest.mark.parametrize(("apart", "launches"), [("collectives", 8), ("messages", 6)])
def test_inductor_under_a_checkpoint(apart, launches):
    on_ranks(2, _compiled_checkpoint, launches, apart=apart)


@pytest.mark.parametrize(
    ("backend", "case", "apart"),
    [("aot_eager", (9, 3, 2, (0, 3, 1)), ""), ("aot_eager", (4, 1, 1, (0, 1, 2)), ""),
     ("inductor", (7, 1, 2, (0, 3, 1)), "messages"), ("inductor", (7, 1, 2, (0, 3, 1)), "mapped")],
)  # fmt: skip
def test_the_layer_compiles(backend, case, apart):
    if backend == "inductor":  # whose C++ compiler takes its time
        on_ranks(2, check_compiled_layer, backend, case, False, (20,), apart=apart)
    else:
        on_ranks(3, check_compiled_layer, backend, case, True, (20, 13, 31))


def test_the_layer_compiles_in_a_group_of_one():
    on_ranks(1, check_compiled_layer, "inductor", (4, 2, 2, (0,)), False, (20,))


# ------------------------------------------------------------------- export, import, tables

_EXPORT = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
import deepsp

class Layer(torch.nn.Module):
    def __init__(self, chunks):
        super().__init__()
        self.attention = deepsp.DistributedAttention(chunks=chunks)
        self.norm = torch.nn.LayerNorm(16)

    def forward(self, x):
        x = self.norm(x)
        return self.attention(x, x[:, :, :4], x[:, :, :4], is_causal=True, enable_gqa=True)

for chunks in (1, 2):
    layer, x = Layer(chunks), torch.randn(2, 12, 8, 16)
    seq = torch.export.Dim("seq", min=2, max=1024)
    for strict in (False, True):
        program = torch.export.export(layer, (x,), dynamic_shapes=({1: seq},), strict=strict)
        assert any("deepsp" in str(n.target) for n in program.graph.nodes), program.graph
        out = program.module()(torch.randn(2, 20, 8, 16))
        assert out.shape == (2, 20, 8, 16)
print("exported")
"""

_IMPORT = """
import sys, torch
import deepsp
found = {"torch._dynamo", "torch._inductor"} & sys.modules.keys()
assert not found, f"import deepsp drags {found} in"
from deepsp import patches
from torch._inductor import decomposition
op = torch.ops.deepsp.seq_to_heads_start.default
assert op in decomposition.decompositions and op in decomposition.select_decomp_table()
assert "deepsp-" in torch.compiler.config.cache_key_tag
from deepsp.compile.lowering.overlap import KeepOverlap
from torch._inductor import config
assert isinstance(config.post_grad_custom_post_pass, KeepOverlap)
assert config.post_grad_custom_post_pass.uuid()
patches.uninstall()
assert config.post_grad_custom_post_pass is None
theirs = []
for before, calls in ((theirs.append, 1), ([theirs.append, theirs.append], 3)):
    config.post_grad_custom_post_pass = before
    patches.install()  # after passes of the user's
    config.post_grad_custom_post_pass(torch.fx.Graph())
    assert len(theirs) == calls and config.post_grad_custom_post_pass.uuid() is None
    patches.uninstall()
    assert config.post_grad_custom_post_pass == before
assert "deepsp-" not in torch.compiler.config.cache_key_tag
assert op not in decomposition.decompositions
assert op not in decomposition.select_decomp_table()
patches.install()  # though Inductor has made a copy of its table by now
assert op in decomposition.decompositions and op in decomposition.select_decomp_table()
print("imported")
"""


@pytest.mark.parametrize(("script", "word"), [(_EXPORT, "exported"), (_IMPORT, "imported")])
def test_in_a_process_of_its_own(script, word):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and word in done.stdout, done.stderr[-3000:]


def test_inductor_knows_every_op_that_launches_or_waits():
    """By its arguments' names: Inductor calls the decomposition in the op's place."""
    table = inductor_table._decompositions()
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("deepsp::")]
    halves = [
        getattr(torch.ops.deepsp, name.removeprefix("deepsp::")).default
        for name in names
        if name.endswith(("_start", "_wait"))
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
    ]
    assert len(halves) > 10 and set(halves) <= table.keys()
    for op, decomposition in table.items():
        collectives = getattr(torch.ops.deepsp_inductor, op._opname).default
        assert str(op._schema).partition("(")[2] == str(collectives._schema).partition("(")[2]
        assert collectives._can_decompose() and callable(decomposition)
