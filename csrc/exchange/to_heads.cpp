// Blocks of this rank's tokens, sent to the ranks that compute attention for them.

#include <ATen/record_function.h>

#include "../common/checks.h"
#include "engine.h"

#include <ATen/ops/empty.h>

namespace deepsp {

namespace {

void add_block(
    at::TensorList inputs,
    const Layout& plan,
    int64_t chunk,
    const PackedBlock& place,
    std::vector<StridedCopy>& copies) {
  const int64_t item = item_of(inputs[0]), first = plan.first(plan.rank);
  for (const auto& part : plan.parts(plan.rank, place.p, chunk)) {
    copies.push_back(copy_of(
        view_of(inputs[part.tensor], part.begin - first, part.heads.begin),
        view_in_block(place.block, plan, part, item), Extent(plan, part).n, item));
  }
}

}  // namespace

void pack_by_tokens(
    at::TensorList inputs, const Layout& plan, int64_t chunk, c10::ArrayRef<PackedBlock> places) {
  std::vector<StridedCopy> copies;
  for (const PackedBlock& place : places) {
    add_block(inputs, plan, chunk, place, copies);
  }
  run(copies, inputs[0].device());
}

std::vector<PackedBlock> launch_to_heads(
    const MakeBlocks& make,
    at::TensorList copied,
    const Layout& plan,
    int64_t chunk,
    Transfer& transfer) {
  const int64_t item = item_of(transfer.buffer());
  const auto gives = plan.counts_by_tokens(chunk);
  const auto gets = plan.counts_by_heads(chunk);
  const auto received_at = prefix_sums(gets);
  Moves moves;
  moves.blocks.push_back(
      {[&](int64_t p) { return Span{received_at[p] * item, gets[p] * item}; },
       [&](int64_t p) { return Bytes{nullptr, gives[p] * item}; }, make});
  moves.begin = [&](int64_t p) { return plan.elements_before(plan.rank, p, chunk) * item; };
  if (transfer.moves_own() && !copied.empty()) {
    moves.reads = copied.vec();
    moves.place = [&](int64_t p, char* theirs, auto& copies) {
      add_block(copied, plan, chunk, {p, theirs + moves.begin(p)}, copies);
    };
  }
  transfer.attach(transfer.start(moves));
  if (transfer.moves_own()) {
    return {};
  }
  return {{plan.rank, data_of(transfer.buffer()) + received_at[plan.rank] * item}};
}

namespace {

// Views of blocks that stack to one section.
std::vector<at::Tensor> views_of(
    const at::Tensor& buffer, const SymPlan& plan, const Section<c10::SymInt>& section) {
  std::vector<at::Tensor> views;
  const c10::SymInt step = buffer.sym_stride(0);  // 1, but for a buffer that was never sent
  for (const auto& [tensor, heads, column, columns] : section.tensors) {
    const c10::SymInt& dim = plan.head_dims[tensor];
    views.push_back(buffer.as_strided_symint(
        {plan.batch, section.rows(), c10::SymInt(heads.size()), dim},
        {step * section.columns, step * plan.batch * section.columns, step * dim, step},
        buffer.sym_storage_offset() + step * column));
  }
  return views;
}

}  // namespace

std::vector<at::Tensor> receive_by_heads(
    const at::Tensor& buffer, const SymPlan& plan, int64_t chunk, std::optional<int64_t> padding) {
  const auto sections = plan.sections(plan.rank, chunk);
  if (sections.size() == 1 && !padding.has_value()) {
    return views_of(buffer, plan, sections[0]);
  }
  std::vector<at::Tensor> outputs;
  for (const auto& section : sections) {
    for (const auto& heads : section.tensors) {
      const c10::SymInt sizes[] = {
          plan.batch, section.rows(), heads.heads.size(), plan.head_dims[heads.tensor]};
      outputs.push_back(
          buffer.is_meta() ? at::empty_symint(sizes, buffer.options())
                           : empty_buffer(ints(sizes), buffer));
    }
  }
  if (buffer.is_meta()) {
    return outputs;
  }
  RECORD_FUNCTION("deepsp::merge", {});
  const Layout layout = concrete(plan);
  const at::Tensor received = buffer.contiguous();  // but for one that was never sent
  const int64_t item = item_of(buffer);
  char* block = data_of(received);
  std::vector<StridedCopy> copies;
  for (int64_t p = 0; p < layout.ranks(); ++p) {
    for (const auto& part : layout.parts(p, layout.rank, chunk)) {
      copies.push_back(copy_of(
          view_in_block(block, layout, part, item), view_of(outputs[part.result], part.row, 0),
          Extent(layout, part).n, item));
    }
    block +=
        (layout.elements(p, layout.rank, chunk) + (p == layout.rank ? padding.value_or(0) : 0)) *
        item;
  }
  run(copies, buffer.device());
  return outputs;
}

}  // namespace deepsp
