// The block tables of a backend as its host believes them to be: what a step's operations will find
// when they look blocks up on the device. It says which blocks an operation touches, and nothing
// that is compared comes from it.
//
// 1. It follows the program alone: what a device makes of it is not seen here.
#pragma once

#include <cstdint>
#include <vector>

#include "sim/protocol/backend.h"

namespace lockstep::cuda {

class TableMirror {
 public:
  explicit TableMirror(const BackendConfig& config);

  // clear_rows, table_updates and table_edits, in this order.
  void apply(const StepProgram& program);

  // Manager blocks that hold positions [first, last) of a row, each once.
  std::vector<std::int32_t> blocks(std::int32_t group, std::int32_t row, std::int32_t first,
                                   std::int32_t last) const;

 private:
  std::vector<std::int64_t> block_sizes_;  // positions of an entry, per group
  std::vector<std::vector<std::vector<std::int32_t>>> block_ids_;  // group, row, entry
};

}  // namespace lockstep::cuda
