#pragma once
// A thread that does what a start can't do, since it waits for nobody: it waits until other ranks
// have written, and passes on what is made of that.

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace deepsp {

class Relay {
 public:
  Relay() : thread_([this] { work(); }) {}
  // Does all jobs first.
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // Jobs are done one after another, in the order in which they were added. They don't throw.
  void add(std::function<void()> job);

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  bool closed_ = false;
  std::thread thread_;  // the last member: it uses all others
};

}  // namespace deepsp
