#include "properties/audit/finding_list.h"

#include <fmt/core.h>

#include <utility>

namespace lockstep {

// A wrong block spoils all that reads or writes it.
static bool spoils_the_rest(AuditRule rule) {
  return rule == AuditRule::attention_read || rule == AuditRule::state_read ||
         rule == AuditRule::handed_out || rule == AuditRule::token_write;
}

void FindingList::add(AuditFinding finding, std::string cause) {
  if (setup_.rules == AuditedRules::memory && group_of(finding.rule) == RuleGroup::policy) return;
  finding.last_step = finding.step;
  const auto [number, is_first] = numbers_.try_emplace(std::move(cause), next_number());
  if (is_first) {
    findings_.push_back(std::move(finding));
  } else if (number->second >= num_taken_) {
    LS_CHECK(number->second - num_taken_ < findings_.size(), "finding {} of {}", number->second,
             next_number());
    AuditFinding& first = findings_[number->second - num_taken_];
    ++first.count;
    first.last_step = finding.step;
  }
}

std::string FindingList::cause_of(AuditRule rule, const std::string& request,
                                  std::string_view detail) const {
  const AuditRequest* live = requests_.find(request);
  return fmt::format("{} {} {} {}", static_cast<int>(rule), request,
                     live == nullptr ? -1 : live->index, detail);
}

void FindingList::name_holders(AuditFinding& finding) const {
  if (finding.block <= 0 || finding.block >= pool_.num_blocks()) return;
  const auto& [last, before] = pool_.holders(BlockId{finding.block});
  if (last.request < 0) return;
  finding.holder = {requests_.name_at(last.request), last.since};
  finding.what += fmt::format("; request {} has had the block since step {}",
                              finding.holder.request, last.since);
  if (before.request < 0) return;
  finding.holder_before = {requests_.name_at(before.request), before.since};
  finding.what += fmt::format(", request {} before it, since step {}",
                              finding.holder_before.request, before.since);
}

void FindingList::report(AuditRule rule, const AuditRequest& request, std::size_t group,
                         std::int64_t token, BlockId block, std::string what) {
  LS_CHECK(group < setup_.groups.size(), "group {} of {}", group, setup_.groups.size());
  if (is_wrong(request, group)) return;
  const bool spoils = spoils_the_rest(rule);
  wrong_[request][group] = spoils;
  AuditFinding finding{.rule = rule,
                       .step = step_,
                       .request = request.name,
                       .group = static_cast<std::int32_t>(group),
                       .token = token,
                       .block = index_of(block),
                       .what = std::move(what)};
  // The state after n tokens is in the entry of the last of them.
  const std::int64_t position = rule == AuditRule::state_read ? token - 1 : token;
  if (position >= 0)
    finding.entry = static_cast<std::int32_t>(position / setup_.block_sizes[group]);
  name_holders(finding);
  std::string detail = fmt::format("group {}", group);
  const bool is_of_block = spoils && finding.holder.since >= 0;
  if (is_of_block) detail += fmt::format(" block {} {}", finding.block, finding.holder.since);
  add(std::move(finding), cause_of(rule, is_of_block ? std::string() : request.name, detail));
}

void FindingList::report(AuditRule rule, const std::string& request, std::string what,
                         std::string_view cause) {
  AuditFinding finding{.rule = rule, .step = step_, .request = request, .what = std::move(what)};
  // The token after the known ones.
  const bool is_of_tokens = rule == AuditRule::sampled || rule == AuditRule::scheduled_tokens;
  if (const AuditRequest* live = requests_.find(request); is_of_tokens && live != nullptr)
    finding.token = std::ssize(live->tokens);
  add(std::move(finding), cause_of(rule, request, cause));
}

void FindingList::replace_text(std::size_t number, std::string what) {
  LS_CHECK(number < next_number(), "finding {} of {}", number, next_number());
  if (number >= num_taken_) findings_[number - num_taken_].what = std::move(what);
}

std::vector<AuditFinding> FindingList::take() {
  num_taken_ += findings_.size();
  return std::exchange(findings_, {});
}

}  // namespace lockstep
