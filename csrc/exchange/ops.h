#pragma once
// The exchange's ops as C++ calls them.

#include "../op.h"

namespace deepsp {

inline const Op seq_to_heads("seq_to_heads");
inline const Op heads_to_seq("heads_to_seq");
inline const Op seq_to_heads_start("seq_to_heads_start");
inline const Op seq_to_heads_wait("seq_to_heads_wait");
inline const Op heads_to_seq_start("heads_to_seq_start");
inline const Op heads_to_seq_wait("heads_to_seq_wait");

}  // namespace deepsp
