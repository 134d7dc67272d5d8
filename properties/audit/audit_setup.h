// What a recording's header says about the engine, and which rules apply. Constant during an audit.
//
// Invariants:
// (1) Every group has a block size: the tokens of one table entry over all ranks of its context.
// (2) `profile` is null for an engine whose release is not known; rules of a release then do not
//     apply.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "properties/audit/audit.h"
#include "properties/audit/audit_requests.h"
#include "properties/audit/pool_contents.h"
#include "reference/profiles/engine_profile.h"

namespace lockstep {

struct AuditSetup {
  AuditSetup(const RecordingHeader& header, AuditScope scope, AuditedRules rules);

  EngineConfig config;
  std::vector<KVCacheGroupSpec> groups;
  std::vector<std::int32_t> block_sizes;   // (1)
  const EngineProfile* profile = nullptr;  // (2)
  AuditScope scope;
  AuditedRules rules;
  bool has_connector = false;
  // Tokens after a hit that the engine's block hashes cover, so that the hit proves them; 0: none.
  std::int32_t hash_lookahead = 0;
  bool drops_last_block = false;  // EAGLE without hashes that look ahead
  std::int32_t hash_block_size = 1;
  std::int32_t hit_alignment = 1;  // hits end at multiples of it
  // Slots after the tokens of a step that the draft model writes: one per draft of EAGLE, MTP and
  // draft models; n-grams need none (vllm/config/speculative.py, v1/core/sched/scheduler.py).
  std::int32_t draft_slots = 0;
  std::int32_t num_replayed = 0;  // tokens of a hit that windows compute again; 0: none

  bool checks_rules() const { return scope != AuditScope::hits_only; }
  // A step is decided before the accepted drafts of the previous one are known.
  bool has_drafts_in_flight() const {
    return config.async_scheduling && config.num_spec_tokens > 0;
  }
  // First position that attention at `position` reads.
  std::int32_t first_read(std::size_t group, std::int32_t position) const;
};

// True if the header of a known release gives the option.
bool is_given(const RecordingHeader& header, std::string_view option);
bool has_states(const RecordingHeader& header);

inline bool is_state(const KVCacheSpec& spec) { return is_state_kind(spec.kind); }
// Slots of tokens by position, which attention reads.
inline bool keeps_tokens(const KVCacheSpec& spec) {
  return !is_state(spec) && !is_ring(spec) && !is_cross_attention(spec);
}
// Every token of a prefix, as long as the request runs.
inline bool keeps_all_tokens(const KVCacheSpec& spec) {
  return is_full_attention(spec.kind) && spec.rswa_window == 0;
}
inline std::int32_t ceil_div32(std::int32_t a, std::int32_t b) { return (a + b - 1) / b; }

// The findings of an audit, one per cause.
//
// Invariants:
// (1) A cause is reported once: further reports raise the count of its first finding.
// (2) After a wrong block, what a request reads and writes in that group follows from it and is not
//     reported.
// (3) Without the rules about policy, none of their findings is kept.

class FindingList {
 public:
  FindingList(const AuditSetup& setup, const AuditRequests& requests, const PoolContents& pool)
      : setup_(setup), requests_(requests), pool_(pool) {}

  void begin_step(std::int64_t step) { step_ = step; }
  std::int64_t step() const { return step_; }
  void begin(const AuditRequest& request) { wrong_.begin(request).resize(setup_.groups.size()); }
  // (2)
  bool is_wrong(const AuditRequest& request, std::size_t group) const {
    return wrong_[request][group];
  }

  // A finding at a token of a request, and its block.
  void report(AuditRule rule, const AuditRequest& request, std::size_t group, std::int64_t token,
              BlockId block, std::string what);
  // A finding of a request, or of none. `cause` tells several findings of one rule apart.
  void report(AuditRule rule, const std::string& request, std::string what,
              std::string_view cause = {});
  void add(AuditFinding finding, std::string cause);
  // Adds "; request b has had the block since step 7".
  void name_holders(AuditFinding& finding) const;
  std::string cause_of(AuditRule rule, const std::string& request, std::string_view detail) const;

  // The number of the next finding, and a new text for one that was not taken yet.
  std::size_t next_number() const { return num_taken_ + findings_.size(); }
  void replace_text(std::size_t number, std::string what);
  std::vector<AuditFinding> take();

 private:
  const AuditSetup& setup_;
  const AuditRequests& requests_;
  const PoolContents& pool_;
  std::int64_t step_ = -1;
  PerRequest<std::vector<bool>> wrong_;  // per group
  std::vector<AuditFinding> findings_;
  std::size_t num_taken_ = 0;
  std::map<std::string, std::size_t> numbers_;  // by cause
};

}  // namespace lockstep
