#pragma once
// What a rank can see of a wrong call from its own arguments. All raise ValueError, before anything
// is sent.

#include "../layout/along.h"
#include "ops.h"

namespace deepsp {

using SymAlong = AlongLayout<c10::SymInt>;
using Along = AlongLayout<int64_t>;

// "replicated", or "partial": whether it is the second.
bool is_partial(std::string_view grad);

// The floats that are summed here. `what` names the dtype in the message.
void check_summed(at::ScalarType dtype, std::string_view what);

// dim, counted from the front.
int64_t wrap_dim(int64_t dim, int64_t dims);

// input is this rank's part, or the whole.
SymAlong check_part(const at::Tensor& input, int64_t dim, c10::SymIntArrayRef sizes, int64_t rank);
SymAlong check_entire(
    const at::Tensor& input, int64_t dim, c10::SymIntArrayRef sizes, int64_t rank);
// What a wait says of the buffer that it is given; shape: the whole's.
SymAlong check_buffer(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    int64_t rank);

// `shape` with another size in dim.
std::vector<c10::SymInt> resized(c10::SymIntArrayRef shape, int64_t dim, const c10::SymInt& length);
// The shape of the whole, of which `shape` is a part.
std::vector<c10::SymInt> entire_shape(
    c10::SymIntArrayRef shape, int64_t dim, c10::SymIntArrayRef sizes);

}  // namespace deepsp
