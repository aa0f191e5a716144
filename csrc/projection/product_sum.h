#pragma once

#include "../transport/launch.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

namespace deepsp {

// A matrix that is summed from products. 16-bit products are added up in float32,
// and their sum is rounded once.
class ProductSum {
 public:
  ProductSum(at::IntArrayRef sizes, const at::Tensor& like) : sizes_(sizes.vec()), like_(like) {
    wide_ = like.scalar_type() == at::kHalf || like.scalar_type() == at::kBFloat16;
  }

  void add_product(const at::Tensor& a, const at::Tensor& b) {
    if (!first_.defined()) {
      first_ = empty_buffer(sizes_, like_);
      at::mm_out(first_, a, b);
    } else if (!wide_) {
      first_.addmm_(a, b);
    } else {
      if (!sum_.defined()) {
        sum_ = first_.to(at::kFloat);
      }
      at::mm_out(first_, a, b);
      sum_.add_(first_);
    }
  }

  at::Tensor total() const {
    return sum_.defined()     ? sum_.to(like_.scalar_type())
           : first_.defined() ? first_
                              : at::zeros(sizes_, like_.options());
  }

 private:
  std::vector<int64_t> sizes_;
  at::Tensor like_;
  bool wide_;
  at::Tensor first_;  // the sum, or where it is wide, each product in turn
  at::Tensor sum_;
};

}  // namespace deepsp
