#pragma once
// Parts of tensors, gathered and scattered: launches and waits, whatever they hold.

#include "../op.h"
#include "../common/copies.h"
#include "../layout/buffer.h"
#include "../transport/moves.h"
#include "checks.h"

#include <ATen/ops/empty.h>

#include <functional>

namespace deepsp {

using Shapes = std::vector<std::vector<int64_t>>;

// Where this rank's part of a tensor is to be made.
struct Destination {
  size_t tensor;
  char* to;
};
using MakeParts = std::function<void(const std::vector<Destination>&)>;

// The buffer of an exchange: of one shape on all ranks.
struct BufferShape {
  SymInts sizes;
  at::TensorOptions options;
  uint64_t kind = 0;  // as Transfer's

  at::Tensor meta() const { return at::empty_symint(sizes, options); }
};

// One exchange on real tensors, into a buffer on `device`.
class Reshard {
 public:
  Reshard(Shards shards, Group group, c10::Device device);
  Reshard(const Reshard&) = delete;
  Reshard& operator=(const Reshard&) = delete;

  const Group& group() const { return group_; }

  // Makes this rank's parts where they belong in the buffer, and sends them from there. Returns the
  // buffer.
  at::Tensor launch_gather(const MakeParts& make, const BufferShape& shape) const;
  // The same for a single tensor whose part, contiguous, is sent from where it is.
  at::Tensor launch_gather(const at::Tensor& part, const BufferShape& shape) const;
  // Waits. Returns the full tensors: views of the buffer where the layout fits, else, or if they
  // must be `fresh`, copies.
  Tensors finish_gather(
      const at::Tensor& buffer, const Shapes& shapes, Dtypes dtypes, bool fresh = false) const;

  // Sends each rank its parts of the inputs, which are contiguous. Returns the buffer.
  at::Tensor launch_scatter(const Tensors& inputs, const BufferShape& shape) const;
  // Waits. Returns the sums, in rank order, of this rank's parts, which were sent in `wire`.
  Tensors finish_scatter(
      const at::Tensor& buffer,
      const Shapes& shapes,
      Dtypes wire,
      Dtypes dtypes,
      OptionalDtype reduce_dtype) const;
  // The same into `results`, contiguous.
  void finish_scatter(
      const at::Tensor& buffer,
      const Tensors& results,
      Dtypes wire,
      OptionalDtype reduce_dtype) const;

  // backend.cpp. The same by one reduce-scatter of the group's backend, of inputs of one dtype.
  at::Tensor launch_backend_sums(const Tensors& inputs, const BufferShape& shape) const;
  Tensors finish_backend_sums(
      const at::Tensor& buffer, const Shapes& shapes, at::ScalarType dtype, Dtypes dtypes) const;

 private:
  bool alone() const { return group_.alone; }
  Transfer transfer(const BufferShape& shape) const;
  // A copy of rank p's part of tensor i, with these distances between rows.
  StridedCopy copy_of(
      size_t i, int64_t p, const char* from, int64_t from_row, char* to, int64_t to_row) const;
  // Its part of a full tensor.
  char* part_of(const at::Tensor& full, size_t i, int64_t p) const;
  // The copies of this rank's part of a single tensor to where a buffer has it.
  StridedCopy copy_gathered(const at::Tensor& part, char* buffer) const;
  // Copies this rank's own parts to where they would have been received.
  void place_gathered(const at::Tensor& part, const at::Tensor& buffer) const;
  void place_scattered(const Tensors& inputs, const at::Tensor& buffer) const;

  // This rank's slot in a buffer of slots of one size.
  at::Tensor slot_in(const at::Tensor& buffer) const;
  // The copies that make rank p's packed block.
  void add_block(
      const Tensors& inputs, int64_t p, char* to, std::vector<StridedCopy>& copies) const;

  BufferLayout at_;
  const Shards& shards_ = at_.shards;
  int64_t rank_ = shards_.rank;
  Group group_;
};

// The exchange of an op that was given `rank` and `group_name`, between tensors on the device of
// `like`. `item`: the bytes that the layout counts as one; `sizes`: what has an entry for each
// rank. Ranks compare a start's `arguments` with DEEPSP_DEBUG=1.
Reshard reshard_of(
    const char* op,
    const SymShards& layout,
    int64_t item,
    const char* sizes,
    const at::Tensor& like,
    const Given& given,
    const std::function<std::vector<std::string>()>& arguments = {});
constexpr const char* kListSizes = "the sizes of each tensor";
// That of a start of lists; `name`: what messages call the tensors.
Reshard reshard_lists(
    const char* op,
    const char* name,
    at::TensorList tensors,
    const SymShards& layout,
    Dtypes dtypes,
    const Given& given);

// An uninitialised tensor; a large one on the CPU is the pool's.
at::Tensor empty_result(at::IntArrayRef sizes, const at::TensorOptions& options);
// A buffer that is sent, or that nothing is received into.
at::Tensor buffer_for(c10::SymIntArrayRef sizes, const at::TensorOptions& options);
// That of an exchange of lists.
BufferShape list_buffer(const SymShards& layout, Dtypes dtypes, const at::Tensor& like);

}  // namespace deepsp
