#include "introduction.h"

#include "launch.h"

#include <ATen/ops/empty.h>

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <numeric>
#include <stdexcept>

namespace deepsp {

const char* word_of(Wanted wanted) {
  return wanted == Wanted::mapped ? "mapped" : wanted == Wanted::messages ? "messages" : "auto";
}

Wanted wanted_of(const std::string& word, const char* name) {
  for (const Wanted wanted : {Wanted::automatic, Wanted::mapped, Wanted::messages}) {
    if (word == word_of(wanted)) {
      return wanted;
    }
  }
  TORCH_CHECK_VALUE(
      false, "expected ", name, " to be \"auto\", \"mapped\" or \"messages\", got \"", word, "\"");
}

Wanted wanted_by_default() {
  const char* const word = std::getenv("DEEPSP_TRANSPORT");
  return word == nullptr ? Wanted::automatic : wanted_of(word, "DEEPSP_TRANSPORT");
}

void check_alike(const Group& group, const std::function<Wanted(int64_t)>& wanted_by) {
  const Wanted first = wanted_by(0);
  for (int64_t p = 1; p < group.size; ++p) {
    TORCH_CHECK_VALUE(
        wanted_by(p) == first, "expected all ranks of group '", group.name,
        "' to use the same transport, got ", word_of(first), " on rank 0 and ",
        word_of(wanted_by(p)), " on rank ", p,
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
  wait_for(group, launch_all_gather(group, heard, said.to(there)));
  const at::Tensor all = heard.cpu();
  return {static_cast<const char*>(all.const_data_ptr()), static_cast<size_t>(all.numel())};
}

}  // namespace deepsp
