#include "engine.h"

#include "../transport/agreement.h"

#include <ATen/ops/empty.h>

namespace deepsp {

Transfer transfer_of(
    const Group& group,
    const Layout& plan,
    int64_t chunk,
    const at::Tensor& like,
    BlockOrder order) {
  const auto elements = [&, by_tokens = plan.columns_by_tokens(chunk)](int64_t p) {
    return plan.buffer_elements(p, chunk, by_tokens);
  };
  return Transfer(
      group, elements, {elements(plan.rank)}, like.options(), static_cast<uint64_t>(order));
}

std::vector<at::Tensor> meta_buffers(const SymPlan& plan, const at::Tensor& like) {
  std::vector<at::Tensor> buffers;
  for (int64_t chunk = 0; chunk < plan.chunks(); ++chunk) {
    buffers.push_back(at::empty_symint({plan.buffer_elements(chunk)}, like.options()));
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

void settle_if_watched(const at::Tensor& buffer, const Layout& plan, int64_t chunk) {
  if (waits_at_once()) {
    settle(buffer, plan, chunk);
  }
}

Group group_of(
    const char* op,
    std::string_view name,
    const Layout& plan,
    const at::Tensor& like,
    int64_t chunk) {
  return agreed_group(
      op, name, plan.rank, plan.ranks(), like.device(), "seq_lens",
      [&]() -> std::vector<std::string> {
        const int64_t parts = plan.heads.query_parts();
        return {
            to_text("seq_lens ", plan.given_lens()),
            to_text("batch size ", plan.batch),
            to_text("num_heads ", plan.heads.num_heads()),
            to_text("head_dims ", plan.head_dims),
            parts == HeadLayout::kAuto ? "query_parts auto" : to_text("query_parts ", parts),
            to_text("dtype ", like.scalar_type()),
            to_text("chunk ", chunk, " of ", plan.chunks())};
      });
}

}  // namespace deepsp
