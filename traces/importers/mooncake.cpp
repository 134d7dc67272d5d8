#include <fmt/format.h>

#include "base/json_reader.h"
#include "base/line_reader.h"
#include "traces/formats/prompt_json.h"
#include "traces/importers/foreign_traces.h"

namespace lockstep {
namespace {

constexpr int kDigitsOfMs = 6;  // 1 ms is 10^6 ns

// A key that has two names in the wild: exactly one of them.
JsonValue required_alias(JsonObject& object, std::string_view name, std::string_view alias) {
  if (object.has(name) && object.has(alias)) {
    object.refuse_because(fmt::format("found both \"{}\" and \"{}\"; expected one", name, alias));
  }
  return object.has(alias) ? object.optional(alias) : object.required(name);
}

class MooncakeReader final : public ImportReader {
 public:
  MooncakeReader(LineReader&& lines, const ImportOptions& options)
      : ImportReader(std::move(lines), options, "mooncake"), json_(lines_.path()) {
    header_.ids = {.block_tokens = options.mooncake_block_tokens, .tail = IdTail::ceil};
  }

 private:
  Result<ImportedRow> read_row(std::string_view line) override {
    ImportedRow row;
    if (json_.parse(line, lines_.number(), lines_.is_cut_off())) row = row_of(json_.root());
    if (!json_.ok()) return json_.failure();
    last_t_ns_ = row.t_ns;
    return row;
  }

  ImportedRow row_of(JsonValue value) {
    JsonObject object = value.object();
    ImportedRow row;
    JsonValue time = required_alias(object, "timestamp", "created_time");
    row.t_ns = time.scaled_decimal(kDigitsOfMs);
    if (row.t_ns < last_t_ns_)
      time.refuse("a time not before that of the row above, and not below 0");
    const auto length =
        required_alias(object, "input_length", "input_tokens").integer(1, kPromptTokensMax);
    JsonValue output = required_alias(object, "output_length", "output_tokens");
    row.output_length = output.integer<std::int32_t>(0);
    if (row.output_length == 0 && options_.zero_output == ZeroOutput::refuse)
      output.refuse("at least one output token");
    JsonValue hash_ids = object.required("hash_ids");
    std::vector<std::uint64_t> ids;
    for (JsonValue id : hash_ids.array()) ids.push_back(id.integer(0, kHashIdMax));
    object.finish();
    if (!json_.ok()) return row;
    if (auto prompt = prompt_of_hash_ids(ids, length, *header_.ids, ordinal_)) {
      row.prompt = std::move(*prompt);
    } else {
      hash_ids.refuse_because(
          fmt::format("found {} ids for {} tokens; expected {}, one per {} tokens", ids.size(),
                      length, hash_ids_for(length, *header_.ids), header_.ids->block_tokens));
    }
    return row;
  }

  JsonReader json_;
  std::int64_t last_t_ns_ = 0;
};

}  // namespace

Result<std::unique_ptr<TraceReader>> open_mooncake(const std::string& path,
                                                   const ImportOptions& options) {
  LS_CHECK(options.mooncake_block_tokens > 0, "blocks of {} tokens", options.mooncake_block_tokens);
  LS_ASSIGN_OR_RETURN(auto lines, LineReader::open(path));
  return std::make_unique<MooncakeReader>(std::move(lines), options);
}

}  // namespace lockstep
