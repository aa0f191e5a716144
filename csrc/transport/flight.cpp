#include "flight.h"

#include "c10d.h"
#include "errors.h"

#include <torch/csrc/autograd/anomaly_mode.h>

#ifdef DEEPSP_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace deepsp {

bool waits_at_once() {
  return torch::autograd::AnomalyMode::is_enabled() || debugging();
}

void clear_if_waiting_at_once(const at::Tensor& buffer) {
  if (waits_at_once()) {
    buffer.zero_();
  }
}

bool capturing([[maybe_unused]] c10::Device device) {
#ifdef DEEPSP_CUDA
  if (device.is_cuda()) {
    cudaStreamCaptureStatus status{};
    C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(device.index()), &status));
    return status != cudaStreamCaptureStatusNone;
  }
#endif
  return false;
}

int64_t current_stream([[maybe_unused]] c10::Device device) {
#ifdef DEEPSP_CUDA
  if (device.is_cuda()) {
    return c10::cuda::getCurrentCUDAStream(device.index()).id();
  }
#endif
  return 0;
}

Flight::~Flight() {
  if (failed_ || stream.has_value()) {
    return;
  }
  try {
    wait_all();
  } catch (const std::exception&) {
    // The group is broken: its next use raises.
  }
}

template <class Wait>
void Flight::wait(int64_t source, const Wait& wait) {
  failed_ = true;  // unless it doesn't throw
  try {
    with_context([&] { return what; }, source, wait);
  } catch (...) {
    if (mapped) {
      mapped->fail();  // peers may still write here, and wait for blocks of this rank
    }
    throw;
  }
  failed_ = false;
}

void Flight::wait(Work& work, int64_t source) {
  if (work) {
    wait(source, [&] { work->wait(); });
    work.reset();
  }
}

void Flight::wait_receive(int64_t source) {
  for (std::vector<Work>& by_source : receives) {
    wait(by_source[source], source);
  }
  if (mapped && mapped->reaches(source)) {
    wait(source, [&] { mapped->wait(exchange, source); });
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
  const int64_t size = mapped             ? mapped->size()
                       : receives.empty() ? 0
                                          : static_cast<int64_t>(receives[0].size());
  for (int64_t source = 0; source < size; ++source) {
    wait_receive(source);
  }
  wait(collective);
  wait_sends();
}

void Flight::wait_messages() {
  std::vector<int64_t> missing;
  std::string why;
  failed_ = true;
  for (size_t source = 0; source < receives[0].size(); ++source) {
    const Work& work = receives[0][source];
    try {
      if (work && missing.empty()) {
        work->wait();
      } else if (work) {
        work->wait(std::chrono::milliseconds(1));  // the first wait took the whole timeout
      }
    } catch (const std::exception& error) {
      why = missing.empty() ? message_of(error) : why;
      missing.push_back(static_cast<int64_t>(source));
    }
  }
  if (!missing.empty()) {
    raise_failed(what, missing, why);
  }
  receives.clear();
  failed_ = false;
  wait_sends();
}

std::unique_ptr<Flight> Flight::release_if_done() {
  if (!done_on_device || !collective || !collective->isCompleted() || collective->exception()) {
    return nullptr;
  }
  auto done = std::make_unique<Flight>();
  done->stream = stream;
  done->collective = std::move(collective);
  done->holds = std::move(holds);
  return done;
}

}  // namespace deepsp
