// Audit: what recorded decisions do to memory, whichever engine made them. The audit does not ask
// whether the reference would decide the same. It follows every slot and every recurrent state from
// the decisions, as a worker would execute them, and checks every read.
//
// Each ledger of this folder has the invariants of its rules: blocks, tokens, recurrent states,
// transfers, outputs, drafts, sessions, inputs, cache events, hits, worker facts, and policy.
//
// (1) With a KV connector, a load counts as written once it has completed, except in blocks that
//     are reported invalid; blocks of a load or a send are in use.
// (2) The first wrong read of a request in a group is reported, not those that follow from it.
// (3) States are followed to the worker's own tables: the block that a row reads one from, those it
//     writes for drafts, and the one into which a prefill exports a checkpoint.
//
// Not checked: whether kernels address the slots correctly (replay does), layers of a draft model
// apart from what a hit needs, the keys that a ring holds, the bytes that a connector moves.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "traces/formats/recording.h"

namespace lockstep {

// The invariant that does not hold. The text of a finding has the details.
enum class AuditRule : std::uint8_t {
  attention_read,    // a slot holds exactly the request's prefix up to that token
  state_read,        // a state is the one after the request's tokens so far
  handed_out,        // a new block is one that no live request still reads
  token_write,       // a write goes to a block of the request, unshared, in its table
  scheduled_tokens,  // a row computes known or drafted tokens of a live request
  conservation,      // blocks held and free add up to the pool
  common_prefix,     // common blocks are in every running table
  transfer,          // only a load or send in flight completes
  standstill,        // no deadlock; a request alone in the pool runs
  draft_read,        // a hit ends where the draft model's next tokens are the same
  zeroing,           // a new block of attention next to states is zeroed
  sampled,           // a token is sampled where the rows allow one; an end has its reason
  queues,            // a live request is in one queue; its end is reported, once
  starts,            // a row is new or resumed where the worker has no blocks of its request
  planned_blocks,    // a request holds no more states than the pool is planned for
  draft_slots,       // a table has slots for the drafts after a step
  cache_events,      // an event has the tokens, parent, group and keys of the block it describes
  hits,              // content in the pool is hit, unless a reason prevents it
  forbidden_hit,     // a hit is content since the last reset, of a request that reads the cache
  drafts,            // a row verifies the drafts that were proposed for it
  stale_output,      // only the request that computed an output receives it
  victim,            // under policy `priority`, the least important request is preempted
  inputs,            // a row has the encoder rows and the grammar that it needs
  computed_again,    // a running request continues after its last computed token
  excess_blocks,     // a request holds no block more than its tokens and drafts need
  limits,            // a step fits into the worker: tokens, requests, adapters, encoder rows
  worker_batch,      // the worker runs the scheduled rows from their positions
  worker_table,      // the worker's tables are those that were handed over
  worker_slot,       // the worker writes each token to its slot
  worker_page,       // bytes change in the slots of the step and nowhere else
  worker_zeroing,    // the worker zeroes the blocks of the step and no others
  recording,         // the decisions are complete: no block outside the pool, no group missing
};

// Rules about memory: what is read, written, held and delivered. Rules about policy, which a team
// may change on purpose: which requests run, how many, and with how many blocks (hits, victim,
// standstill, limits, excess_blocks).
enum class RuleGroup : std::uint8_t { memory, policy };
RuleGroup group_of(AuditRule rule);
enum class AuditedRules : std::uint8_t { all, memory };

// A request that a block was allocated to, and the step.
struct BlockHolder {
  std::string request;  // empty: none
  std::int64_t since = -1;
};

// One cause, reported once per request and group, or once per block that others read or write.
struct AuditFinding {
  AuditRule rule = AuditRule::recording;
  std::string file{};
  std::int64_t step = -1;  // first step that shows it
  std::string request{};
  std::int32_t group = -1;
  std::int64_t token = -1;  // position in the request; -1: none
  std::int32_t entry = -1;  // of the request's table, with the token
  std::int32_t block = -1;
  BlockHolder holder{}, holder_before{};  // the last two requests that the block was allocated to
  std::int64_t count = 1;                 // steps or rows that show it
  std::int64_t last_step = -1;            // last of them
  std::string what{};                     // what is wrong
};

// "audit.RULE step N request R group G token T entry E block B: SENTENCE", without absent parts.
// The names of rules do not change.
std::string line_of(const AuditFinding& finding);

// Why content in the pool was not hit, in the order in which the reasons are tried; the last two:
// why it was no longer in the pool.
enum class HitLoss : std::uint8_t {
  off,          // prefix caching, or this request's reading
  group,        // another group of full attention has less of it
  last_token,   // one token must be computed
  alignment,    // a hit ends at a block boundary of all groups
  eagle,        // the draft model needs the tokens after it
  window,       // the window before the end is not in the pool
  state,        // no state is left at the end
  retention,    // sparse: only some states and windows keep a hash
  unexplained,  // none of these
  evicted,      // its block was allocated again, as far back as the audit remembers
  cleared,      // by a reset
};
inline constexpr std::size_t kHitLosses = 11;
std::string_view name_of(HitLoss loss);

// Over all requests that arrived or were resumed. Not counted with a connector.
struct HitTotals {
  std::int64_t lookups = 0;
  std::int64_t tokens = 0;  // that were looked up
  std::int64_t there = 0;   // tokens in the pool, in whole blocks of attention
  std::int64_t hit = 0;
  std::array<std::int64_t, kHitLosses> lost{};
  HitTotals& operator+=(const HitTotals& other);
};

// A harness that runs an engine sees itself whether the engine makes progress: it gets deadlocks
// only as cycles, and neither lost hits nor planned blocks. For an engine other than the reference,
// the harness does not see what requests hold: planned blocks are checked.
// `hits_only` counts what could be hit and checks nothing.
enum class AuditScope : std::uint8_t { running_engine, other_engine, whole_recording, hits_only };

// Why a recording cannot be audited: states with drafts in flight, in releases whose worker places
// them by a count that a recording does not have. Empty: it can.
std::string why_not_audited(const RecordingHeader& header);

struct AuditFile {
  std::string file;
  std::int64_t steps = 0;
  std::int64_t reads_checked = 0;
  HitTotals hits;
  std::string skipped;                     // why it was not audited
  bool has_sessions = false;               // which no run follows
  std::string cut_off{};                   // as cut_off_text()
  std::vector<std::string> not_checked{};  // as Auditor::not_checked()
  std::vector<AuditFinding> findings;
};

// Called with each finding as soon as a step shows it; its count and last step are those so far.
using TellFinding = std::function<void(const AuditFinding& finding)>;
// With `tell`, a recording that is still being written is read as it grows.
Result<AuditFile> audit_recording(const std::string& path, AuditedRules rules = AuditedRules::all,
                                  const TellFinding& tell = {});
// A recording that was read from `path`.
Result<AuditFile> audit_recording(const std::string& path,
                                  std::shared_ptr<const Recording> recording, AuditedRules rules);

}  // namespace lockstep
