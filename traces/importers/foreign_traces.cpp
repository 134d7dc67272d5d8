#include "traces/importers/foreign_traces.h"

#include <fmt/format.h>

#include <algorithm>

namespace lockstep {

TraceRequest request_of(ImportedRow&& row, std::uint64_t ordinal) {
  TraceRequest request;
  request.spec.name = fmt::format("r{}", ordinal);
  request.spec.prompt = std::move(row.prompt);
  request.spec.arrival_ns = row.t_ns;
  request.output.length = std::max(row.output_length, 1);
  request.spec.max_tokens = request.output.length;
  return request;
}

Result<bool> ImportReader::next(TraceRecord& record) {
  while (true) {
    std::string_view line;
    const auto got = lines_.next(line);
    if (!got) return tl::unexpected(got.error());
    if (!*got) return false;
    auto row = read_row(line);
    if (!row) return tl::unexpected(row.error());
    const bool kept = row->output_length > 0 || options_.zero_output != ZeroOutput::skip;
    if (kept) record = request_of(std::move(*row), ordinal_);
    ++ordinal_;
    if (kept) return true;
  }
}

std::string file_name_of(std::string_view path) {
  return std::string(path.substr(path.rfind('/') + 1));  // npos + 1 is 0
}

}  // namespace lockstep
