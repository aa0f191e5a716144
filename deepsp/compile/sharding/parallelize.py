"""One rank's graph, from a graph that Dynamo captured."""

from __future__ import annotations

from torch import fx

from deepsp.attention import parts
from deepsp.compile.sharding import checkpointing, writes
from deepsp.compile.sharding.nodes import is_differentiated
from deepsp.compile.sharding.normalize import check_supported, fake_inputs, normalize
from deepsp.compile.sharding.report import Report
from deepsp.compile.sharding.rewrite import Rewriter
from deepsp.ranks.groups import Group, member_of

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
            saved for backward; attention and what was exchanged is always saved, the rest is
            recomputed. None: as the inner compiler decides.
        chunks: the number of parts of each rank's heads; while attention works on one, the next is
            exchanged.
        query_parts: as in :func:`deepsp.distributed_attention`.
        report: records the decisions.
        drop_caches: returns an empty tensor in place of each output that is keys or values of
            attention in training, and lists their places in ``.meta["absent"]``:
            :func:`deepsp.compile.sharding.caches.without` says so to whoever uses one.

    Returns:
        A differentiable graph with the inputs and outputs of ``gm``, for any inner compiler.

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
    does_nothing = all(n.op in ("placeholder", "output") for n in gm.graph.nodes)
    if (member[1] == 1 and memory_budget is None) or does_nothing:
        return gm
    check_supported(gm)
    inputs, mode = fake_inputs(gm, example_inputs)
    normal = normalize(gm, inputs, mode)
    writes.results_out_of_place(normal, mode)
    writes.views_out_of_place(normal, mode)
    normal.compile_subgraph_reason = getattr(gm, "compile_subgraph_reason", None)
    walk = Rewriter(normal, inputs, mode, member, gradients, outputs, chunks, query_parts)
    walk.drop_caches = drop_caches
    if report is not None:
        walk.report = report
    with mode:
        graph = walk.run()
    checkpointing.keep_exchanged(graph)
    if memory_budget is not None and memory_budget < 1:
        differentiated = {n for n, x in walk.env.items() if is_differentiated(x)}
        checkpointing.tag(graph, memory_budget, differentiated)
    result = fx.GraphModule(normal, graph)
    placeholders = enumerate(graph.find_nodes(op="placeholder"))
    result.meta["alike"] = [i for i, n in placeholders if n in walk.alike]
    result.meta["absent"] = walk.absent_places
    return result
