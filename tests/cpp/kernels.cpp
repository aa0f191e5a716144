// Kernels and layouts under sanitizers (`make sanitize`), without torch: against plain loops, on
// memory that ends where the last element does, by several threads at once.

#include "../../csrc/kernels/copy.h"
#include "../../csrc/kernels/float16.h"
#include "../../csrc/kernels/sum.h"
#include "../../csrc/layout/buffer.h"
#include "../../csrc/layout/pieces.h"
#include "../../csrc/layout/plan.h"
#include "../../csrc/layout/shards.h"
#include "common.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <thread>

using namespace deepsp;

namespace {

// Rows [0, rows), each by one thread.
void on_threads(int64_t rows, const std::function<void(int64_t, int64_t)>& work) {
  constexpr int64_t kThreads = 3;
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] { work(rows * t / kThreads, rows * (t + 1) / kThreads); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

void copies() {
  // Rows of all kinds: of a size known at compile time, any, and large enough to stream.
  for (const int64_t row : {1, 2, 4, 8, 16, 3, 24, 100, 130, 4100}) {
    for (int round = 0; round < 8; ++round) {
      StridedCopy c{};
      c.row_bytes = row;
      int64_t src = row + (round % 2 ? draw(0, 9) : 0), dst = row + (round % 3 ? draw(0, 9) : 0);
      for (int d = kCopyDims - 1; d >= 0; --d) {
        c.n[d] = d == 0 && row >= 130 ? (row == 130 ? 600 : 70) : draw(round == 7 ? 0 : 1, 5);
        c.src_stride[d] = src;
        c.dst_stride[d] = dst;
        src = src * std::max<int64_t>(c.n[d], 1) + (round % 4 == 3 ? draw(0, 5) : 0);
        dst = dst * std::max<int64_t>(c.n[d], 1);
      }
      // Up to the last byte, and no further.
      int64_t src_end = row, dst_end = row;
      for (int d = 0; d < kCopyDims; ++d) {
        src_end += (std::max<int64_t>(c.n[d], 1) - 1) * c.src_stride[d];
        dst_end += (std::max<int64_t>(c.n[d], 1) - 1) * c.dst_stride[d];
      }
      const auto from = std::make_unique<char[]>(src_end);
      const auto to = std::make_unique<char[]>(dst_end);
      const auto expected = std::make_unique<char[]>(dst_end);
      for (int64_t i = 0; i < src_end; ++i) {
        from[i] = static_cast<char>(draw(-128, 127));
      }
      c.src = from.get();
      c.dst = to.get();
      for (int64_t i = 0; i < c.rows(); ++i) {
        int64_t rest = i, at_src = 0, at_dst = 0;
        for (int d = kCopyDims - 1; d >= 0; --d) {
          at_src += rest % c.n[d] * c.src_stride[d];
          at_dst += rest % c.n[d] * c.dst_stride[d];
          rest /= c.n[d];
        }
        std::memcpy(expected.get() + at_dst, from.get() + at_src, row);
      }
      const StridedCopy whole = coalesce(c);
      require(whole.bytes() == c.bytes(), "coalesce keeps the bytes");
      for (const StridedCopy& copy : {c, whole}) {
        std::memset(to.get(), 0, dst_end);
        if (c.rows() > 0) {
          on_threads(copy.rows(), [&](int64_t begin, int64_t end) {
            if (begin < end) {
              copy_rows_cpu(copy, begin, end);
            }
          });
        }
        require(std::memcmp(to.get(), expected.get(), dst_end) == 0, "copy_rows_cpu");
      }
      // Window by window of the destination, of whichever order its dimensions are.
      std::swap(c.n[0], c.n[2]);
      std::swap(c.src_stride[0], c.src_stride[2]);
      std::swap(c.dst_stride[0], c.dst_stride[2]);
      const int64_t most = round == 0 ? dst_end : draw(std::max<int64_t>(dst_end / 40, 1), dst_end);
      int64_t bytes = 0;
      for (int64_t begin = 0; begin < dst_end; begin += most) {
        const int64_t size = std::min(most, dst_end - begin);
        const auto window = std::make_unique<char[]>(size);
        std::vector<StridedCopy> parts;
        add_within(c, c.dst + begin, size, window.get(), parts);
        require(parts.size() <= 2 * kCopyDims + 3, "few parts");
        for (const StridedCopy& part : parts) {
          bytes += part.bytes();
          copy_rows_cpu(part, 0, part.rows());
        }
        require(std::memcmp(window.get(), expected.get() + begin, size) == 0, "add_within");
      }
      require(bytes == c.bytes(), "each byte once");
    }
  }
}

template <class T>
void sums(Float dtype, Float to, Float within) {
  for (const int64_t inner : {1, 7, 300, 263}) {
    for (const int64_t step : {1, 2}) {
      const int64_t rows = inner == 263 ? 2003 : 5;  // 1 MiB in any dtype: written past the cache
      const int64_t sources = 3, length = (rows * inner - 1) * step + 1;
      std::vector<std::unique_ptr<T[]>> data;
      StridedSum sum{dtype, to, within, nullptr, {1, 1, rows, inner}, {0, 0, inner, 1}, {}};
      for (int64_t k = 0; k < sources; ++k) {
        data.push_back(std::make_unique<T[]>(length));
        for (int64_t i = 0; i < length; ++i) {
          // Small integers: exact in every dtype.
          const float value = static_cast<float>((i + k) % 5);
          if constexpr (std::is_floating_point_v<T>) {
            data[k][i] = value;
          } else {
            data[k][i] = T::store(value);
          }
        }
        sum.sources.push_back({data[k].get(), {0, 0, inner * step, step}});
      }
      const auto result = std::make_unique<T[]>(rows * inner);
      sum.dst = result.get();
      on_threads(rows, [&](int64_t begin, int64_t end) { sum_rows_cpu(sum, begin, end); });
      for (int64_t i = 0; i < rows * inner; ++i) {
        double expected = 0, found = 0;
        for (int64_t k = 0; k < sources; ++k) {
          expected += static_cast<double>((i * step + k) % 5);
        }
        if constexpr (std::is_floating_point_v<T>) {
          found = result[i];
        } else {
          found = T::load(result[i]);
        }
        require(found == expected, "sum_rows_cpu");
      }
    }
  }
}

void casts() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Float16 half{static_cast<uint16_t>(bits)};
    const BFloat16 brain{static_cast<uint16_t>(bits)};
    const bool number = (bits & 0x7C00) != 0x7C00 || (bits & 0x3FF) == 0;
    require(!number || Float16::store(Float16::load(half)).bits == bits, "float16");
    const bool brain_number = (bits & 0x7F80) != 0x7F80 || (bits & 0x7F) == 0;
    require(!brain_number || BFloat16::store(BFloat16::load(brain)).bits == bits, "bfloat16");
  }
}

