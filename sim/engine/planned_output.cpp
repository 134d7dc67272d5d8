#include "sim/engine/planned_output.h"

namespace lockstep {
namespace {

constexpr std::int32_t kVocabulary = 50'000;

}  // namespace

PlannedOutput::PlannedOutput(const TraceRequest& request, std::uint64_t seed, std::uint64_t ordinal)
    : plan_(request.output),
      eos_(request.spec.eos_token),
      ends_with_eos_(eos_ && request.output.length < request.spec.max_tokens),
      key_(mix(seed ^ mix(ordinal))) {}

// Never the eos token by accident.
std::int32_t PlannedOutput::made(std::int64_t index) const {
  const std::uint64_t random = mix(key_ + static_cast<std::uint64_t>(index));
  const auto token = static_cast<std::int32_t>(random % kVocabulary);
  return token == eos_ ? (token + 1) % kVocabulary : token;
}

std::int32_t PlannedOutput::token(std::int64_t index) const {
  if (index < static_cast<std::int64_t>(plan_.tokens.size()))
    return plan_.tokens[static_cast<std::size_t>(index)];
  if (plan_.fill && index < plan_.length) return *plan_.fill;
  if (ends_with_eos_ && index == plan_.length - 1) return *eos_;
  return made(index);
}

std::int32_t PlannedOutput::draft(std::int64_t index, std::int32_t acceptance_percent) const {
  const std::int32_t right = token(index);
  const std::uint64_t coin = mix(~key_ + static_cast<std::uint64_t>(index));
  if (static_cast<std::int32_t>(coin % 100) < acceptance_percent) return right;
  const std::int32_t wrong = (right + 1) % kVocabulary;
  return wrong == eos_ ? (wrong + 1) % kVocabulary : wrong;
}

}  // namespace lockstep
