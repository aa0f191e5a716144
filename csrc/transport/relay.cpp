#include "relay.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

namespace deepsp {

Relay::~Relay() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Relay::add(std::function<void()> job) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  changed_.notify_all();
}

void Relay::work() {
  at::init_num_threads();
  at::AutoDispatchBelowADInplaceOrView guard;  // as in a kernel
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return closed_ || !jobs_.empty(); });
    if (jobs_.empty()) {
      return;
    }
    auto job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    job = nullptr;
    lock.lock();
  }
}

}  // namespace deepsp
