#include "engine.h"

#include "../transport/agreement.h"

#include <ATen/ops/empty.h>

namespace deepsp {

Departure departure_of(
    const Group* group, const Layout& layout, int64_t chunk, const at::Tensor& like, Order order) {
  const auto elements = [&](int64_t p) {
    Layout theirs = layout;
    theirs.rank = p;
    return std::max(theirs.elements_by_heads(chunk), theirs.elements_by_tokens(chunk));
  };
  return Departure(
      group, elements, {elements(layout.rank)}, like.options(), static_cast<uint64_t>(order));
}

at::Tensor meta_buffer(const SymBlockLayout& shapes, int64_t chunk, const at::Tensor& like) {
  return at::empty_symint({buffer_elements(shapes, chunk)}, like.options());
}

std::vector<at::Tensor> meta_buffers(const SymBlockLayout& shapes, const at::Tensor& like) {
  std::vector<at::Tensor> buffers;
  for (int64_t chunk = 0; chunk < shapes.heads.chunks(); ++chunk) {
    buffers.push_back(meta_buffer(shapes, chunk, like));
  }
  return buffers;
}

std::vector<at::Tensor> dense(at::TensorList buffers) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& buffer : buffers) {
    result.push_back(buffer.contiguous());
  }
  return result;
}

void settle_if_watched(const at::Tensor& buffer, const Layout& layout, int64_t chunk) {
  if (watched()) {
    settle(buffer, layout, chunk);
  }
}

std::unique_ptr<Group> group_of(
    const char* op,
    std::string_view name,
    const Layout& layout,
    const at::Tensor& like,
    int64_t chunk) {
  Group group = agreed_group(
      op, name, layout.rank, layout.parts(), like.device(), "seq_lens",
      [&]() -> std::vector<std::string> {
        std::vector<int64_t> heads;
        for (size_t i = 0; i < layout.heads.tensors(); ++i) {
          heads.push_back(layout.heads.num_heads(i));
        }
        return {said("seq_lens ", layout.seq_lens),
                said("batch size ", layout.batch),
                said("num_heads ", heads),
                said("head_dims ", layout.head_dims),
                said("dtype ", like.scalar_type()),
                said("chunk ", chunk, " of ", layout.heads.chunks())};
      });
  return group.alone ? nullptr : std::make_unique<Group>(std::move(group));
}

}  // namespace deepsp
