// What every importer gets out of a row of a foreign trace, and the request it becomes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "base/line_reader.h"
#include "base/result.h"
#include "traces/formats/request_trace.h"
#include "traces/importers/open_trace.h"

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

// A foreign trace of one request a line, in the order of the file.
class ImportReader : public TraceReader {
 public:
  ImportReader(LineReader&& lines, const ImportOptions& options, std::string kind)
      : lines_(std::move(lines)), options_(options) {
    header_.source = {.kind = std::move(kind), .name = file_name_of(lines_.path()), .seed = {}};
  }
  const TraceHeader& header() const override { return header_; }
  Result<bool> next(TraceRecord& record) override;

 protected:
  virtual Result<ImportedRow> read_row(std::string_view line) = 0;

  LineReader lines_;
  ImportOptions options_;
  TraceHeader header_;
  std::uint64_t ordinal_ = 0;  // of the row
};

}  // namespace lockstep
