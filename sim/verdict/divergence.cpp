#include "sim/verdict/divergence.h"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/names.h"
#include "base/number_text.h"

namespace lockstep {
namespace {

// Adds a labelled line; nothing for an empty value.
void add_line(std::string& text, std::string_view label, const std::string& value) {
  if (!value.empty()) text += fmt::format("  {:<9} {}\n", label, on_one_line(value));
}

// -1 means that the number does not apply.
std::string number_or_nothing(std::int64_t number) {
  return number < 0 ? std::string() : fmt::format("{}", number);
}

// Returns the rank and its coordinates: "3 (tp 1, pp 1)". Data parallel ranks have only "dp 1".
std::string rank_of(const Divergence& found) {
  std::string place;
  for (const auto& [name, number] : {std::pair{"tp", found.tp_rank},
                                     {"pp", found.pp_rank},
                                     {"cp", found.cp_rank},
                                     {"dp", found.dp_rank}})
    if (number >= 0) place += fmt::format("{}{} {}", place.empty() ? "" : ", ", name, number);
  if (place.empty()) return number_or_nothing(found.rank);
  return found.rank < 0 ? place : fmt::format("{} ({})", found.rank, place);
}

// Returns where the difference is, from the rank to the byte: "request r17, token 305, group 0,
// layer 3 (layers.3), tensor 1, block 812, slot 12997, byte 640". A layer without a number is left
// out.
std::string place_of(const Divergence& found) {
  std::string text;
  const auto add = [&](std::string_view what, const std::string& value) {
    if (!value.empty()) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", what, value);
  };
  add("rank", rank_of(found));
  add("request", found.request);
  add("token", number_or_nothing(found.token));
  add("group", number_or_nothing(found.group));
  add("layer", found.layer < 0 ? "" : fmt::format("{} ({})", found.layer, found.layer_name));
  add("head", number_or_nothing(found.head));
  add("tensor", number_or_nothing(found.tensor));
  add("block", number_or_nothing(found.block));
  add("host block", number_or_nothing(found.host_block));
  add("slot", number_or_nothing(found.slot));
  add("byte", number_or_nothing(found.byte));
  return text;
}

}  // namespace

std::string to_text(const Divergence& found) {
  std::string text = fmt::format("divergence in step {}, {}\n", found.step, name_of(found.phase));
  add_line(text, "what", found.message);
  add_line(text, "where", place_of(found));
  add_line(text, "expected", found.expected);
  add_line(text, "found", found.found);
  add_line(text, "whose", found.owner);
  add_line(text, "writer", found.writer);
  add_line(text, "doing", found.doing);
  return found.sanitizer_words ? text + found.sanitizer_words() : text;
}

// Fields that do not apply are written too, so that every divergence has the same keys. Host
// blocks, sanitizer output and pages are exceptions.
nlohmann::ordered_json json_of(const Divergence& found) {
  nlohmann::ordered_json json;
  json["phase"] = name_of(found.phase);
  json["step"] = found.step;
  json["rank"] = found.rank;
  json["tp_rank"] = found.tp_rank;
  json["pp_rank"] = found.pp_rank;
  json["cp_rank"] = found.cp_rank;
  json["dp_rank"] = found.dp_rank;
  json["request"] = found.request;
  json["layer"] = found.layer;
  json["layer_name"] = found.layer_name;
  json["group"] = found.group;
  json["tensor"] = found.tensor;
  json["block"] = found.block;
  if (found.host_block >= 0) json["host_block"] = found.host_block;
  json["slot"] = found.slot;
  json["head"] = found.head;
  json["part"] = found.part;
  json["token"] = found.token;
  json["byte"] = found.byte;
  json["wrong_bytes"] = found.wrong_bytes;
  json["expected"] = found.expected;
  json["found"] = found.found;
  json["owner"] = found.owner;
  json["writer"] = found.writer;
  json["doing"] = found.doing;
  json["message"] = found.message;
  if (const auto words = found.sanitizer_words ? found.sanitizer_words() : ""; !words.empty())
    json["sanitizer_words"] = words;
  // A page may have megabytes; most divergences have none.
  if (found.found_page.empty()) return json;
  json["expected_page"] = hex_digits(found.expected_page);
  json["found_page"] = hex_digits(found.found_page);
  for (const PageSpan& span : found.spans)
    json["spans"].push_back({span.first_byte, span.size_bytes, span.what});
  return json;
}

std::string to_json(const Divergence& divergence) {
  using Json = nlohmann::ordered_json;
  return json_of(divergence).dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace lockstep
