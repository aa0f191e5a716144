#include "agreement.h"

#include "c10d.h"
#include "errors.h"
#include "launch.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <torch/library.h>

#include <algorithm>
#include <sstream>

namespace deepsp {
namespace {

// Every rank's `mine`, which has the same length everywhere.
at::Tensor gather(const Group& group, c10::Device device, const at::Tensor& mine) {
  const at::Tensor sent = mine.to(device);
  const at::Tensor received = at::empty({group.size * sent.numel()}, sent.options());
  gather_from_all(group, received, sent);
  return received.cpu();
}

// Ranks that don't exist say nothing.
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

}  // namespace

bool debugging() {
  return is_switched_on("DEEPSP_DEBUG");
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
  at::Tensor length = at::empty({1}, at::kLong);
  length.data_ptr<int64_t>()[0] = static_cast<int64_t>(mine.size());
  const at::Tensor lengths = gather(group, device, length);
  const int64_t longest = lengths.max().item<int64_t>();
  at::Tensor text = at::zeros({longest}, at::kByte);
  std::copy(mine.begin(), mine.end(), text.data_ptr<uint8_t>());
  const at::Tensor texts = gather(group, device, text);
  const auto said_by = [&](int64_t p) {
    const auto* begin = reinterpret_cast<const char*>(texts.data_ptr<uint8_t>()) + p * longest;
    return std::string(begin, lengths.data_ptr<int64_t>()[p]);
  };
  bool alike = true;
  for (int64_t p = 1; p < group.size; ++p) {
    alike = alike && said_by(p) == said_by(0);
  }
  for (size_t n = 0; !alike; ++n) {
    // What is said, in the order of who says it first, and by whom.
    std::vector<std::pair<std::string, std::vector<int64_t>>> sides;
    for (int64_t p = 0; p < group.size; ++p) {
      const std::string line = line_of(said_by(p), n);
      auto side = std::find_if(
          sides.begin(), sides.end(), [&](const auto& other) { return other.first == line; });
      if (side == sides.end()) {
        side = sides.insert(sides.end(), {line, {}});
      }
      side->second.push_back(p);
    }
    if (sides.size() > 1) {
      std::ostringstream text;
      for (const auto& [line, ranks] : sides) {
        text << ", " << names_of(ranks);
        text << (ranks.size() == 1 ? " passes " : " pass ") << line;
      }
      TORCH_CHECK_VALUE(
          false, group.op, ": ranks disagree: ", text.str().substr(2),
          "; every rank must make the same call");
    }
  }
}

namespace {

// For ops that compare on their own: a module's first call.
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
  m.impl("check_agreement", check_agreement_kernel);
}

}  // namespace deepsp
