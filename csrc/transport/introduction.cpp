#include "introduction.h"

#include "launch.h"

#include <ATen/ops/empty.h>

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <numeric>
#include <stdexcept>
#include <string_view>

namespace deepsp {

const char* word_of(Wanted wanted) {
  return wanted == Wanted::mapped ? "mapped" : wanted == Wanted::messages ? "messages" : "auto";
}

namespace {

std::optional<Wanted> known(std::string_view word) {
  for (const Wanted wanted : {Wanted::automatic, Wanted::mapped, Wanted::messages}) {
    if (word == word_of(wanted)) {
      return wanted;
    }
  }
  return std::nullopt;
}

}  // namespace

Wanted wanted_of(const std::string& word, const char* name) {
  const std::optional<Wanted> wanted = known(word);
  TORCH_CHECK_VALUE(
      wanted.has_value(), "expected ", name, " to be \"auto\", \"mapped\" or \"messages\", got \"",
      word, "\"");
  return *wanted;
}

Request request_of(std::optional<Wanted> use) {
  const char* const word = std::getenv("DEEPSP_TRANSPORT");
  Request request;
  if (use.has_value() || word == nullptr) {
    request.wanted = use.value_or(Wanted::automatic);
  } else if (const std::optional<Wanted> wanted = known(word)) {
    request.wanted = *wanted;
  } else {
    request.unknown_word = *word == '\0' ? " " : word;
  }
  return request;
}

void check_requests(const Group& group, const std::function<const Request&(int64_t)>& request_by) {
  for (int64_t p = 0; p < group.size; ++p) {
    const std::string unknown = request_by(p).unknown_word.str();
    TORCH_CHECK_VALUE(
        unknown.empty(),
        "expected DEEPSP_TRANSPORT to be \"auto\", \"mapped\" or \"messages\", got \"", unknown,
        "\" on rank ", p, " of group '", group.name, "'; set it alike on every rank, or unset it");
  }
  const Wanted first = request_by(0).wanted;
  for (int64_t p = 1; p < group.size; ++p) {
    TORCH_CHECK_VALUE(
        request_by(p).wanted == first, "expected all ranks of group '", group.name,
        "' to use the same transport, got ", word_of(first), " on rank 0 and ",
        word_of(request_by(p).wanted), " on rank ", p,
        "; set DEEPSP_TRANSPORT, or the argument of deepsp.transport, alike on every rank");
  }
}

Reach Reach::nobody(int64_t size, const std::string& why) {
  Reach reach{std::vector<int64_t>(size), std::vector<std::string>(size, why)};
  std::iota(reach.machine.begin(), reach.machine.end(), 0);
  return reach;
}

std::string machine_word() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  struct stat network{};
  if (boot.empty() || stat("/proc/self/ns/net", &network) != 0) {
    throw std::runtime_error("/proc doesn't say which machine this is");
  }
  std::string word = boot + "/" + std::to_string(network.st_ino) + "/" + std::to_string(geteuid());
  // For tests: ranks that say different words are on different machines.
  if (const char* other = std::getenv("DEEPSP_TEST_MACHINE")) {
    word += std::string("/") + other;
  }
  return word;
}

std::string all_bytes(const Group& group, const void* mine, int64_t bytes, c10::Device device) {
  const at::Tensor said = at::empty({bytes}, at::kByte);
  std::memcpy(said.mutable_data_ptr(), mine, bytes);
  const at::TensorOptions there = said.options().device(device);
  const at::Tensor heard = at::empty({group.size * bytes}, there);
  gather_from_all(group, heard, said.to(there));
  const at::Tensor all = heard.cpu();
  return {static_cast<const char*>(all.const_data_ptr()), static_cast<size_t>(all.numel())};
}

}  // namespace deepsp
