// Requests that wait for each other: turns of a conversation, sub-agents, and the turn that joins
// them. Importers with linked rows read the whole file into a list of requests; in_order() makes a
// request trace of it.
//
// 1. A request that waits for others arrives `delay_ns` after the last of them has ended; any other
//    at `t_ns`. With `keeps_time` the links are only checked, and the recorded time applies
//    (sources that record links, but not when an answer ended).
// 2. The order is that of `t_ns`, and a request follows all that it waits for; ties keep the file's
//    order. So times never decrease.
// 3. Requests that wait for each other in a cycle are refused by name, at the line of the first.
//
// Not checked here: whether recorded times are plausible.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "traces/formats/request_trace.h"
#include "traces/importers/foreign_rows.h"
#include "traces/importers/open_trace.h"

namespace lockstep {

// A request with its links, as an importer found it.
struct LinkedRequest {
  // Without arrival, and without a prompt if prompt_tokens is positive.
  TraceRequest request{};
  // Ids of the prompt by the header's convention; empty: the prompt is private.
  std::vector<std::uint64_t> hash_ids{};
  // 0: request.spec.prompt is complete.
  std::int64_t prompt_tokens = 0;
  std::int64_t t_ns = 0;  // since the trace's own zero
  // Indices in the list of requests; later ones are allowed.
  std::vector<std::size_t> waits_for{};
  // True if the recorded time applies despite the links (1.).
  bool keeps_time = false;
  // True if the source recorded no output tokens; ZeroOutput decides its treatment.
  bool has_no_output = false;
  // Line in the source, for messages.
  std::int64_t line = 1;

  // Plans `length` tokens of any content that end the request by their number; 1 token where the
  // source has none.
  void set_output(std::int32_t length);
};

// Returns the header of an imported trace; `path` names the source.
TraceHeader header_of(std::string kind, std::string_view path,
                      std::optional<HashIdConvention> ids = {});

// Orders the requests and returns them as a trace. O(n log n) for n requests and as many links.
// Errors: a cycle; a request with `keeps_time` that is recorded before one that it follows; two
// requests of one name; an output of no tokens where those are refused.
Result<std::unique_ptr<TraceReader>> in_order(const std::string& path, TraceHeader header,
                                              std::vector<LinkedRequest> requests,
                                              const ImportOptions& options, ReadNotes notes);

// An agent's request as recorded: when it began and ended, but not which others it waited for.
struct AgentRequest {
  std::string session;
  // Session that started this one; empty: none.
  std::string parent;
  std::int64_t end_ns = 0;
  // waits_for and delay are not set yet.
  LinkedRequest linked;
};

// Infers the links, as upstream replays do. Requests of a session wait for each other in the order
// in which they started. The first of a child session waits for the latest request of its parent
// that started no later. The parent's first request that started no earlier than the end of the
// child's last one waits for that. The delay is the recorded time after the last of those; 0 where
// they overlap.
std::vector<LinkedRequest> link_sessions(std::vector<AgentRequest> requests);

}  // namespace lockstep
