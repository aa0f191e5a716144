"""Attention on one rank, with all tokens of some heads."""

from __future__ import annotations

from deepsp.placement.table import Op, Row, row, rule


@rule(
    "scaled_dot_product_attention",
    "attention would see this rank's tokens only, or features of its heads",
)
def attention(op: Op) -> list[Row]:
    """[..., heads, tokens, head_dim]: dimensions before the tokens can be sharded."""
    qkv, mask = [op["query"], op["key"], op["value"]], op["attn_mask"]
    ndim = len(op.shape(qkv[0]))
    rows = []
    for d in range(ndim - 2):
        inputs = [(x, None if op.is_one(op.shape(x)[d]) else d) for x in qkv]
        if mask is not None:
            place = d - ndim + len(op.shape(mask))
            alone = place < 0 or op.is_one(op.shape(mask)[place])
            inputs.append((mask, None if alone else place))
        rows += row(d, *inputs)
    if not op["is_causal"]:  # each query looks at every key
        place = None if mask is None else len(op.shape(mask)) - 2
        alone = place is None or place < 0 or op.is_one(op.shape(mask)[place])
        queries, *rest = qkv
        masked = (mask, None if alone else place)
        rows += row(ndim - 2, (queries, ndim - 2), *((x, None) for x in rest), masked)
    return rows