void layouts() {
  for (int64_t parts = 1; parts <= 5; ++parts) {
    for (int64_t kv = 1; kv <= 6; ++kv) {
      for (int64_t each = 1; each <= 3; ++each) {
        const int64_t heads = kv * each;
        if (heads < parts) {
          continue;
        }
        const HeadLayout layout({heads, kv}, parts, 2);
        std::vector<int> owners(heads);
        for (int64_t rank = 0; rank < parts; ++rank) {
          int64_t kv_heads = 0;
          for (int64_t chunk = 0; chunk < layout.chunks(); ++chunk) {
            const Range q = layout.range(0, rank, chunk);
            for (int64_t h = q.begin; h < q.end; ++h) {
              ++owners[h];
            }
            kv_heads += layout.range(1, rank, chunk).size();
          }
          require(kv_heads == layout.range(1, rank).size(), "each kv head travels once");
        }
        for (const int owner : owners) {
          require(owner == 1, "each query head has one rank and chunk");
        }
        int64_t covered = 0;
        for (const HeadSegment& segment : layout.segments(1)) {
          covered += segment.heads.size();
          require(!segment.readers.empty(), "each kv head is read");
          require(
              std::is_sorted(segment.readers.begin(), segment.readers.end()),
              "readers ascend, and sums with them");
        }
        require(covered == kv, "segments cover all heads");
      }
    }
    std::vector<int64_t> sizes;
    for (int64_t p = 0; p < parts; ++p) {
      sizes.push_back(p * 2);
    }
    const ShardLayout<int64_t> shards{{{3, sizes, 5}}, 0};
    int64_t full = 0, slot = 0;
    for (int64_t p = 0; p < parts; ++p) {
      full += shards.block(p);
      slot = std::max(slot, shards.block(p));
    }
    require(shards[0].full() == full && shards.slot() == slot, "ShardLayout");
  }
}

