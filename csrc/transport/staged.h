#pragma once
// Staged copies between GPUs that reach each other's memory: symmetric memory for their stages
// (stages.h), and two streams for the exchanges.

#include "../kernels/copy.h"
#include "flight.h"

#include <functional>
#include <memory>
#include <vector>

namespace deepsp {

// Appends the copies that make this rank's block for rank p, whose buffer begins at `buffer`.
using AddCopies = std::function<void(int64_t p, char* buffer, std::vector<StridedCopy>& copies)>;

class Staged {
 public:
  virtual ~Staged() = default;

  // Launches one exchange that fills this rank's `buffer`, and returns its flight. `bytes`: the
  // sizes of the buffers, by rank, alike on all ranks. add_copies: for all ranks, this one
  // included; the copies read `reads`.
  virtual std::unique_ptr<Flight> exchange(
      const Group& group,
      const std::vector<int64_t>& bytes,
      const at::Tensor& buffer,
      at::TensorList reads,
      const AddCopies& add_copies) = 0;
};

// With CUDA only. This rank's stage.
at::Tensor allocate_stage(c10::Device device);
// All ranks of the group call this together, each with its stage. An error if a GPU doesn't reach
// another one.
std::shared_ptr<Staged> make_staged(const Group& group, at::Tensor stage, c10::Device device);

}  // namespace deepsp
