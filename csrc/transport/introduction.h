#pragma once
// What the ranks of a group tell each other before they choose how blocks travel.

#include "group.h"

#include <ATen/core/Tensor.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace deepsp {

// How blocks are to travel. automatic: by memory where that is possible.
enum class Wanted { automatic, mapped, messages };
// ValueError unless it is "auto", "mapped" or "messages"; `name`: what messages call it.
Wanted wanted_of(const std::string& word, const char* name);
const char* word_of(Wanted wanted);

// What all ranks know of all ranks.
struct Reach {
  // By rank: the lowest rank among those whose memory it reaches, itself included; a rank that
  // stands alone reaches nobody's.
  std::vector<int64_t> machine;
  // By rank: why it stands alone; else empty.
  std::vector<std::string> why;

  bool reaches(int64_t rank, int64_t other) const { return machine[rank] == machine[other]; }
  // Everybody stands alone, for the same reason.
  static Reach nobody(int64_t size, const std::string& why);
};

// Ranks with the same word may share memory: one kernel, one network, one user.
std::string machine_word();

// A string that travels in a struct.
template <size_t size>
struct Text {
  char data[size] = {};

  Text& operator=(const std::string& text) {
    std::memset(data, 0, size);
    std::memcpy(data, text.data(), std::min(text.size(), size - 1));
    return *this;
  }
  // The other end may have sent `size` bytes without a zero.
  std::string str() const { return {data, strnlen(data, size)}; }
};

// What a rank asks for. A wrong word in its environment is sent to the other ranks, too: if it
// raised at once, they would wait for this rank.
struct Request {
  Wanted wanted = Wanted::automatic;
  Text<40> unknown_word;  // of DEEPSP_TRANSPORT; empty: it has a known one, or none
};
// `use` if given, else what DEEPSP_TRANSPORT says.
Request request_of(std::optional<Wanted> use);
// ValueError unless all ranks ask for the same; request_by(p): what rank p asks for.
void check_requests(const Group& group, const std::function<const Request&(int64_t)>& request_by);

// What came of something that a rank did on its own.
struct Outcome {
  bool done;
  Text<240> why;  // it isn't
};
// Of act(), which may throw.
template <class Act>
Outcome outcome_of(const Act& act) {
  Outcome outcome{true, {}};
  try {
    act();
  } catch (const std::exception& error) {
    const auto* ours = dynamic_cast<const c10::Error*>(&error);
    outcome.done = false;
    outcome.why = ours ? ours->what_without_backtrace() : error.what();
  }
  return outcome;
}

// Every rank's `bytes` bytes, behind one another; they travel in tensors on `device`.
std::string all_bytes(const Group& group, const void* mine, int64_t bytes, c10::Device device);
// Every rank's `mine`.
template <class T>
std::vector<T> all_say(const Group& group, const T& mine, c10::Device device = at::kCPU) {
  const std::string said = all_bytes(group, &mine, sizeof(T), device);
  std::vector<T> all(group.size);
  std::memcpy(static_cast<void*>(all.data()), said.data(), said.size());
  return all;
}

}  // namespace deepsp
