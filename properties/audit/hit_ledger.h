// The content that the pool had when a request arrived, how much of it was hit, and why not the
// rest.
//
// Invariants:
// (1) Content is in the pool until its block is allocated again or zeroed. A hit can use it unless
//     the prefix cache was reset since. No hash decides.
// (2) Every token that was in the pool is hit or lost for one reason: `there` is `hit` and the
//     reasons before `evicted`.
// (3) At most a twentieth of the tokens in the pool is lost for no reason (hits).
// (4) A hit has no block that was allocated before the last reset. A request that does not read the
//     prefix cache hits nothing, and neither does any request while prefix caching is off
//     (forbidden_hit).
//
// With a KV connector, hits are from elsewhere too: only (4) is checked, for the local ones.
#pragma once

#include <array>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "properties/audit/audit_setup.h"

namespace lockstep {

class HitLedger : Ledger {
 public:
  explicit HitLedger(AuditCore& core)
      : Ledger(core), places_(setup_.groups.size()), num_places_max_(setup_.groups.size(), 4096) {}

  void begin(const AuditRequest& request, bool reads_cache) {
    reads_cache_.begin(request) = reads_cache;
  }
  // Resets of the prefix cache. `first_step`: the first one that is decided after the event.
  void begin(const RecordedEvent& event, std::int64_t first_step);
  // A new request starts after `hit` tokens.
  void step(const AuditRequest& request, std::int32_t hit);
  // (4) After the copies of the step.
  void check_allowed(const AuditRow& row) const;
  // (3)
  void end();

  // A block is full of tokens that stand, or has a state where a hit may end.
  void note(std::size_t group, std::uint64_t content, BlockId block);
  const HitTotals& totals() const { return totals_; }

 private:
  // Two blocks that may hold content of a group, and the number of resets before.
  struct Place {
    BlockId block = kNullBlock;
    BlockId block_before = kNullBlock;
    std::int64_t epoch = 0;
  };
  enum class Presence : std::uint8_t { never, evicted, cleared, there };
  // Tokens that a hit loses, reason by reason, from the end of what was in the pool.
  struct Count {
    HitTotals totals{};
    std::int32_t end = 0;  // tokens that are not lost yet
    std::int32_t hit = 0;
    void lose(HitLoss cause, std::int32_t next) {
      next = std::max(next, hit);
      if (next >= end) return;
      totals.lost[static_cast<std::size_t>(cause)] += end - next;
      end = next;
    }
  };
  bool still_holds(BlockId block, std::size_t group, std::uint64_t content) const;
  Presence presence_of(std::size_t group, std::uint64_t content) const;
  std::int32_t reach_of(const AuditRequest& request, std::size_t group,
                        std::array<std::int64_t, kHitLosses>& gone) const;
  bool can_end(const AuditRequest& request, std::size_t group, std::int32_t end) const;
  bool can_end(const AuditRequest& request, std::int32_t end, bool states) const;
  std::int32_t end_for_draft_model(const AuditRequest& request, std::int32_t end) const;
  void lose_ends(const AuditRequest& request, Count& count) const;
  void report_first(const AuditRequest& request, const Count& count);

  PerRequest<std::uint8_t> reads_cache_;
  std::vector<std::unordered_map<std::uint64_t, Place>> places_;  // per group, by content
  std::vector<std::size_t> num_places_max_;  // per group, when unused entries are removed
  std::int64_t epoch_ = 0;                   // resets
  std::int64_t reset_in_ = -1;               // step of the last reset
  std::int64_t first_step_ = -1;             // first step after it
  HitTotals totals_;
  AuditFinding first_loss_;
};

}  // namespace lockstep
