#include "agreement.h"

#include "exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cstdlib>
#include <sstream>

namespace deepsp {
namespace {

// Every rank's `mine`, which has the same length everywhere.
at::Tensor gather(const Group& group, c10::Device device, const at::Tensor& mine) {
  const at::Tensor sent = mine.to(device);
  const at::Tensor received = at::empty({group.size * sent.numel()}, sent.options());
  all_gather(group, received, sent)->wait();
  return received.cpu();
}

std::string line_of(const std::string& text, size_t n) {
  std::istringstream lines(text);
  std::string line;
  for (size_t i = 0; i <= n; ++i) {
    if (!std::getline(lines, line)) {
      return "nothing";
    }
  }
  return line;
}

}  // namespace

bool debugging() {
  const char* value = std::getenv("DEEPSP_DEBUG");
  return value != nullptr && std::string(value) == "1";
}

void check_agreement(
    const Group& group,
    c10::Device device,
    const char* op,
    const std::vector<std::string>& arguments) {
  if (group.size == 1) {
    return;
  }
  std::string mine = op;
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
  const std::string first = said_by(0);
  for (int64_t p = 1; p < group.size; ++p) {
    const std::string other = said_by(p);
    for (size_t n = 0; other != first; ++n) {
      const std::string a = line_of(first, n);
      const std::string b = line_of(other, n);
      TORCH_CHECK_VALUE(
          a == b, op, ": ranks disagree: rank 0 passes ", a, ", rank ", p, " passes ", b,
          "; every rank must make the same call");
    }
  }
}

}  // namespace deepsp
