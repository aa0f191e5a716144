#include "request.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <numeric>
#include <stdexcept>
#include <string_view>

namespace deepsp {

namespace {

const char* word_of(Wanted wanted) {
  return wanted == Wanted::mapped ? "mapped" : wanted == Wanted::messages ? "messages" : "auto";
}

std::optional<Wanted> known(std::string_view word) {
  for (const Wanted wanted : {Wanted::automatic, Wanted::mapped, Wanted::messages}) {
    if (word == word_of(wanted)) {
      return wanted;
    }
  }
  return std::nullopt;
}

}  // namespace

Wanted parse_wanted(const std::string& word, const char* name) {
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

void check_requests(const Group& group, const std::function<const Request&(int64_t)>& request_of) {
  for (int64_t p = 0; p < group.size; ++p) {
    const std::string unknown = request_of(p).unknown_word.str();
    TORCH_CHECK_VALUE(
        unknown.empty(),
        "expected DEEPSP_TRANSPORT to be \"auto\", \"mapped\" or \"messages\", got \"", unknown,
        "\" on rank ", p, " of group '", group.name, "'; set it alike on every rank, or unset it");
  }
  const Wanted first = request_of(0).wanted;
  for (int64_t p = 1; p < group.size; ++p) {
    TORCH_CHECK_VALUE(
        request_of(p).wanted == first, "expected all ranks of group '", group.name,
        "' to use the same transport, got ", word_of(first), " on rank 0 and ",
        word_of(request_of(p).wanted), " on rank ", p,
        "; set DEEPSP_TRANSPORT, or the argument of deepsp.transport, alike on every rank");
  }
}

Reach Reach::nobody(int64_t size, const std::string& why) {
  Reach reach{std::vector<int64_t>(size), std::vector<std::string>(size, why)};
  std::iota(reach.machine.begin(), reach.machine.end(), 0);
  return reach;
}

std::string machine_id() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  struct stat network{};
  if (boot.empty() || stat("/proc/self/ns/net", &network) != 0) {
    throw std::runtime_error("/proc doesn't say which machine this is");
  }
  std::string id = boot + "/" + std::to_string(network.st_ino) + "/" + std::to_string(geteuid());
  // For tests: ranks with different words count as on different machines.
  if (const char* other = std::getenv("DEEPSP_TEST_MACHINE")) {
    id += std::string("/") + other;
  }
  return id;
}

}  // namespace deepsp
