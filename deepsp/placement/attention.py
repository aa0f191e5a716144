"""Attention on one rank: what has all tokens of some heads."""

from __future__ import annotations

from deepsp.placement.table import Op, Row, row, rule


@rule(
    "scaled_dot_product_attention",
    "attention would see this rank's tokens only, or features of its heads",
)
def attention(op: Op) -> list[Row]:
    """[..., heads, tokens, head_dim]: whatever stands before the tokens is computed alone."""
    qkv, mask = [op["query"], op["key"], op["value"]], op["attn_mask"]
    ndim = len(op.shape(qkv[0]))
    rows = []
    for d in range(ndim - 2):
        inputs = [(x, None if op.is_one(op.shape(x)[d]) else d) for x in qkv]
        if mask is not None:
            at = d - ndim + len(op.shape(mask))
            alone = at < 0 or op.is_one(op.shape(mask)[at])
            inputs.append((mask, None if alone else at))
        rows += row(d, *inputs)
    if not op["is_causal"]:  # each query looks at every key
        at = None if mask is None else len(op.shape(mask)) - 2
        alone = at is None or at < 0 or op.is_one(op.shape(mask)[at])
        queries, *rest = qkv
        masked = (mask, None if alone else at)
        rows += row(ndim - 2, (queries, ndim - 2), *((x, None) for x in rest), masked)
    return rows
