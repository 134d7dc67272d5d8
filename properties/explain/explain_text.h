// A step-by-step record as text for a terminal of 100 columns: the case, its steps, and at the end
// what went wrong, where, what was expected there and why. Block tables, the pool and a page are
// shown in characters (explain_text.cpp).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "properties/explain/explain.h"
#include "reference/types/kv_cache_spec.h"
#include "sim/verdict/divergence.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

struct ExplanationTextOptions {
  std::size_t steps_max = 12;  // the last ones; 0: all
};

// Ends with the sentence of the check that failed.
std::string to_text(const SavedCase& saved, const Explanation& explanation,
                    const ExplanationTextOptions& options = {});

inline constexpr std::size_t kTextColumns = 98;

// Words on lines of kTextColumns, the first behind `label`, the others indented as far.
std::string wrapped(const std::string& label, const std::string& text);

// "[4: 0-3] [5*: 4-5] [-: 8-11]": one cell per block with its tokens, * if the step allocates it.
// Cells in the middle of a long table are left out.
std::string table_picture(const std::vector<BlockId>& table, const KVCacheSpec& spec,
                          std::int64_t tokens, const std::vector<BlockId>& handed_out);

// Owners of the blocks of a small pool, "1-3: r0, 4: r0 and r1, 5-9: free"; counts for a large one.
std::string pool_picture(const std::vector<BlockState>& pool);

// The rows of a divergence's page: what belongs there and whether it does. Empty: no page in it.
std::string page_picture(const Divergence& divergence);

}  // namespace lockstep
