#include "flight.h"

#include "agreement.h"
#include "c10d.h"
#include "errors.h"
#include "mapped.h"
#include "pool.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#ifdef DEEPSP_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

namespace deepsp {

bool watched() {
  return torch::autograd::AnomalyMode::is_enabled() || debugging();
}

void clear_if_watched(const at::Tensor& buffer) {
  if (watched()) {
    buffer.zero_();
  }
}

Flight::~Flight() {
  if (failed_ || stream.has_value()) {
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
  try {
    with_context([&] { return what; }, from, [&] { return work->wait(); });
  } catch (...) {
    if (mapped) {
      mapped->fail();  // others may still write, and wait for what this rank won't write any more
    }
    throw;
  }
  failed_ = false;
  work.reset();
}

void Flight::wait_mapped(int64_t source) {
  failed_ = true;
  with_context([&] { return what; }, source, [&] { mapped->wait(exchange, source); });
  failed_ = false;
}

void Flight::wait_receive(int64_t source) {
  for (std::vector<Work>& by_source : receives) {
    wait(by_source[source], source);
  }
  if (!on_arrival.empty() && on_arrival[source]) {
    std::exchange(on_arrival[source], nullptr)();
  }
  if (mapped && mapped->reaches(source)) {
    wait_mapped(source);
  }
  wait(collective);
}

void Flight::wait_sends() {
  for (Work& work : sends) {
    wait(work);
  }
  holds.clear();
}

void Flight::wait_naming_all() {
  std::vector<int64_t> missing;
  std::string why;
  failed_ = true;
  for (size_t source = 0; source < receives[0].size(); ++source) {
    const Work& work = receives[0][source];
    try {
      if (work && missing.empty()) {
        work->wait();
      } else if (work) {
        work->wait(std::chrono::milliseconds(1));  // the others have had as long
      }
    } catch (const std::exception& error) {
      why = missing.empty() ? text_of(error) : why;
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

void Flight::wait_all() {
  const size_t size = mapped ? mapped->size() : receives.empty() ? 0 : receives[0].size();
  for (size_t source = 0; source < size; ++source) {
    wait_receive(static_cast<int64_t>(source));
  }
  wait(collective);
  wait_sends();
}

namespace {

c10::Stream current_stream(const at::Tensor& of) {
  return c10::impl::VirtualGuardImpl(of.device().type()).getStream(of.device());
}

// Memory belongs to the stream that it was made for: torch gives it to the next tensor of that
// stream as soon as its own is gone. What another stream waits for, it uses, too.
void used_on_current_stream(const at::Tensor& buffer, const Flight& flight) {
  const c10::Stream current = current_stream(buffer);
  if (current == *flight.stream) {
    return;
  }
  if (!flight.collective) {  // whose wait would order the streams
    c10::Event so_far(buffer.device().type());
    so_far.record(*flight.stream);
    so_far.block(current);
  }
  const c10::impl::VirtualGuardImpl device(buffer.device().type());
  device.recordDataPtrOnStream(buffer.storage().data_ptr(), current);
  for (const at::Tensor& sent : flight.holds) {
    device.recordDataPtrOnStream(sent.storage().data_ptr(), current);
  }
}

}  // namespace

void made_here(const at::Tensor& buffer) {
  if (!buffer.is_cpu()) {
    auto flight = std::make_unique<Flight>();
    flight->stream = current_stream(buffer);
    flight->local = true;
    set_flight(buffer, std::move(flight));
  }
}

std::unique_ptr<Flight> let_go_if_done(Flight& flight) {
  const Work& work = flight.collective;
  if (!flight.done_on_device || !work || !work->isCompleted() || work->exception()) {
    return nullptr;
  }
  auto done = std::make_unique<Flight>();
  done->stream = flight.stream;
  done->collective = std::move(flight.collective);
  done->holds = std::move(flight.holds);
  return done;
}

bool capturing([[maybe_unused]] c10::Device device) {
#ifdef DEEPSP_CUDA
  if (device.is_cuda()) {
    return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  }
#endif
  return false;
}

void launch_into(const at::Tensor& buffer, std::unique_ptr<Flight> flight) {
  set_flight(buffer, std::move(flight));
}

void launch_into(
    const Group& group, const at::Tensor& buffer, const Work& work, const at::Tensor& sent) {
  auto flight = std::make_unique<Flight>();
  flight->what = name_of(group);
  flight->collective = work;
  flight->together = true;
  if (!buffer.is_cpu()) {
    flight->stream = current_stream(buffer);
    flight->done_on_device = group.done_on_device && !capturing(buffer.device());
  }
  if (!sent.is_alias_of(buffer)) {
    flight->holds.push_back(sent);
  }
  if (watched()) {
    return flight->wait_all();
  }
  set_flight(buffer, std::move(flight));
}

std::unique_ptr<Flight> land(const at::Tensor& buffer) {
  auto flight = flight_into(buffer);
  if (flight) {
    flight->wait_all();
    mark_landed(buffer, *flight);
  }
  return flight;
}

void mark_landed(const at::Tensor& buffer, const Flight& flight) {
  auto landed = std::make_unique<Flight>();
  landed->landed = true;
  landed->together = flight.together;
  landed->order = flight.order;
  set_flight(buffer, std::move(landed));
}

namespace {

template <class T>
T asked(const at::Tensor& buffer, T Flight::* what) {
  auto flight = take_flight(buffer);
  if (!flight) {
    return T{};
  }
  const T found = (*flight).*what;
  set_flight(buffer, std::move(flight));
  return found;
}

}  // namespace

bool has_landed(const at::Tensor& buffer) {
  return asked(buffer, &Flight::landed);
}

bool travels_together(const at::Tensor& buffer) {
  return !buffer.is_cpu() || asked(buffer, &Flight::together);
}

Order order_of(const at::Tensor& buffer) {
  return asked(buffer, &Flight::order);
}

std::unique_ptr<Flight> flight_into(const at::Tensor& buffer) {
  TORCH_CHECK_VALUE(
      !asked(buffer, &Flight::landed),
      "expected a buffer that hasn't been waited for, got one that was waited for already; call "
      "the wait once for each start");
  auto flight = take_flight(buffer);
  if (flight && flight->stream.has_value()) {
    used_on_current_stream(buffer, *flight);
  }
  if (flight && flight->local) {
    set_flight(buffer, std::move(flight));
    return nullptr;
  }
  return flight;
}

}  // namespace deepsp
