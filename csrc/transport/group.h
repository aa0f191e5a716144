#pragma once
// A process group by name, and the few things that its backend decides.

#include <ATen/core/Tensor.h>

#include <chrono>
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
  const char* op;  // the op that uses the group, for error messages
  int64_t rank;
  int64_t size;
  // Blocks are sent by irecv and isend: steady on gloo, where all-to-all isn't.
  bool point_to_point;
  // A group of one rank: nothing is sent.
  bool alone;
  // NCCL: a work that has completed has done so on the device, and needs no wait.
  bool done_on_device;
};

// Whether an environment variable is 1.
bool is_switched_on(const char* variable);
// For tests: gloo, too, and groups of one rank exchange blocks by collectives, as NCCL does, so
// that one process, or one GPU, runs NCCL's path.
bool sends_to_itself();
// DEEPSP_DEBUG=1.
bool debugging();

// ValueError if no group of that name exists, or if this process is not `rank` of `size` in it.
// `sizes` names the argument with one entry for each rank; nullptr: the call passes the size.
Group resolve_group(
    const char* op,
    std::string_view name,
    int64_t rank,
    int64_t size,
    c10::Device device,
    const char* sizes = nullptr);

std::chrono::milliseconds timeout_of(const Group& group, c10::Device device);

}  // namespace deepsp
