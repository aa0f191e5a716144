#include "../collectives/exchange.h"
#include "../exchange/checks.h"
#include "ops.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace deepsp {

int64_t check_unshard(
    const at::Tensor& input, int64_t dim, c10::SymIntArrayRef seq_lens, int64_t rank) {
  check_seq_lens(seq_lens, rank);
  TORCH_CHECK_VALUE(
      dim >= -input.dim() && dim < input.dim(), "dim is ", dim, ", but the tensor has ",
      input.dim(), " dimensions");
  dim = dim < 0 ? dim + input.dim() : dim;
  TORCH_CHECK_VALUE(
      input.sym_size(dim) == seq_lens[rank], "the tensor has size ", input.sym_size(dim),
      " in dimension ", dim, ", but seq_lens[", rank, "] of this rank is ", seq_lens[rank],
      "; they must be the same");
  return dim;
}

namespace {

at::Tensor all_reduce_kernel(
    const at::Tensor& input,
    double /*grad_scale*/,
    int64_t rank,
    int64_t size,
    std::string_view group_name) {
  const Group group = resolve_group(group_name, rank, size, input.device());
  at::Tensor out = input.clone(at::MemoryFormat::Contiguous);
  if (size > 1) {
    all_reduce_sum(group, out)->wait();
  }
  return out;
}

at::Tensor unshard_kernel(
    const at::Tensor& input,
    int64_t dim,
    at::IntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name) {
  dim = check_unshard(input, dim, c10::fromIntArrayRefSlow(seq_lens), rank);
  const int64_t parts = static_cast<int64_t>(seq_lens.size());
  const Group group = resolve_group(group_name, rank, parts, input.device());
  if (parts == 1) {
    return input.clone(at::MemoryFormat::Contiguous);
  }
  // Not every backend gathers unequal shards: pad to the longest.
  const int64_t longest = *std::max_element(seq_lens.begin(), seq_lens.end());
  std::vector<int64_t> padding(2 * (input.dim() - dim), 0);
  padding.back() = longest - seq_lens[rank];
  const at::Tensor shard = at::constant_pad_nd(input, padding).contiguous();
  std::vector<int64_t> sizes = shard.sizes().vec();
  sizes.insert(sizes.begin(), parts);
  const at::Tensor gathered = at::empty(sizes, input.options());
  all_gather(group, gathered.view({-1}), shard.view({-1}))->wait();
  std::vector<at::Tensor> shards;
  for (int64_t p = 0; p < parts; ++p) {
    shards.push_back(gathered.select(0, p).narrow(dim, 0, seq_lens[p]));
  }
  return at::cat(shards, dim);
}

// Gradients travel in flat buckets of about this size, each in flight while the
// next is filled.
constexpr int64_t kBucketBytes = int64_t(25) << 20;

void sum_gradients_kernel(
    at::TensorList gradients, int64_t rank, int64_t size, std::string_view group_name) {
  if (size == 1 || gradients.empty()) {
    return;
  }
  struct Bucket {
    std::vector<at::Tensor> members;
    at::Tensor flat;
    Work work;
    int64_t bytes = 0;
  };
  std::vector<Bucket> buckets;
  for (const at::Tensor& gradient : gradients) {
    TORCH_CHECK_VALUE(
        gradient.layout() == at::kStrided, "gradients: a gradient is ", gradient.layout(),
        "; only dense gradients can be summed");
    const bool fits = !buckets.empty() && buckets.back().bytes < kBucketBytes &&
                      buckets.back().members[0].options().type_equal(gradient.options()) &&
                      buckets.back().members[0].device() == gradient.device();
    if (!fits) {
      buckets.emplace_back();
    }
    buckets.back().members.push_back(gradient);
    buckets.back().bytes += static_cast<int64_t>(gradient.nbytes());
  }
  for (Bucket& bucket : buckets) {
    std::vector<at::Tensor> flat;
    for (const at::Tensor& gradient : bucket.members) {
      flat.push_back(gradient.reshape({-1}));
    }
    bucket.flat = at::cat(flat);
    bucket.work =
        all_reduce_sum(resolve_group(group_name, rank, size, bucket.flat.device()), bucket.flat);
  }
  for (Bucket& bucket : buckets) {
    bucket.work->wait();
    int64_t offset = 0;
    for (const at::Tensor& gradient : bucket.members) {
      gradient.copy_(bucket.flat.narrow(0, offset, gradient.numel()).view(gradient.sizes()));
      offset += gradient.numel();
    }
  }
}

void register_kernels(torch::Library& m) {
  m.impl("all_reduce", all_reduce_kernel);
  m.impl("unshard", unshard_kernel);
  m.impl("sum_gradients_", sum_gradients_kernel);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CPU, m) {
  register_kernels(m);
}

#ifdef DEEPSP_CUDA
TORCH_LIBRARY_IMPL(deepsp, CUDA, m) {
  register_kernels(m);
}
#endif

}  // namespace deepsp
