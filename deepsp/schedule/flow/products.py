"""How placements follow what multiplies and sums: matrix products, embeddings, attention."""

from __future__ import annotations

from torch import Tensor

from deepsp import dims
from deepsp.schedule.flow.values import Call, Place, Split
from deepsp.schedule.placement import PARTIAL, REPLICATE

Operand = tuple[str, Tensor, list]
"""A role for messages, the tensor, and a label for each of its dimensions."""


def contract(call: Call, operands: list[Operand], output: list) -> Place:
    """A sum of products, as einsum says it: dimensions of the same label go together, those that
    ``output`` doesn't have are summed."""
    partial = [o for o in operands if call.value(o[1]).partial]
    sharded = [o for o in operands if call.value(o[1]).split]
    if partial:
        value = call.value(partial[0][1])
        if sharded or len(partial) > 1:
            other = (sharded or partial[1:])[0]
            call.fail_partial(
                value, f"{other[0]} isn't Replicate, and a product of sums isn't a sum of products"
            )
        return PARTIAL
    if not sharded:
        return REPLICATE
    places = {role: call.value(t).place for role, t, _ in sharded}
    unknown = [o for o in sharded if places[o[0]].axis is None]
    if unknown and len(sharded) > len(unknown):
        # Where one is known to be sharded, the lengths on this rank only fit if the other is, too.
        role, tensor, of = next(o for o in sharded if o not in unknown)
        label = of[places[role].axis]
        for at, other, labels in unknown:
            if label in labels and other.size(labels.index(label)) > 1:
                where = labels.index(label)
                places[at] = Split(where, places[role].parts, places[at].origin)
        unknown = [o for o in sharded if places[o[0]].axis is None]
    if unknown:
        if len(sharded) > 1:
            call.fail_split(call.value(unknown[0][1]), "it is multiplied by another sharded tensor")
        return places[unknown[0][0]]
    labels = {role: label[places[role].axis] for role, _, label in sharded}
    if len(set(labels.values())) > 1:
        _conflict(call, sharded, places, labels, output)
    label = next(iter(labels.values()))
    first_role, _, _ = sharded[0]
    place = places[first_role]
    for role, tensor, of in operands:
        if label not in of:
            continue
        value = call.value(tensor)
        if value.replicated:
            if tensor.size(of.index(label)) != 1 and not value.uniform:
                _one_is_replicated(
                    call, role, tensor, of.index(label), sharded[0], place, label, output
                )
        elif not _alike(places[role], place):
            call.fail(
                f"expected {role} to have the parts of {first_role} ({place}, "
                f"{list(place.parts)}), got {value.place}, {list(value.place.parts)}"
            )
    if label in output:
        return place.at(output.index(label))
    return PARTIAL


def _alike(a: Split, b: Split) -> bool:
    return a.parts == b.parts


def _conflict(call: Call, sharded, places, labels, output):
    (a, x, _), (b, y, _) = (
        sharded[0],
        next(o for o in sharded if labels[o[0]] != labels[sharded[0][0]]),
    )
    summed = [role for role in (a, b) if labels[role] not in output]
    if summed:
        text = "one of them is sharded along what is summed, the other isn't"
    else:
        text = "each rank would have but a tile of the product, its rows and its columns"
    call.fail(
        f"{a} ({call.value(x).name}) is {places[a]}, but {b} ({call.value(y).name}) is "
        f"{places[b]}: {text}; sync {a} with mode='fwd_pre' and all_gather"
    )


def _one_is_replicated(call: Call, role, tensor, axis, first, place, label, output):
    other, x, _ = first
    value = call.value(tensor)
    if label in output:
        fix = f"gather {other} with all_gather, or split {role} along axis {axis}"
    elif other == "input":
        fix = (
            f"gather the input with all_gather, or shard {role} along axis {axis}, which makes the "
            "output partial"
        )
    else:
        fix = f"{role} has to be sharded along axis {axis} (scatter), or {other} isn't"
    call.fail(
        f"{other} ({call.value(x).name}) is {place}, but {role} ({value.name}) is Replicate, of "
        f"length {tensor.size(axis)} along axis {axis}: {fix}"
    )


def add_bias(call: Call, place: Place, bias: Tensor | None, axis: int) -> Place:
    """The placement of a product once a bias is added along ``axis`` of it."""
    if bias is None:
        return place
    value = call.value(bias)
    if place is PARTIAL:
        if value.partial:
            return place
        call.fail(
            f"the bias ({value.name}) is added to a Partial tensor on every rank and would count P "
            "times; add it after the reduction (a sharded layer's own, or bias=None)"
        )
    if value.partial:
        call.fail_partial(value, "it is added to a tensor that isn't Partial")
    if isinstance(place, Split) and place.axis == axis:
        if bias.dim() == 0 or bias.size(-1) == 1 or value.uniform:
            return place
        if not value.split or not _alike(value.place, place):
            call.fail(
                f"expected the bias ({value.name}) to be sharded like the output ({place}), got "
                f"{value.place}; shard it with the weight"
            )
        return place
    if value.split:
        call.fail(
            f"expected the bias ({value.name}) to be sharded like the output ({place}), got "
            f"{value.place}; shard it with the weight"
        )
    return place


def _product(call: Call, of, a: Tensor, b: Tensor) -> Place:
    """``of``: what says how the operands' dimensions go together."""
    labels, output = of(a.dim(), b.dim())
    return contract(call, [("input", a, labels[0]), ("weight", b, labels[1])], output)


def linear(call: Call) -> Place:
    x, weight = call.arg(0, "input"), call.arg(1, "weight")
    place = _product(call, dims.linear, x, weight)
    return add_bias(call, place, call.arg(2, "bias"), x.dim() - 1)


