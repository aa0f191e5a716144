// The exchange differentiated: seq_to_heads and heads_to_seq are each other's
// adjoint; the backward of a start is a wait, that of a wait is a start. Every
// backward is made of ops again, so it traces and can be differentiated.

#include "ops.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace deepsp {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// What a backward must know of the exchange; nothing else is saved.
struct Shapes {
  std::vector<c10::SymInt> num_heads;
  std::vector<c10::SymInt> head_dims;
  c10::SymInt batch;
  std::vector<c10::SymInt> seq_lens;
  int64_t chunk = 0;
  int64_t chunks = 1;
  int64_t rank = 0;
  std::string group_name;
  // Whether the inputs lie in memory as [S_rank, B, H, D]: their gradients do, too.
  bool tokens_first = false;

  void save(AutogradContext* ctx) const {
    auto& data = ctx->saved_data;
    data["num_heads"] = c10::SymIntArrayRef(num_heads);
    data["head_dims"] = c10::SymIntArrayRef(head_dims);
    data["batch"] = batch;
    data["seq_lens"] = c10::SymIntArrayRef(seq_lens);
    data["chunk"] = chunk;
    data["chunks"] = chunks;
    data["rank"] = rank;
    data["group_name"] = group_name;
    data["tokens_first"] = tokens_first;
  }

  explicit Shapes(AutogradContext* ctx) {
    auto& data = ctx->saved_data;
    num_heads = data["num_heads"].toSymIntVector();
    head_dims = data["head_dims"].toSymIntVector();
    batch = data["batch"].toSymInt();
    seq_lens = data["seq_lens"].toSymIntVector();
    chunk = data["chunk"].toInt();
    chunks = data["chunks"].toInt();
    rank = data["rank"].toInt();
    group_name = data["group_name"].toStringRef();
    tokens_first = data["tokens_first"].toBool();
  }

  Shapes(
      at::TensorList inputs,
      c10::SymIntArrayRef seq_lens,
      int64_t rank,
      std::string_view group_name)
      : seq_lens(seq_lens.vec()), rank(rank), group_name(group_name) {
    for (const at::Tensor& x : inputs) {
      num_heads.push_back(x.dim() == 4 ? x.sym_size(2) : c10::SymInt(0));
      head_dims.push_back(x.dim() == 4 ? x.sym_size(3) : c10::SymInt(0));
    }
    batch = !inputs.empty() && inputs[0].dim() == 4 ? inputs[0].sym_size(0) : c10::SymInt(0);
  }
};

bool lies_tokens_first(const at::Tensor& x) {
  return x.dim() == 4 && TORCH_GUARD_OR_FALSE(x.sym_size(0).sym_ne(1)) &&
         TORCH_GUARD_OR_FALSE(x.sym_stride(0).sym_lt(x.sym_stride(1)));
}

// One gradient for every tensor of the list argument, none for the others.
variable_list with_undefined(variable_list gradients, size_t others) {
  gradients.resize(gradients.size() + others);
  return gradients;
}

struct HeadsToSeq : Function<HeadsToSeq> {
  static variable_list forward(
      AutogradContext* ctx,
      at::TensorList inputs,
      c10::SymIntArrayRef num_heads,
      c10::SymIntArrayRef seq_lens,
      int64_t rank,
      std::string_view group_name,
      bool tokens_first) {
    Shapes(inputs, seq_lens, rank, group_name).save(ctx);
    at::AutoDispatchBelowADInplaceOrView guard;
    return heads_to_seq(inputs, num_heads, seq_lens, rank, group_name, tokens_first);
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    const Shapes s(ctx);
    return with_undefined(seq_to_heads(gradients, s.seq_lens, s.rank, s.group_name), 5);
  }
};

struct SeqToHeadsStart : Function<SeqToHeadsStart> {
  static variable_list forward(
      AutogradContext* ctx,
      at::TensorList inputs,
      c10::SymIntArrayRef seq_lens,
      int64_t chunks,
      bool last_first,
      int64_t rank,
      std::string_view group_name) {
    Shapes s(inputs, seq_lens, rank, group_name);
    s.tokens_first = !inputs.empty() && lies_tokens_first(inputs[0]);
    s.save(ctx);
    at::AutoDispatchBelowADInplaceOrView guard;
    return seq_to_heads_start(inputs, seq_lens, chunks, last_first, rank, group_name);
  }

  static variable_list backward(AutogradContext* ctx, variable_list buffers) {
    const Shapes s(ctx);
    return with_undefined(
        heads_to_seq_wait(
            buffers, s.num_heads, s.head_dims, s.batch, s.seq_lens, s.rank, s.group_name,
            s.tokens_first),
        5);
  }
};

