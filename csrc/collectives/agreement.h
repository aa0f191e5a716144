#pragma once
// What only a comparison between ranks shows. It costs two small collectives: on a module's first
// call, and on each with DEEPSP_DEBUG=1.

#include "group.h"

#include <string>
#include <vector>

namespace deepsp {

bool debugging();

// ValueError, on every rank, unless all ranks say the same: names the first difference, and who
// says what. `arguments` begin with the argument's name.
void check_agreement(
    const Group& group, c10::Device device, const std::vector<std::string>& arguments);

}  // namespace deepsp
