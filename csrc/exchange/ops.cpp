#include "ops.h"

#include "../dispatch.h"

namespace deepsp {

std::vector<at::Tensor> seq_to_heads(
    at::TensorList inputs,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name) {
  static const auto op = find_op<decltype(seq_to_heads)>("deepsp::seq_to_heads");
  return op.call(inputs, seq_lens, rank, group_name);
}

std::vector<at::Tensor> heads_to_seq(
    at::TensorList inputs,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name,
    bool tokens_first) {
  static const auto op = find_op<decltype(heads_to_seq)>("deepsp::heads_to_seq");
  return op.call(inputs, num_heads, seq_lens, rank, group_name, tokens_first);
}

std::vector<at::Tensor> seq_to_heads_start(
    at::TensorList inputs,
    c10::SymIntArrayRef seq_lens,
    int64_t chunks,
    bool last_first,
    int64_t rank,
    std::string_view group_name) {
  static const auto op = find_op<decltype(seq_to_heads_start)>("deepsp::seq_to_heads_start");
  return op.call(inputs, seq_lens, chunks, last_first, rank, group_name);
}

std::vector<at::Tensor> seq_to_heads_wait(
    const at::Tensor& buffer,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank,
    std::string_view group_name) {
  static const auto op = find_op<decltype(seq_to_heads_wait)>("deepsp::seq_to_heads_wait");
  return op.call(
      buffer, num_heads, head_dims, std::move(batch), seq_lens, chunk, chunks, rank, group_name);
}

at::Tensor heads_to_seq_start(
    at::TensorList inputs,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank,
    std::string_view group_name) {
  static const auto op = find_op<decltype(heads_to_seq_start)>("deepsp::heads_to_seq_start");
  return op.call(inputs, num_heads, seq_lens, chunk, chunks, rank, group_name);
}

std::vector<at::Tensor> heads_to_seq_wait(
    at::TensorList buffers,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name,
    bool tokens_first) {
  static const auto op = find_op<decltype(heads_to_seq_wait)>("deepsp::heads_to_seq_wait");
  return op.call(
      buffers, num_heads, head_dims, std::move(batch), seq_lens, rank, group_name, tokens_first);
}

}  // namespace deepsp
