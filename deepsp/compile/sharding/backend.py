"""``torch.compile(model, backend="deepsp")``, and the pass alone for a backend of your own."""

from __future__ import annotations

from sympy import sympify
from torch import fx
from torch._dynamo import config
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch._functorch import config as functorch_config
from torch._guards import CompileContext

from deepsp.compile.sharding import checkpointing
from deepsp.compile.sharding.boundary import GATHERS, role_of, without_caches
from deepsp.compile.sharding.nodes import draws_inside, is_differentiated
from deepsp.compile.sharding.normalize import (
    check_supported,
    equate_sizes,
    fake_inputs,
    normalize,
    without_cache,
)
from deepsp.compile.sharding.report import CannotShard, Report
from deepsp.compile.sharding.rewrite import Rewriter
from deepsp.compile.sharding.rules.recurrences import capture_recurrences
from deepsp.compile.sharding.together import together
from deepsp.compile.sharding.tokens import same
from deepsp.compile.sharding.watch import note_run
from deepsp.compile.sharding.writes import results_out_of_place, views_out_of_place
from deepsp.data.same_batch import compare_batches
from deepsp.ranks.groups import Group, Member, member_of
from deepsp.ranks.randomness import sharded_randomness
from deepsp.sequence.attention import parts

# Compile backward at once: an error there must come before any rank runs the graph.
_EAGER_BACKWARD = {
    name: True
    for name in ["force_non_lazy_backward_lowering"]
    if hasattr(functorch_config, name)  # not in every version
}


def deepsp(gm: fx.GraphModule, example_inputs, *, options=None, **kwargs):
    """A backend of ``torch.compile`` that shards the sequence over a group.

    ``options``: those of :func:`deepsp.compile.parallelize`, and ``inner``, the compiler that takes
    the result ("inductor").
    """
    from torch._dynamo.backends.registry import lookup_backend

    options = dict(options or {})
    inner = options.pop("inner", "inductor")
    group: Group = options.pop("group", None)
    options_taken = {"gradients", "outputs", "memory_budget", "chunks", "query_parts"}
    if set(options) - options_taken:
        raise ValueError(
            "expected options to have group, inner, gradients, outputs, memory_budget, chunks and "
            f"query_parts only, got {sorted(set(options) - options_taken)}"
        )
    _settle_floats(gm)
    options["query_parts"] = parts.validate(options.get("query_parts", "auto"), group)
    member = member_of(group)

    alike: list[int] = []
    names = [_name(n) for n in gm.graph.find_nodes(op="placeholder")]

    def work():
        new = parallelize(gm, example_inputs, member, drop_caches=True, **options)
        if config.assume_static_by_default and _is_first_compilation():
            _settle_lengths(gm)
        alike.extend(new.meta.get("alike", ()))
        compiler = lookup_backend(inner) if isinstance(inner, str) else inner
        if inner == "inductor" and any(node.target in GATHERS for node in new.graph.nodes):
            kwargs["config_patches"] = _fuse_gathers(kwargs.get("config_patches"))
        # Equal collectives, of zeros on this rank, aren't equal on others.
        apart = {"cse": False} if new.meta.get("apart") else {}
        with functorch_config.patch(_EAGER_BACKWARD | apart):
            compiled = compiler(new, example_inputs, **kwargs)
        marked = [i for i, n in enumerate(gm.graph.find_nodes(op="placeholder")) if role_of(n)]
        compiled = _with_one_batch(compiled, [(i, names[i]) for i in marked], member)
        if draws_inside(new):
            compiled = _with_sharded_randomness(compiled, member)
        compiled = without_caches(compiled, new.meta.get("absent", ()))
        return compiled if does_nothing(gm) else _noted(compiled)

    def compared():
        return [(names[i], example_inputs[i]) for i in alike]

    compiled = together(work, compared, member)
    # Each compilation numbers floats anew, so these names would mean others in the next one.
    TensorifyState.clear()
    return compiled


