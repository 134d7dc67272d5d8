// The messages of the scheduler protocol and its replies, as lines of JSON. docs/protocols.md
// documents every key; keys shared with engine recordings are read and written by the same code.
//
// Not here: the dialogue, its time limits and its findings (sim/foreign/engine_process.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json_reader.h"
#include "traces/formats/recording.h"

namespace lockstep {

// Version of the messages; an adapter with another one is refused at `hello`.
inline constexpr std::int64_t kSchedulerProtocolVersion = 1;

// The engine's reply to `hello`.
struct EngineHello {
  RecordedEngine engine;
  // Supported features, in the words of docs/protocols.md: "full", "async_scheduling", "lacks:...".
  std::vector<std::string> features;
  bool can(std::string_view feature) const {
    return std::ranges::find(features, feature) != features.end();
  }
};

// Messages, each with its newline.
// `protocol`: the key of the version, "scheduler_protocol" for example.
std::string hello_message_of(std::string_view protocol, std::int64_t version);
std::string hello_message();
// Starts a case. The engine's name and the block sizes are omitted: the engine has the one and
// derives the others.
std::string open_message(const RecordingHeader& header);
// Events of clients, in the form that recordings have.
std::string add_message(const RequestSpec& request);
std::string abort_message(const std::string& name);
std::string pause_message(PauseState state);
std::string reset_message(bool preempts_running);
// The feature that an engine needs for it.
constexpr std::string_view reset_feature(bool preempts_running) {
  return preempts_running ? "reset_running" : "reset_prefix_cache";
}
// Requests the decision of `step`. shows_tables: the reply must contain the tables of all running
// requests.
std::string schedule_message(std::int64_t step, bool shows_tables);
// Passes the step's `sampled`, `drafts` and `worker` to the engine.
std::string update_message(const RecordedStep& step);
std::string close_message();
// Lockstep's answers to the connector's queries (ConnectorLine).
std::string connector_answer_message(const RecordedConnectorAnswer& answer);
std::string keeps_message(bool keeps);

// Replies. Each function reads the keys of its reply from the object and leaves "failed", which any
// reply may have, to the caller. The caller also calls finish().
EngineHello read_hello(JsonObject& object);
// Reads `opened` into the header's block sizes and returns "", or returns the reason of a refusal.
std::string read_opened(JsonObject& object, RecordingHeader& header);
// Returns the reason for which the engine refuses a request; empty: it was accepted.
std::string read_refusal(JsonObject& object);
// Reads the decision and the state into an empty step.
void read_decision(JsonObject& object, const RecordingHeader& header, RecordedStep& step);

// What an `update` changed, besides the state.
struct EngineOutcome {
  // Per request of the step that is live or just ended: tokens of its prompt and accepted output.
  std::vector<std::pair<std::string, std::int64_t>> num_tokens;
};
// Reads outcome and state; they replace what the step has of them.
EngineOutcome read_outcome(JsonObject& object, const RecordingHeader& header, RecordedStep& step);
// Returns whether the prefix cache was emptied, and reads the state into the step.
bool read_reset(JsonObject& object, const RecordingHeader& header, RecordedStep& step);

// A query or notification of the engine's connector between a message and its reply;
// docs/protocols.md, "With a KV connector".
struct ConnectorLine {
  // vLLM's get_num_new_matched_tokens(), request_finished() and update_state_after_alloc().
  enum class Kind : std::uint8_t { matched_tokens, finished, allocated };
  Kind kind = Kind::matched_tokens;
  std::string id;
  // matched_tokens: tokens found locally; allocated: tokens to load.
  std::int32_t tokens = 0;
  // allocated: blocks of the first group, as KVConnector::update_state_after_alloc() takes them.
  std::vector<BlockId> blocks;
  // finished: the blocks that the request still has. Absent: as reported last.
  std::optional<BlocksPerGroup> kept;
};
ConnectorLine read_connector_line(JsonObject& object, const RecordingHeader& header);

}  // namespace lockstep
