#include <ATen/record_function.h>

#include "transport.h"

namespace deepsp {
namespace {

// The copies that make the block [S_rank, B, X_p] for rank p out of the inputs.
void block_by_tokens(
    at::TensorList inputs,
    const Layout& layout,
    int64_t chunk,
    int64_t p,
    char* block,
    std::vector<StridedCopy>& copies) {
  const int64_t item = item_of(inputs[0]);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Range heads = layout.heads.range(i, p, chunk);
    const int64_t dim = layout.head_dims[i];
    copies.push_back(copy_of(
        view_of(inputs[i], 0, heads.begin),
        block_view(
            block, layout.batch, layout.columns(p, chunk), layout.column(i, p, chunk), dim, item),
        {layout.seq_lens[layout.rank], layout.batch, heads.size(), dim}, item));
  }
}

}  // namespace

void launch_to_heads(
    at::TensorList inputs,
    const Layout& layout,
    int64_t chunk,
    const Group* group,
    const at::Tensor& buffer) {
  const c10::Device device = inputs[0].device();
  const int64_t item = item_of(inputs[0]);
  const auto gives = counts_by_tokens(layout, chunk);
  const auto gets = counts_by_heads(layout, chunk);
  const auto got_at = prefix_sums(gets);
  const auto sent_at = prefix_sums(gives);
  char* const arrivals = data_of(buffer);
  std::vector<StridedCopy> copies;

  if (group == nullptr || group->point_to_point) {
    RECORD_FUNCTION("deepsp::pack", {});
    if (group != nullptr) {
      auto flight = std::make_unique<Flight>();
      const at::Tensor sent = empty_buffer({sent_at.back() - gives[layout.rank]}, inputs[0]);
      flight->holds.push_back(sent);
      char* next = data_of(sent);
      exchange_point_to_point(
          *group, [&](int64_t p) { return Bytes{arrivals + got_at[p] * item, gets[p] * item}; },
          [&](int64_t p) {
            const Bytes block{next, gives[p] * item};
            copies.clear();
            block_by_tokens(inputs, layout, chunk, p, block.data, copies);
            run(copies, device);
            next += block.size;
            return block;
          },
          *flight);
      launch_into(buffer, std::move(flight));
    }
    // This rank's own block is made where it would arrive.
    char* const own = arrivals + got_at[layout.rank] * item;
    copies.clear();
    block_by_tokens(inputs, layout, chunk, layout.rank, own, copies);
    run(copies, device);
    return;
  }

  const at::Tensor sent = empty_buffer({sent_at.back()}, inputs[0]);
  {
    RECORD_FUNCTION("deepsp::pack", {});
    for (int64_t p = 0; p < layout.parts(); ++p) {
      block_by_tokens(inputs, layout, chunk, p, data_of(sent) + sent_at[p] * item, copies);
    }
    run(copies, device);
  }
  launch_into(
      buffer, exchange_all_to_all(*group, buffer.narrow(0, 0, got_at.back()), sent, gets, gives),
      sent);
}

std::vector<at::Tensor> views_by_heads(
    const at::Tensor& buffer, const Layout& layout, int64_t chunk) {
  const int64_t columns = layout.columns(layout.rank, chunk);
  const int64_t step = buffer.stride(0);  // 1, but for a buffer that never travelled
  std::vector<at::Tensor> views;
  for (size_t i = 0; i < layout.heads.tensors(); ++i) {
    const int64_t dim = layout.head_dims[i];
    views.push_back(buffer.as_strided(
        {layout.batch, layout.token(layout.parts()),
         layout.heads.range(i, layout.rank, chunk).size(), dim},
        {step * columns, step * layout.batch * columns, step * dim, step},
        buffer.storage_offset() + step * layout.column(i, layout.rank, chunk)));
  }
  return views;
}

}  // namespace deepsp
