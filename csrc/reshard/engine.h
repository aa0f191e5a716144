#pragma once
// Parts of tensors sent off and landed, in both directions, whatever they hold.

#include "../common/copies.h"
#include "../layout/buffer.h"
#include "../op.h"
#include "../transport/departure.h"
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

// The buffer of an exchange. All ranks' are alike.
struct BufferShape {
  SymInts sizes;
  at::TensorOptions options;

  at::Tensor meta() const { return at::empty_symint(sizes, options); }
};

// One exchange on real tensors, into a buffer on `device`.
class Reshard {
 public:
  Reshard(Shards shards, Group group, c10::Device device);
  Reshard(const Reshard&) = delete;
  Reshard& operator=(const Reshard&) = delete;

  const Group& group() const { return group_; }

  // Makes this rank's parts where they belong in the buffer, and sends them off from there. The
  // buffer.
  at::Tensor launch_gather(const MakeParts& make, const BufferShape& shape) const;
  // The same for a single tensor whose part, contiguous, travels as it is.
  at::Tensor launch_gather(const at::Tensor& part, const BufferShape& shape) const;
  // Waits: the full tensors, views where each lies in one piece, else (or where they must be
  // `fresh`) copies.
  Tensors land_gather(
      const at::Tensor& buffer, const Shapes& shapes, Dtypes dtypes, bool fresh = false) const;

  // Sends every rank's parts of the inputs, contiguous, off to it. The buffer.
  at::Tensor launch_scatter(const Tensors& inputs, const BufferShape& shape) const;
  // Waits: the sums of this rank's parts, which travelled in `wire`, in rank order.
  Tensors land_scatter(
      const at::Tensor& buffer,
      const Shapes& shapes,
      Dtypes wire,
      Dtypes dtypes,
      OptionalDtype reduce_dtype) const;

 private:
  bool alone() const { return group_.alone; }
  Departure departure(const BufferShape& shape) const;
  // Rank p's part of tensor i, of which rows lie so far apart.
  StridedCopy copy_of(
      size_t i, int64_t p, const char* from, int64_t from_row, char* to, int64_t to_row) const;
  // Its part of a full tensor.
  char* part_of(const at::Tensor& full, size_t i, int64_t p) const;
  // The copies of this rank's part of a single tensor to where a buffer has it.
  StridedCopy copy_gathered(const at::Tensor& part, char* buffer) const;
  // This rank's own, to where they would have arrived.
  void place_gathered(const at::Tensor& part, const at::Tensor& buffer) const;
  void place_scattered(const Tensors& inputs, const at::Tensor& buffer) const;

  void gather_slots(const Departure& departure) const;
  // Writes this rank's slot to where every rank's buffer has it.
  void stage_slot(const Departure& departure, const at::Tensor& slot) const;
  void scatter_blocks(const Tensors& inputs, const Departure& departure) const;
  // The copies that make rank p's packed block.
  void add_block(
      const Tensors& inputs, int64_t p, char* to, std::vector<StridedCopy>& copies) const;

  BufferLayout at_;
  const Shards& shards_ = at_.shards;
  int64_t rank_ = shards_.rank;
  Group group_;
};

// That of an op on lists, which wait for `buffer`.
Reshard reshard_lists(
    const char* op, const at::Tensor& buffer, const SymShards& layout, std::string_view group_name);
// That of one which starts, with tensors that messages call so: compared with DEEPSP_DEBUG=1.
Reshard reshard_lists(
    const char* op,
    const char* name,
    at::TensorList tensors,
    const SymShards& layout,
    Dtypes dtypes,
    std::string_view group_name);

// An uninitialised tensor; a large one on the CPU comes from the pool.
at::Tensor empty_result(at::IntArrayRef sizes, const at::TensorOptions& options);
// A buffer that is sent, or that nothing travels to.
at::Tensor buffer_for(c10::SymIntArrayRef sizes, const at::TensorOptions& options);
// That of an exchange of lists.
BufferShape list_buffer(const SymShards& layout, Dtypes dtypes, const at::Tensor& like);

}  // namespace deepsp
