#include "agreement.h"

#include "c10d.h"
#include "launch.h"

#include <ATen/ops/empty.h>

#include <torch/library.h>

namespace deepsp {
namespace {

// A group without peers: its collectives return anything.
bool is_fake(const Group& group) {
  return group.pg->getBackendName() == "fake";
}

std::string line_of(const std::string& text, size_t n) {
  size_t begin = 0;
  for (size_t i = 0; i < n; ++i) {
    begin = text.find('\n', begin);
    if (begin == std::string::npos) {
      return "nothing";
    }
    ++begin;
  }
  return text.substr(begin, text.find('\n', begin) - begin);
}

// The first line in which `texts` differ: each version, and which ranks pass it.
std::string first_difference(const std::vector<std::string>& texts) {
  for (size_t n = 0;; ++n) {
    std::vector<std::pair<std::string, std::vector<int64_t>>> versions;
    for (size_t p = 0; p < texts.size(); ++p) {
      const std::string line = line_of(texts[p], n);
      auto version = std::find_if(
          versions.begin(), versions.end(), [&](const auto& other) { return other.first == line; });
      if (version == versions.end()) {
        version = versions.insert(versions.end(), {line, {}});
      }
      version->second.push_back(static_cast<int64_t>(p));
    }
    if (versions.size() > 1) {
      std::string text;
      for (const auto& [line, ranks] : versions) {
        text += text.empty() ? "" : ", ";
        text += list_ranks(ranks) + (ranks.size() == 1 ? " passes " : " pass ") + line;
      }
      return text;
    }
  }
}

}  // namespace

std::string gather_bytes(const Group& group, const void* mine, int64_t bytes, c10::Device device) {
  const at::Tensor sent = at::empty({bytes}, at::kByte);
  std::memcpy(sent.mutable_data_ptr(), mine, bytes);
  const at::TensorOptions options = sent.options().device(device);
  const at::Tensor received = at::empty({group.size * bytes}, options);
  gather_from_all(group, received, sent.to(options));
  const at::Tensor all = received.cpu();
  return {static_cast<const char*>(all.const_data_ptr()), static_cast<size_t>(all.numel())};
}

void check_agreement(
    const Group& group, c10::Device device, const std::vector<std::string>& arguments) {
  if (group.size == 1 || is_fake(group)) {
    return;
  }
  std::string mine = group.op;
  for (const std::string& argument : arguments) {
    mine += '\n' + argument;
  }
  struct Summary {
    uint64_t hash, length;
    bool operator==(const Summary& other) const {
      return hash == other.hash && length == other.length;
    }
  };
  const Summary summary{hash_bytes(kNoHash, mine.data(), mine.size()), mine.size()};
  const std::vector<Summary> all = gather_structs(group, summary, device);
  if (std::count(all.begin(), all.end(), summary) == group.size) {
    return;  // otherwise no rank returns here
  }
  uint64_t longest = 0;
  for (const Summary& theirs : all) {
    longest = std::max(longest, theirs.length);
  }
  mine.resize(longest);
  const std::string padded =
      gather_bytes(group, mine.data(), static_cast<int64_t>(longest), device);
  std::vector<std::string> texts;
  for (const Summary& theirs : all) {
    texts.push_back(padded.substr(texts.size() * longest, theirs.length));
  }
  TORCH_CHECK_VALUE(
      false, group.op, ": ranks disagree: ", first_difference(texts),
      "; every rank must make the same call");
}

namespace {

// For ops that compare in Python: a module's first call.
void check_agreement_kernel(
    std::string_view op,
    const std::vector<std::string>& arguments,
    const at::Tensor& like,
    int64_t rank,
    int64_t size,
    std::string_view group_name) {
  if (like.is_meta()) {
    return;
  }
  const std::string name(op);
  check_agreement(
      resolve_group(name.c_str(), group_name, rank, size, like.device()), like.device(), arguments);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeExplicitAutograd, m) {
  m.impl("_check_agreement", check_agreement_kernel);
}

}  // namespace deepsp
