#include "exchange.h"

#include "agreement.h"
#include "pool.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <torch/version.h>

#include <map>
#include <mutex>
#include <torch/csrc/autograd/anomaly_mode.h>

// torch 2.13 gave single-tensor collectives names without an underscore.
#define DEEPSP_TORCH_BEFORE_2_13 (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13)

namespace deepsp {

bool watched() {
  return torch::autograd::AnomalyMode::is_enabled() || debugging();
}

void clear_if_watched(const at::Tensor& buffer) {
  if (watched()) {
    buffer.zero_();
  }
}

namespace {

// Our tags lie in the upper half of what gloo takes, away from users' own.
constexpr int kFirstTag = 1 << 30;
constexpr int kTags = 1 << 29;

// Exchanges are counted by group, so that a message meets the receive of the
// same exchange and no other.
int next_tag(const c10::intrusive_ptr<c10d::ProcessGroup>& pg) {
  struct Count {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
    int next = 0;
  };
  static std::mutex mutex;
  static std::map<const void*, Count> counts;
  std::lock_guard<std::mutex> lock(mutex);
  auto it = counts.find(pg.get());
  if (it == counts.end() || it->second.group.expired()) {
    for (auto old = counts.begin(); old != counts.end();) {
      old = old->second.group.expired() ? counts.erase(old) : std::next(old);
    }
    it = counts.emplace(pg.get(), Count{c10::weak_intrusive_ptr<c10d::ProcessGroup>(pg)}).first;
  }
  const int tag = kFirstTag + it->second.next;
  it->second.next = (it->second.next + 1) % kTags;
  return tag;
}

// Not owned: a tensor that owned its block's memory, held by a work that belongs
// to the block, would keep itself alive.
at::Tensor unowned(Bytes bytes) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), bytes.size, at::DataPtr(bytes.data, at::kCPU)),
      c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(at::kByte));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({bytes.size});
  return tensor;
}

std::string name_of(const Group& group) {
  return std::string(group.op) + " of rank " + std::to_string(group.rank) + " in group '" +
         group.name + "' of " + std::to_string(group.size);
}

// Runs `act`, which talks to other ranks; its error says in which exchange, `what()`, which is
// asked only then. `from`: whose block it is that arrives, -1: any.
template <class What, class Act>
auto named(const What& what, int64_t from, const Act& act) {
  try {
    return act();
  } catch (const std::exception& error) {
    const auto* ours = dynamic_cast<const c10::Error*>(&error);
    TORCH_CHECK_WITH(
        DistBackendError, false, what(), " failed",
        from >= 0 ? " waiting for rank " + std::to_string(from) : std::string(), ": ",
        ours ? ours->what_without_backtrace() : error.what(),
        ". Another rank died, hangs, or makes another call (DEEPSP_DEBUG=1 compares them); the "
        "group can't be used any more");
  }
}

// A launch fails, too, where a peer has died since the last exchange.
template <class Launch>
Work launched(const Group& group, const Launch& launch) {
  return named([&] { return name_of(group); }, -1, launch);
}

}  // namespace

Flight::~Flight() {
  if (failed_) {
    return;
  }
  try {
    wait_all();
  } catch (const std::exception&) {
    // Whoever uses the group next is told.
  }
}

void Flight::wait(Work& work, int64_t from) {
  if (!work) {
    return;
  }
  failed_ = true;  // unless it doesn't throw
  named([&] { return what; }, from, [&] { return work->wait(); });
  failed_ = false;
  work.reset();
}

void Flight::wait_receive(int64_t source) {
  for (std::vector<Work>& by_source : receives) {
    wait(by_source[source], source);
  }
  wait(collective);
}

void Flight::wait_sends() {
  for (Work& work : sends) {
    wait(work);
  }
  holds.clear();
}

void Flight::wait_all() {
  for (std::vector<Work>& by_source : receives) {
    for (size_t source = 0; source < by_source.size(); ++source) {
      wait(by_source[source], static_cast<int64_t>(source));
    }
  }
  wait(collective);
  wait_sends();
}

at::Tensor empty_buffer(at::IntArrayRef sizes, const at::Tensor& like) {
  return like.is_cpu() ? pool_empty(sizes, like.scalar_type()) : at::empty(sizes, like.options());
}

