#include "transport.h"

#include "../collectives/agreement.h"

#include <sstream>

namespace deepsp {

at::Tensor buffer_for(const SymBlockLayout& shapes, int64_t chunk, const at::Tensor& like) {
  const int64_t elements = buffer_elements(shapes, chunk).expect_int();
  const at::Tensor buffer = empty_buffer({elements}, like);
  if (watched()) {
    buffer.zero_();  // it may be larger than what arrives
  }
  return buffer;
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
  auto group =
      std::make_unique<Group>(resolve_group(op, name, layout.rank, layout.parts(), like.device()));
  if (layout.parts() == 1) {
    return nullptr;
  }
  if (debugging()) {
    std::vector<int64_t> heads;
    for (size_t i = 0; i < layout.heads.tensors(); ++i) {
      heads.push_back(layout.heads.num_heads(i));
    }
    std::vector<std::string> arguments;
    const auto add = [&](const char* argument, const auto& value) {
      std::ostringstream text;
      text << argument << ' ' << value;
      arguments.push_back(text.str());
    };
    add("seq_lens", at::IntArrayRef(layout.seq_lens));
    add("batch size", layout.batch);
    add("num_heads", at::IntArrayRef(heads));
    add("head_dims", at::IntArrayRef(layout.head_dims));
    add("dtype", like.scalar_type());
    add("chunk", std::to_string(chunk) + " of " + std::to_string(layout.heads.chunks()));
    check_agreement(*group, like.device(), arguments);
  }
  return group;
}

}  // namespace deepsp
