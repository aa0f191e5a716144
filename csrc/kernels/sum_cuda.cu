#include "float_cuda.h"
#include "launch_cuda.h"
#include "sum.h"

#include <algorithm>

namespace deepsp {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxSums = 96;

// A sum, whose sources lie in its batch.
struct Sum {
  void* dst;
  const void* begun;    // the total of earlier sources, contiguous, of dtype `within`; null: none
  int64_t n[kSumDims];  // the innermost in vectors, if `vectors`
  int64_t dst_stride[kSumDims];
  int32_t first_source;
  int32_t count;
  Float dtype;
  Float to;
  Float within;
  bool vectors;  // kVector elements at a time, by 16 bytes
};

struct Batch {
  int count;
  int32_t used;                       // sources
  int64_t first_block[kMaxSums + 1];  // of each sum; the last: their number
  Sum sums[kMaxSums];
  SumSource sources[kMaxSumSources];
};

template <class A>
__device__ A kept_in(Float within, A x) {
  if (within == Float::bf16) {
    return static_cast<A>(load(round_to<__nv_bfloat16>(x)));
  }
  if (within == Float::f16) {
    return static_cast<A>(load(round_to<__half>(x)));
  }
  return x;
}

template <class O, class A>
__device__ void store(O* to, const A* sums, bool vectors) {
  if (!vectors) {
    *to = round_to<O>(sums[0]);
    return;
  }
  Pack<O> out;
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    out.items[e] = round_to<O>(sums[e]);
  }
  write_pack(to, out);
}

template <class A>
__device__ void store(Float dtype, void* dst, int64_t at, const A* sums, bool vectors) {
  switch (dtype) {
    case Float::f64:
      return store(static_cast<double*>(dst) + at, sums, vectors);
    case Float::f32:
      return store(static_cast<float*>(dst) + at, sums, vectors);
    case Float::bf16:
      return store(static_cast<__nv_bfloat16*>(dst) + at, sums, vectors);
    case Float::f16:
      return store(static_cast<__half*>(dst) + at, sums, vectors);
  }
}

// Element or vector number `e` of a sum.
template <class T, class A>
__device__ void sum_one(const Sum& sum, const SumSource* sources, int64_t e) {
  int64_t index[kSumDims];
  int64_t rest = e;
#pragma unroll
  for (int d = kSumDims - 1; d >= 0; --d) {
    const int64_t next = quotient(rest, sum.n[d]);
    index[d] = rest - next * sum.n[d];
    rest = next;
  }
  if (sum.vectors) {
    index[kSumDims - 1] *= kVector;
  }
  const auto place = [&](const int64_t* stride) {
    int64_t at = 0;
#pragma unroll
    for (int d = 0; d < kSumDims; ++d) {
      at += index[d] * stride[d];
    }
    return at;
  };
  A total[kVector];
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    total[k] = -0.0;  // unlike 0, it leaves -0 as it is
  }
  if (sum.begun != nullptr) {
    const A* begun = static_cast<const A*>(sum.begun) + (sum.vectors ? e * kVector : e);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      if (k == 0 || sum.vectors) {
        total[k] = begun[k];
      }
    }
  }
  for (int s = 0; s < sum.count; ++s) {
    const T* from = static_cast<const T*>(sources[s].data) + place(sources[s].stride);
    if (sum.vectors) {
      const Pack<T> in = read_pack(from);
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        total[k] = kept_in(sum.within, total[k] + static_cast<A>(load(in.items[k])));
      }
    } else {
      total[0] = kept_in(sum.within, total[0] + static_cast<A>(load(*from)));
    }
  }
  store(sum.to, sum.dst, place(sum.dst_stride), total, sum.vectors);
}

template <class T>
__device__ void sum_in(const Sum& sum, const SumSource* sources, int64_t e) {
  if (sum.within == Float::f64) {
    sum_one<T, double>(sum, sources, e);
  } else {
    sum_one<T, float>(sum, sources, e);
  }
}

