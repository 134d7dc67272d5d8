// The messages of the scheduler protocol and its replies, as lines of JSON.
// docs/protocols.md documents every key; what a message shares with an engine recording is
// read and written as there.
//
// Not here: the dialogue (sim/foreign/engine_process.h).
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

inline constexpr std::int64_t kSchedulerProtocolVersion = 1;

struct EngineHello {
  RecordedEngine engine;
  std::vector<std::string> features;  // what it can be asked for
  bool can(std::string_view feature) const {
    return std::ranges::find(features, feature) != features.end();
  }
};

// Messages, each with its newline.
std::string hello_message();
std::string open_message(const RecordingHeader& header);  // its engine and block sizes: not said
std::string add_message(const RequestSpec& request);
std::string abort_message(const std::string& name);
std::string pause_message(PauseState state);
std::string reset_message(bool preempts_running);
std::string schedule_message(std::int64_t step, bool shows_tables);
// `sampled`, `drafts` and `worker` of the step.
std::string update_message(const RecordedStep& step);
std::string close_message();
std::string connector_answer_message(const RecordedConnectorAnswer& answer);
std::string keeps_message(bool keeps);

// Replies: the keys of the object, except those of every reply ("failed").
EngineHello read_hello(JsonObject& object);
// `opened`, into the header's block sizes; or the reason of a refusal.
std::string read_opened(JsonObject& object, RecordingHeader& header);
std::string read_refusal(JsonObject& object);  // of a request; empty: it was taken
// Decision and state, into an empty step.
void read_decision(JsonObject& object, const RecordingHeader& header, RecordedStep& step);

struct EngineOutcome {
  std::vector<std::pair<std::string, std::int64_t>> num_tokens;  // by request
};
// Outcome and state: what the step has of them is replaced.
EngineOutcome read_outcome(JsonObject& object, const RecordingHeader& header, RecordedStep& step);
bool read_reset(JsonObject& object, const RecordingHeader& header, RecordedStep& step);

// What the engine's connector asks or tells between a message and its reply.
struct ConnectorLine {
  enum class Kind : std::uint8_t { matched_tokens, finished, allocated };
  Kind kind = Kind::matched_tokens;
  std::string id;
  std::int32_t tokens = 0;      // found locally; of `allocated`, to be loaded
  std::vector<BlockId> blocks;  // of `allocated`, of the first group
};
ConnectorLine read_connector_line(JsonObject& object, const RecordingHeader& header);

}  // namespace lockstep