def matmul(call: Call) -> Place:
    a = call.args[0]
    b = call.args[1] if len(call.args) > 1 else next(iter(call.kwargs.values()))
    return _product(call, dims.matmul, *((b, a) if call.name == "rmatmul" else (a, b)))


def addmm(call: Call) -> Place:
    bias, a, b = call.args[:3]
    place = _product(call, dims.matmul, a, b)
    value = call.value(bias)
    if bias.dim() == 1 and call.arg(3, "beta", 1) != 0:
        return add_bias(call, place, bias, max(a.dim(), b.dim()) - 1)
    if call.arg(3, "beta", 1) == 0 or value.uniform or value.place == place:
        return place
    wrong = f"expected what is added to {value.name} to be {value.place}, got {place}"
    if place is PARTIAL or value.partial:
        call.fail(wrong)
    if isinstance(place, Split) and value.replicated and place.axis is not None:
        axis = place.axis - max(a.dim(), b.dim()) + bias.dim()
        if axis < 0 or bias.size(axis) == 1:
            return place
    call.fail(wrong)


def einsum(call: Call) -> Place:
    equation, tensors = call.args[0], list(call.args[1:])
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        tensors = list(tensors[0])
    if not isinstance(equation, str):
        call.fail("expected its equation in letters, got the form with lists of numbers")
    labels, output = dims.einsum(equation, [t.dim() for t in tensors])
    named = [(f"operand {n}", t, of) for n, (t, of) in enumerate(zip(tensors, labels, strict=True))]
    return contract(call, named, output)


def bilinear_outer(call: Call) -> Place:
    a, b = call.args[:2]
    return contract(call, [("input", a, ["row"]), ("vec2", b, ["out"])], ["row", "out"])


def convolution(call: Call) -> Place:
    x, weight = call.arg(0, "input"), call.arg(1, "weight")
    value = call.value(x)
    space = [("space", n) for n in range(weight.dim() - 2)]
    batch = ["batch"] if x.dim() == weight.dim() else []
    if value.split and value.place.axis is not None and value.place.axis > len(batch):
        call.fail_split(value, "a convolution reads across the sharded axis")
    groups = call.arg(6, "groups", 1)
    if groups != 1 and any(v.split and v.place.axis != 0 for _, v in call.tensors):
        call.fail("a grouped convolution of sharded channels can't be followed")
    kernel = [("kernel", n) for n in range(weight.dim() - 2)]
    place = contract(
        call,
        [("input", x, [*batch, "in", *space]), ("weight", weight, ["out", "in", *kernel])],
        [*batch, "out", *space],
    )
    return add_bias(call, place, call.arg(2, "bias"), len(batch))


def embedding(call: Call) -> Place:
    index, weight = call.arg(0, "input"), call.arg(1, "weight")
    value, of = call.value(index), call.value(weight)
    if value.partial:
        call.fail_partial(value, "it is an index")
    if of.partial:
        return PARTIAL
    if not of.split:
        return value.place
    if of.place.axis != 1:
        call.fail(
            f"the weight ({of.name}) is {of.place}, by its vocabulary, and lacks the rows of other "
            "ranks; shard an nn.Embedding through the schedule, which masks their indices"
        )
    if value.split:
        call.fail(
            f"the weight ({of.name}) is {of.place}, and the indices are {value.place}; gather one "
            "with all_gather"
        )
    return of.place.at(index.dim())


def attention(call: Call) -> Place:
    q, k, v = (call.arg(n, name) for n, name in enumerate(("query", "key", "value")))
    mask = call.arg(3, "attn_mask")
    named = [("query", q), ("key", k), ("value", v)]
    for role, x in [*named, *([("attn_mask", mask)] if mask is not None else [])]:
        value = call.value(x)
        if value.partial:
            call.fail_partial(value, f"{role} is Partial")
    sharded = [(role, x, call.place(x)) for role, x in named if call.value(x).split]
    if not sharded:
        if mask is not None and call.value(mask).split:
            call.fail_split(call.value(mask), "attn_mask is sharded, but query isn't")
        return REPLICATE
    role, x, place = sharded[0]
    for of, y, at in sharded:
        if at.axis is None:
            call.fail_split(call.value(y), f"{of} is sharded along an unknown axis")
        if at.axis == y.dim() - 2:
            call.fail(
                f"{of} is {at}, by its sequence, and attention would see this rank's tokens only; "
                "use parallelize_attention (deepsp.DistributedAttention), or gather the tokens "
                "with all_gather before the projections"
            )
        if at.axis == y.dim() - 1:
            call.fail_split(call.value(y), f"{of} is sharded inside of its heads")
        if at.axis != place.axis or len(at.parts) != len(place.parts):
            call.fail(f"expected {of} to be sharded like {role} ({place}), got {at}")
    for of, y in named:
        if not call.value(y).split and y.size(place.axis) != 1:
            call.fail(
                f"expected {of} ({call.value(y).name}) to be sharded like {role} ({place}), got "
                f"Replicate, with all heads; shard it, or gather {role} with all_gather"
            )
    if mask is not None:
        axis = place.axis - q.dim() + mask.dim()
        value = call.value(mask)
        if value.split:
            if value.place.axis != axis:
                call.fail(
                    f"expected attn_mask to be sharded like {role} ({place}), got {value.place}"
                )
        elif axis >= 0 and mask.size(axis) != 1 and not value.uniform:
            call.fail(
                f"expected attn_mask ({value.name}) to be sharded like {role} ({place}), got "
                f"Replicate, of length {mask.size(axis)} along that axis; split it with scatter"
            )
    return place
