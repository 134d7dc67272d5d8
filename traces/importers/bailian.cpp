#include <fmt/format.h>

#include <unordered_map>

#include "traces/formats/prompt_json.h"
#include "traces/importers/foreign_rows.h"
#include "traces/importers/foreign_traces.h"
#include "traces/importers/request_graph.h"

namespace lockstep {
namespace {

struct BailianChats {
  HashIdConvention read_as;  // ids as in the file: the last one covers the rest
  std::vector<LinkedRequest> requests;
  std::vector<std::int64_t> parents;  // chat ids; -1: none
  std::vector<std::int64_t> turns;
  std::unordered_map<std::int64_t, std::size_t> place_of;
  WideIds wide;

  void read_row(JsonValue value, std::int64_t line, const ImportOptions& options) {
    JsonObject object = value.object();
    JsonValue chat = object.required("chat_id");
    const std::int64_t chat_id = chat.integer(0);
    if (!place_of.emplace(chat_id, requests.size()).second) chat.refuse("a chat_id that is new");
    parents.push_back(object.required("parent_chat_id").integer(-1));
    turns.push_back(object.required("turn").integer(1));
    object.required("type").string();
    LinkedRequest linked;
    linked.line = line;
    linked.keeps_time = true;
    linked.request.spec.name = fmt::format("chat{}", chat_id);
    linked.t_ns = read_arrival_ns(object, "timestamp", kDigitsOfSeconds, options);
    linked.prompt_tokens = object.required("input_length").integer(1, kPromptTokensMax);
    linked.set_output(object.required("output_length").integer<std::int32_t>(0));
    linked.hash_ids =
        read_hash_ids(object.required("hash_ids"), linked.prompt_tokens, read_as, wide);
    // The id of a block that is not full may stand for padding as well: the next turn has another.
    if (linked.prompt_tokens % read_as.block_tokens != 0 && !linked.hash_ids.empty())
      linked.hash_ids.pop_back();
    object.finish();
    requests.push_back(std::move(linked));
  }

  // A part of the trace begins inside conversations: a parent that is not there is none.
  Result<void> link(const std::string& path) {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const auto parent = place_of.find(parents[i]);
      if (parent == place_of.end()) continue;
      requests[i].waits_for.push_back(parent->second);
    }
    return check_turns(path);
  }

  Result<void> check_turns(const std::string& path) const {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      for (const std::size_t parent : requests[i].waits_for) {
        // Chats that follow each other in a cycle have no turns; in_order() names them.
        if (turns[parent] < turns[i] || requests[parent].t_ns >= requests[i].t_ns) continue;
        return fail(
            fmt::format("{}:{}: field `turn`: found {}; expected more than {}, the turn of "
                        "its parent_chat_id",
                        path, requests[i].line, turns[i], turns[parent]));
      }
    }
    return {};
  }
};

}  // namespace

Result<std::unique_ptr<TraceReader>> open_bailian(const std::string& path,
                                                  const ImportOptions& options) {
  BailianChats chats;
  chats.read_as = {.block_tokens = options.block_tokens.value_or(16), .tail = IdTail::ceil};
  ReadNotes notes;
  if (!options.block_tokens)
    notes.assumed.emplace_back("ids of 16 tokens, as Bailian's (--import block=N)");
  LS_RETURN_IF_ERROR(for_each_row(path, options, notes, [&](JsonValue value, std::int64_t line) {
    chats.read_row(value, line, options);
  }));
  LS_RETURN_IF_ERROR(chats.link(path));
  const HashIdConvention kept{.block_tokens = chats.read_as.block_tokens, .tail = IdTail::floor};
  return in_order(path, header_of("bailian", path, kept), std::move(chats.requests), options,
                  std::move(notes));
}

}  // namespace lockstep
