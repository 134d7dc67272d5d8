#include "traces/formats/known_file.h"

#include <algorithm>

#include "base/json_reader.h"
#include "base/line_reader.h"

namespace lockstep {
namespace {

constexpr std::size_t kKnownFileMax = 1 << 20;

// "2027-01-31": as text its order is that of time.
bool is_date(std::string_view text) {
  constexpr std::string_view kShape = "0000-00-00";
  if (text.size() != kShape.size()) return false;
  for (std::size_t i = 0; i < text.size(); ++i)
    if (kShape[i] == '-' ? text[i] != '-' : text[i] < '0' || text[i] > '9') return false;
  const std::string_view month = text.substr(5, 2), day = text.substr(8, 2);
  return month >= "01" && month <= "12" && day >= "01" && day <= "31";
}

KnownFailure read_known(JsonValue value) {
  JsonObject object = value.object();
  KnownFailure known;
  known.id = object.required("id").nonempty_string();
  known.check = object.required("check").nonempty_string();
  if (auto text = object.optional("text")) known.text = text.nonempty_string();
  if (auto until = object.optional("until")) {
    known.until = until.nonempty_string();
    if (!is_date(known.until)) until.refuse("a day, as in \"2027-01-31\"");
  }
  object.finish();
  return known;
}

}  // namespace

Result<std::vector<KnownFailure>> read_known_file(const std::string& path) {
  LS_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, kKnownFileMax));
  JsonReader json(path);
  std::vector<KnownFailure> known;
  if (json.parse(text)) {
    JsonObject object = json.root().object();
    object.required("lockstep_known").integer(1, 1);
    for (JsonValue entry : object.required("known").array()) {
      known.push_back(read_known(entry));
      const auto is_same = [&](const KnownFailure& other) { return other.id == known.back().id; };
      if (std::ranges::count_if(known, is_same) > 1) entry.refuse("an id that is there once");
    }
    object.finish();
  }
  if (!json.ok()) return json.failure();
  return known;
}

}  // namespace lockstep
