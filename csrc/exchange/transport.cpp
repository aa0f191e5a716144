#include "transport.h"

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
    std::string_view name, const Layout& layout, const at::Tensor& like) {
  auto group =
      std::make_unique<Group>(resolve_group(name, layout.rank, layout.parts(), like.device()));
  return layout.parts() == 1 ? nullptr : std::move(group);
}

}  // namespace deepsp