// No byte of a buffer is anybody's twice, or outside of it.
class Claims {
 public:
  explicit Claims(int64_t bytes) : taken_(bytes) {}

  void claim(int64_t begin, int64_t bytes, int64_t step = 0, int64_t times = 1) {
    for (int64_t t = 0; t < times; ++t) {
      for (int64_t n = begin + t * step; n < begin + t * step + bytes; ++n) {
        require(n >= 0 && n < static_cast<int64_t>(taken_.size()), "inside of the buffer");
        require(!taken_[n], "nobody else's");
        taken_[n] = true;
      }
    }
  }

 private:
  std::vector<bool> taken_;
};

// Every element of every block: the tokens of heads that its owner reads, each once, where sections
// say that it lies.
void check_plan(const Plan<int64_t>& plan) {
  const HeadLayout& heads = plan.heads;
  const int64_t ranks = plan.ranks(), total = plan.total();
  std::vector<int> queries(heads.num_heads(0) * total);
  for (int64_t owner = 0; owner < ranks; ++owner) {
    std::vector<int> others(heads.num_heads(1) * total);
    Range read{heads.num_heads(1), 0};
    const int64_t each = heads.num_heads(0) / heads.num_heads(1);
    for (int64_t chunk = 0; chunk < plan.chunks(); ++chunk) {
      for (const Cell& cell : heads.cells(owner, chunk)) {
        read.begin = std::min(read.begin, cell.heads.begin / each);
        read.end = std::max(read.end, (cell.heads.end - 1) / each + 1);
      }
      int64_t before = 0, all = 0;
      std::vector<std::vector<int64_t>> tokens;  // by result: its section's, row by row
      for (const auto& section : plan.sections(owner, chunk)) {
        all += section.rows() * plan.batch * section.columns;
        std::vector<int64_t> rows;
        for (const auto& [begin, end, _] : section.tokens) {
          for (int64_t t = begin; t < end; ++t) {
            rows.push_back(t);
          }
        }
        tokens.insert(tokens.end(), section.tensors.size(), rows);
      }
      require(plan.elements_by_heads(owner, chunk) == all, "elements_by_heads");
      for (int64_t source = 0; source < ranks; ++source) {
        require(plan.elements_before(source, owner, chunk) == before, "elements_before");
        const int64_t elements = plan.elements(source, owner, chunk);
        before += elements;
        Claims block(elements);
        int64_t claimed = 0;
        for (const auto& part : plan.parts(source, owner, chunk)) {
          const int64_t width = part.heads.size() * plan.head_dims[part.tensor];
          block.claim(part.offset + part.column, width, part.columns, part.tokens() * plan.batch);
          claimed += width * part.tokens() * plan.batch;
          require(
              part.tokens() == 0 ||
                  (part.begin >= plan.first(source) && part.end <= plan.first(source + 1)),
              "a source sends its own tokens");
          for (int64_t h = part.heads.begin; h < part.heads.end; ++h) {
            for (int64_t t = part.begin; t < part.end; ++t) {
              ++(part.tensor == 0 ? queries : others)[h * total + t];
              require(
                  tokens[part.result].at(part.row + t - part.begin) == t,
                  "rows are those of its section");
            }
          }
        }
        require(claimed == elements, "blocks are full");
      }
      require(before == all, "blocks stack to sections");
      const auto ways = {
          plan.elements_by_heads(owner, chunk),
          plan.seq_lens[owner] * plan.batch * plan.columns_by_tokens(chunk)};
      require(
          plan.buffer_elements(owner, chunk, plan.columns_by_tokens(chunk)) == std::max(ways),
          "buffer_elements");
      Plan<int64_t> theirs = plan;
      theirs.rank = owner;
      require(
          theirs.padding(chunk, true) >= 0 && theirs.padding(chunk, false) >= 0,
          "a buffer holds what arrives both ways");
    }
    for (int64_t h = 0; h < heads.num_heads(1); ++h) {
      for (int64_t t = 0; t < total; ++t) {
        require(
            others[h * total + t] == (h >= read.begin && h < read.end),
            "a kv head goes once to each rank that reads it");
      }
    }
  }
  for (const int times : queries) {
    require(times == 1, "each query is one rank's");
  }
}

