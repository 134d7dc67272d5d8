// What the ledgers of an audit share. Each ledger adds its own state of each request and checks the
// rules about it: `begin` takes what happened before a step's decision, `step` the decision, `end`
// its outputs. audit_steps.cpp calls them in the order of the worker.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "properties/audit/audit_requests.h"
#include "properties/audit/audit_setup.h"
#include "properties/audit/pool_contents.h"

namespace lockstep {

struct AuditCore {
  AuditCore(const RecordingHeader& header, AuditScope scope, AuditedRules rules)
      : setup(header, scope, rules), pool(header.num_blocks) {}

  AuditSetup setup;
  PoolContents pool;
  AuditRequests requests;
  FindingList findings{setup, requests, pool};
  std::int64_t num_reads = 0;     // slots and states that were checked
  std::int64_t last_output = -1;  // last step whose output the engine has received
};

// What the model returned for a request of the step; empty for a chunk of a prompt.
std::span<const std::int32_t> sampled_of(const RecordedStep& step, const std::string& name);

class Ledger {
 protected:
  explicit Ledger(AuditCore& core)
      : core_(core),
        setup_(core.setup),
        pool_(core.pool),
        requests_(core.requests),
        findings_(core.findings) {}

  std::int32_t block_size(std::size_t group) const { return setup_.block_sizes[group]; }
  std::size_t num_groups() const { return setup_.groups.size(); }
  const KVCacheSpec& spec_of(std::size_t group) const { return setup_.groups[group].spec; }
  std::int64_t step_number() const { return findings_.step(); }
  void report(AuditRule rule, const AuditRequest& request, std::size_t group, std::int64_t token,
              BlockId block, std::string what) const {
    findings_.report(rule, request, group, token, block, std::move(what));
  }
  void report(AuditRule rule, const std::string& request, std::string what,
              std::string_view cause = {}) const {
    findings_.report(rule, request, std::move(what), cause);
  }
  // The block of a token; the null block: none, or a block of another group.
  BlockId block_of(const AuditRequest& request, std::size_t group, std::int32_t position) const {
    const std::vector<BlockId>& table = request.tables[group];
    const auto index = static_cast<std::size_t>(position / block_size(group));
    const bool is_there = index < table.size() && table[index] != kNullBlock &&
                          pool_.belongs_to(table[index], static_cast<std::int32_t>(group));
    return is_there ? table[index] : kNullBlock;
  }

  AuditCore& core_;
  const AuditSetup& setup_;
  PoolContents& pool_;
  AuditRequests& requests_;
  FindingList& findings_;
};

}  // namespace lockstep
