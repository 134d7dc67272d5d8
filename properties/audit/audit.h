// Audit: what recorded decisions do to memory, whoever made them. Nobody asks whether our scheduler
// would have decided so; a ledger of every slot and every state page is kept from the decisions
// alone, as a worker would execute them, and every read is checked against it.
//
// Found:
// (1) an attention read of a slot that does not hold exactly that request's prefix up to that
// token; (2) a state read at a token count, or of a prefix, that it does not stand for; (3) a block
// handed out as new while a live request can still read it, a table of the scheduler's that is not
// the worker's, a request that comes back as if it had run on; (4) a write to the null block, to a
// block that is shared, or beyond the table; (5) tokens scheduled that nobody knows, or for a
// request that has left; more tokens or requests than a worker has room for; (6) blocks lost: held
// and free do not add up to the pool, where a recording shows its tables or nobody runs; (7) blocks
// said to be common to the batch that are not; (8) a load or a send reported over that was not
// under way; (9) a recording that ends while nothing runs and requests wait for each other in a
// circle; (10) where hashes look ahead, a hit that ends with a token behind which another one stood
// than in this request: an EAGLE drafter's row covers both; (11) a new block of attention beside
// states that is not zeroed; (12) a token sampled from a row that has none to give, or of a request
// that has all of its own; an end whose reason is not so; a token behind the one that ended it;
// (13) a live request in no queue, or in two; a preemption or an end that is not told to the
// worker, or to nobody at all; (14) where a recording shows its tables, a request that holds more
// states than the pool is planned for; (15) a table without room for the drafts that come behind a
// step, where they have slots; (16) where a recording has cache events, an index rebuilt from them
// that is not what requests hit, or an event that differs in tokens, parent, group or keys from the
// block that it describes; (17) hits lost for no reason, in more than a twentieth of what
// could be hit; (18) drafts that were not proposed for what they are verified behind, or that a
// request keeps which has lost what they were made of; (19) output that is taken though its request
// has left or was to have it dropped, or dropped without need; (20) under policy `priority`, a
// request preempted while a less important one runs on; and where a recording has facts of the
// worker that held the cache: (21) a batch or positions that are not those decided; (22) a table
// that is not what was handed over; (23) a slot that is not the token's; (24) bytes that changed
// beside the slots of the step, or did not change in them; (25) blocks zeroed that should not be,
// or not zeroed that should; (26) tokens computed that stand for an image whose rows are not
// there, a request scheduled that still waits for its grammar; (27) a running request that computes
// tokens again, and no preemption, reset, rejected draft or lost block sent it back; (28) a request
// that holds more blocks than its tokens and drafts need; (29) more tokens, requests or adapters in
// a step than a worker has room for, more rows encoded than the encoder has.
// With a KV connector, what it loads counts as written once the load is over, except in blocks that
// are reported invalid, and blocks that it still writes or sends are in use. A request's first
// wrong read in a group is reported, and not the consequences that follow from it.
//
// States are followed to the worker's own tables: the block it reads one from, those it writes for
// drafts, and the one into which a prefill exports a state from inside a chunk.
//
// Not seen from a recording: whether kernels address the slots rightly (replay does that), layers
// of a draft model but for (10), what a ring of keys holds, and whether a connector moves the right
// bytes.
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

// What was broken, for whoever sorts findings; the sentence says the rest.
enum class AuditRule : std::uint8_t {
  attention_read,    // (1)
  state_read,        // (2)
  handed_out,        // (3)
  token_write,       // (4)
  scheduled_tokens,  // (5)
  conservation,      // (6)
  common_prefix,     // (7)
  transfer,          // (8)
  standstill,        // (9)
  draft_read,        // (10)
  zeroing,           // (11)
  sampled,           // (12)
  queues,            // (13)
  planned_blocks,    // (14)
  draft_slots,       // (15)
  cache_events,      // (16)
  hits,              // (17)
  drafts,            // (18)
  stale_output,      // (19)
  victim,            // (20)
  inputs,            // (26)
  computed_again,    // (27)
  excess_blocks,     // (28)
  limits,            // (29)
  worker_batch,      // (21)
  worker_table,      // (22)
  worker_slot,       // (23)
  worker_page,       // (24)
  worker_zeroing,    // (25)
  recording,         // the decisions are not whole: a block outside the pool, a group left out
};
std::string_view name_of(AuditRule rule);

