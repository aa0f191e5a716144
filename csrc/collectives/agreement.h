#pragma once
// What only a comparison between ranks shows. On with DEEPSP_DEBUG=1: it costs two small
// collectives a call.

#include "group.h"

#include <string>
#include <vector>

namespace deepsp {

bool debugging();

// ValueError, on every rank, unless all ranks say the same: names the first difference
// and both sides. `arguments` begin with the argument's name.
void check_agreement(
    const Group& group,
    c10::Device device,
    const char* op,
    const std::vector<std::string>& arguments);

}  // namespace deepsp
