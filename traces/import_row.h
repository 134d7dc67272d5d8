// What every importer gets out of a row of a foreign trace, and the request it becomes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "traces/request_trace.h"

namespace lockstep {

struct ImportedRow {
  std::int64_t t_ns = 0;
  Prompt prompt;
  std::int32_t output_length = 0;  // 0: none was recorded
};

// Row number `ordinal` as a request called r<ordinal>, which ends by its length. An output of no
// tokens becomes one token, since an engine takes no less (ZeroOutput::one_token).
TraceRequest request_of(ImportedRow&& row, std::uint64_t ordinal);

std::string file_name_of(std::string_view path);

}  // namespace lockstep