// Rules about memory: what is read, written, held and delivered. Rules about policy, which a team
// may change on purpose: which requests run, and how many (hits, victim, standstill, limits).
enum class RuleGroup : std::uint8_t { memory, policy };
RuleGroup group_of(AuditRule rule);
enum class AuditedRules : std::uint8_t { all, memory };

// Who has had a block, and since which step.
struct BlockHolder {
  std::string request;  // empty: nobody
  std::int64_t since = -1;
};

// One cause, told once: for a request and a group, and for a block that others trip over too.
struct AuditFinding {
  AuditRule rule = AuditRule::recording;
  std::string file{};
  std::int64_t step = -1;  // where it first shows
  std::string request{};
  std::int32_t group = -1;
  std::int64_t token = -1;  // position in the request; -1: none
  std::int32_t entry = -1;  // of the request's table, where the token lies
  std::int32_t block = -1;
  BlockHolder holder{}, holder_before{};  // of the block: the last one that got it as new
  std::int64_t count = 1;                 // how often it was seen
  std::int64_t last_step = -1;            // in which last
  std::string what{};                     // one sentence
};

// "audit.RULE step N request R group G token T entry E block B: SENTENCE", without what a finding
// has not: for a bug report. Rules keep their names.
std::string line_of(const AuditFinding& finding);

// Why content that was in the pool was not hit, in the order in which it is asked; the last two:
// why it was not in the pool any more.
enum class HitLoss : std::uint8_t {
  off,          // prefix caching, or this request's reading
  group,        // another group of full attention has less of it
  last_token,   // one token has to be computed
  alignment,    // a hit ends where the blocks of all groups do
  eagle,        // the drafter needs what lies behind
  window,       // nothing of the window before the end
  state,        // no state was left at the end
  retention,    // sparse: only some states and windows are kept findable
  unexplained,  // nothing of this
  evicted,      // its block was handed out again: as far back as is remembered
  cleared,      // by a reset
};
inline constexpr std::size_t kHitLosses = 11;
std::string_view name_of(HitLoss loss);

// Of all requests that came in, those that were preempted each time. Not counted with a connector.
struct HitTotals {
  std::int64_t lookups = 0;
  std::int64_t tokens = 0;  // that could not be more
  std::int64_t there = 0;   // of these, in the pool, as far as whole blocks of attention go
  std::int64_t hit = 0;
  std::array<std::int64_t, kHitLosses> lost{};
  HitTotals& operator+=(const HitTotals& other);
};

// Whoever runs an engine sees for himself whether it gets on, and what its requests hold: of (9) he
// is told of circles alone, and of (14) and (17) nothing. Who runs another engine does not see what
// its requests hold.
// `hits_only` counts what could be hit and checks nothing.
enum class AuditScope : std::uint8_t { running_engine, other_engine, whole_recording, hits_only };

// One recording, fed step by step.
class Auditor {
 public:
  explicit Auditor(const RecordingHeader& header, AuditScope scope = AuditScope::running_engine,
                   AuditedRules rules = AuditedRules::all);
  ~Auditor();
  Auditor(Auditor&&) noexcept;

  void step(const RecordedStep& step);
  void end(const RecordingEnd& end);
  std::vector<AuditFinding> take_findings();  // file is left empty
  std::int64_t reads_checked() const;         // slots and states
  const HitTotals& hits() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Why a recording cannot be audited (states with drafts in flight, in releases whose worker places
// them by a count that a recording does not have); empty: it can.
std::string why_not_audited(const RecordingHeader& header);

struct AuditFile {
  std::string file;
  std::int64_t steps = 0;
  std::int64_t reads_checked = 0;
  HitTotals hits;
  std::string skipped;       // why it was not audited
  bool has_profile = false;  // of its engine, so that the model can run it
  std::vector<AuditFinding> findings;
};

// Called with each finding as soon as a step shows it; its count and last step are those so far.
using TellFinding = std::function<void(const AuditFinding& finding)>;
// With `tell`, a recording that is still being written is read as it grows.
Result<AuditFile> audit_recording(const std::string& path, AuditedRules rules = AuditedRules::all,
                                  const TellFinding& tell = {});

}  // namespace lockstep