__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ Batch batch) {
  const int n = item_at(batch.first_block, batch.count, blockIdx.x);
  const Sum& sum = batch.sums[n];
  const SumSource* sources = batch.sources + sum.first_source;
  const int64_t e =
      (static_cast<int64_t>(blockIdx.x) - batch.first_block[n]) * kThreads + threadIdx.x;
  if (e >= sum.n[0] * sum.n[1] * sum.n[2] * sum.n[3]) {
    return;
  }
  switch (sum.dtype) {
    case Float::f64:
      return sum_in<double>(sum, sources, e);
    case Float::f32:
      return sum_in<float>(sum, sources, e);
    case Float::bf16:
      return sum_in<__nv_bfloat16>(sum, sources, e);
    case Float::f16:
      return sum_in<__half>(sum, sources, e);
  }
}

// Whether each kVector elements lie together, at a multiple of 16 bytes.
bool has_vectors(const Sum& sum, const SumSource* sources) {
  const auto fits = [&](const void* data, const int64_t* stride, int64_t item) {
    bool fine = reinterpret_cast<uint64_t>(data) % 16 == 0 && stride[kSumDims - 1] == 1;
    for (int d = 0; d + 1 < kSumDims; ++d) {
      fine = fine && (sum.n[d] == 1 || stride[d] * item % 16 == 0);
    }
    return fine;
  };
  return sum.n[kSumDims - 1] % kVector == 0 && fits(sum.dst, sum.dst_stride, size_of(sum.to)) &&
         std::all_of(sources, sources + sum.count, [&](const SumSource& source) {
           return fits(source.data, source.stride, size_of(sum.dtype));
         });
}

// What a sum's total takes between its launches.
int64_t total_bytes(const StridedSum& sum) {
  const bool once = sum.sources.size() <= kMaxSumSources;
  return once ? 0 : (sum.elements() * size_of(wide(sum.within)) + 15) / 16 * 16;
}

// Adds sources [begin, begin + count) of a sum to a batch.
void add_sum(const StridedSum& sum, size_t begin, size_t count, char* total, Batch& batch) {
  const int n = batch.count++;
  Sum& s = batch.sums[n];
  s = {sum.dst,    begin > 0 ? total : nullptr, {},        {},
       batch.used, static_cast<int32_t>(count), sum.dtype, sum.to,
       sum.within};
  std::copy_n(sum.n, kSumDims, s.n);
  std::copy_n(sum.dst_stride, kSumDims, s.dst_stride);
  if (begin + count < sum.sources.size()) {
    s.dst = total;
    s.to = wide(sum.within);
    s.dst_stride[kSumDims - 1] = 1;
    for (int d = kSumDims - 1; d > 0; --d) {
      s.dst_stride[d - 1] = s.dst_stride[d] * s.n[d];
    }
  }
  SumSource* const sources = batch.sources + batch.used;
  std::copy_n(sum.sources.begin() + begin, count, sources);
  batch.used += static_cast<int32_t>(count);
  s.vectors = has_vectors(s, sources);
  if (s.vectors) {
    s.n[kSumDims - 1] /= kVector;
  }
  const int64_t steps = s.n[0] * s.n[1] * s.n[2] * s.n[3];
  batch.first_block[n + 1] = batch.first_block[n] + (steps + kThreads - 1) / kThreads;
}

}  // namespace

int64_t scratch_bytes(const std::vector<StridedSum>& sums) {
  int64_t bytes = 0;
  for (const StridedSum& sum : sums) {
    bytes += total_bytes(sum);
  }
  return bytes;
}

cudaError_t sum_rows_cuda(const std::vector<StridedSum>& sums, void* scratch, cudaStream_t stream) {
  // Each round adds the next sources of all sums that have some left.
  bool left = true;
  for (size_t begin = 0; left; begin += kMaxSumSources) {
    left = false;
    char* total = static_cast<char*>(scratch);
    for (size_t next = 0; next < sums.size();) {
      Batch batch = {};
      for (; next < sums.size() && batch.count < kMaxSums; ++next) {
        const StridedSum& sum = sums[next];
        const size_t most = sum.sources.size();
        if (sum.elements() > 0 && (begin == 0 || begin < most)) {
          const size_t count = std::min<size_t>(most - begin, kMaxSumSources);
          if (batch.used + count > kMaxSumSources) {
            break;
          }
          add_sum(sum, begin, count, total, batch);
          left = left || begin + count < most;
        }
        total += total_bytes(sum);
      }
      if (batch.count > 0) {
        const cudaError_t error =
            launch(sum_kernel, batch.first_block[batch.count], kThreads, stream, batch);
        if (error != cudaSuccess) {
          return error;
        }
      }
    }
  }
  return cudaSuccess;
}

}  // namespace deepsp
