#ifdef DEEPSP_CUDA
#include "staged.h"

#include "../kernels/signal.h"
#include "c10d.h"
#include "stages.h"

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

// The first size of a half; it grows by powers of two.
constexpr int64_t kFirstHalf = int64_t(4) << 20;

// The memory of all ranks' stages.
struct Region {
  at::Tensor memory;
  c10::intrusive_ptr<symmetric::SymmetricMemory> mapped;

  static at::Tensor allocate(int64_t half_bytes, c10::Device device) {
    return symmetric::empty_strided_p2p(
        {2 * half_bytes}, {1}, at::kByte, device, std::nullopt, std::nullopt);
  }
  Region(at::Tensor allocated, const Group& group)
      : memory(std::move(allocated)), mapped(symmetric::rendezvous(memory, group.name)) {
    TORCH_CHECK(
        mapped->world_within_direct_access(), "a GPU doesn't reach the memory of another one");
    TORCH_CHECK(
        group.size <= kMostSignals &&
            Stages::word_bytes(group.size) <= static_cast<int64_t>(mapped->get_signal_pad_size()),
        "the group has too many ranks for signals");
  }

  Stages stages(const Group& group, int64_t half_bytes, c10::Device device) const {
    const auto timeout = std::chrono::nanoseconds(timeout_of(group, device));
    return Stages(
        group.rank, mapped->get_buffer_ptrs(), mapped->get_signal_pad_ptrs(), half_bytes,
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

class Symmetric final : public Staged {
 public:
  Symmetric(const Group& group, at::Tensor memory, c10::Device device)
      : device_(device),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index())),
        half_bytes_(memory.numel() / 2),
        region_(std::in_place, std::move(memory), group),
        stages_(region_->stages(group, half_bytes_, device)) {}

  std::unique_ptr<Flight> exchange(
      const Group& group,
      const std::vector<int64_t>& bytes,
      const at::Tensor& buffer,
      at::TensorList reads,
      const std::function<void(const Buffers&)>& write) override {
    RECORD_FUNCTION("deepsp::exchange", {});
    std::lock_guard<std::mutex> lock(mutex_);
    c10::cuda::CUDAGuard device_guard(device_);
    const c10::impl::VirtualGuardImpl streams(device_.type());
    const c10::Stream current = streams.getStream(device_);
    grow(group, *std::max_element(bytes.begin(), bytes.end()));

    c10::Event before(device_.type());
    before.record(current);
    before.block(stream_);
    {
      c10::cuda::CUDAStreamGuard stream_guard(stream_);
      Buffers buffers;
      for (int64_t p = 0; p < group.size; ++p) {
        buffers.push_back(stages_.half(p));
      }
      write(buffers);
      C10_CUDA_CHECK(stages_.arrive(stream_.stream()));
      C10_CUDA_CHECK(stages_.take(
          static_cast<char*>(buffer.mutable_data_ptr()), bytes[group.rank], stream_.stream()));
    }
    streams.recordDataPtrOnStream(buffer.storage().data_ptr(), stream_);
    for (const at::Tensor& read : reads) {
      streams.recordDataPtrOnStream(read.storage().data_ptr(), stream_);
    }
    auto flight = std::make_unique<Flight>();
    flight->collective =
        shared(c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<StreamWork>(stream_)));
    flight->together = true;
    flight->stream = current;
    return flight;
  }

 private:
  // All ranks grow in the same exchange, since their sizes are alike.
  void grow(const Group& group, int64_t bytes) {
    if (bytes <= half_bytes_) {
      return;
    }
    int64_t half_bytes = half_bytes_;
    while (half_bytes < bytes) {
      half_bytes *= 2;
    }
    // The rendezvous ends when all ranks have come this far, and so have done with the old region.
    stream_.synchronize();
    std::optional<Region> larger(std::in_place, Region::allocate(half_bytes, device_), group);
    region_.swap(larger);
    half_bytes_ = half_bytes;
    stages_ = region_->stages(group, half_bytes_, device_);
  }

  c10::Device device_;
  c10::cuda::CUDAStream stream_;
  int64_t half_bytes_;
  std::mutex mutex_;
  std::optional<Region> region_;
  Stages stages_;
};

}  // namespace

at::Tensor allocate_stage(c10::Device device) {
  return Region::allocate(kFirstHalf, device);
}

std::shared_ptr<Staged> make_staged(const Group& group, at::Tensor stage, c10::Device device) {
  return std::make_shared<Symmetric>(group, std::move(stage), device);
}

}  // namespace deepsp
#endif