def _noted(compiled):
    """Tells the watch of a call that the pass's graph ran."""

    def run(*args):
        note_run()
        return compiled(*args)

    return run


def _with_one_batch(compiled, inputs: list[tuple[int, str]], member: Member):
    """Compares the marked inputs across the ranks before each call."""

    def run(*args):
        compare_batches([(name, args[i]) for i, name in inputs], member)
        return compiled(*args)

    return run if inputs else compiled


def _with_sharded_randomness(compiled, member: Member):
    """Each rank drops other tokens, while the default generators stay alike, so that a program
    draws the same batches from them on every rank."""

    def run(*args):
        with sharded_randomness(member):
            return compiled(*args)

    return run


def _name(placeholder: fx.Node) -> str:
    """The user's name for an input, as far as Dynamo knows it."""
    role = role_of(placeholder)
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    return role[0] if role else getattr(source, "name", placeholder.name)


def _fuse_gathers(patches: dict | None) -> dict:
    """Adds the pass that gathers weights in the narrow dtype, together and early."""
    from torch._inductor import config as inductor_config

    from deepsp.compile.passes.fuse_gather_cast import FuseGatherCast

    name = "post_grad_custom_post_pass"
    patches = dict(patches or {})
    before = patches.get(name, getattr(inductor_config, name))
    if not isinstance(before, FuseGatherCast):
        patches[name] = FuseGatherCast(before)
    return patches


def _is_first_compilation() -> bool:
    """Whether Dynamo compiles this frame for the first time."""
    compilation = CompileContext.current_compile_id()
    return compilation is not None and not compilation.frame_compile_id


def _settle_lengths(gm: fx.GraphModule) -> None:
    """Makes the number of tokens a constant, unless the user marked it dynamic. The pass needed a
    symbol, to tell tokens from other sizes; the inner compiler is faster without, and a second
    length is a symbol there, too."""
    lengths = []
    for node in gm.graph.find_nodes(op="placeholder"):
        role = role_of(node)
        if role:
            example = getattr(node.meta.get("grapharg"), "example", None)
            if role[1] in getattr(example, "_dynamo_dynamic_indices", ()):
                return  # the others are as long
            lengths.append(node.meta["example_value"].size(role[1]))
    for length in lengths:
        int(length)  # a guard


def _settle_floats(gm: fx.GraphModule) -> None:
    """Makes a module's floats (an epsilon, a scale) constants, until one changes. With
    ``dynamic=True`` they are inputs, and AOTAutograd asks Dynamo, late, to restart with those that
    are used as numbers as constants. Asking now repeats only Dynamo's work."""
    if config.assume_static_by_default or not _is_first_compilation():
        return
    names = set()
    for node in gm.graph.find_nodes(op="placeholder"):
        number = getattr(node.meta.get("example_value"), "item_memo", None)
        source = getattr(node.meta.get("grapharg"), "source", None)
        if number is not None and source.guard_source.is_unspecialized_nn_module():
            names.add(number.node._expr.name)
    if any(not TensorifyState.should_specialize(name) for name in names):
        for name in names:
            TensorifyState.specialize(name)
        raise TensorifyScalarRestartAnalysis


def does_nothing(gm: fx.GraphModule) -> bool:
    """Whether a graph only passes its inputs on."""
    return all(n.op in ("placeholder", "output") for n in gm.graph.nodes)


GRADIENTS = ("sum", "local", "mean")
OUTPUTS = ("full", "local")


