// The CUDA kernels, run on the CPU under ASan and UBSan (`make sanitize`): the same bits as the CPU
// kernels', whatever the strides, offsets and tails; no access past the last byte, none of 16 bytes
// at another address; work and index arithmetic at sizes that no memory here has.

#include "../../csrc/kernels/cast.h"
#include "../../csrc/kernels/copy_plan.h"
#include "../../csrc/kernels/float16.h"
#include "common.h"

#include <cmath>
#include <memory>
#include <type_traits>

using namespace deepsp;

namespace {

int64_t one_of(std::initializer_list<int64_t> values) {
  return values.begin()[draw(0, static_cast<int64_t>(values.size()) - 1)];
}

// `size` bytes, `offset` behind a multiple of 16, that end where the memory does.
struct Memory {
  std::unique_ptr<char[]> all;
  char* data;
  int64_t size;

  Memory(int64_t size, int64_t offset)
      : all(new char[offset + size]), data(all.get() + offset), size(size) {
    require(reinterpret_cast<uint64_t>(all.get()) % 16 == 0, "new aligns");
    for (int64_t i = 0; i < size; ++i) {
      data[i] = static_cast<char>(generator());
    }
  }
};

// ---------------------------------------------------------------- copies

struct Copied {
  StridedCopy copy;
  std::unique_ptr<Memory> src, dst, expected;
};

Copied random_copy(bool long_rows) {
  Copied it{};
  StridedCopy& c = it.copy;
  c.row_bytes =
      long_rows
          ? one_of({4096, 4097, 5000, 8192, 12290, 65536, 100001})
          : one_of({0, 1, 2, 3, 4, 6, 8, 10, 16, 24, 48, 63, 64, 80, 96, 130, 160, 192, 256, 1024});
  const bool aligned = draw(0, 1) == 1;
  const auto gap = [&] { return aligned ? 16 * draw(0, 3) : draw(0, 20); };
  int64_t src = c.row_bytes + (aligned ? -c.row_bytes & 15 : 0), dst = src;
  for (int d = kCopyDims - 1; d >= 0; --d) {
    c.n[d] = draw(0, 20) == 0 ? 0 : draw(0, 2) == 0 ? 1 : draw(1, long_rows ? 3 : 6);
    src += gap();
    dst += gap();
    const bool repeats = draw(0, 9) == 0;  // of a source that is expanded
    c.src_stride[d] = repeats ? 0 : src;
    c.dst_stride[d] = dst;
    src *= repeats ? 1 : std::max<int64_t>(c.n[d], 1);
    dst *= std::max<int64_t>(c.n[d], 1);
  }
  int64_t src_end = c.row_bytes, dst_end = c.row_bytes;
  for (int d = 0; d < kCopyDims; ++d) {
    src_end += std::max<int64_t>(c.n[d] - 1, 0) * c.src_stride[d];
    dst_end += std::max<int64_t>(c.n[d] - 1, 0) * c.dst_stride[d];
  }
  it.src = std::make_unique<Memory>(src_end, aligned ? 0 : draw(0, 15));
  it.dst = std::make_unique<Memory>(dst_end, aligned ? 0 : draw(0, 15));
  it.expected = std::make_unique<Memory>(dst_end, 0);
  c.src = it.src->data;
  std::copy_n(it.dst->data, dst_end, it.expected->data);
  c.dst = it.expected->data;
  if (c.bytes() > 0) {
    copy_rows_cpu(c, 0, c.rows());
  }
  c.dst = it.dst->data;
  if (draw(0, 1)) {
    c = coalesce(c);
  }
  return it;
}

void copies() {
  for (int round = 0; round < 60; ++round) {
    const int64_t count = round == 0 ? 300 : draw(1, 12);  // more than a launch takes
    std::vector<Copied> all;
    std::vector<StridedCopy> list;
    int64_t any = 0;
    for (int64_t n = 0; n < count; ++n) {
      all.push_back(random_copy(round % 3 == 1));
      list.push_back(all.back().copy);
      any += list.back().bytes() > 0;
    }
    launches = 0;
    require(copy_rows_cuda(list, nullptr) == cudaSuccess, "copy_rows_cuda returns");
    require(launches == (any + kMaxCopies - 1) / kMaxCopies, "as few launches as can be");
    for (const Copied& it : all) {
      require(
          std::equal(it.dst->data, it.dst->data + it.dst->size, it.expected->data),
          "copy_rows_cuda");
    }
  }
}

// What can't be run here: the plan and the arithmetic of more than 2^31 rows, of rows of more than
// 2^31 bytes.
void large_copies() {
  constexpr int64_t kTwoGi = int64_t(1) << 31;
  for (int round = 0; round < 300; ++round) {
    std::vector<StridedCopy> list;
    for (int64_t i = 0, count = draw(1, 130); i < count; ++i) {
      StridedCopy c{};
      c.src = reinterpret_cast<const char*>(draw(1, kTwoGi) * 2);
      c.dst = reinterpret_cast<char*>(draw(1, kTwoGi) * 2);
      c.row_bytes = one_of({2, 130, 256, 4096, 26 << 20, (26 << 20) + 2, 3 * kTwoGi + 1});
      const int64_t wide = c.row_bytes > 4096 ? 3 : 70000;
      const int64_t n[] = {draw(1, 3), draw(1, wide), draw(1, wide), draw(1, 3)};
      for (int d = 0; d < kCopyDims; ++d) {
        c.n[d] = n[d];
        c.src_stride[d] = draw(0, kTwoGi);
        c.dst_stride[d] = draw(0, kTwoGi);
      }
      list.push_back(c);
    }
    size_t next = 0;
    const CopyBatch batch = next_batch(list, next);
    require(next == std::min<size_t>(list.size(), kMaxCopies), "a batch is full");
    for (int i = 0; i < batch.count; ++i) {
      const StridedCopy& c = batch.copies[i];
      const int64_t pieces = c.rows() * batch.pieces_of_row[i];
      const int64_t warps = batch.first_warp[i + 1] - batch.first_warp[i];
      require(
          warps * batch.pieces_per_warp[i] >= pieces &&
              (warps - 1) * batch.pieces_per_warp[i] < pieces,
          "warps take all pieces, and none is idle");
      require(
          batch.pieces_per_warp[i] * std::min(c.row_bytes, kBytesPerWarp) <= 64 << 10,
          "no warp moves more than 64 KiB");
      require(item_at(batch.first_warp, batch.count, batch.first_warp[i]) == i, "a first warp");
      require(item_at(batch.first_warp, batch.count, batch.first_warp[i + 1] - 1) == i, "a last");
      for (int k = 0; k < 20; ++k) {
        const int64_t at = k == 0 ? pieces - 1 : draw(0, pieces - 1);
        const CopyPiece piece = piece_of(c, batch.pieces_of_row[i], at);
        const int64_t within = at % batch.pieces_of_row[i] * kBytesPerWarp;
        __int128 src = reinterpret_cast<int64_t>(c.src) + within;
        __int128 dst = reinterpret_cast<int64_t>(c.dst) + within;
        int64_t rest = at / batch.pieces_of_row[i];
        for (int d = kCopyDims - 1; d >= 0; --d) {
          src += static_cast<__int128>(rest % c.n[d]) * c.src_stride[d];
          dst += static_cast<__int128>(rest % c.n[d]) * c.dst_stride[d];
          rest /= c.n[d];
        }
        require(
            src == reinterpret_cast<int64_t>(piece.src) &&
                dst == reinterpret_cast<int64_t>(piece.dst) &&
                piece.bytes == std::min(c.row_bytes - within, kBytesPerWarp),
            "piece_of");
      }
    }
  }
}

// ---------------------------------------------------------------- floats

constexpr Float kFloats[] = {Float::f64, Float::f32, Float::bf16, Float::f16};

double value_of(Float dtype, const char* at) {
  const auto as = [&](auto x) {
    std::copy_n(at, sizeof(x), reinterpret_cast<char*>(&x));
    return x;
  };
  switch (dtype) {
    case Float::f64:
      return as(double{});
    case Float::f32:
      return as(float{});
    case Float::bf16:
      return BFloat16::load(as(BFloat16{}));
    default:
      return Float16::load(as(Float16{}));
  }
}

void put(Float dtype, char* at, double value) {
  const auto as = [&](auto x) { std::copy_n(reinterpret_cast<char*>(&x), sizeof(x), at); };
  switch (dtype) {
    case Float::f64:
      return as(value);
    case Float::f32:
      return as(static_cast<float>(value));
    case Float::bf16:
      return as(BFloat16::store(static_cast<float>(value)));
    default:
      return as(Float16::store(static_cast<float>(value)));
  }
}

// Bit for bit, but for which NaN it is.
bool same(Float dtype, const char* a, const char* b) {
  const int64_t item = size_of(dtype);
  return std::equal(a, a + item, b) ||
         (std::isnan(value_of(dtype, a)) && std::isnan(value_of(dtype, b)));
}

double any_value() {
  switch (draw(0, 12)) {
    case 0:
      return -0.0;
    case 1:
      return INFINITY;
    case 2:
      return -NAN;
    case 3:
      return 1e-40;
    case 4:
      return 3e-8;
    case 5:
      return 65520.0;
    case 6:
      return 3.4e38;
    default:
      return std::normal_distribution<double>(0, 100)(generator);
  }
}

Memory numbers(Float dtype, int64_t count, int64_t offset, bool finite) {
  Memory memory(count * size_of(dtype), offset * size_of(dtype));
  for (int64_t i = 0; i < count; ++i) {
    put(dtype, memory.data + i * size_of(dtype),
        finite ? std::normal_distribution<double>(0, 1)(generator) : any_value());
  }
  return memory;
}

void casts() {
  for (int round = 0; round < 12; ++round) {
    const int64_t count = round == 0 ? 600 : draw(1, 20);  // more than a launch takes
    std::vector<Memory> from, to;
    std::vector<Cast> list;
    int64_t any = 0;
    for (int64_t n = 0; n < count; ++n) {
      const Float a = kFloats[n % 4], b = kFloats[n / 4 % 4];
      const int64_t elements =
          round == 0 ? draw(0, 9) : one_of({0, 1, 7, 8, 9, 300, 8191, 8192, 8193, 20000});
      const bool aligned = draw(0, 1) == 1;
      from.push_back(numbers(a, elements, aligned ? 0 : draw(0, 7), false));
      to.push_back(Memory(elements * size_of(b), aligned ? 0 : draw(0, 7) * size_of(b)));
      list.push_back({from.back().data, to.back().data, elements, a, b});
      any += elements > 0;
    }
    launches = 0;
    require(cast_cuda(list, nullptr) == cudaSuccess, "cast_cuda returns");
    require(launches == (any + 511) / 512, "as few launches as can be");
    for (int64_t n = 0; n < count; ++n) {
      const Cast& cast = list[n];
      for (int64_t i = 0; i < cast.count; ++i) {
        char expected[8];
        put(cast.to, expected, value_of(cast.from, from[n].data + i * size_of(cast.from)));
        require(same(cast.to, to[n].data + i * size_of(cast.to), expected), "cast_cuda");
      }
    }
  }
}

struct Summed {
  StridedSum sum;
  std::vector<Memory> sources;
  std::unique_ptr<Memory> dst, expected;
};

Summed random_sum(int64_t fewest_sources, int64_t most_sources) {
  Summed it{};
  StridedSum& s = it.sum;
  s.dtype = kFloats[draw(0, 3)];
  s.to = kFloats[draw(0, 3)];
  s.within = s.dtype == Float::f64 ? Float::f64 : kFloats[draw(0, 3)];
  // Only where all three hold are there vectors.
  const bool starts = draw(0, 2) > 0, steps = draw(0, 2) > 0, whole = draw(0, 2) > 0;
  const int64_t n[] = {
      draw(1, 3), draw(0, 20) == 0 ? 0 : draw(1, 3), draw(1, 4),
      whole ? 8 * draw(1, 8) : draw(1, 70)};
  std::copy_n(n, kSumDims, s.n);
  // Each dimension outside of the next, with room between; the innermost may have steps.
  const auto strides = [&](int64_t* stride) {
    int64_t next = steps || draw(0, 2) ? 1 : 2;
    for (int d = kSumDims - 1; d >= 0; --d) {
      stride[d] = next;
      next *= std::max<int64_t>(n[d], 1);
      next += steps ? (-next & 7) + 8 * draw(0, 1) : draw(0, 3);
    }
    int64_t end = 1;
    for (int d = 0; d < kSumDims; ++d) {
      end += std::max<int64_t>(n[d] - 1, 0) * stride[d];
    }
    return end;
  };
  for (int64_t k = 0, count = draw(fewest_sources, most_sources); k < count; ++k) {
    SumSource source{};
    const int64_t end = strides(source.stride);
    it.sources.push_back(numbers(s.dtype, end, starts ? 0 : draw(0, 7), draw(0, 3) > 0));
    source.data = it.sources.back().data;
    s.sources.push_back(source);
  }
  const int64_t size = strides(s.dst_stride) * size_of(s.to);
  it.dst = std::make_unique<Memory>(size, starts ? 0 : draw(0, 7) * size_of(s.to));
  it.expected = std::make_unique<Memory>(size, 0);
  std::copy_n(it.dst->data, size, it.expected->data);
  s.dst = it.expected->data;
  if (s.elements() > 0) {
    sum_rows_cpu(s, 0, s.rows());
  }
  s.dst = it.dst->data;
  return it;
}

void sums() {
  for (int round = 0; round < 68; ++round) {
    std::vector<Summed> all;
    std::vector<StridedSum> list;
    int64_t sources = 0, any = 0;
    const auto add = [&](int64_t fewest, int64_t most) {
      all.push_back(random_sum(fewest, most));
      list.push_back(all.back().sum);
      const bool empty = list.back().elements() == 0;
      any += !empty;
      sources += empty ? 0 : static_cast<int64_t>(list.back().sources.size());
    };
    // More sums, or more sources, than a launch takes.
    for (int64_t n = 0, count = round < 2 ? 200 - 150 * round : draw(1, 10); n < count; ++n) {
      add(1, round == 1 ? 40 : 6);
    }
    // Sums of more sources than a launch takes, among the others.
    for (const int64_t count : {512, 513, 1024, 1025, 1600}) {
      if (round >= 60) {
        add(count, count);
        add(1, 6);
      }
    }
    Memory scratch(scratch_bytes(list), 0);
    require((scratch.size > 0) == (round >= 60), "scratch memory only for more");
    launches = 0;
    require(sum_rows_cuda(list, scratch.data, nullptr) == cudaSuccess, "sum_rows_cuda returns");
    require(
        launches <= (round < 60 ? any / 96 + sources / (kMaxSumSources - 40) + 1 : any + 7),
        "few launches");
    for (const Summed& it : all) {
      const int64_t item = size_of(it.sum.to);
      for (int64_t i = 0; i < it.dst->size; i += item) {
        require(same(it.sum.to, it.dst->data + i, it.expected->data + i), "sum_rows_cuda");
      }
    }
  }
}

}  // namespace

int main() {
  copies();
  large_copies();
  casts();
  sums();
  std::puts("CUDA kernels on the CPU: fine");
}
