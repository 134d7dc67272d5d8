// What a search for a defect of memory plans wants of the models that it draws.
#pragma once

#include <cstdint>

namespace lockstep {

struct PlanBias {
  bool states = false;          // Mamba layers beside attention
  bool split_blocks = false;    // states so large that a block is several kernel blocks
  bool hidden_states = false;   // a layer of hidden states
  bool windows = false;         // sliding windows beside full attention
  bool equal_pages = false;     // two kinds of layers, equal pages, other block sizes
  bool packed = false;          // several attention layers a page
  bool ranks = false;           // context parallelism
  bool aligned_states = false;  // kept for prefix hits: mode align
  bool many_requests = false;   // more requests at once than a small pool has state blocks
  std::int64_t num_blocks = 0;  // 0: two to four
};

}  // namespace lockstep