def parallelize(
    gm: fx.GraphModule,
    example_inputs,
    group: Group = None,
    gradients: str = "sum",
    outputs: str = "full",
    memory_budget: float | None = None,
    chunks: int = 1,
    query_parts: int | str = "auto",
    report: Report | None = None,
    *,
    drop_caches: bool = False,
) -> fx.GraphModule:
    """Turns a graph for one device into this rank's graph, sharded over the sequence.

    Args:
        gm: a graph that Dynamo captured, with at least one tensor that
            :func:`deepsp.prepare_inputs` has marked. It isn't changed.
        example_inputs: as backends of ``torch.compile`` get them.
        group: the sequence group.
        gradients: "sum": every rank gets the full gradient of each parameter. "local": the partial
            gradient. "mean": the partial gradient times the group's size, for wrappers that
            average.
        outputs: "full": sharded outputs are gathered. "local": they are returned as they are.
        memory_budget: 0 to 1, the fraction of the bytes of each token's own computation that is
            saved for backward; attention and exchanged tensors are always saved, the rest is
            recomputed. None: the inner compiler decides.
        chunks: the number of parts of each rank's heads; while attention works on one, the next is
            exchanged.
        query_parts: as in :func:`deepsp.distributed_attention`.
        report: records the decisions.
        drop_caches: returns an empty tensor in place of each output that is keys or values of
            attention in training, and lists their places in ``.meta["absent"]``:
            :func:`deepsp.compile.sharding.boundary.without_caches` raises if one is used.

    Returns:
        A differentiable graph with the inputs and outputs of ``gm``, for any inner compiler. If its
        ``.meta["apart"]`` is true, compile it with ``torch._functorch.config.cse`` off: collectives
        that are equal on this rank, of zeros, aren't on others.

    Raises:
        ValueError: an unknown option, or :class:`deepsp.compile.CannotShard`: something in the
            graph can't be sharded. The message names the op, the reason and the line of the user's
            code. Nothing has been sent then.
    """
    if gradients not in GRADIENTS:
        raise ValueError(f"expected gradients to be 'sum', 'local' or 'mean', got {gradients!r}")
    if outputs not in OUTPUTS:
        raise ValueError(f"expected outputs to be 'full' or 'local', got {outputs!r}")
    if memory_budget is not None and not 0 <= memory_budget <= 1:
        raise ValueError(f"expected 0 <= memory_budget <= 1 or None, got {memory_budget}")
    if type(chunks) is not int or chunks < 1:
        raise ValueError(f"expected chunks to be an int >= 1, got {chunks!r}")
    query_parts = parts.validate(query_parts, group)
    member = member_of(group)
    if (member[1] == 1 and memory_budget is None) or does_nothing(gm):
        return gm
    capture_recurrences(gm)
    check_supported(gm)
    inputs, mode = fake_inputs(gm, example_inputs)
    pending = getattr(mode.shape_env, "pending_fresh_unbacked_symbols", [])
    before = list(pending)
    equate_sizes(gm, inputs)
    with without_cache(mode):
        normal = normalize(gm, inputs, mode)
        results_out_of_place(normal, mode)
        views_out_of_place(normal, mode)
        normal.compile_subgraph_reason = getattr(gm, "compile_subgraph_reason", None)
        while True:
            walk = Rewriter(normal, inputs, mode, member, gradients, outputs, chunks, query_parts)
            walk.drop_caches = drop_caches
            if report is not None:
                report.decisions.clear()
                walk.report = report
            try:
                with mode:
                    graph = walk.run()
                break
            except CannotShard:
                # A length that became a constant on the way isn't known to be the same as before.
                if all(same(n, mode.shape_env.replace(sympify(n))) for n in walk.lengths):
                    raise
    checkpointing.keep_exchanged(graph)
    if memory_budget is not None and memory_budget < 1:
        differentiated = {n for n, x in walk.env.items() if is_differentiated(x)}
        checkpointing.tag(graph, memory_budget, differentiated)
    pending[:] = before  # numbers from data: the inner compiler makes them anew
    result = fx.GraphModule(normal, graph)
    placeholders = enumerate(graph.find_nodes(op="placeholder"))
    result.meta["alike"] = [i for i, n in placeholders if n in walk.alike]
    result.meta["absent"] = walk.absent_places
    result.meta["apart"] = walk.has_empty
    return result
