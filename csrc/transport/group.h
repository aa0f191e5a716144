#pragma once
// A process group by name, and the few things that its backend decides.

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>

namespace c10d {
class ProcessGroup;
}

namespace deepsp {

struct Group {
  std::shared_ptr<c10d::ProcessGroup> pg;
  std::string name;
  // What it is used for, as errors say it.
  const char* op;
  int64_t rank;
  int64_t size;
  // Blocks travel by irecv and isend: steady on gloo, where all-to-all isn't.
  bool point_to_point;
  // Nothing travels.
  bool alone;
  // NCCL's works: one that has completed has done so on the device, and need not be waited for.
  bool done_on_device;
};

// Whether an environment variable is 1.
bool is_switched_on(const char* variable);

// ValueError if no group of that name exists, or if this process is not `rank`
// of `size` in it; `sizes` is the list that has an entry for each rank, nullptr where the call
// passes the size itself.
Group resolve_group(
    const char* op,
    std::string_view name,
    int64_t rank,
    int64_t size,
    c10::Device device,
    const char* sizes = nullptr);

}  // namespace deepsp
