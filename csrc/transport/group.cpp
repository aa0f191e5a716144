#include "group.h"

#include "c10d.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <cstdlib>

namespace deepsp {
namespace {

bool is_backend(const char* name, c10d::ProcessGroup& pg, c10::DeviceType device) {
  try {
    return pg.getBackend(device)->getBackendName() == name;
  } catch (const c10::Error&) {
    return false;  // a group without backends of its own: the fake one
  }
}

}  // namespace

bool is_switched_on(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && std::string_view(value) == "1";
}

bool debugging() {
  return is_switched_on("DEEPSP_DEBUG");
}

bool sends_to_itself() {
  return is_switched_on("DEEPSP_TEST_COLLECTIVES");
}

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
        false, "expected group_name to be the name of a process group of this process, got '", name,
        "'");
  }
  TORCH_CHECK_VALUE(
      pg->getSize() == size || sizes, "expected size to be ", pg->getSize(),
      ", the number of ranks of group '", name, "', got ", size);
  TORCH_CHECK_VALUE(
      pg->getSize() == size, "expected ", sizes, " to have one entry for each of the ",
      pg->getSize(), " ranks of group '", name, "', got ", size);
  TORCH_CHECK_VALUE(
      pg->getRank() == rank, "expected rank to be ", pg->getRank(),
      ", the rank of this process in group '", name, "', got ", rank);
  const bool collectives = sends_to_itself();
  const bool point_to_point =
      !collectives && device.is_cpu() && is_backend("gloo", *pg, device.type());
  const bool nccl = is_backend("nccl", *pg, device.type());
  return {shared(std::move(pg)), std::string(name),         op,  rank, size,
          point_to_point,        size == 1 && !collectives, nccl};
}

std::chrono::milliseconds timeout_of(const Group& group, c10::Device device) {
  return group.pg->getBackend(device.type())->getBackendOptions()->timeout;
}

}  // namespace deepsp