void exchange_point_to_point(
    const Group& group,
    const std::function<Bytes(int64_t)>& receive,
    const std::function<Bytes(int64_t)>& send,
    Flight& flight) {
  RECORD_FUNCTION("deepsp::exchange", {});
  const int tag = next_tag(group.pg);
  flight.what = name_of(group);
  // Each rank begins with a neighbour, so that no rank is everybody's first.
  flight.receives.emplace_back(group.size);
  for (int64_t step = 1; step < group.size; ++step) {
    const int64_t source = (group.rank - step + group.size) % group.size;
    const Bytes bytes = receive(source);
    if (bytes.size > 0) {
      std::vector<at::Tensor> block{unowned(bytes)};
      flight.receives.back()[source] =
          launched(group, [&] { return group.pg->recv(block, static_cast<int>(source), tag); });
    }
  }
  for (int64_t step = 1; step < group.size; ++step) {
    const int64_t target = (group.rank + step) % group.size;
    const Bytes bytes = send(target);
    if (bytes.size > 0) {
      std::vector<at::Tensor> block{unowned(bytes)};
      flight.sends.push_back(
          launched(group, [&] { return group.pg->send(block, static_cast<int>(target), tag); }));
    }
  }
}

Work exchange_all_to_all(
    const Group& group,
    const at::Tensor& received,
    const at::Tensor& sent,
    const std::vector<int64_t>& receive_counts,
    const std::vector<int64_t>& send_counts) {
  RECORD_FUNCTION("deepsp::exchange", {});
  // Bytes, since not every backend knows every dtype.
  const int64_t item = static_cast<int64_t>(sent.element_size());
  at::Tensor to = received.view(at::kByte);
  at::Tensor from = sent.view(at::kByte);
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

Work all_gather(const Group& group, const at::Tensor& out, const at::Tensor& in) {
  at::Tensor to = out;
  at::Tensor from = in;
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

namespace {

Work all_reduce(const Group& group, const at::Tensor& tensor, c10d::ReduceOp::RedOpType op) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  options.asyncOp = true;
  return launched(group, [&] { return group.pg->allreduce(tensors, options); });
}

}  // namespace

Work all_reduce_sum(const Group& group, const at::Tensor& tensor) {
  return all_reduce(group, tensor, c10d::ReduceOp::SUM);
}

Work all_reduce_max(const Group& group, const at::Tensor& tensor) {
  return all_reduce(group, tensor, c10d::ReduceOp::MAX);
}

void wait_for(const Group& group, const Work& work) {
  named([&] { return name_of(group); }, -1, [&] { return work->wait(); });
}

void launch_into(const at::Tensor& buffer, std::unique_ptr<Flight> flight) {
  set_flight(buffer, std::move(flight));
}

void launch_into(
    const Group& group, const at::Tensor& buffer, const Work& work, const at::Tensor& sent) {
  if (buffer.is_cpu()) {
    auto flight = std::make_unique<Flight>();
    flight->what = name_of(group);
    flight->collective = work;
    flight->holds.push_back(sent);
    set_flight(buffer, std::move(flight));
  } else {
    c10d::register_work(buffer, work);  // an asynchronous work holds what it sends
  }
}

std::unique_ptr<Flight> land(const at::Tensor& buffer) {
  auto flight = flight_into(buffer);
  if (flight) {
    flight->wait_all();
    mark_landed(buffer);
  }
  return flight;
}

void mark_landed(const at::Tensor& buffer) {
  auto landed = std::make_unique<Flight>();
  landed->landed = true;
  set_flight(buffer, std::move(landed));
}

bool has_landed(const at::Tensor& buffer) {
  if (!buffer.is_cpu()) {
    return false;
  }
  auto flight = take_flight(buffer);
  if (!flight) {
    return false;
  }
  const bool landed = flight->landed;
  set_flight(buffer, std::move(flight));
  return landed;
}

std::unique_ptr<Flight> flight_into(const at::Tensor& buffer) {
  if (!buffer.is_cpu()) {
    c10d::wait_tensor(buffer);
    return nullptr;
  }
  auto flight = take_flight(buffer);
  TORCH_CHECK_VALUE(
      !flight || !flight->landed,
      "buffer: this exchange was waited for already; a buffer that was started is waited for once");
  return flight;
}

}  // namespace deepsp
