// The exchange's kernels, the same for CPU and CUDA, and for meta tensors as far as results have
// shapes. Blocks are packed by one copy and merged by one: what a rank receives of queries has
// other tokens than keys and values, so that no strides fit both.

#include "../common/checks.h"
#include "../common/copies.h"
#include "../exchange/engine.h"
#include "../transport/agreement.h"
#include "checks.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

namespace deepsp {
namespace {

using Blocks = ShareBlocks<int64_t>;

at::Tensor meta_buffer(const SymShareBlocks& blocks, int64_t chunk, const at::Tensor& like) {
  return at::empty_symint({elements_of_buffer(blocks, chunk)}, like.options());
}

std::unique_ptr<Group> group_of(
    const char* op,
    std::string_view name,
    const Blocks& blocks,
    const at::Tensor& like,
    int64_t chunk) {
  Group group = agreed_group(
      op, name, blocks.rank, blocks.shares.ranks(), like.device(), "seq_lens",
      [&]() -> std::vector<std::string> {
        std::vector<int64_t> heads;
        for (size_t i = 0; i < blocks.shares.tensors(); ++i) {
          heads.push_back(blocks.shares.num_heads(i));
        }
        return {
            said("seq_lens ", blocks.seq_lens),
            said("batch size ", blocks.batch),
            said("num_heads ", heads),
            said("head_dims ", blocks.head_dims),
            blocks.shares.query_parts() == ShareLayout::kAuto
                ? "query_parts auto"
                : said("query_parts ", blocks.shares.query_parts()),
            said("dtype ", like.scalar_type()),
            said("chunk ", chunk, " of ", blocks.chunks)};
      });
  return group.alone ? nullptr : std::make_unique<Group>(std::move(group));
}

// A part of a block, and where it lies.
struct Part : SharePart<int64_t> {
  View view;
  int64_t n[kCopyDims];
};

std::vector<Part> parts_of(
    const Blocks& blocks, int64_t source, int64_t owner, int64_t chunk, char* data, int64_t item) {
  std::vector<Part> parts;
  for (const SharePart<int64_t>& part : parts_of_block(blocks, source, owner, chunk).first) {
    if (part.tokens() > 0) {
      const int64_t dim = blocks.head_dims[part.tensor];
      parts.push_back(
          {part,
           block_view(
               data + part.offset * item, blocks.batch, part.columns, part.column, dim, item),
           {part.tokens(), blocks.batch, part.heads.size(), dim}});
    }
  }
  return parts;
}

int64_t first_token(const Blocks& blocks) {
  return prefix_sums(blocks.seq_lens)[blocks.rank];
}

// Where the block of each rank begins, behind one another; under Inductor with the padding that
// follows this rank's own.
std::vector<int64_t> places(
    const Blocks& blocks, int64_t chunk, bool mine_are_tokens, int64_t padding) {
  std::vector<int64_t> sizes = counts_of_blocks(blocks, chunk, mine_are_tokens);
  sizes[blocks.rank] += padding;
  return prefix_sums(sizes);
}

// Makes ranks' blocks, by one list of copies. Of tokens, of inputs [B, S_rank, H_i, D_i].
void pack_tokens(
    at::TensorList inputs, const Blocks& blocks, int64_t chunk, c10::ArrayRef<Place> at) {
  RECORD_FUNCTION("deepsp::pack", {});
  const int64_t first = first_token(blocks), item = item_of(inputs[0]);
  std::vector<StridedCopy> copies;
  for (const auto& [p, data] : at) {
    for (const Part& part : parts_of(blocks, blocks.rank, p, chunk, data, item)) {
      copies.push_back(copy_of(
          view_of(inputs[part.tensor], part.begin - first, part.heads.begin), part.view, part.n,
          item));
    }
  }
  run(copies, inputs[0].device());
}

// Of cells' queries and what they read.
void pack_shares(
    at::TensorList inputs, const Blocks& blocks, int64_t chunk, c10::ArrayRef<Place> at) {
  RECORD_FUNCTION("deepsp::pack", {});
  const int64_t item = item_of(inputs[0]);
  std::vector<StridedCopy> copies;
  for (const auto& [p, data] : at) {
    for (const Part& part : parts_of(blocks, p, blocks.rank, chunk, data, item)) {
      copies.push_back(copy_of(view_of(inputs[part.cell], part.row, 0), part.view, part.n, item));
    }
  }
  run(copies, inputs[0].device());
}

// Sends blocks of tokens, or of cells, off, each as soon as it is made of what it `reads`. This
// rank's own goes straight to where it would arrive.
at::Tensor launch(
    const Group* group,
    const Blocks& blocks,
    int64_t chunk,
    bool mine_are_tokens,
    at::TensorList reads,
    const MakeBlocks& make) {
  const int64_t rank = blocks.rank;
  const auto of = [&](int64_t p) {
    Blocks theirs = blocks;
    theirs.rank = p;
    return theirs;
  };
  const auto elements = [&](int64_t p) { return elements_of_buffer(of(p), chunk); };
  Departure departure(group, elements, {elements(rank)}, reads[0].options());
  const at::Tensor& buffer = departure.buffer();
  const auto gives = counts_of_blocks(blocks, chunk, mine_are_tokens);
  const auto gets = counts_of_blocks(blocks, chunk, !mine_are_tokens);
  const int64_t item = item_of(buffer);
  const auto got_at = prefix_sums(gets), given_at = prefix_sums(gives);
  char* const arrivals = data_of(buffer);
  // Where this rank's block begins in p's buffer.
  const auto place_in = [&](int64_t p, char* theirs) {
    return Place{
        p, theirs + prefix_sums(counts_of_blocks(of(p), chunk, !mine_are_tokens))[rank] * item};
  };
  if (group == nullptr || group->point_to_point) {
    auto flight = std::make_unique<Flight>();
    if (!departure.reaches_all()) {
      const at::Tensor sent = empty_buffer({given_at.back() - gives[rank]}, buffer);
      flight->holds.push_back(sent);
      char* next = data_of(sent);
      departure.send(
          [&](int64_t p) { return Bytes{arrivals + got_at[p] * item, gets[p] * item}; },
          [&](int64_t p) {
            const Bytes block{next, gives[p] * item};
            make(Place{p, block.data});
            next += block.size;
            return block;
          },
          *flight);
    }
    departure.write(
        [&](int64_t p, char* theirs) {
          if (gives[p] > 0) {
            make(place_in(p, theirs));
          }
        },
        *flight);
    make(Place{rank, arrivals + got_at[rank] * item});
    if (watched()) {
      flight->wait_all();
    } else if (group != nullptr) {
      launch_into(buffer, std::move(flight));
    }
    return buffer;
  }
  if (departure.staged()) {
    launch_into(buffer, departure.stage(reads, [&](const Buffers& buffers) {
      std::vector<Place> places;
      for (int64_t p = 0; p < group->size; ++p) {
        places.push_back(place_in(p, buffers[p]));
      }
      make(places);
    }));
    return buffer;
  }
  const at::Tensor sent = empty_buffer({given_at.back()}, buffer);
  std::vector<Place> all;
  for (int64_t p = 0; p < group->size; ++p) {
    all.push_back({p, data_of(sent) + given_at[p] * item});
  }
  make(all);
  launch_into(
      *group, buffer,
      launch_all_to_all(*group, lent(buffer.narrow(0, 0, got_at.back())), sent, gets, gives), sent);
  return buffer;
}

Tensors seq_to_shares_start_kernel(
    at::TensorList inputs,
    int64_t query_parts,
    c10::SymIntArrayRef seq_lens,
    int64_t chunks,
    bool last_first,
    int64_t rank,
    std::string_view group_name) {
  const SymShareBlocks shapes = check_tokens_to_share(inputs, query_parts, seq_lens, chunks, rank);
  Tensors buffers(chunks);
  for (int64_t n = 0; n < chunks; ++n) {
    const int64_t chunk = last_first ? chunks - 1 - n : n;
    if (inputs[0].is_meta()) {
      buffers[chunk] = meta_buffer(shapes, chunk, inputs[0]);
      continue;
    }
    const Blocks blocks = concrete(shapes);
    const auto group = group_of("seq_to_shares", group_name, blocks, inputs[0], chunk);
    buffers[chunk] = launch(
        group.get(), blocks, chunk, /*mine_are_tokens=*/true, inputs,
        [&](c10::ArrayRef<Place> at) { pack_tokens(inputs, blocks, chunk, at); });
  }
  return buffers;
}

// What has arrived in the buffer of a chunk. padded: by Inductor's collective, which sends the
// difference in size between the two ways, too.
Tensors merge_to_shares(
    const at::Tensor& buffer, const SymShareBlocks& shapes, int64_t chunk, bool padded) {
  Tensors outputs;
  const auto add = [&](const c10::SymInt& tokens, int64_t heads, size_t i) {
    const c10::SymInt sizes[] = {shapes.batch, tokens, heads, shapes.head_dims[i]};
    outputs.push_back(
        buffer.is_meta() ? at::empty_symint(sizes, buffer.options())
                         : empty_buffer(ints(sizes), buffer));
  };
  for (const Cell& cell : shapes.shares.cells(shapes.rank)) {
    add(shapes.queries(cell, chunk), cell.heads.size(), 0);
  }
  for (size_t i = 1; chunk == 0 && i < shapes.shares.tensors(); ++i) {
    add(shapes.total(), shapes.shares.reads(i, shapes.rank).size(), i);
  }
  if (buffer.is_meta()) {
    return outputs;
  }
  const Blocks blocks = concrete(shapes);
  const at::Tensor arrived = buffer.contiguous();  // but for one that never travelled
  land(buffer);
  RECORD_FUNCTION("deepsp::merge", {});
  const int64_t item = item_of(buffer);
  const auto at = places(blocks, chunk, false, padded ? padding_of(blocks, chunk, false) : 0);
  std::vector<StridedCopy> copies;
  for (int64_t p = 0; p < blocks.shares.ranks(); ++p) {
    for (const Part& part :
         parts_of(blocks, p, blocks.rank, chunk, data_of(arrived) + at[p] * item, item)) {
      copies.push_back(copy_of(part.view, view_of(outputs[part.cell], part.row, 0), part.n, item));
    }
  }
  run(copies, buffer.device());
  return outputs;
}

template <bool padded>
Tensors seq_to_shares_wait_kernel(
    const at::Tensor& buffer,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    c10::SymInt batch,
    int64_t query_parts,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank,
    std::string_view /*group_name*/) {
  return merge_to_shares(
      buffer,
      check_share_buffers(
          buffer, num_heads, head_dims, batch, query_parts, seq_lens, chunk, chunks, rank),
      chunk, padded);
}

at::Tensor shares_to_seq_start_kernel(
    at::TensorList inputs,
    c10::SymIntArrayRef num_heads,
    int64_t query_parts,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank,
    std::string_view group_name) {
  const SymShareBlocks shapes =
      check_shares(inputs, num_heads, query_parts, seq_lens, chunk, chunks, rank);
  if (inputs[0].is_meta()) {
    return meta_buffer(shapes, chunk, inputs[0]);
  }
  const Blocks blocks = concrete(shapes);
  const auto group = group_of("shares_to_seq", group_name, blocks, inputs[0], chunk);
  return launch(
      group.get(), blocks, chunk, /*mine_are_tokens=*/false, inputs,
      [&](c10::ArrayRef<Place> at) { pack_shares(inputs, blocks, chunk, at); });
}

// What ranks say of the heads of tensor `i`: each head's sum, in rank order.
void add_sums(
    const std::vector<std::vector<Part>>& by_rank,
    size_t i,
    const at::Tensor& out,
    int64_t first,
    std::vector<StridedCopy>& copies,
    std::vector<StridedSum>& sums) {
  const int64_t item = item_of(out);
  const Float dtype = float_type(out.scalar_type());
  for (int64_t head = 0; head < out.size(2); ++head) {
    StridedSum sum{dtype, dtype, wide(dtype), nullptr, {}, {}, {}};
    const Part* only = nullptr;
    for (const std::vector<Part>& parts : by_rank) {
      for (const Part& part : parts) {
        if (part.tensor != i || head < part.heads.begin || head >= part.heads.end) {
          continue;
        }
        only = &part;
        SumSource& added = sum.sources.emplace_back(
            SumSource{part.view.data + (head - part.heads.begin) * part.n[3] * item, {}});
        std::copy_n(part.view.stride, kSumDims, added.stride);
      }
    }
    if (only == nullptr) {
      continue;  // of no tokens
    }
    const View to = view_of(out, only->begin - first, head);
    const int64_t n[kCopyDims] = {only->n[0], only->n[1], 1, only->n[3]};
    if (sum.sources.size() == 1) {
      View from = only->view;
      from.data += (head - only->heads.begin) * only->n[3] * item;
      copies.push_back(copy_of(from, to, n, item));
      continue;
    }
    sum.dst = to.data;
    std::copy_n(n, kSumDims, sum.n);
    std::copy_n(to.stride, kSumDims, sum.dst_stride);
    sums.push_back(std::move(sum));
  }
}

template <bool padded>
Tensors shares_to_seq_wait_kernel(
    at::TensorList buffers,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    c10::SymInt batch,
    int64_t query_parts,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view /*group_name*/) {
  check_buffers(buffers);
  const auto chunks = static_cast<int64_t>(buffers.size());
  const SymShareBlocks shapes = check_share_buffers(
      buffers, num_heads, head_dims, batch, query_parts, seq_lens, 0, chunks, rank);
  const at::Tensor& like = buffers[0];
  Tensors outputs;
  for (size_t i = 0; i < shapes.shares.tensors(); ++i) {
    const c10::SymInt sizes[] = {batch, seq_lens[rank], num_heads[i], head_dims[i]};
    outputs.push_back(
        like.is_meta() ? at::empty_symint(sizes, like.options()) : empty_buffer(ints(sizes), like));
  }
  if (like.is_meta()) {
    return outputs;
  }
  const Blocks blocks = concrete(shapes);
  const int64_t item = item_of(like), first = first_token(blocks);
  std::vector<StridedCopy> copies;
  std::vector<StridedSum> sums;
  Tensors arrived;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    arrived.push_back(buffers[chunk].contiguous());  // but for one that never travelled
    land(buffers[chunk]);
    const auto at = places(blocks, chunk, true, padded ? padding_of(blocks, chunk, true) : 0);
    std::vector<std::vector<Part>> by_rank;
    for (int64_t p = 0; p < blocks.shares.ranks(); ++p) {
      by_rank.push_back(
          parts_of(blocks, rank, p, chunk, data_of(arrived.back()) + at[p] * item, item));
      for (const Part& part : by_rank.back()) {
        if (part.tensor == 0) {
          copies.push_back(copy_of(
              part.view, view_of(outputs[0], part.begin - first, part.heads.begin), part.n, item));
        }
      }
    }
    for (size_t i = 1; chunk == 0 && i < shapes.shares.tensors(); ++i) {
      add_sums(by_rank, i, outputs[i], first, copies, sums);
    }
  }
  RECORD_FUNCTION("deepsp::merge", {});
  run(copies, like.device());
  run(sums, like.device());
  return outputs;
}

// The same blocks for a collective of Inductor's.
template <class Pack>
at::Tensor packed(
    const SymShareBlocks& shapes,
    int64_t chunk,
    bool mine_are_tokens,
    const at::Tensor& like,
    const Pack& pack) {
  if (like.is_meta()) {
    c10::SymInt size = padding_of(shapes, chunk, !mine_are_tokens);
    for (const c10::SymInt& count : counts_of_blocks(shapes, chunk, mine_are_tokens)) {
      size = size + count;
    }
    return at::empty_symint({size}, like.options());
  }
  const Blocks blocks = concrete(shapes);
  const auto at =
      places(blocks, chunk, mine_are_tokens, padding_of(blocks, chunk, !mine_are_tokens));
  const at::Tensor sent = empty_buffer({at.back()}, like);
  std::vector<Place> all;
  for (int64_t p = 0; p < blocks.shares.ranks(); ++p) {
    all.push_back({p, data_of(sent) + at[p] * item_of(sent)});
  }
  pack(blocks, all);
  return sent;
}

at::Tensor seq_to_shares_pack_kernel(
    at::TensorList inputs,
    int64_t query_parts,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank) {
  return packed(
      check_tokens_to_share(inputs, query_parts, seq_lens, chunks, rank), chunk, true, inputs[0],
      [&](const Blocks& blocks, c10::ArrayRef<Place> at) {
        pack_tokens(inputs, blocks, chunk, at);
      });
}

at::Tensor shares_to_seq_pack_kernel(
    at::TensorList inputs,
    c10::SymIntArrayRef num_heads,
    int64_t query_parts,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank) {
  return packed(
      check_shares(inputs, num_heads, query_parts, seq_lens, chunk, chunks, rank), chunk, false,
      inputs[0], [&](const Blocks& blocks, c10::ArrayRef<Place> at) {
        pack_shares(inputs, blocks, chunk, at);
      });
}

}  // namespace

DEEPSP_KERNELS(m) {
  m.impl("seq_to_shares_start", seq_to_shares_start_kernel);
  m.impl("seq_to_shares_wait", seq_to_shares_wait_kernel<false>);
  m.impl("shares_to_seq_start", shares_to_seq_start_kernel);
  m.impl("shares_to_seq_wait", shares_to_seq_wait_kernel<false>);
}

DEEPSP_KERNELS_IN(deepsp_inductor, m) {
  m.impl("seq_to_shares_pack", seq_to_shares_pack_kernel);
  m.impl("seq_to_shares_merge", seq_to_shares_wait_kernel<true>);
  m.impl("shares_to_seq_pack", shares_to_seq_pack_kernel);
  m.impl("shares_to_seq_merge", shares_to_seq_wait_kernel<true>);
}

}  // namespace deepsp
