#include "launch.h"

#include "../common/drop_if.h"
#include "c10d.h"
#include "errors.h"
#include "pool.h"

#include <ATen/ops/alias.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <torch/version.h>

#include <atomic>
#include <map>
#include <mutex>

// torch 2.13 gave single-tensor collectives names without an underscore.
#define DEEPSP_TORCH_BEFORE_2_13 (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13)

namespace deepsp {

namespace {

// Our tags lie in the upper half of what gloo takes, away from users' own.
constexpr int kFirstTag = 1 << 30;
constexpr int kTags = 1 << 29;

// What launches keep of a group.
struct Launches {
  explicit Launches(c10::weak_intrusive_ptr<c10d::ProcessGroup> group) : group(std::move(group)) {}

  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  std::atomic<uint32_t> exchanges = 0;
  std::mutex one_at_a_time;
};

std::shared_ptr<Launches> launches_of(const std::shared_ptr<c10d::ProcessGroup>& pg) {
  static std::mutex mutex;
  static std::map<const void*, std::shared_ptr<Launches>> all;
  std::lock_guard<std::mutex> lock(mutex);
  auto it = all.find(pg.get());
  if (it == all.end() || it->second->group.expired()) {
    drop_if(all, [](const auto& launches) { return launches->group.expired(); });
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group(intrusive(pg));
    it = all.emplace(pg.get(), std::make_shared<Launches>(std::move(group))).first;
  }
  return it->second;
}

at::Tensor unowned(Bytes bytes) {
  return tensor_over(at::DataPtr(bytes.data, at::kCPU), {bytes.size}, at::kByte);
}

// The same memory in a tensor that Python doesn't know. A backend's thread may free it last, and
// freeing a Python object on such a thread kills a process that is about to exit.
at::Tensor unnamed(const at::Tensor& tensor) {
  return at::alias(tensor);
}

// A launch fails, too, if a peer has died since the last exchange. `peer`: -1 for all. Several
// threads may launch: gloo takes that, but NCCL's communicators take one call at a time.
template <class Launch>
Work launched(const Group& group, const Launch& launch, int64_t peer = -1) {
  const auto launches = group.point_to_point ? nullptr : launches_of(group.pg);
  std::unique_lock<std::mutex> lock;
  if (launches) {
    lock = std::unique_lock(launches->one_at_a_time);
  }
  return shared(with_context(group, peer, launch));
}

}  // namespace

at::Tensor empty_buffer(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return options.device().is_cpu() ? pool_empty(sizes, c10::typeMetaToScalarType(options.dtype()))
                                   : at::empty(sizes, options);
}

at::Tensor bytes_of(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}).view(at::kByte);
}

at::Tensor unowned(const at::Tensor& tensor) {
  return tensor.is_cpu()
             ? tensor_over(
                   at::DataPtr(tensor.data_ptr(), at::kCPU), tensor.sizes(), tensor.scalar_type())
             : tensor;
}

void exchange_point_to_point(
    const Group& group,
    const std::function<bool(int64_t)>& among,
    const std::function<Bytes(int64_t)>& receive,
    const std::function<Bytes(int64_t)>& send,
    Flight& flight) {
  RECORD_FUNCTION("deepsp::exchange", {});
  // So that a message meets the receive of the same exchange.
  const int tag = kFirstTag + static_cast<int>(launches_of(group.pg)->exchanges++ % kTags);
  flight.what = describe(group);
  // Each rank begins with the next one, so that no rank is everybody's first.
  flight.receives.emplace_back(group.size);
  for (int64_t step = 1; step < group.size; ++step) {
    const int64_t source = (group.rank - step + group.size) % group.size;
    const Bytes bytes = among(source) ? receive(source) : Bytes{};
    if (bytes.size > 0) {
      std::vector<at::Tensor> block{unowned(bytes)};
      flight.receives.back()[source] = launched(
          group, [&] { return group.pg->recv(block, static_cast<int>(source), tag); }, source);
    }
  }
  for (int64_t step = 1; step < group.size; ++step) {
    const int64_t target = (group.rank + step) % group.size;
    const Bytes bytes = among(target) ? send(target) : Bytes{};
    if (bytes.size > 0) {
      std::vector<at::Tensor> block{unowned(bytes)};
      flight.sends.push_back(launched(
          group, [&] { return group.pg->send(block, static_cast<int>(target), tag); }, target));
    }
  }
}