struct SeqToHeadsWait : Function<SeqToHeadsWait> {
  static variable_list forward(
      AutogradContext* ctx,
      const at::Tensor& buffer,
      c10::SymIntArrayRef num_heads,
      c10::SymIntArrayRef head_dims,
      const c10::SymInt& batch,
      c10::SymIntArrayRef seq_lens,
      int64_t chunk,
      int64_t chunks,
      int64_t rank,
      std::string_view group_name) {
    Shapes s({}, seq_lens, rank, group_name);
    s.num_heads = num_heads.vec();
    s.chunk = chunk;
    s.chunks = chunks;
    s.save(ctx);
    at::AutoDispatchBelowADInplaceOrView guard;
    return seq_to_heads_wait(
        buffer, num_heads, head_dims, batch, seq_lens, chunk, chunks, rank, group_name);
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    const Shapes s(ctx);
    return with_undefined(
        {heads_to_seq_start(
            gradients, s.num_heads, s.seq_lens, s.chunk, s.chunks, s.rank, s.group_name)},
        8);
  }
};

struct HeadsToSeqStart : Function<HeadsToSeqStart> {
  static Variable forward(
      AutogradContext* ctx,
      at::TensorList inputs,
      c10::SymIntArrayRef num_heads,
      c10::SymIntArrayRef seq_lens,
      int64_t chunk,
      int64_t chunks,
      int64_t rank,
      std::string_view group_name) {
    Shapes s(inputs, seq_lens, rank, group_name);
    s.num_heads = num_heads.vec();
    s.chunk = chunk;
    s.chunks = chunks;
    s.save(ctx);
    at::AutoDispatchBelowADInplaceOrView guard;
    return heads_to_seq_start(inputs, num_heads, seq_lens, chunk, chunks, rank, group_name);
  }

  static variable_list backward(AutogradContext* ctx, variable_list buffers) {
    const Shapes s(ctx);
    return with_undefined(
        seq_to_heads_wait(
            buffers[0], s.num_heads, s.head_dims, s.batch, s.seq_lens, s.chunk, s.chunks, s.rank,
            s.group_name),
        6);
  }
};

struct HeadsToSeqWait : Function<HeadsToSeqWait> {
  static variable_list forward(
      AutogradContext* ctx,
      at::TensorList buffers,
      c10::SymIntArrayRef num_heads,
      c10::SymIntArrayRef head_dims,
      const c10::SymInt& batch,
      c10::SymIntArrayRef seq_lens,
      int64_t rank,
      std::string_view group_name,
      bool tokens_first) {
    Shapes s({}, seq_lens, rank, group_name);
    s.chunks = static_cast<int64_t>(buffers.size());
    s.save(ctx);
    at::AutoDispatchBelowADInplaceOrView guard;
    return heads_to_seq_wait(
        buffers, num_heads, head_dims, batch, seq_lens, rank, group_name, tokens_first);
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    const Shapes s(ctx);
    return with_undefined(
        // The last chunk first: autograd asks for it first.
        seq_to_heads_start(gradients, s.seq_lens, s.chunks, true, s.rank, s.group_name), 7);
  }
};

// ------------------------------------------------------------------- as kernels

// Not an op of its own below autograd: its outputs share a buffer, and only a
// wait's schema can say so.
std::vector<at::Tensor> seq_to_heads_composite(
    at::TensorList inputs,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name) {
  TORCH_CHECK_VALUE(!inputs.empty(), "inputs is empty; at least one tensor is needed");
  const Shapes s(inputs, seq_lens, rank, group_name);
  const std::vector<at::Tensor> buffers =
      seq_to_heads_start(inputs, seq_lens, 1, false, rank, group_name);
  return seq_to_heads_wait(
      buffers[0], s.num_heads, s.head_dims, s.batch, seq_lens, 0, 1, rank, group_name);
}

std::vector<at::Tensor> heads_to_seq_autograd(
    at::TensorList inputs,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name,
    bool tokens_first) {
  return HeadsToSeq::apply(inputs, num_heads, seq_lens, rank, group_name, tokens_first);
}

std::vector<at::Tensor> seq_to_heads_start_autograd(
    at::TensorList inputs,
    c10::SymIntArrayRef seq_lens,
    int64_t chunks,
    bool last_first,
    int64_t rank,
    std::string_view group_name) {
  return SeqToHeadsStart::apply(inputs, seq_lens, chunks, last_first, rank, group_name);
}

std::vector<at::Tensor> seq_to_heads_wait_autograd(
    const at::Tensor& buffer,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank,
    std::string_view group_name) {
  return SeqToHeadsWait::apply(
      buffer, num_heads, head_dims, batch, seq_lens, chunk, chunks, rank, group_name);
}

at::Tensor heads_to_seq_start_autograd(
    at::TensorList inputs,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank,
    std::string_view group_name) {
  return HeadsToSeqStart::apply(inputs, num_heads, seq_lens, chunk, chunks, rank, group_name);
}

std::vector<at::Tensor> heads_to_seq_wait_autograd(
    at::TensorList buffers,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name,
    bool tokens_first) {
  return HeadsToSeqWait::apply(
      buffers, num_heads, head_dims, batch, seq_lens, rank, group_name, tokens_first);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  m.impl("seq_to_heads", seq_to_heads_composite);
}

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  m.impl("heads_to_seq", heads_to_seq_autograd);
  m.impl("seq_to_heads_start", seq_to_heads_start_autograd);
  m.impl("seq_to_heads_wait", seq_to_heads_wait_autograd);
  m.impl("heads_to_seq_start", heads_to_seq_start_autograd);
  m.impl("heads_to_seq_wait", heads_to_seq_wait_autograd);
}

}  // namespace deepsp
