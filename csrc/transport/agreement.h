#pragma once
// What only a comparison between ranks shows. It costs two small collectives: on a module's first
// call, and on each with DEEPSP_DEBUG=1.

#include "../common/checks.h"
#include "group.h"

#include <sstream>
#include <string>
#include <vector>

namespace deepsp {

bool debugging();

// ValueError, on every rank, unless all ranks say the same: names the first difference, and who
// says what. `arguments` begin with the argument's name.
void check_agreement(
    const Group& group, c10::Device device, const std::vector<std::string>& arguments);

// The group of a call, as resolve_group finds it. With DEEPSP_DEBUG=1 its ranks have made the same
// call then, with the `arguments()` that tell calls apart.
template <class Given>
Group agreed_group(
    const char* op,
    std::string_view name,
    int64_t rank,
    int64_t size,
    c10::Device device,
    const char* sizes,
    const Given& arguments) {
  Group group = resolve_group(op, name, rank, size, device, sizes);
  if (debugging()) {
    check_agreement(group, device, arguments());
  }
  return group;
}

template <class T>
const T& shown(const T& part) {
  return part;
}
template <class T>
at::ArrayRef<T> shown(const std::vector<T>& part) {
  return part;
}
inline std::string shown(at::ScalarType part) {
  return dtype_name(part);
}

// The parts of what a rank says, one after another.
template <class... Parts>
std::string said(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << shown(parts));
  return text.str();
}

}  // namespace deepsp