void plans() {
  const auto below = [](int64_t n) { return static_cast<int64_t>(generator() % n); };
  for (int round = 0; round < 2000; ++round) {
    const int64_t ranks = 1 + below(7), kv = 1 + below(4), heads = kv * (1 + below(3));
    std::vector<int64_t> lens, query_parts{0};
    for (int64_t p = 0; p < ranks; ++p) {
      lens.push_back(below(4) ? below(7) : 0);
    }
    for (int64_t parts = 1; parts <= ranks; ++parts) {
      if (ranks % parts == 0 && heads >= ranks / parts) {
        query_parts.push_back(parts);
      }
    }
    const HeadLayout layout(
        {heads, kv}, ranks, 1 + below(3), query_parts[below(query_parts.size())]);
    check_plan({layout, {1 + below(3), 1 + below(3)}, 1 + below(2), lens, below(ranks)});
  }
}

void buffers() {
  for (int round = 0; round < 120; ++round) {
    const int64_t parts = 1 + round % 4;
    const auto below = [](int64_t n) { return static_cast<int64_t>(generator() % n); };
    ShardLayout<int64_t> shards{{}, below(parts)};
    for (int64_t i = 0, count = 1 + below(3); i < count; ++i) {
      // Some large enough to travel on their own, or row by row.
      const int64_t inner = round % 10 ? 1 + below(40) : (below(2) ? kInPlaceBytes : kRowBytes) / 4;
      Shard<int64_t> shard{parts == 1 ? 1 : 1 + below(3), {}, inner};
      for (int64_t p = 0; p < parts; ++p) {
        shard.sizes.push_back(below(6));
      }
      shards.tensors.push_back(shard);
    }
    for (const bool point_to_point : {false, true}) {
      const BufferLayout buffer(shards, point_to_point);
      Claims gathered(parts * shards.slot()), scattered(parts * shards.slot());
      for (size_t i = 0; i < shards.size(); ++i) {
        const Shard<int64_t>& shard = shards[i];
        for (int64_t p = 0; p < parts; ++p) {
          if (buffer.is_received_whole(i)) {
            gathered.claim(buffer.gathered(i, p), shard.row(p), shard.row(), shard.outer);
          } else {
            gathered.claim(buffer.gathered(i, p), shard.part(p));
          }
          scattered.claim(buffer.scattered(i, p), shard.part(shards.rank));
        }
      }
    }
  }
}

// Adds to seen[query][key] what PyTorch's kernels let a query see.
void see(const KernelCall& call, std::vector<std::vector<int>>& seen) {
  if (call.dense > 0) {
    const Piece& piece = call.piece;
    const bool is_causal = piece.sight == Sight::kCausal;
    const int64_t queries = piece.queries.size() / call.dense;
    const int64_t keys = piece.keys.size() / call.dense;
    require(
        call.borders.empty() && piece.sight != Sight::kBand && (queries == keys || !is_causal) &&
            queries * call.dense == piece.queries.size() && keys * call.dense == piece.keys.size(),
        "a dense call has rows of one length, and no window");
    for (int64_t i = 0; i < piece.queries.size(); ++i) {
      for (int64_t j = 0; j < keys; ++j) {
        if (!is_causal || j <= i % queries) {
          ++seen[piece.queries.begin + i][piece.keys.begin + i / queries * keys + j];
        }
      }
    }
    return;
  }
  std::vector<int64_t> q_ends{call.piece.queries.size()}, k_ends{call.piece.keys.size()};
  if (!call.borders.empty()) {
    q_ends.assign(call.borders.begin() + 1, call.borders.end());
    k_ends = q_ends;
  }
  int64_t most = 0, q_begin = 0, k_begin = 0;
  for (size_t n = 0; n < k_ends.size(); ++n) {
    most = std::max(most, k_ends[n] - (n > 0 ? k_ends[n - 1] : 0));
  }
  const auto window = [&](int64_t asked) { return asked < 0 || asked >= most ? INT32_MAX : asked; };
  const int64_t left = window(call.window.left), right = window(call.window.right);
  for (size_t n = 0; n < q_ends.size(); ++n) {
    const int64_t queries = q_ends[n] - q_begin, keys = k_ends[n] - k_begin;
    require(call.borders.empty() || queries <= call.longest, "the longest document");
    for (int64_t i = 0; i < queries; ++i) {
      bool any = false;
      for (int64_t j = 0; j < keys; ++j) {
        const int64_t diagonal = i + keys - queries;
        if (diagonal - left <= j && j <= diagonal + right) {
          ++seen[call.piece.queries.begin + q_begin + i][call.piece.keys.begin + k_begin + j];
          any = true;
        }
      }
      require(any, "each query of a call sees a key");
    }
    q_begin = q_ends[n];
    k_begin = k_ends[n];
  }
}

