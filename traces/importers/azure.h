// Azure's LLM inference traces (CSV): TIMESTAMP, ContextTokens, GeneratedTokens, found by the names
// in the header line. Nothing in them says which prompts share a prefix, so none do: every prompt
// is private to its request.
//
// Timestamps keep every digit: YYYY-MM-DD HH:MM:SS[.up to 9 digits], with T for the space and Z or
// an offset behind it (the 2024 and 2025 files), become integer ns since the first row. Lines may
// end in \r\n, and the last line in nothing.
#pragma once

#include <memory>
#include <optional>
#include <string_view>

#include "traces/importers/open_trace.h"

namespace lockstep {

Result<std::unique_ptr<TraceReader>> open_azure(const std::string& path,
                                                const ImportOptions& options);

// Whether a first line is the header of such a file.
bool is_azure_header(std::string_view line);

// Nanoseconds since 1970-01-01 00:00 UTC; nothing for what is no such time. Years 1970 to 2199.
std::optional<std::int64_t> utc_ns_of(std::string_view timestamp);

}  // namespace lockstep
