"""The gradients of parameters: summed over the ranks in buckets, or left partial."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from deepsp.compile.sharding.forms import Forms
from deepsp.compile.sharding.nodes import is_differentiated

BUCKET_BYTES = 25 << 20
_ours = torch.ops.deepsp


def drop_unused(forms: Forms) -> None:
    """Parameters that no output is differentiated by get no gradient, as in one process."""
    reached, stack = set(), [forms.new.output_node()]
    while stack:
        for node in stack.pop().all_input_nodes:
            leaves = tree_leaves(forms.env[node])
            if node not in reached and any(is_differentiated(x) for x in leaves):
                reached.add(node)
                stack.append(node)
    there = set(forms.new.nodes)
    for share, full in list(forms.parameters.items()):
        if share not in reached:
            if share in there:
                share.replace_all_uses_with(full)
            del forms.parameters[share]


def settle(forms: Forms) -> None:
    """Gives parameters that are used with tokens the gradients that were asked for."""
    if forms.gradients == "local":
        for share, full in forms.parameters.items():
            share.replace_all_uses_with(full)
        return
    if forms.gradients == "mean":
        for share, full in forms.parameters.items():
            with forms.new.inserting_before(share):
                new = forms.call(_ours._scale_gradient.default, full, float(forms.size))
            share.replace_all_uses_with(new)
        return
    open_: dict[tuple, list[fx.Node]] = {}
    filled: dict[tuple, int] = {}
    for share, full in forms.parameters.items():
        value = forms.env[full]
        key = (value.dtype, value.device)
        if key not in open_ or filled[key] >= BUCKET_BYTES:
            if key in open_:
                _replace(forms, open_[key])
            open_[key], filled[key] = [], 0
        open_[key].append(share)
        filled[key] += value.nbytes
    for bucket in open_.values():
        _replace(forms, bucket)


def _replace(forms: Forms, shares: list[fx.Node]) -> None:
    last = forms.new.find_nodes(op="placeholder")[-1]
    with forms.new.inserting_before(last.next):
        started = forms.replicate_start([forms.parameters[s] for s in shares])
    with forms.new.inserting_before(shares[0]):
        for share, summed in zip(shares, forms.replicate_wait(*started), strict=True):
            share.replace_all_uses_with(summed)
