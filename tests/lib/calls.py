"""Calls of ops: right arguments for each of them, and wrong ones that must raise."""

import re

import torch
import torch.distributed as dist
from reference import draw, lens_of

import deepsp  # noqa: F401  (registers the ops)

op = torch.ops.deepsp


def leaf(*shape, seed=0):
    return draw(*shape, seed=seed, dtype=torch.float32).requires_grad_()


def arguments(kind):
    """Returns right arguments for every op, by its name."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD.group_name
    lens = lens_of(kind, 4 * size, size)
    q, k = leaf(2, lens[rank], 8, 6), leaf(2, lens[rank], 2, 6, seed=1)
    held = [x.detach().requires_grad_() for x in op.seq_to_heads([q, k], lens, rank, group)]
    shape = ([8, 2], [6, 6], 2)
    x, weights = leaf(2, lens[rank], 5), [leaf(48, 5), leaf(12, 5)]
    shards, f32, bf16, e5m2 = [x[0], q[0]], torch.float32, torch.bfloat16, torch.float8_e5m2
    whole = [leaf(sum(lens), 5), leaf(sum(lens), 8, 6).detach().to(bf16).requires_grad_()]
    rows = [[5, 8, 6], [1, 2]]
    biases, output = [leaf(48), leaf(12)], leaf(7, 48)
    labels = torch.arange(2 * lens[rank]).view(2, -1) % 12
    whole_q, slots = [2, sum(lens), 8, 6], leaf(size, 2 * max(lens) * 8 * 6)

    def landed(buffers):
        return [b.detach().requires_grad_() for b in buffers]

    # opcheck reads, copies and compares what is on its way: in anomaly mode, a start returns when
    # everything has arrived.
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        arriving = landed(op.seq_to_heads_start([q, k], lens, 2, False, rank, group))
        out = landed([op.heads_to_seq_start(held[:1], [8], lens, 0, 1, rank, group)])
        leaving = landed([op.heads_to_seq_start(held, [8, 2], lens, 0, 1, rank, group)])
        chunks = len(arriving)
        documents = torch.tensor([[0, 3], [3, sum(lens)], [sum(lens) + 1, 2 * sum(lens)]])
        attended = held[0], held[1], held[1]
        blocks = op._blockwise_attention(*attended, documents, True, [2, 0], None, None, None)
        streamed = [y.detach() for y in op._streamed_attention(
            q, k, k, documents, True, [], None, 2.0, leaf(8), 3, lens, rank, group)]  # fmt: skip
        with_lse = [y.detach() for y in op._streamed_attention(
            q, k, k, documents, True, [], None, 2.0, leaf(8), 3, lens, rank, group,
            return_lse=True)]  # fmt: skip
        sums = leaf(*held[0].shape[:3])
        joined = op._join_log_sum(held[0], sums)
        parts = {"query_parts": size}
        cut = landed(op.seq_to_heads_start([q, k], lens, 2, False, rank, group, **parts))
        cells = [
            landed(op.seq_to_heads_wait(b, *shape, lens, n, len(cut), rank, group, **parts))
            for n, b in enumerate(cut)
        ]
        returning = landed([
            op.heads_to_seq_start(x, [8, 2], lens, n, len(cut), rank, group, **parts)
            for n, x in enumerate(cells)
        ])  # fmt: skip
        cut = landed(op.seq_to_heads_start([q, k], lens, 2, False, rank, group, **parts))
        shards = [y.detach().requires_grad_() for y in shards]
        (one,) = landed([op.gather_cast_start(shards[0], lens, bf16, rank, group)])
        (gathered,) = landed(
            [op._gather_cast_coalesced_start(shards, lens * 2, [bf16, f32], rank, group)]
        )
        before, halo = landed(
            [op.previous_tokens_start(q, n, 1, lens, rank, group) for n in (3, 1)]
        )
        counts = [[(3 * p + r) % 4 for r in range(size)] for p in range(size)]
        flat = [n for of_rank in counts for n in of_rank]
        arrive = sum(of_rank[rank] for of_rank in counts)
        (sent_rows,) = landed([
            op._rows_start(leaf(sum(counts[rank]), 5), flat, False, rank, group)
        ])  # fmt: skip
        (scattered,) = landed(
            [op._reduce_scatter_cast_coalesced_start(whole, lens * 2, rank, group)]
        )
        return {
            "seq_to_heads": ([q, k], lens, rank, group),
            "heads_to_seq": (held, [8, 2], lens, rank, group),
            "seq_to_heads_start": ([q, k], lens, 2, False, rank, group),
            "seq_to_heads_wait": (arriving[0], *shape, lens, 0, chunks, rank, group),
            "heads_to_seq_start": (held, [8, 2], lens, 0, 1, rank, group),
            "heads_to_seq_wait": (leaving, *shape, lens, rank, group),
            "previous_tokens": (q, 3, 1, lens, rank, group),
            "previous_tokens_start": (q, 3, 1, lens, rank, group),
            "previous_tokens_wait": (before, 3, 1, lens, list(q.shape), rank, group),
            "expert_dispatch": (leaf(sum(counts[rank]), 5), flat, rank, group),
            "expert_combine": (leaf(arrive, 5), flat, rank, group),
            "_rows_start": (leaf(sum(counts[rank]), 5), flat, False, rank, group),
            "_rows_wait": (sent_rows, flat, False, rank, group),
            "halo:_rows_start": (leaf(min(rank, 1), 5), lens, True, rank, group),
            "halo:_rows_wait": (halo, lens, False, rank, group),
            "_fold_states": (*(leaf(1, 2, 3, 3), leaf(1, 2, 3, 4), [1] * len(lens), rank, group),),
            "project_to_heads": (x, weights, biases, [8, 2], lens, rank, group),
            "heads_to_output": (held[0], output, leaf(7), 8, lens, rank, group),
            "_project_to_heads_start": (
                *(x, weights, biases, [8, 2], lens, 2, False, rank, group),
            ),
            "_project_to_heads_backward": (
                *([b.detach() for b in leaving], x.detach(), [w.detach() for w in weights]),
                *([8, 2], 2, lens, [1, 1, 0, 0, 1], rank, group),
            ),
            "_heads_to_output_wait": (out, output, leaf(7), 8, 2, lens, rank, group),
            "_heads_to_output_weight_grad": (
                *(draw(2, lens[rank], 7, dtype=torch.float32), [b.detach() for b in out]),
                *(8, 6, lens, rank, group),
            ),
            "distributed_attention": (q, k, k, None, 0.0, True, None, True, 1, lens, rank, group),
            "chunked": (q, k, k, None, 0.0, False, 0.5, True, 2, lens, rank, group),
            "_kv_of_cell": ([held[1]], 8, 2, size, rank),
            "_attention_of_cell": (
                *(held[0], held[1], held[1], None, 0.0, True, None, 8, size, rank),
            ),
            "_dropout_seed": (q, rank, 2),
            "_attention_with_dropout": (
                *(held[0], held[1], held[1], torch.zeros(sum(lens), sum(lens)).requires_grad_()),
                *(0.3, False, None, torch.tensor(5)),
            ),
            "_attention_with_dropout_backward": (
                *(draw(*held[0].shape, dtype=torch.float32), held[0].detach()),
                *(held[1].detach(), held[1].detach(), None, 0.3, True, None),
                *(torch.tensor(5), [1, 0, 1, 0]),
            ),
            "_blockwise_attention": (*attended, documents, True, [2, 0], None, None, None),
            "_blockwise_attention_backward": (
                *(torch.ones_like(blocks[0]), *(y.detach() for y in attended), documents, True),
                *([2, 0], None, None, None, *(y.detach() for y in blocks), [1, 1, 1, 0]),
            ),
            "_streamed_attention": (
                *(q, k, k, documents, True, [], None, 2.0, leaf(8), 3, lens, rank, group),
            ),
            "cut:_streamed_attention": (
                *(q, k, k, documents, True, [], None, 2.0, leaf(8), 3, lens, rank, group),
            ),
            "_streamed_attention_backward": (
                *(torch.ones_like(streamed[0]), k.detach(), k.detach(), documents, True, [], None),
                *(2.0, leaf(8).detach(), 3, lens, rank, group, streamed[1:]),
            ),
            "distributed_attention_with_lse": (
                *(q, k, k, None, 0.0, True, None, True, 1, lens, rank, group),
            ),
            "merge_attention": ([held[0], leaf(*held[0].shape)], [sums, leaf(*sums.shape)]),
            "_join_log_sum": (held[0], sums),
            "_split_log_sum": (leaf(*joined.shape),),
            "both:_blockwise_attention_backward": (
                *(torch.ones_like(blocks[0]), *(y.detach() for y in attended), documents, True),
                *([2, 0], None, None, None, *(y.detach() for y in blocks), [1, 1, 1, 0], []),
                *(torch.ones_like(blocks[1]),),
            ),
            "lse:_streamed_attention": (
                *(q, k, k, documents, True, [], None, 2.0, leaf(8), 3, lens, rank, group),
            ),
            "lse:_streamed_attention_backward": (
                *(with_lse[0], k.detach(), k.detach(), documents, True, [], None),
                *(2.0, leaf(8).detach(), 3, lens, rank, group, with_lse[1:]),
            ),
            "_check_attention": (*(torch.ones(8, 8).bool(), 0.0, False, torch.float32, 2, 8, 8),),
            "all_reduce": (leaf(3, 4), "replicated", rank, size, group),
            "all_reduce_start": ([leaf(3, 4), leaf(5)], "partial", rank, size, group),
            "all_reduce_wait": (leaf(17), [3, 4, 5], [2, 1], "partial", rank, size, group),
            "all_gather": (q, 1, lens, "partial", rank, group),
            "all_gather_start": (q, 1, lens, "replicated", rank, group),
            "all_gather_wait": (slots, 1, lens, whole_q, "replicated", rank, group),
            "reduce_scatter": (leaf(*whole_q), 1, lens, rank, group),
            "reduce_scatter_start": (leaf(*whole_q), 1, lens, rank, group),
            "reduce_scatter_wait": (slots, 1, lens, whole_q, rank, group),
            "all_gather_matmul": (x, weights[1], biases[1], 1, lens, rank, group),
            "_all_gather_matmul_backward": (
                *(draw(2, sum(lens), 12, dtype=torch.float32), x.detach(), weights[1].detach()),
                *(1, lens, [1, 1, 1], rank, group),
            ),
            "matmul_reduce_scatter": (
                *(leaf(2, sum(lens), 5), weights[1], biases[1], 1, lens, rank, group),
            ),
            "_matmul_reduce_scatter_backward": (
                *(draw(2, lens[rank], 12, dtype=torch.float32), leaf(2, sum(lens), 5).detach()),
                *(weights[1].detach(), 1, lens, [1, 1, 1], rank, group),
            ),
            "scatter": (leaf(*whole_q), 1, lens, "replicated", rank, group),
            "scatter_start": (leaf(*whole_q), 1, lens, rank, group),
            "scatter_wait": (slots, 1, lens, whole_q, rank, group),
            "_sum_gradients_": ([torch.ones(3), torch.ones(2, 2)], rank, size, group),
            "gather_cast": (shards[0], lens, bf16, rank, group),
            "gather_cast_start": (shards[0], lens, bf16, rank, group),
            "gather_cast_wait": (one, lens, [5], bf16, rank, group),
            "gather_cast_coalesced": (shards, lens * 2, [bf16, f32], rank, group),
            "_gather_cast_coalesced_start": (shards, lens * 2, [bf16, f32], rank, group),
            "_gather_cast_coalesced_wait": (gathered, lens * 2, *rows, [bf16, f32], rank, group),
            "reduce_scatter_cast": (whole[0], lens, f32, rank, group),
            "_reduce_scatter_cast_coalesced": (whole, lens * 2, [f32, f32], rank, group),
            "_reduce_scatter_cast_coalesced_start": (whole, lens * 2, rank, group),
            "_reduce_scatter_cast_coalesced_wait": (
                *(scattered, lens * 2, *rows, [f32, bf16], [f32, f32], None, rank, group),
            ),
            "gather_cast_float8": (shards[0].detach(), lens, e5m2, rank, group),
            "_gather_cast_float8_coalesced": (
                *([y.detach() for y in shards], lens * 2, e5m2, rank, group),
            ),
            "gather_through_float8": (shards, lens * 2, e5m2, bf16, rank, group),
            "replicate_start": ([leaf(3, 4), leaf(5)], rank, size, group),
            "replicate_wait": ([leaf(3, 4), leaf(5)], leaf(17), rank, size, group),
            "_scale_gradient": (leaf(3, 4), 2.0),
            "replicated": (leaf(3, 4),),
            "linear_cross_entropy": (x, weights[1], biases[1], labels, -100, 0.1, 3, 3.0),
            "_linear_cross_entropy_gradients": (
                *(x.detach(), weights[1].detach(), biases[1].detach(), labels),
                *(1, 0.0, None, [1, 0, 1], None, 0.5, 0.1, labels / 3),
            ),
            "linear_kl": (
                *(x, weights[1], biases[1], x.detach().cos(), weights[1].detach(), None, labels),
                *(-100, 0.0, 0.7, 3, 3, 3.0, 0.5, None, 1.0, True),
            ),
            "_linear_kl_gradients": (
                *(x.detach(), weights[1].detach(), biases[1].detach(), x.detach().cos()),
                *(weights[1].detach(), None, labels, 1, 0.5, 1.0, None, None, [1, 0, 1]),
                *(None, 0.5, 2.0, 1.0, True, labels / 3),
            ),
            "token_log_probs": (x, weights[1], biases[1], labels, -100, 3, 3.0, 0.5, 0.7, True),
            "_token_log_probs_backward": (
                *([x.detach()[..., 0]] * 3, x.detach(), weights[1].detach(), None, labels),
                *(x.detach()[..., 0], x.detach()[..., 1], 1, None, 30.0, 0.5, 2.0, [1, 1, 0]),
            ),
            "token_split": (13, size),
            "head_split": (8, 2, size, rank),
            "deal_documents": ([3, 40, 0, 9], size, 60, 1.0, 0.1),
            "_indices_in": (q, [2, 5, 7, 7]),
            "_cells": (3, 13, size, rank, 1 if size > 1 else 0, 2, 0 if size > 1 else 1),
            "cut:seq_to_heads_start": ([q, k], lens, 2, False, rank, group),
            "cut:seq_to_heads_wait": (cut[0], *shape, lens, 0, len(cut), rank, group),
            "cut:heads_to_seq_start": (cells[0], [8, 2], lens, 0, len(cut), rank, group),
            "cut:heads_to_seq_wait": (returning, *shape, lens, rank, group),
            "_check_agreement": ("a call", [f"lengths {lens}"], q, rank, size, group),
            "_chunks_in_force": (8, size, 4),
            "_dense_tokens": (),
        }


def all_raise(cases):
    """Asserts that each call raises ValueError with its message."""
    wrong = []
    for call, message in cases:
        try:
            call()
        except ValueError as error:
            if not re.search(message, str(error)):
                wrong.append(f"{message!r} isn't in {error}")
        except Exception as error:
            wrong.append(f"{message!r}: {error!r}"[:300])
        else:
            wrong.append(f"{message!r}: went through")
    assert not wrong, "\n".join(wrong)
