#include "properties/known_findings.h"

#include <algorithm>

#include "properties/case_parts.h"

namespace lockstep {
namespace {

template <class Predicate>
auto count_groups(const SavedCase& saved, Predicate predicate) {
  return std::ranges::count_if(saved.cache.groups, [&](const KVCacheGroupSpec& group) {
    return predicate(group.spec.kind);
  });
}

bool has_states(const SavedCase& saved) {
  return count_groups(saved, [](CacheKind kind) { return kind == CacheKind::mamba; }) > 0;
}

bool is_cached_0_22_1(const SavedCase& saved) {
  return saved.engine.engine == "vllm-0.22.1" && saved.engine.enable_prefix_caching;
}

bool state_hit_is_longer(const SavedCase& saved) {
  return is_cached_0_22_1(saved) && saved.engine.spec_method == SpecMethod::eagle &&
         has_states(saved);
}

bool second_full_group_is_not_cut(const SavedCase& saved) {
  return is_cached_0_22_1(saved) && count_groups(saved, [](CacheKind kind) {
                                      return kind == CacheKind::full_attention ||
                                             kind == CacheKind::mla ||
                                             kind == CacheKind::hidden_state;
                                    }) > 1;
}

bool preempts_in_own_step(const SavedCase& saved) {
  return saved.engine.policy == SchedulingPolicy::priority && saved.engine.enable_prefix_caching;
}

bool has_windows(const SavedCase& saved) {
  return count_groups(saved, [](CacheKind kind) {
           return kind == CacheKind::sliding_window || kind == CacheKind::chunked_local;
         }) > 0;
}

bool plans_windows_without_lookahead(const SavedCase& saved) {
  const SpecMethod method = saved.engine.spec_method;
  return (method == SpecMethod::eagle || method == SpecMethod::draft_model) && has_windows(saved);
}

bool frees_windows_by_drafts(const SavedCase& saved) {
  return saved.engine.engine == "vllm-0.22.1" && saved.engine.async_scheduling &&
         saved.engine.num_spec_tokens > 0 && has_windows(saved);
}

bool plans_too_few_states(const SavedCase& saved) {
  return saved.engine.engine == "vllm-0.33.0" && saved.engine.async_scheduling &&
         saved.engine.mamba_cache_mode == MambaCacheMode::align && has_states(saved);
}

bool has_equals_without_a_cache(const SavedCase& saved) {
  if (saved.engine.policy != SchedulingPolicy::priority || saved.engine.enable_prefix_caching)
    return false;
  const auto requests = requests_of(saved);
  for (std::size_t i = 0; i < requests.size(); ++i)
    for (std::size_t j = i + 1; j < requests.size(); ++j)
      if (requests[i]->priority == requests[j]->priority &&
          requests[i]->arrival_ns == requests[j]->arrival_ns)
        return true;
  return false;
}

constexpr std::string_view kWrongHit[] = {"audit.attention_read", "audit.state_read", "decide"};
constexpr std::string_view kSharedBeyondHit[] = {
    "audit.handed_out",     "audit.attention_read",  "audit.state_read", "audit.token_write",
    "invariant.one_writer", "invariant.queue_front", "decide",           "reuse"};
constexpr std::string_view kNotComputed[] = {"invariant.published"};
constexpr std::string_view kFreedInFlight[] = {"audit.handed_out", "audit.attention_read",
                                               "audit.token_write"};
constexpr std::string_view kLiveness[] = {"liveness"};

constexpr KnownFinding kFindings[] = {
    {1, "with EAGLE, a state hit is longer than the attention hit beside it", state_hit_is_longer,
     kWrongHit},
    {2, "a second full-attention group keeps blocks beyond the common hit",
     second_full_group_is_not_cut, kSharedBeyondHit},
    {3, "a request preempted in its own step leaves blocks that nobody computed",
     preempts_in_own_step, kNotComputed},
    {4, "a window is retired by a count that includes rejected drafts", frees_windows_by_drafts,
     kFreedInFlight},
    {5, "with a step in flight a request holds more states than its pool is planned for",
     plans_too_few_states, kLiveness},
    {6, "a window's pool is planned without the slots of drafts", plans_windows_without_lookahead,
     kLiveness},
    {11, "requests of one priority and arrival preempt each other for ever",
     has_equals_without_a_cache, kLiveness},
};

const KnownFinding* finding_of(const SavedCase& saved, const Outcome& outcome) {
  for (const KnownFinding& finding : kFindings)
    if (std::ranges::find(finding.checks, outcome.check) != finding.checks.end() &&
        finding.can_happen(saved))
      return &finding;
  return nullptr;
}

}  // namespace

std::span<const KnownFinding> known_findings() { return kFindings; }

const KnownFinding* known_finding(const SavedCase& saved, const Outcome& outcome) {
  if (!outcome.failed()) return nullptr;
  if (const KnownFinding* finding = finding_of(saved, outcome)) return finding;
  if (outcome.kind != OutcomeKind::divergence) return nullptr;
  const Outcome decided = judge(saved);
  return decided.failed() && decided.step <= outcome.step ? finding_of(saved, decided) : nullptr;
}

}  // namespace lockstep
