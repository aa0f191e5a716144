#include "engine.h"

namespace deepsp {

void pack_by_tokens(
    at::TensorList inputs, const Layout& layout, int64_t chunk, c10::ArrayRef<Place> places) {
  const int64_t item = item_of(inputs[0]);
  std::vector<StridedCopy> copies;
  for (const auto& [p, block] : places) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Range heads = layout.heads.range(i, p, chunk);
      const int64_t dim = layout.head_dims[i];
      copies.push_back(copy_of(
          view_of(inputs[i], 0, heads.begin),
          block_view(
              block, layout.batch, layout.columns(p, chunk), layout.column(i, p, chunk), dim, item),
          {layout.seq_lens[layout.rank], layout.batch, heads.size(), dim}, item));
    }
  }
  run(copies, inputs[0].device());
}

std::vector<Place> launch_to_heads(
    const MakeBlocks& make,
    at::TensorList copied,
    const Layout& layout,
    int64_t chunk,
    const Group* group,
    Departure& departure) {
  const at::Tensor& buffer = departure.buffer();
  const int64_t item = item_of(buffer);
  const auto gives = layout.counts_by_tokens(chunk);
  const auto gets = layout.counts_by_heads(chunk);
  const auto got_at = prefix_sums(gets);
  const auto sent_at = prefix_sums(gives);
  char* const arrivals = data_of(buffer);

  // Where this rank's block begins in p's buffer.
  const auto place_in = [&](int64_t p, char* theirs) {
    const int64_t before = layout.token(layout.rank) * layout.batch;
    return Place{p, theirs + before * layout.columns(p, chunk) * item};
  };

  if (group == nullptr || group->point_to_point) {
    if (group != nullptr) {
      auto flight = std::make_unique<Flight>();
      if (!departure.reaches_all()) {
        const at::Tensor sent = empty_buffer({sent_at.back() - gives[layout.rank]}, buffer);
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
      launch_into(buffer, std::move(flight));
    }
    // This rank's own block is made where it would arrive.
    return {{layout.rank, arrivals + got_at[layout.rank] * item}};
  }

  std::vector<Place> places;
  const auto stage = [&](at::TensorList reads, const auto& write) {
    launch_into(buffer, departure.stage(reads, [&](const Buffers& buffers) {
      std::vector<Place> staged;
      for (int64_t p = 0; p < layout.parts(); ++p) {
        staged.push_back(place_in(p, buffers[p]));
      }
      write(staged);
    }));
  };
  if (departure.staged() && !copied.empty()) {
    stage(copied, make);
    return {};
  }
  const at::Tensor sent = empty_buffer({sent_at.back()}, buffer);
  for (int64_t p = 0; p < layout.parts(); ++p) {
    places.push_back({p, data_of(sent) + sent_at[p] * item});
  }
  make(places);
  if (departure.staged()) {
    stage({sent}, [&](const std::vector<Place>& staged) {
      std::vector<StridedCopy> copies;
      for (const auto& [p, block] : staged) {
        copies.push_back(copy_of_bytes(places[p].block, block, gives[p] * item));
      }
      run(copies, buffer.device());
    });
    return {};
  }
  launch_into(
      *group, buffer,
      launch_all_to_all(*group, lent(buffer.narrow(0, 0, got_at.back())), sent, gets, gives), sent);
  return {};
}

std::vector<at::Tensor> views_by_heads(
    const at::Tensor& buffer, const SymBlockLayout& layout, int64_t chunk) {
  const c10::SymInt columns = layout.columns(layout.rank, chunk);
  std::vector<at::Tensor> views;
  for (size_t i = 0; i < layout.heads.tensors(); ++i) {
    const c10::SymInt dim = layout.head_dims[i];
    const c10::SymInt step = buffer.sym_stride(0);  // 1, but for a buffer that never travelled
    views.push_back(buffer.as_strided_symint(
        {layout.batch, layout.token(layout.parts()),
         c10::SymInt(layout.heads.range(i, layout.rank, chunk).size()), dim},
        {step * columns, step * layout.batch * columns, step * dim, step},
        buffer.sym_storage_offset() + step * layout.column(i, layout.rank, chunk)));
  }
  return views;
}

}  // namespace deepsp
