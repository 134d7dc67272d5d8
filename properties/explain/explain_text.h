// The step-by-step record as text for a terminal of 100 columns: the case, its steps, and at the
// end what went wrong, where, what was expected there and why. Block tables, the pool and a page
// use plain characters (explain_text.cpp).
//
// Not checked: whether the record is consistent. The text of a case depends on the record only, so
// the same case prints the same text.
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
  std::size_t steps_max = 12;  // the last steps that are printed; 0: all
};

// Formats the record. The text ends with the error message of the failing check, or states that the
// case does not fail.
std::string to_text(const SavedCase& saved, const Explanation& explanation,
                    const ExplanationTextOptions& options = {});

// Width of a line. Two columns of 100 stay free for terminals that wrap early.
inline constexpr std::size_t kTextColumns = 98;

// Breaks `text` at spaces into lines of kTextColumns. The first line starts with `label`, the
// others with as many spaces. A longer word gets its own line, uncut.
std::string wrapped(const std::string& label, const std::string& text);

// Draws a block table: "[4: 0-3] [5*: 4-5] [-: 8-11]". Each cell has a block id and the tokens in
// the block; * marks blocks that the step allocates, - the null block. `tokens` is how many tokens
// the table holds; later cells are "empty". A state block has no tokens of its own, so its cell is
// the id only. A long table omits the cells in the middle.
std::string table_picture(const std::vector<BlockId>& table, const KVCacheSpec& spec,
                          std::int64_t tokens, const std::vector<BlockId>& handed_out);

// Draws the owners of the blocks: "1-3: r0, 4: r0 and r1, 5-9: free". A pool of more than 64 blocks
// becomes three counts.
std::string pool_picture(const std::vector<BlockState>& pool);

// Draws the spans of a divergence's page, one per row: what belongs there and whether it does.
// Empty: the divergence has no page. A page with more than 16 spans shows only the wrong ones.
std::string page_picture(const Divergence& divergence);

}  // namespace lockstep
