// Every op of the library. Shapes: B batch, S tokens of the full sequence, S_r
// those of rank r, H_i and D_i heads and head dimension of tensor i, h_i the
// heads of it that this rank holds.
//
// Arguments that recur:
//   seq_lens    tokens on each rank; its length is the group's size
//   num_heads   H_i of each tensor
//   rank        this process's rank in the group
//   group_name  the group as c10d knows it
//   chunks      into how many consecutive parts each rank's own query heads are cut; a
//               head of another tensor is sent with the first part that reads it
//   ranks       the number of ranks
// Wrong arguments raise ValueError before anything is sent.

#include "inductor/decomposition.h"

#include <Python.h>
#include <torch/library.h>

namespace deepsp {

TORCH_LIBRARY(deepsp, m) {
  const std::vector<at::Tag> pure = {at::Tag::pt2_compliant_tag};
  // What waits inside, or asks a generator where it stands, can't be captured in a CUDA graph.
  const std::vector<at::Tag> uncaptured = {at::Tag::pt2_compliant_tag, at::Tag::cudagraph_unsafe};

  // --- layout: pure integer functions

  // Tokens of each rank when `total` are split like torch.tensor_split.
  m.def("token_split(SymInt total, int parts) -> SymInt[]", pure);
  // [q_begin, q_end, kv_begin, kv_end]: the query heads of a rank (and chunk),
  // and the kv heads that are sent with them.
  m.def(
      "head_split(int num_heads, int num_kv_heads, int parts, int rank, int chunk=0, "
      "int chunks=1) -> int[]",
      pure);
  // Deals documents out over ranks (layout/deal.h): for each document the level of its block and
  // the block's first rank, then each level's width, then for each level the tokens that each rank
  // holds of its documents.
  m.def(
      "deal_documents(int[] lengths, int ranks, int max_tokens, float linear, "
      "float quadratic, float[] pairs=[]) -> int[]",
      pure);
  // The cells that a rank computes attention for in a chunk (layout/heads.h), six numbers each: the
  // begin and end of its query heads, and of two ranges of tokens, of `total` in the sequence, the
  // second of which may be empty.
  m.def(
      "_cells(int num_heads, SymInt total, int ranks, int rank, int chunk=0, int chunks=1, "
      "int query_parts=1) -> SymInt[]",
      pure);
  // The number of chunks in force when `chunks` are asked for.
  m.def("_chunks_in_force(int num_heads, int ranks, int chunks, int query_parts=1) -> int", pure);
  // From how many tokens on a causal document, or what is as much work, is a dense call on a GPU
  // (attention/piece.cpp).
  m.def("_dense_tokens() -> int", pure);
  // The numbers in ranges, begin and end of each: int64 on the device of `like`. An op, not an
  // arange in a graph: Inductor's FlexAttention reads tensors that are there, not what it would
  // compute.
  m.def("_indices_in(Tensor like, SymInt[] ranges) -> Tensor", pure);

  // --- agreement

  // ValueError on every rank, naming who says what, unless all ranks of the group pass the same
  // `arguments`, each of which begins with its name. `op`: what the error begins with; `like`: a
  // tensor on the device to communicate from.
  m.def(
      "_check_agreement(str op, str[] arguments, Tensor like, int rank, int size, "
      "str group_name) -> ()",
      uncaptured);

  // --- exchange

  // inputs[i] [B, S_rank, H_i, D_i] -> [B, S, h_i, D_i]: views, with the last
  // two dimensions contiguous, of one fresh buffer. inputs[0] is q, whose heads
  // are split like torch.tensor_split; head j of q reads head j / (H_0 / H_i).
  // Composite: the start and the wait below.
  m.def(
      "seq_to_heads(Tensor[] inputs, SymInt[] seq_lens, int rank, str group_name, *, "
      "int levels=1) -> Tensor[]",
      uncaptured);
  // Its adjoint: inputs[i] [B, S, h_i, D_i] -> [B, S_rank, H_i, D_i], fresh and
  // contiguous; tokens_first: lying in memory as [S_rank, B, H_i, D_i]. What several
  // ranks say of one head is summed, in rank order, in float32 (float64 for float64).
  // levels: the widths of layout/plan.h, 2, 3, 4, 6, ... and the number of ranks, if several.
  // seq_lens then has every rank's tokens of the first, then those of the next; the inputs have
  // them in this order. A rank gets tensors for each of its blocks, one level's after the other's.
  m.def(
      "heads_to_seq(Tensor[] inputs, SymInt[] num_heads, SymInt[] seq_lens, int rank, "
      "str group_name, *, bool tokens_first=False, int levels=1) -> Tensor[]",
      uncaptured);
  // The same in two halves. What a start returns is on its way: the caller may neither read
  // it nor write to the inputs until it was waited for, once. A wait
  // consumes its buffer. Both halves run in eager code, or both in compiled code.
  // One buffer a chunk; fewer than asked for where the heads don't allow as many.
  // last_first: the last chunk leaves first, as backward wants it.
  // query_parts: 1: heads are whole. Else a head's queries are cut into as many parts, 0: wherever
  // it takes for every rank to have the same work (layout/heads.h). A rank then gets for each of
  // its cells queries [B, n, h, D_0] and, with chunk 0, the heads that they read of each other
  // tensor, [B, S, h_i, D_i]. Chunks are halves of the sequence, at most two.
  m.def(
      "seq_to_heads_start(Tensor[] inputs, SymInt[] seq_lens, int chunks, bool last_first, "
      "int rank, str group_name, *, int query_parts=1, int levels=1) -> Tensor[]",
      uncaptured);
  // Views of the buffer, or, of several cells or levels, fresh.
  // tokens_first: a hint, alike on all ranks. True: the inputs of the start lie in memory as
  // [S_rank, B, H_i, D_i]; false: as [B, S_rank, H_i, D_i]. Ranks that share memory write gradients
  // in that order. None: unknown, or _project_to_heads_start was the start, whose backward reads
  // rows.
  m.def(
      "seq_to_heads_wait(Tensor(a -> *) buffer, SymInt[] num_heads, SymInt[] head_dims, "
      "SymInt batch, SymInt[] seq_lens, int chunk, int chunks, int rank, "
      "str group_name, *, bool? tokens_first=None, int query_parts=1, int levels=1) -> Tensor(a)[]",
      uncaptured);
  // The heads of one chunk. tokens_first: what heads_to_seq_wait will most likely be given, if that
  // waits for it; a buffer that ranks write into then holds the result. None: unknown, or
  // _heads_to_output_wait waits, which reads rows.
  m.def(
      "heads_to_seq_start(Tensor[] inputs, SymInt[] num_heads, SymInt[] seq_lens, int chunk, "
      "int chunks, int rank, str group_name, *, bool? tokens_first=None, int query_parts=1, "
      "int levels=1) -> Tensor",
      uncaptured);
  // The buffers of all chunks, in order.
  m.def(
      "heads_to_seq_wait(Tensor[] buffers, SymInt[] num_heads, SymInt[] head_dims, "
      "SymInt batch, SymInt[] seq_lens, int rank, str group_name, *, "
      "bool tokens_first=False, int query_parts=1, int levels=1) -> Tensor[]",
      uncaptured);

  // --- the tokens before

  // input: this rank's tokens along dim. Fresh, with n along dim: the n tokens of the sequence
  // before this rank's first one, zeros where there are none. No others are sent. Their gradients
  // go back, and are added in rank order, 16-bit ones in float32. Composite, as are its halves;
  // shape: the input's.
  m.def(
      "previous_tokens(Tensor input, SymInt n, int dim, SymInt[] seq_lens, int rank, "
      "str group_name) -> Tensor",
      uncaptured);
  m.def(
      "previous_tokens_start(Tensor input, SymInt n, int dim, SymInt[] seq_lens, int rank, "
      "str group_name) -> Tensor",
      uncaptured);
  m.def(
      "previous_tokens_wait(Tensor buffer, SymInt n, int dim, SymInt[] seq_lens, SymInt[] shape, "
      "int rank, str group_name) -> Tensor",
      uncaptured);

  // --- experts on the sequence's ranks

  // rows [n, elements], those for rank 0 first: to the ranks that hold their experts. counts: how
  // many rows each rank sends to each, [ranks * ranks], by source. Fresh: those from rank 0 first.
  // Composite, and each other's backward.
  m.def(
      "expert_dispatch(Tensor rows, SymInt[] counts, int rank, str group_name) -> Tensor",
      uncaptured);
  // What experts made of them, with the same counts, back to where they came from.
  m.def(
      "expert_combine(Tensor rows, SymInt[] counts, int rank, str group_name) -> Tensor",
      uncaptured);
  // The exchange of both; home: the way back. halo: of previous_tokens, whose n it is; counts are
  // seq_lens then, rows are tokens for each rank behind, and become those of the ranks before. op:
  // what errors call it.
  m.def(
      "_rows_start(Tensor rows, SymInt[] counts, bool home, int rank, str group_name, *, "
      "SymInt? halo=None, str? op=None) -> Tensor",
      uncaptured);
  m.def(
      "_rows_wait(Tensor buffer, SymInt[] counts, bool home, int rank, str group_name, *, "
      "SymInt? halo=None, str? op=None) -> Tensor",
      uncaptured);

  // --- linear layers around the exchange

  // x [B, S_rank, dim] through linear layers weights[i] [H_i·D_i, dim], biases[i]
  // [H_i·D_i] (or none at all), then exchanged: [B, S, h_i, D_i], as seq_to_heads
  // returns them. A single weight (and bias) for several num_heads is a fused one.
  // Composite: start and wait. On gloo, while one rank's part is in flight, the next is computed.
  m.def(
      "project_to_heads(Tensor x, Tensor[] weights, Tensor[] biases, SymInt[] num_heads, "
      "SymInt[] seq_lens, int rank, str group_name) -> Tensor[]",
      uncaptured);
  // input [B, S, h, D], exchanged to this rank's tokens of all heads, then through a
  // linear layer: weight [dim, H·D], bias [dim] -> [B, S_rank, dim]. Composite.
  m.def(
      "heads_to_output(Tensor input, Tensor weight, Tensor? bias, SymInt num_heads, "
      "SymInt[] seq_lens, int rank, str group_name) -> Tensor",
      uncaptured);
  // The halves that compute; seq_to_heads_wait and heads_to_seq_start are the others.
  // Products are written into what is sent, and taken from what was received: nothing is
  // packed or merged. Sums of 16-bit products are taken in float32.
  m.def(
      "_project_to_heads_start(Tensor x, Tensor[] weights, Tensor[] biases, "
      "SymInt[] num_heads, SymInt[] seq_lens, int chunks, bool last_first, int rank, "
      "str group_name, *, int query_parts=1) -> Tensor[]",
      uncaptured);
  // The buffers of all chunks, in order.
  m.def(
      "_heads_to_output_wait(Tensor[] buffers, Tensor weight, Tensor? bias, SymInt num_heads, "
      "SymInt batch, SymInt[] seq_lens, int rank, str group_name, *, int query_parts=1) -> "
      "Tensor",
      uncaptured);
  // What their backwards need. `wanted`: whether for x, each weight, each bias; the
  // gradients wanted come in that order. They have no derivative.
  m.def(
      "_project_to_heads_backward(Tensor[] buffers, Tensor? x, Tensor[] weights, "
      "SymInt[] num_heads, SymInt batch, SymInt[] seq_lens, int[] wanted, int rank, "
      "str group_name, *, int query_parts=1) -> Tensor[]",
      uncaptured);
  // From the buffers of _heads_to_output_wait, which may have waited for them.
  m.def(
      "_heads_to_output_weight_grad(Tensor grad, Tensor[] buffers, SymInt num_heads, "
      "SymInt head_dim, SymInt[] seq_lens, int rank, str group_name, *, int query_parts=1) -> "
      "Tensor",
      pure);

  // --- attention

  // q [B, S_rank, Hq, D], k [B, S_rank, Hkv, D], v [B, S_rank, Hkv, Dv] ->
  // [B, S_rank, Hq, Dv]: scaled_dot_product_attention over the full sequence.
  // Masks are global. chunks: the exchange of one chunk of heads is in flight
  // while attention works on another. layout: "bshd", or "sbhd" or "bhsd": where
  // q, k, v and the output have their dimensions batch, sequence, heads and head_dim.
  // sharded_randomness: ranks that are seeded alike drop other weights all the same.
  // documents, window_size, softcap, sinks: as in _blockwise_attention, of all tokens and heads.
  // kv_chunk: as in _streamed_attention. query_parts: as above; 1: heads alone are shared out.
  // dealt: documents that blocks of ranks share. seq_lens has every rank's tokens that are its
  // own, then those of each level (seq_to_heads). dealt[n]: as documents, of this rank's own
  // tokens, then of the sequence of its block of each level.
  m.def(
      "distributed_attention(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, float dropout_p, "
      "bool is_causal, float? scale, bool enable_gqa, int chunks, SymInt[] seq_lens, int rank, "
      "str group_name, *, str layout='bshd', bool sharded_randomness=False, "
      "Tensor? documents=None, int[] window_size=[], "
      "float? softcap=None, Tensor? sinks=None, "
      "int? kv_chunk=None, int query_parts=1, Tensor[]? dealt=None, str exchange='heads') -> "
      "Tensor",
      uncaptured);
  // The same, and the log-sum-exp of each query's scores, [B, S_rank, Hq] in the layout's order:
  // float32, or float64 for float64. It comes with the output, in one exchange.
  m.def(
      "distributed_attention_with_lse(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, "
      "float dropout_p, bool is_causal, float? scale, bool enable_gqa, int chunks, "
      "SymInt[] seq_lens, int rank, str group_name, *, str layout='bshd', "
      "bool sharded_randomness=False, Tensor? documents=None, int[] window_size=[], "
      "float? softcap=None, Tensor? sinks=None, int? kv_chunk=None, int query_parts=1, "
      "Tensor[]? dealt=None, str exchange='heads') -> (Tensor output, Tensor log_sum_exp)",
      uncaptured);
  // What attention to several sets of keys gives, outs [..., D] and log_sums [...], as attention to
  // all of them. Where a log-sum-exp is -inf, its output has no weight, whatever it is.
  m.def(
      "merge_attention(Tensor[] outs, Tensor[] log_sums) -> (Tensor output, Tensor log_sum_exp)",
      pure);
  // [B, n, h, D] and [B, n, h] as one tensor [B, n, h, D + 1], of 16-bit numbers D + 4, with the
  // tokens first in memory; and the way back, fresh. Each is the other's backward.
  m.def("_join_log_sum(Tensor out, Tensor log_sum) -> Tensor", pure);
  m.def("_split_log_sum(Tensor joined) -> (Tensor out, Tensor log_sum)", pure);
  // What the query heads of a cell read of k or v: `received` is what each wait so far has given,
  // [B, S, h, D], the first chunk's first. Each head is repeated for its query heads where their
  // numbers differ from head to head; else a view.
  m.def(
      "_kv_of_cell(Tensor(a)[] received, int num_heads, int num_kv_heads, int ranks, int rank, "
      "int chunk=0, int chunks=1, int query_parts=1, int cell=0) -> Tensor(a)",
      pure);
  // scaled_dot_product_attention of a cell, [B, n, h, D]: k and v as _kv_of_cell gives them, the
  // mask that of all num_heads heads and all queries.
  m.def(
      "_attention_of_cell(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, float dropout_p, "
      "bool is_causal, float? scale, int num_heads, int ranks, int rank, int chunk=0, "
      "int chunks=1, int query_parts=1, int cell=0, *, bool sharded_randomness=False, "
      "Tensor? documents=None, int[] window_size=[], float? softcap=None, Tensor? sinks=None) -> "
      "Tensor",
      pure);
  // Attention by blocks of scores, [B, S, h, D]: no mask and no matrix of all scores is made.
  // documents [N, 2], integers on any device: where each begins and ends among the B * S tokens; or
  // [N, 3], with the number of its parent, an earlier document whose tokens, and whose ancestors',
  // its queries see, too (-1: none; windows then go back along this path; is_causal);
  // tokens attend to those of their document only, and outside of all to none (0); None: each row
  // is one. window_size: none or (left, right), how many tokens before and after its own a token
  // sees; -1: all. softcap: scores are softcap * tanh(score / softcap). sinks [h]: a score of each
  // head more, whose value is 0. queries: none, or begin and end of each of some ascending ranges
  // of tokens, those that q has. The log-sum-exp is [B, h, S]; the gradients are of q, k, v and
  // sinks, where wanted, and have no derivative.
  m.def(
      "_blockwise_attention(Tensor q, Tensor k, Tensor v, Tensor? documents, bool is_causal, "
      "int[] window_size, float? scale, float? softcap, Tensor? sinks, SymInt[] queries=[]) -> "
      "(Tensor output, Tensor log_sum_exp)",
      pure);
  m.def(
      "_blockwise_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? documents, "
      "bool is_causal, int[] window_size, float? scale, float? softcap, Tensor? sinks, "
      "Tensor output, Tensor log_sum_exp, int[] wanted, SymInt[] queries=[], "
      "Tensor? grad_log_sum_exp=None) -> Tensor[]",
      pure);
  // The same over a sharded sequence, q [B, S_rank, Hq, D], k and v alike; sinks [Hq]. Keys and
  // values are exchanged a part at a time, kv_chunk tokens of the full sequence, in backward once
  // more: two parts exist at a time. Returns the output (return_lse: joined with the log-sum-exp),
  // then what backward needs: q, the output and the log-sum-exp of each of this rank's cells.
  m.def(
      "_streamed_attention(Tensor q, Tensor k, Tensor v, Tensor? documents, bool is_causal, "
      "int[] window_size, float? scale, float? softcap, Tensor? sinks, int kv_chunk, "
      "SymInt[] seq_lens, int rank, str group_name, *, int query_parts=1, bool return_lse=False) "
      "-> Tensor[]",
      uncaptured);
  m.def(
      "_streamed_attention_backward(Tensor grad, Tensor k, Tensor v, Tensor? documents, "
      "bool is_causal, int[] window_size, float? scale, float? softcap, Tensor? sinks, "
      "int kv_chunk, SymInt[] seq_lens, int rank, str group_name, Tensor[] saved, *, "
      "int query_parts=1, bool return_lse=False) -> Tensor[]",
      uncaptured);
  // scaled_dot_product_attention of [B, S, h, D], dropping what a seed says. Its gradients, of
  // q, k, v and attn_mask, where wanted, compute it once more; they have no derivative.
  // _dropout_seed: a rank's own, an int64 scalar on the CPU, so that no GPU is waited for. It
  // follows from the rank and the default generator of like's device, which draws `draws` times. (A
  // fake one's device is said in Python.) An empty tensor there tells what draws anew,
  // AOTAutograd's checkpoints, whose generator it is.
  m.def(
      "_dropout_seed(Tensor like, int rank, int draws=1) -> (Tensor seed, Tensor of_device)",
      {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded, at::Tag::cudagraph_unsafe});
  m.def(
      "_attention_with_dropout(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, float dropout_p, "
      "bool is_causal, float? scale, Tensor seed) -> Tensor",
      uncaptured);
  m.def(
      "_attention_with_dropout_backward(Tensor grad, Tensor q, Tensor k, Tensor v, "
      "Tensor? attn_mask, float dropout_p, bool is_causal, float? scale, Tensor seed, "
      "int[] wanted) -> Tensor[]",
      uncaptured);
  // Raises what _attention_of_cell would, for callers that send before they attend.
  m.def(
      "_check_attention(Tensor? attn_mask, float dropout_p, bool is_causal, ScalarType dtype, "
      "SymInt batch, SymInt num_heads, SymInt tokens, *, Tensor? documents=None, "
      "int[] window_size=[], float? softcap=None, Tensor? sinks=None) -> ()",
      pure);

  // --- collectives along a dimension, and sums

  // sizes: size along dim on each rank, any number, zero too. grad says what every rank holds of
  // the full tensor's gradient. "replicated": all of it, since every rank uses the full tensor in
  // the same way. "partial": a partial gradient; the gradient is their sum over ranks. 16-bit
  // floats are sent as they are and are summed in reduce_dtype (None: float32), in rank order.

  // The local tensors of all ranks along dim, one after another. The gradient of a local tensor is
  // its slice of the full gradient ("replicated"), or of the sum of the partial ones ("partial").
  // Composite: start and wait.
  m.def(
      "all_gather(Tensor input, int dim, SymInt[] sizes, str grad, int rank, str group_name, *, "
      "ScalarType? reduce_dtype=None) -> Tensor",
      uncaptured);
  // This rank's part along dim of the sum. The gradient is the all-gather of the parts'. Composite.
  m.def(
      "reduce_scatter(Tensor input, int dim, SymInt[] sizes, int rank, str group_name, *, "
      "ScalarType? reduce_dtype=None) -> Tensor",
      uncaptured);
  // This rank's part along dim of what every rank has: nothing is sent. Its gradient is the
  // all-gather of the parts' ("replicated"), or zero beside the part ("partial"). Composite.
  m.def(
      "scatter(Tensor input, int dim, SymInt[] sizes, str grad, int rank, str group_name) -> "
      "Tensor",
      uncaptured);
  // The state before this rank's tokens, [B, H, K, V], of a recurrence that ranks run on their own
  // tokens: zero, and of the ranks before, in order, transition · state + update. transition: [B,
  // H, K, K], or [B, H] where it is a number. rows: B, for each rank. In float32, or wider.
  // Composite.
  m.def(
      "_fold_states(Tensor transition, Tensor update, SymInt[] rows, int rank, str group_name) -> "
      "Tensor",
      uncaptured);
  // In halves, as above: what a start returns is on its way; a wait consumes it. shape: the full
  // tensor's. A buffer is [ranks, the largest part's elements].
  m.def(
      "all_gather_start(Tensor input, int dim, SymInt[] sizes, str grad, int rank, "
      "str group_name, *, ScalarType? reduce_dtype=None) -> Tensor",
      uncaptured);
  m.def(
      "all_gather_wait(Tensor(a -> *) buffer, int dim, SymInt[] sizes, SymInt[] shape, str grad, "
      "int rank, str group_name) -> Tensor(a)[]",
      uncaptured);
  m.def(
      "reduce_scatter_start(Tensor input, int dim, SymInt[] sizes, int rank, str group_name) -> "
      "Tensor",
      uncaptured);
  m.def(
      "reduce_scatter_wait(Tensor buffer, int dim, SymInt[] sizes, SymInt[] shape, int rank, "
      "str group_name, *, ScalarType? reduce_dtype=None) -> Tensor",
      uncaptured);
  // For "replicated" gradients.
  m.def(
      "scatter_start(Tensor input, int dim, SymInt[] sizes, int rank, str group_name) -> Tensor",
      pure);
  m.def(
      "scatter_wait(Tensor(a -> *) buffer, int dim, SymInt[] sizes, SymInt[] shape, int rank, "
      "str group_name) -> Tensor(a)[]",
      pure);

  // The sum over the group, on every rank. The gradient passes through ("replicated"), or is
  // summed in turn ("partial").
  m.def(
      "all_reduce(Tensor input, str grad, int rank, int size, str group_name, *, "
      "ScalarType? reduce_dtype=None) -> Tensor",
      uncaptured);
  // The tensors of one call have one dtype and are sent in one message: one flat buffer on its way;
  // views of it. shapes: one after another, dims: how many sizes each tensor has.
  m.def(
      "all_reduce_start(Tensor[] inputs, str grad, int rank, int size, str group_name, *, "
      "ScalarType? reduce_dtype=None) -> Tensor",
      uncaptured);
  m.def(
      "all_reduce_wait(Tensor(a -> *) buffer, SymInt[] shapes, int[] dims, str grad, int rank, "
      "int size, str group_name, *, ScalarType? reduce_dtype=None) -> Tensor(a)[]",
      uncaptured);
  // In place: each tensor becomes its sum over the group.
  m.def(
      "_sum_gradients_(Tensor(a!)[] gradients, int rank, int size, str group_name) -> ()",
      uncaptured);

  // --- linear layers around them

  // input [.., n, .., K], dim not its last, weight [M, K], bias [M]. The input's parts of all ranks
  // along dim, by this rank's columns of a weight: on gloo, a part is multiplied while the next
  // is sent. The gradients of what was gathered are partial, and are summed.
  m.def(
      "all_gather_matmul(Tensor input, Tensor weight, Tensor? bias, int dim, SymInt[] sizes, "
      "int rank, str group_name, *, ScalarType? reduce_dtype=None) -> Tensor",
      uncaptured);
  // This rank's part along dim of the sum of the ranks' products, and the bias: on gloo, a part
  // is in flight while the next is computed.
  m.def(
      "matmul_reduce_scatter(Tensor input, Tensor weight, Tensor? bias, int dim, SymInt[] sizes, "
      "int rank, str group_name, *, ScalarType? reduce_dtype=None) -> Tensor",
      uncaptured);
  // What their backwards need. wanted: whether for input, weight, bias; the gradients wanted come
  // in that order. They have no derivative.
  m.def(
      "_all_gather_matmul_backward(Tensor grad, Tensor input, Tensor weight, int dim, "
      "SymInt[] sizes, int[] wanted, int rank, str group_name, *, "
      "ScalarType? reduce_dtype=None) -> Tensor[]",
      uncaptured);
  m.def(
      "_matmul_reduce_scatter_backward(Tensor grad, Tensor input, Tensor weight, int dim, "
      "SymInt[] sizes, int[] wanted, int rank, str group_name) -> Tensor[]",
      uncaptured);

  // --- replicated tensors that every rank uses for its own tokens

  // Forward, the tensors themselves; backward, the partial gradients of the ranks become their
  // sum over the group: launched where replicate_wait stands, waited for where replicate_start
  // does. Composite. The tensors of one call have one dtype and are sent in one message.
  m.def(
      "replicate_start(Tensor(a)[] tensors, int rank, int size, str group_name) -> "
      "(Tensor(a)[] tensors, Tensor token)",
      pure);
  m.def(
      "replicate_wait(Tensor(a)[] tensors, Tensor token, int rank, int size, str group_name) -> "
      "Tensor(a)[]",
      pure);
  // The tensor itself; its gradient times scale. Composite.
  m.def("_scale_gradient(Tensor(a) input, float scale) -> Tensor(a)", pure);
  // A copy. In a graph that the compile pass shards, every rank gets the full tensor. Composite.
  m.def("replicated(Tensor input) -> Tensor", pure);

  // --- sharded weights

  // Rows of dimension 0 are shared out: sizes[p] of them lie on rank p, any number, zero
  // too. The shard is cast, then gathered: [sum of sizes, ...] in `dtype`, a view of a
  // fresh buffer. The gradient is reduce_scatter_cast of the output's, which has `dtype`;
  // its sum is kept in reduce_dtype (None: float32, and float64 for float64), in rank
  // order, and becomes the shard's dtype. backend_sums, in place of reduce_dtype: the dtype in
  // which gradients are sent in one reduce-scatter of the group's backend, which sums them in its
  // own order. Composite: start and wait.
  m.def(
      "gather_cast(Tensor shard, SymInt[] sizes, ScalarType dtype, int rank, str group_name, *, "
      "ScalarType? reduce_dtype=None, ScalarType? backend_sums=None) -> Tensor",
      uncaptured);
  // In two halves, which are given the same backend_sums; a wait consumes its buffer. row_shape:
  // the shard's shape without dimension 0.
  m.def(
      "gather_cast_start(Tensor shard, SymInt[] sizes, ScalarType dtype, int rank, "
      "str group_name, *, ScalarType? reduce_dtype=None, ScalarType? backend_sums=None) -> Tensor",
      uncaptured);
  m.def(
      "gather_cast_wait(Tensor(a) buffer, SymInt[] sizes, SymInt[] row_shape, ScalarType dtype, "
      "int rank, str group_name, *, ScalarType? backend_sums=None) -> Tensor(a)",
      uncaptured);
  // Many at once, each with a dtype of its own: as few messages as pay. sizes: those of
  // the first shard on every rank, then those of the second, ... Large ones arrive in
  // place, small ones share a message and are copied out once.
  m.def(
      "gather_cast_coalesced(Tensor[] shards, SymInt[] sizes, ScalarType[] dtypes, int rank, "
      "str group_name, *, ScalarType? reduce_dtype=None, ScalarType? backend_sums=None) -> "
      "Tensor[]",
      uncaptured);
  m.def(
      "_gather_cast_coalesced_start(Tensor[] shards, SymInt[] sizes, ScalarType[] dtypes, "
      "int rank, str group_name, *, ScalarType? reduce_dtype=None, "
      "ScalarType? backend_sums=None) -> Tensor",
      uncaptured);
  // row_shapes: the shapes without dimension 0, one after another; row_dims: how many
  // entries of it each tensor has.
  m.def(
      "_gather_cast_coalesced_wait(Tensor(a -> *) buffer, SymInt[] sizes, SymInt[] row_shapes, "
      "int[] row_dims, ScalarType[] dtypes, int rank, str group_name, *, "
      "ScalarType? backend_sums=None) -> Tensor(a)[]",
      uncaptured);
  // The adjoint: input [sum of sizes, ...] is sent in the dtype that it has; the sum over
  // ranks of this rank's rows, fresh, in `dtype`. The same bytes as the gather. By all-to-all
  // and a local sum on every backend, unless backend_sums is given.
  m.def(
      "reduce_scatter_cast(Tensor input, SymInt[] sizes, ScalarType dtype, int rank, "
      "str group_name, *, ScalarType? reduce_dtype=None, ScalarType? backend_sums=None) -> Tensor",
      uncaptured);
  m.def(
      "_reduce_scatter_cast_coalesced(Tensor[] inputs, SymInt[] sizes, ScalarType[] dtypes, "
      "int rank, str group_name, *, ScalarType? reduce_dtype=None, "
      "ScalarType? backend_sums=None) -> Tensor[]",
      uncaptured);
  // backend_sums: a tensor of stride 0 (reshard/backend.cpp).
  m.def(
      "_reduce_scatter_cast_coalesced_start(Tensor[] inputs, SymInt[] sizes, int rank, "
      "str group_name, *, ScalarType? backend_sums=None) -> Tensor",
      uncaptured);
  m.def(
      "_reduce_scatter_cast_coalesced_wait(Tensor buffer, SymInt[] sizes, SymInt[] row_shapes, "
      "int[] row_dims, ScalarType[] wire_dtypes, ScalarType[] dtypes, ScalarType? reduce_dtype, "
      "int rank, str group_name, *, ScalarType? backend_sums=None) -> Tensor[]",
      uncaptured);
  // Gathered in float8_e4m3fn or float8_e5m2: data times inv_scale is the weight. A
  // tensor is scaled so that its largest magnitude on any rank is the largest float8. No
  // derivative: autograd would cast it to float8.
  m.def(
      "gather_cast_float8(Tensor shard, SymInt[] sizes, ScalarType dtype, int rank, "
      "str group_name) -> (Tensor data, Tensor inv_scale)",
      uncaptured);
  m.def(
      "_gather_cast_float8_coalesced(Tensor[] shards, SymInt[] sizes, ScalarType dtype, int rank, "
      "str group_name) -> (Tensor[] data, Tensor inv_scales)",
      uncaptured);
  // For training: gathered in float8_dtype, returned in `dtype`; the gradient is
  // reduce_scatter_cast's, as if nothing had been rounded.
  m.def(
      "gather_through_float8(Tensor[] shards, SymInt[] sizes, ScalarType float8_dtype, "
      "ScalarType dtype, int rank, str group_name, *, ScalarType? reduce_dtype=None) -> Tensor[]",
      uncaptured);

  // --- the loss

  // hidden [..., E], weight [C, E], bias [C], labels [...] integers, 0 to C - 1: the sum of the
  // cross entropies of hidden's linear layer, over the tokens whose label isn't ignore_index, a
  // float64 scalar. Logits are softcap * tanh(scale * (hidden weight^T + bias) / softcap), there
  // for chunk_tokens at a time (None: for 32 MiB), in float32 (float64 for float64). A token counts
  // token_weights [...] times; z_loss times the square of the logarithm of its sum of exponentials
  // is added. Where a gradient is needed it is found on the way, and scaled in backward: it is held
  // from here to there, the weight's and the bias's in float32.
  m.def(
      "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, "
      "int ignore_index=-100, float label_smoothing=0.0, int? chunk_tokens=None, "
      "float? softcap=None, float scale=1.0, float z_loss=0.0, Tensor? token_weights=None) "
      "-> Tensor",
      pure);
  // The sum, then those of its gradients that are wanted: of hidden, weight, bias. They have no
  // derivative.
  m.def(
      "_linear_cross_entropy_gradients(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, "
      "int ignore_index, float label_smoothing, int? chunk_tokens, int[] wanted, "
      "float? softcap=None, float scale=1.0, float z_loss=0.0, Tensor? token_weights=None) "
      "-> Tensor[]",
      pure);
  // The divergence of two models of the same classes, each with logits as above, divided by
  // temperature: p of hidden, q of teacher_hidden, summed over the tokens whose label isn't
  // ignore_index; float64. beta 0: KL(q || p); 1: KL(p || q); between:
  // beta KL(q || m) + (1 - beta) KL(p || m), where m = (1 - beta) p + beta q. top_k: the classes
  // other than the top_k most likely of q count as one. Then the sum of p's entropies (all classes;
  // 0 unless asked for), which has no gradient. The teacher's tensors are constants.
  m.def(
      "linear_kl(Tensor hidden, Tensor weight, Tensor? bias, Tensor teacher_hidden, "
      "Tensor teacher_weight, Tensor? teacher_bias, Tensor labels, int ignore_index=-100, "
      "float beta=0.0, float temperature=1.0, int? top_k=None, int? chunk_tokens=None, "
      "float? softcap=None, float scale=1.0, float? teacher_softcap=None, "
      "float teacher_scale=1.0, bool entropy=False, Tensor? token_weights=None) "
      "-> (Tensor, Tensor)",
      pure);
  // Both sums, then the gradients of the first that are wanted: of hidden, weight, bias. They have
  // no derivative.
  m.def(
      "_linear_kl_gradients(Tensor hidden, Tensor weight, Tensor? bias, Tensor teacher_hidden, "
      "Tensor teacher_weight, Tensor? teacher_bias, Tensor labels, int ignore_index, float beta, "
      "float temperature, int? top_k, int? chunk_tokens, int[] wanted, float? softcap=None, "
      "float scale=1.0, float? teacher_softcap=None, float teacher_scale=1.0, "
      "bool entropy=False, Tensor? token_weights=None) -> Tensor[]",
      pure);
  // The same logits divided by temperature: of each token the logarithm of the probability of its
  // id, the logarithm of the sum of exponentials, and, if asked for, the entropy; [...] in float32
  // (float64 for float64). Where the id is ignore_index the first and the last are 0. Nothing of
  // the logits is kept: backward computes them again.
  m.def(
      "token_log_probs(Tensor hidden, Tensor weight, Tensor? bias, Tensor ids, "
      "int ignore_index=-100, int? chunk_tokens=None, float? softcap=None, float scale=1.0, "
      "float temperature=1.0, bool entropy=False) -> Tensor[]",
      pure);
  // grads: of each of its outputs. The gradients of hidden, weight and bias that are wanted.
  m.def(
      "_token_log_probs_backward(Tensor[] grads, Tensor hidden, Tensor weight, Tensor? bias, "
      "Tensor ids, Tensor logsumexp, Tensor? entropy, int ignore_index, int? chunk_tokens, "
      "float? softcap, float scale, float temperature, int[] wanted) -> Tensor[]",
      pure);

  // --- the CPU buffer pool

  m.def("_pool_idle_bytes() -> int");
  m.def("_pool_limit() -> int");
  m.def("_pool_set_limit(int bytes) -> ()");
  m.def("_pool_clear() -> ()");

  // --- how a group's blocks are sent between tensors of a kind of device

  // By rank: the lowest rank that it shares memory with, or why it shares none. All
  // ranks call this. use: "auto", "mapped" or "messages"; to be given before the group's first
  // exchange.
  m.def(
      "_transport(int rank, int size, str group_name, str? use, Device device) -> "
      "(int[], str[])");
}

}  // namespace deepsp

// Loading this module is what registers the ops; it has nothing of its own.
PyMODINIT_FUNC PyInit__C(void) {
  deepsp::inductor::define_decompositions();
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};
  return PyModule_Create(&module);
}
