#pragma once
// Staged copies between GPUs that reach each other's memory: symmetric memory for their stages
// (stages.h), and a stream for the exchanges.

#include "flight.h"

#include <functional>
#include <memory>
#include <vector>

namespace deepsp {

// By rank: where its buffer begins.
using Buffers = std::vector<char*>;

class Staged {
 public:
  virtual ~Staged() = default;

  // Launches one exchange that fills this rank's `buffer`, and returns its flight. `bytes`: the
  // sizes of the buffers, by rank, alike on all ranks. write(buffers) launches the copies of this
  // rank's blocks for all ranks, itself included, on the current stream; they read `reads`.
  virtual std::unique_ptr<Flight> exchange(
      const Group& group,
      const std::vector<int64_t>& bytes,
      const at::Tensor& buffer,
      at::TensorList reads,
      const std::function<void(const Buffers&)>& write) = 0;
};

// With CUDA only. This rank's first stage.
at::Tensor allocate_stage(c10::Device device);
// All ranks of the group call this together, each with its stage. An error if a GPU doesn't reach
// another one.
std::shared_ptr<Staged> make_staged(const Group& group, at::Tensor stage, c10::Device device);

}  // namespace deepsp
