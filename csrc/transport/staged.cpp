#include "staged.h"

#ifdef DEEPSP_CUDA
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
#endif

namespace deepsp {

#ifdef DEEPSP_CUDA

namespace symmetric = c10d::symmetric_memory;

namespace {

// Halves grow by powers of two from here on.
constexpr int64_t kFirstHalf = int64_t(4) << 20;

// Memory of all ranks.
struct Region {
  at::Tensor memory;
  c10::intrusive_ptr<symmetric::SymmetricMemory> mapped;

  static at::Tensor allocate(int64_t half_bytes, c10::Device device) {
    return symmetric::empty_strided_p2p(
        {2 * half_bytes}, {1}, at::kByte, device, std::nullopt, std::nullopt);
  }
  Region(at::Tensor of, const Group& group)
      : memory(std::move(of)), mapped(symmetric::rendezvous(memory, group.name)) {
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
        group.rank, of<char>(mapped->get_buffer_ptrs()),
        of<uint64_t>(mapped->get_signal_pad_ptrs()), half_bytes,
        static_cast<uint64_t>(timeout.count()));
  }

 private:
  template <class T>
  static std::vector<T*> of(const std::vector<void*>& pointers) {
    std::vector<T*> found;
    for (void* const pointer : pointers) {
      found.push_back(static_cast<T*>(pointer));
    }
    return found;
  }
};

// What waits for it comes after it.
class Landing final : public c10d::Work {
 public:
  explicit Landing(c10::Stream stream) : device_(stream.device()), event_(device_.type()) {
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
        shared(c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<Landing>(stream_)));
    flight->together = true;
    flight->stream = current;
    return flight;
  }

 private:
  // All ranks come here with the same sizes, so they meet.
  void grow(const Group& group, int64_t bytes) {
    if (bytes <= half_bytes_) {
      return;
    }
    int64_t half_bytes = half_bytes_;
    while (half_bytes < bytes) {
      half_bytes *= 2;
    }
    // Nobody writes into the old one any more when all ranks have come this far.
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

struct Offer {
  Request request;
  Text<160> machine;
  Outcome allocated;
};

}  // namespace

std::pair<Reach, std::shared_ptr<Staged>> connect_gpus(
    const Group& group, const Request& request, c10::Device device) {
  Offer mine{request, {}, {}};
  at::Tensor memory;
  const Wanted wanted = request.wanted;
  if (wanted == Wanted::mapped) {
    mine.allocated = outcome_of([&] {
      mine.machine = machine_word();
      memory = Region::allocate(kFirstHalf, device);
    });
  }
  const std::vector<Offer> offers = all_say(group, mine, device);
  check_requests(group, [&](int64_t p) -> const Request& { return offers[p].request; });
  if (wanted != Wanted::mapped) {
    const bool messages = wanted == Wanted::messages;
    return {
        Reach::nobody(
            group.size, messages ? "messages are asked for"
                                 : "GPUs write into each other's memory only where that is asked "
                                   "for, by use=\"mapped\": it is new"),
        nullptr};
  }
  const auto check = [&](int64_t p, bool reaches, const std::string& why) {
    TORCH_CHECK_VALUE(
        reaches, "expected all ranks of group '", group.name,
        "' to reach each other's memory, since the transport is \"mapped\", but rank ", p,
        " doesn't (", why, "); use \"auto\" or \"messages\"");
  };
  for (int64_t p = 0; p < group.size; ++p) {
    check(p, offers[p].allocated.done, offers[p].allocated.why.str());
    check(
        p, offers[p].machine.str() == offers[0].machine.str(),
        "it runs on another machine than rank 0");
  }

  std::shared_ptr<Staged> staged;
  const std::vector<Outcome> outcomes = all_say(
      group,
      outcome_of([&] { staged = std::make_shared<Symmetric>(group, std::move(memory), device); }),
      device);
  for (int64_t p = 0; p < group.size; ++p) {
    check(p, outcomes[p].done, outcomes[p].why.str());
  }
  return {
      {std::vector<int64_t>(group.size, 0), std::vector<std::string>(group.size)},
      std::move(staged)};
}

#else

std::pair<Reach, std::shared_ptr<Staged>> connect_gpus(
    const Group& group, const Request&, c10::Device) {
  return {Reach::nobody(group.size, "deepsp was built without CUDA"), nullptr};
}

#endif

}  // namespace deepsp
