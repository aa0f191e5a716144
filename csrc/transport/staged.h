#pragma once
// The ranks of a group whose GPUs reach each other's memory: symmetric memory for their stages
// (stages.h), and a stream in which blocks travel.

#include "flight.h"
#include "introduction.h"

#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace deepsp {

// By rank: where its buffer begins.
using Buffers = std::vector<char*>;

class Staged {
 public:
  virtual ~Staged() = default;

  // Launches one exchange, and ties it to this rank's `buffer`. `bytes`: of the buffers, by rank,
  // alike on all ranks. write(buffers) launches the copies of this rank's blocks for all ranks,
  // itself included, on the current stream; they read `reads`.
  virtual std::unique_ptr<Flight> exchange(
      const Group& group,
      const std::vector<int64_t>& bytes,
      const at::Tensor& buffer,
      at::TensorList reads,
      const std::function<void(const Buffers&)>& write) = 0;
};

// All ranks of the group call this. ValueError on every rank if they want different things, or if
// they want memory that they don't reach.
std::pair<Reach, std::shared_ptr<Staged>> connect_gpus(
    const Group& group, const Request& request, c10::Device device);

}  // namespace deepsp