Work launch_all_to_all(
    const Group& group,
    const at::Tensor& received,
    const at::Tensor& sent,
    const std::vector<int64_t>& receive_counts,
    const std::vector<int64_t>& send_counts) {
  RECORD_FUNCTION("deepsp::exchange", {});
  // As bytes: not every backend knows every dtype.
  const int64_t item = static_cast<int64_t>(sent.element_size());
  at::Tensor to = unnamed(received).view(at::kByte);
  at::Tensor from = unnamed(sent).view(at::kByte);
  std::vector<int64_t> to_bytes, from_bytes;
  for (int64_t p = 0; p < group.size; ++p) {
    to_bytes.push_back(receive_counts[p] * item);
    from_bytes.push_back(send_counts[p] * item);
  }
  c10d::AllToAllOptions options;
  options.asyncOp = true;
  return launched(group, [&] {
#if DEEPSP_TORCH_BEFORE_2_13
    return group.pg->alltoall_base(to, from, to_bytes, from_bytes, options);
#else
    return group.pg->all_to_all_single(to, from, to_bytes, from_bytes, options);
#endif
  });
}

Work launch_all_gather(const Group& group, const at::Tensor& out, const at::Tensor& in) {
  at::Tensor to = unnamed(out);
  at::Tensor from = unnamed(in);
  c10d::AllgatherOptions options;
  options.asyncOp = true;
  return launched(group, [&] {
#if DEEPSP_TORCH_BEFORE_2_13
    return group.pg->_allgather_base(to, from, options);
#else
    return group.pg->all_gather_single(to, from, options);
#endif
  });
}

Work launch_reduce_scatter(const Group& group, const at::Tensor& out, const at::Tensor& in) {
  RECORD_FUNCTION("deepsp::exchange", {});
  at::Tensor to = unnamed(out);
  at::Tensor from = unnamed(in);
  c10d::ReduceScatterOptions options;
  options.asyncOp = true;
  return launched(group, [&] {
#if DEEPSP_TORCH_BEFORE_2_13
    return group.pg->_reduce_scatter_base(to, from, options);
#else
    return group.pg->reduce_scatter_single(to, from, options);
#endif
  });
}

namespace {

Work all_reduce(const Group& group, const at::Tensor& tensor, c10d::ReduceOp::RedOpType op) {
  std::vector<at::Tensor> tensors{unnamed(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  options.asyncOp = true;
  return launched(group, [&] { return group.pg->allreduce(tensors, options); });
}

}  // namespace

Work launch_sum(const Group& group, const at::Tensor& tensor) {
  return all_reduce(group, tensor, c10d::ReduceOp::SUM);
}

Work launch_max(const Group& group, const at::Tensor& tensor) {
  return all_reduce(group, tensor, c10d::ReduceOp::MAX);
}

void wait_for(const Group& group, const Work& work) {
  with_context(group, -1, [&] { return work->wait(); });
}

void gather_from_all(const Group& group, const at::Tensor& out, const at::Tensor& in) {
  if (!group.point_to_point) {
    return wait_for(group, launch_all_gather(group, out, in));
  }
  const auto bytes = static_cast<int64_t>(in.nbytes());
  char* const received = static_cast<char*>(out.mutable_data_ptr());
  char* const sent = static_cast<char*>(in.data_ptr());
  std::memcpy(received + group.rank * bytes, sent, bytes);
  Flight flight;
  exchange_point_to_point(
      group, [](int64_t) { return true; },
      [&](int64_t p) { return Bytes{received + p * bytes, bytes}; },
      [&](int64_t) { return Bytes{sent, bytes}; }, flight);
  flight.wait_messages();
}

}  // namespace deepsp
