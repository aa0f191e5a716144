// What an op's arguments say of its exchange and its buffer.

#include "../common/checks.h"
#include "../transport/agreement.h"
#include "engine.h"

namespace deepsp {

Reshard reshard_of(
    const char* op,
    const SymShards& layout,
    int64_t item,
    const char* sizes,
    const at::Tensor& like,
    const Given& given,
    const std::function<std::vector<std::string>()>& arguments) {
  const std::string_view name = given["group_name"];
  const Group group =
      arguments
          ? agreed_group(op, name, layout.rank, layout.parts(), like.device(), sizes, arguments)
          : resolve_group(op, name, layout.rank, layout.parts(), like.device(), sizes);
  return Reshard(concrete(layout, item), group, like.device());
}

Reshard reshard_lists(
    const char* op,
    const char* name,
    at::TensorList tensors,
    const SymShards& layout,
    Dtypes dtypes,
    const Given& given) {
  return reshard_of(op, layout, /*item=*/1, kListSizes, tensors[0], given, [&] {
    std::vector<std::string> arguments;
    for (size_t i = 0; i < tensors.size(); ++i) {
      arguments.push_back(to_text(
          name, "[", i, "] ", tensors[i].scalar_type(), " with rows of ",
          tensors[i].sizes().slice(1), ", sizes ", layout[i].sizes, " and dtype ", dtypes[i]));
    }
    if (const auto sums = given.find("backend_sums"); sums && !sums->isNone()) {
      arguments.push_back(to_text("backend_sums ", sums->toScalarType()));
    }
    return arguments;
  });
}

at::Tensor buffer_for(c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
  if (options.device().is_meta()) {
    return at::empty_symint(sizes, options);
  }
  const at::Tensor buffer = empty_buffer(ints(sizes), options);
  remember_stream(buffer);
  clear_if_waiting_at_once(buffer);
  return buffer;
}

BufferShape list_buffer(const SymShards& layout, Dtypes dtypes, const at::Tensor& like) {
  return {{buffer_elements(layout, dtypes)}, like.options().dtype(buffer_dtype(dtypes))};
}

}  // namespace deepsp
