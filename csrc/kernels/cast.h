#pragma once
// Casts of contiguous pieces of memory, many in one launch: how shards are packed for
// sending on a GPU. On the CPU Tensor::copy_ does it: it runs at the speed of a plain copy.

#ifdef DEEPSP_CUDA

#include "sum.h"

namespace deepsp {

struct Cast {
  const void* src;
  void* dst;
  int64_t count;  // elements
  Float from;
  Float to;
};

// All casts in as few launches as their number allows (one, up to 512), each rounded to
// nearest even, as Tensor.to does.
cudaError_t cast_cuda(const std::vector<Cast>& casts, cudaStream_t stream);

}  // namespace deepsp

#endif
