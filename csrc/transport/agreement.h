#pragma once
// What ranks tell each other, and whether all of them make the same call.

#include "../common/checks.h"
#include "errors.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

namespace deepsp {

// Continues a hash, alike on all ranks, with more bytes. FNV-1a.
constexpr uint64_t kNoHash = 14695981039346656037ull;
inline uint64_t hash_bytes(uint64_t hash, const void* data, size_t size) {
  for (size_t i = 0; i < size; ++i) {
    hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211ull;
  }
  return hash;
}

// ValueError, on every rank, unless all ranks pass the same: names the first difference, and which
// ranks pass what. Each of `arguments` begins with the argument's name. It costs one collective of
// 16 bytes a rank, and another one if they differ: on a module's first call, and on each with
// DEEPSP_DEBUG=1.
void check_agreement(
    const Group& group, c10::Device device, const std::vector<std::string>& arguments);

// The group of a call, by resolve_group. With DEEPSP_DEBUG=1, also checks that its ranks make the
// same call, by the `arguments()` that tell calls apart.
template <class Arguments>
Group agreed_group(
    const char* op,
    std::string_view name,
    int64_t rank,
    int64_t size,
    c10::Device device,
    const char* sizes,
    const Arguments& arguments) {
  Group group = resolve_group(op, name, rank, size, device, sizes);
  if (debugging()) {
    check_agreement(group, device, arguments());
  }
  return group;
}

template <class T>
const T& printable(const T& part) {
  return part;
}
template <class T>
at::ArrayRef<T> printable(const std::vector<T>& part) {
  return part;
}
inline std::string printable(at::ScalarType part) {
  return dtype_name(part);
}

// The parts as one text.
template <class... Parts>
std::string to_text(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << printable(parts));
  return text.str();
}

// A string in a struct that is sent to other ranks.
template <size_t size>
struct Text {
  char data[size] = {};

  Text& operator=(const std::string& text) {
    std::memset(data, 0, size);
    std::memcpy(data, text.data(), std::min(text.size(), size - 1));
    return *this;
  }
  // A peer may have sent `size` bytes without a zero.
  std::string str() const { return {data, strnlen(data, size)}; }
};

// Whether something that a rank did by itself succeeded.
struct Outcome {
  bool done;
  Text<240> why;  // it failed
};
template <class Act>
Outcome outcome_of(const Act& act) {
  Outcome outcome{true, {}};
  try {
    act();
  } catch (const std::exception& error) {
    outcome.done = false;
    outcome.why = message_of(error);
  }
  return outcome;
}

// Every rank's `bytes` bytes, in rank order, sent as tensors on `device`.
std::string gather_bytes(const Group& group, const void* mine, int64_t bytes, c10::Device device);
// Every rank's `mine`.
template <class T>
std::vector<T> gather_structs(const Group& group, const T& mine, c10::Device device = at::kCPU) {
  const std::string bytes = gather_bytes(group, &mine, sizeof(T), device);
  std::vector<T> all(group.size);
  std::memcpy(static_cast<void*>(all.data()), bytes.data(), bytes.size());
  return all;
}

}  // namespace deepsp
