// A saved case: all that a replay needs, in one file, so that a divergence found once is found
// again. docs/formats.md, "Saved case".
//
// 1. Self-contained: configuration, plan, requests, recorded decisions and faults are inside.
// 2. Reading what was written gives an equal case; what is on disk is a whole case or not there.
//
// Not checked here: whether a backend, check mode, mutant or fault of that name exists; whoever
// runs the case knows.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "reference/types/engine_config.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/view_types.h"
#include "traces/formats/recording.h"
#include "traces/formats/request_trace.h"

namespace lockstep {

// Something that is made to go wrong at a step, by name, with its numbers.
struct Fault {
  std::string kind;
  std::int64_t step = 0;
  std::vector<std::pair<std::string, std::int64_t>> arguments;
  bool operator==(const Fault&) const = default;
};

struct ExpectedVerdict {
  std::string kind;  // of the divergence; "agreed" when there is none
  std::optional<std::int64_t> step;
  bool operator==(const ExpectedVerdict&) const = default;
};

struct SavedCase {
  std::string name;
  EngineConfig engine;
  KVCacheConfig cache;
  CacheLayout layout = CacheLayout::NHD;
  AttentionBackend attention_backend = AttentionBackend::flash_attn;
  std::vector<std::int64_t> kernel_block_sizes;  // per group, tokens
  std::string backend = "simt";                  // "simt", "cuda", "none"
  std::string check = "check";                   // "fast", "check", "hunt"
  std::vector<std::string> mutants;
  std::uint64_t seed = 0;
  LayoutRule layout_rule = LayoutRule::isolated;
  // Numbers of the run by name (budgets, the step-time model, queries per KV head, ...).
  std::vector<std::pair<std::string, std::int64_t>> settings;
  std::vector<Fault> faults;
  std::optional<ExpectedVerdict> expected;
  Trace trace;
  std::optional<Recording> recording;  // decisions to follow instead of the reference's own
  bool operator==(const SavedCase&) const = default;
};

Result<SavedCase> read_saved_case(const std::string& path);
// The same from memory: what the reader refuses in a file it refuses here. `name` stands for the
// path in the message.
Result<SavedCase> saved_case_from_text(std::string name, std::string text);
std::string saved_case_to_text(const SavedCase& saved);
Result<void> write_saved_case(const std::string& path, const SavedCase& saved);

}  // namespace lockstep