// Every pair that the documents and the band allow once, and no other.
void pieces() {
  size_t joined = 0, cut = 0, rows = 0, shortened = 0, rectangles = 0;
  for (int round = 0; round < 20000; ++round) {
    const int64_t tokens = draw(0, 7) ? draw(1, 24) : draw(60, 90);
    std::vector<Document> documents;
    std::vector<int> number(tokens, -1);
    const int64_t longest = draw(0, 3) ? 12 : tokens;
    for (int64_t at = draw(0, 2), length = draw(1, longest); at < tokens;) {
      length = draw(0, 3) ? draw(1, longest) : length;
      const int64_t end = std::min(tokens, at + length);
      std::fill(number.begin() + at, number.begin() + end, static_cast<int>(documents.size()));
      documents.push_back({{0, 1}, {at, end}});
      at = end + (draw(0, 3) ? 0 : draw(1, 3));
    }
    const auto reach = [] { return draw(0, 1) ? draw(0, 12) : kUnlimited; };
    const Band band{reach(), draw(0, 1) ? 0 : reach()};
    const auto range = [&](int64_t from) {
      const int64_t begin = draw(from, tokens);
      return Range{begin, draw(begin, tokens)};
    };
    const Range keys = draw(0, 1) ? range(0) : Range{0, tokens};
    std::vector<Range> queries;
    if (draw(0, 1)) {
      queries.push_back(range(0));
      queries.push_back(range(queries[0].end));
    }
    std::vector<std::vector<int>> seen(tokens, std::vector<int>(tokens));
    const std::vector<Piece> found = pieces_of(documents, band, keys, queries);
    DenseRule rule;
    if (draw(0, 1)) {
      rule = {draw(1, 30), documents.size() == 1};
    }
    const bool borders = draw(0, 3) > 0;
    const std::vector<KernelCall> calls = kernel_calls(found, band, rule, borders);
    joined += calls.size() < found.size();
    cut += calls.size() > found.size();
    for (const KernelCall& call : calls) {
      see(call, seen);
      require(borders || call.borders.empty(), "no borders where a call may have none");
      const int64_t length = call.dense > 0 ? call.piece.queries.size() / call.dense : 0;
      rows += call.dense > 1;
      rectangles += call.dense > 0 && length != call.piece.keys.size() / call.dense;
      const bool is_whole = std::any_of(found.begin(), found.end(), [&](const Piece& piece) {
        return piece.queries.begin == call.piece.queries.begin && piece.queries.size() == length;
      });
      if (call.dense > 0 && !is_whole) {
        ++shortened;
        int64_t odd = length;
        while (odd % 2 == 0) {
          odd /= 2;
        }
        require(odd < 32, "few lengths are planned");
      }
    }
    for (int64_t i = 0; i < tokens; ++i) {
      const bool is_query =
          queries.empty() || std::any_of(queries.begin(), queries.end(), [&](const Range& r) {
            return r.begin <= i && i < r.end;
          });
      for (int64_t j = 0; j < tokens; ++j) {
        const bool sees = is_query && keys.begin <= j && j < keys.end && number[i] >= 0 &&
                          number[i] == number[j] &&
                          (band.left == kUnlimited || j >= i - band.left) &&
                          (band.right == kUnlimited || j <= i + band.right);
        require(seen[i][j] == sees, "kernels see what the documents and the band allow");
      }
    }
  }
  require(joined > 1000 && cut > 100, "calls of several documents, and pieces in several calls");
  require(
      rows > 100 && shortened > 10 && rectangles > 20,
      "dense calls: of several documents, of a part of one, of a rectangle");
}

}  // namespace

int main() {
  copies();
  sums<double>(Float::f64, Float::f64, Float::f64);
  sums<float>(Float::f32, Float::f32, Float::f32);
  sums<BFloat16>(Float::bf16, Float::bf16, Float::f32);
  sums<Float16>(Float::f16, Float::f16, Float::f16);
  casts();
  layouts();
  plans();
  buffers();
  pieces();
  std::puts("kernels and layouts: fine");
}
