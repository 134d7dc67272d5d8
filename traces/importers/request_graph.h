// Requests that wait for each other: turns of a conversation, sub-agents, and the turn that joins
// them. Importers with linked rows read the whole file into such a list; in_order() makes a request
// trace of it.
//
// 1. A request that waits for others arrives `delay_ns` after the last of them has ended; any other
//    at `t_ns`. With `keeps_time` the links are checked and the recorded time holds (sources that
//    record the links, and not when an answer ended).
// 2. The order is that of `t_ns`, and a request follows all that it waits for; ties keep the file's
//    order. So times never decrease.
// 3. Requests that wait for each other in a cycle are refused by name, at the line of the first.
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

struct LinkedRequest {
  TraceRequest request;                 // without arrival, and without a prompt where one follows
  std::vector<std::uint64_t> hash_ids;  // of the prompt, as the header's convention has them
  std::int64_t prompt_tokens = 0;       // 0: request.spec.prompt is there already
  std::int64_t t_ns = 0;                // since the trace's own zero
  std::vector<std::size_t> waits_for;   // places in the list
  bool keeps_time = false;
  bool has_no_output = false;  // ZeroOutput decides its treatment
  std::int64_t line = 1;

  // `length` tokens that end by their number; one of them where the source has none.
  void set_output(std::int32_t length);
};

TraceHeader header_of(std::string kind, std::string_view path,
                      std::optional<HashIdConvention> ids = {});

// Errors: a cycle; a request with `keeps_time` that is recorded before one that it follows; two of
// one name; an output of no tokens where those are refused.
Result<std::unique_ptr<TraceReader>> in_order(const std::string& path, TraceHeader header,
                                              std::vector<LinkedRequest> requests,
                                              const ImportOptions& options, ReadNotes notes);

// What an agent asked for, as it was recorded: when each request began and ended.
struct AgentRequest {
  std::string session;
  std::string parent;  // session that started this one; empty: none
  std::int64_t end_ns = 0;
  LinkedRequest linked;  // without waits_for and delay
};

// The links that upstream replays infer: requests of a session in the order in which they started;
// the first of a child session waits for the latest request of its parent that started no later;
// the first request of the parent that started no earlier than the end of the child's last one
// waits for that. The delay is the recorded time after the last of those; 0 where they overlap.
std::vector<LinkedRequest> link_sessions(std::vector<AgentRequest> requests);

}  // namespace lockstep
