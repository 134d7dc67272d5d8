// The findings of an audit, one per cause.
//
// Invariants:
// (1) A cause is reported once: further reports raise the count of its first finding.
// (2) After a wrong block, what a request reads and writes in that group follows from it and is not
//     reported.
// (3) Without the rules about policy, none of their findings is kept.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "properties/audit/audit.h"
#include "properties/audit/audit_requests.h"
#include "properties/audit/audit_setup.h"
#include "properties/audit/pool_contents.h"

namespace lockstep {

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
