#pragma once
// The exchange's ops as C++ calls them.

#include "../op.h"

namespace deepsp {

inline const NamedOp seq_to_heads("seq_to_heads");
inline const NamedOp heads_to_seq("heads_to_seq");
inline const NamedOp seq_to_heads_start("seq_to_heads_start");
inline const NamedOp seq_to_heads_wait("seq_to_heads_wait");
inline const NamedOp heads_to_seq_start("heads_to_seq_start");
inline const NamedOp heads_to_seq_wait("heads_to_seq_wait");

}  // namespace deepsp
