#ifdef DEEPSP_CUDA
#include "staged.h"

#include "../kernels/signal.h"
#include "c10d.h"
#include "stages.h"

#include <ATen/ops/alias.h>
#include <ATen/record_function.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <mutex>
#include <optional>

namespace deepsp {

namespace symmetric = c10d::symmetric_memory;

namespace {

constexpr int64_t kHalf = int64_t(64) << 20;

// The memory of all ranks' stages.
struct Region {
  at::Tensor memory;
  c10::intrusive_ptr<symmetric::SymmetricMemory> mapped;

  Region(at::Tensor allocated, const Group& group)
      : memory(std::move(allocated)), mapped(symmetric::rendezvous(memory, group.name)) {
    TORCH_CHECK(
        mapped->world_within_direct_access(), "a GPU doesn't reach the memory of another one");
    TORCH_CHECK(
        group.size <= kMostSignals &&
            Stages::word_bytes(group.size) <= static_cast<int64_t>(mapped->get_signal_pad_size()),
        "the group has too many ranks for signals");
  }

  Stages stages(const Group& group, c10::Device device) const {
    const auto timeout = std::chrono::nanoseconds(timeout_of(group, device));
    return Stages(
        group.rank, mapped->get_buffer_ptrs(), mapped->get_signal_pad_ptrs(), kHalf,
        static_cast<uint64_t>(timeout.count()));
  }
};

// The work of an exchange: a wait makes the current stream wait for the exchange's stream.
class StreamWork final : public c10d::Work {
 public:
  explicit StreamWork(c10::Stream stream) : device_(stream.device()), event_(device_.type()) {
    event_.record(stream);
  }

  bool isCompleted() override { return event_.query(); }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    event_.block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }

 private:
  c10::Device device_;
  c10::Event event_;
};

c10::cuda::CUDAStream high_priority_stream(c10::Device device) {
  return c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index());
}

class Symmetric final : public Staged, Lanes {
 public:
  Symmetric(const Group& group, at::Tensor memory, c10::Device device)
      : device_(device),
        writing_(high_priority_stream(device)),
        taking_(high_priority_stream(device)),
        region_(std::move(memory), group),
        stages_(region_.stages(group, device)) {}

  std::unique_ptr<Flight> exchange(
      const Group& group,
      const std::vector<int64_t>& bytes,
      const at::Tensor& buffer,
      at::TensorList reads,
      const AddCopies& add_copies) override {
    RECORD_FUNCTION("deepsp::exchange", {});
    std::lock_guard<std::mutex> lock(mutex_);
    c10::cuda::CUDAGuard device_guard(device_);
    const c10::Stream current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
    std::vector<std::vector<StridedCopy>> copies(group.size);
    for (int64_t p = 0; p < group.size; ++p) {
      add_copies(p, stages_.begin(p), copies[p]);
    }
    order(current, writing_);
    C10_CUDA_CHECK(
        stages_.exchange(copies, bytes, static_cast<char*>(buffer.mutable_data_ptr()), *this));
    auto flight = std::make_unique<Flight>();
    flight->collective =
        shared(c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<StreamWork>(taking_)));
    flight->together = true;
    flight->stream = current;
    // The streams use all of it until the flight was waited for, or is done.
    flight->done_on_device = true;
    flight->holds = reads.vec();
    flight->holds.push_back(at::alias(buffer));
    return flight;
  }

 private:
  cudaStream_t writing() override { return writing_; }
  cudaStream_t taking() override { return taking_; }
  void writing_waits() override { order(taking_, writing_); }
  void taking_waits() override { order(writing_, taking_); }
  // The second one waits for what the first one was given so far.
  static void order(c10::Stream first, c10::Stream second) {
    c10::Event so_far(first.device_type());
    so_far.record(first);
    so_far.block(second);
  }

  c10::Device device_;
  c10::cuda::CUDAStream writing_, taking_;
  std::mutex mutex_;
  Region region_;
  Stages stages_;
};

}  // namespace

at::Tensor allocate_stage(c10::Device device) {
  return symmetric::empty_strided_p2p(
      {2 * kHalf}, {1}, at::kByte, device, std::nullopt, std::nullopt);
}

std::shared_ptr<Staged> make_staged(const Group& group, at::Tensor stage, c10::Device device) {
  return std::make_shared<Symmetric>(group, std::move(stage), device);
}

}  // namespace deepsp
#endif
