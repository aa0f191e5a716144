#include "c10d.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

namespace deepsp {
namespace {

bool is_gloo(c10d::ProcessGroup& pg, c10::DeviceType device) {
  try {
    return pg.getBackend(device)->getBackendName() == "gloo";
  } catch (const c10::Error&) {
    return false;  // a group without backends of its own: the fake one
  }
}

}  // namespace

Group resolve_group(
    const char* op,
    std::string_view name,
    int64_t rank,
    int64_t size,
    c10::Device device,
    const char* sizes) {
  c10::intrusive_ptr<c10d::ProcessGroup> pg;
  try {
    pg = c10d::resolve_process_group(std::string(name));
  } catch (const c10::Error&) {
    TORCH_CHECK_VALUE(
        false, "group_name: no process group is named '", name,
        "'; pass the group_name of a group that exists in this process");
  }
  TORCH_CHECK_VALUE(
      pg->getSize() == size, sizes, " has ", size, " entries, but the group '", name, "' has ",
      pg->getSize(), " ranks; one entry for each is right");
  TORCH_CHECK_VALUE(
      pg->getRank() == rank, "rank is ", rank, ", but this process is rank ", pg->getRank(),
      " of the group '", name, "'");
  const bool point_to_point = device.is_cpu() && is_gloo(*pg, device.type());
  return {shared(std::move(pg)), std::string(name), op, rank, size, point_to_point};
}

}  // namespace deepsp
