#include "sim/pair/travellers.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "sim/pair/paired_engine.h"

namespace lockstep {
namespace {

constexpr std::int64_t kRefusedNamed = 20;

}  // namespace

void Travellers::arrived(RequestSpec spec, std::uint64_t ticket) {
  const std::string name = spec.name;
  const auto number = static_cast<std::uint64_t>(counts_.requests++);
  ledger_.arrived(number, name);
  Traveller& traveller = travellers_[name];
  traveller = {
      .spec = std::move(spec), .ticket = ticket, .transfer = {.request = number, .attempt = 0}};
  set_out(traveller);
}

void Travellers::abort_request(const std::string& name) {
  const auto traveller = travellers_.find(name);
  if (traveller == travellers_.end()) return;
  traveller->second.was_aborted = true;
  sender_.forget(name);
  const bool prefills = traveller->second.stage == Traveller::Stage::prefill;
  (prefills ? prefill_ : decode_)->abort_request(name);
}

std::int64_t Travellers::num_prefilled(const Traveller& traveller) const {
  const auto& groups = options_.decode.backend.plan.groups;
  const bool has_window = std::ranges::any_of(
      groups, [](const KVCacheGroupSpec& group) { return is_sliding_window(group.spec.kind); });
  return traveller.spec.prompt.size() - (has_window ? 1 : 0);
}

// To the prefill engine, for another attempt.
void Travellers::set_out(Traveller& traveller) {
  ++traveller.transfer.attempt;
  const std::int64_t num_tokens = num_prefilled(traveller);
  if (!options_.is_apart || num_tokens == 0) return decode_here(traveller);
  traveller.stage = Traveller::Stage::prefill;
  RequestSpec spec = traveller.spec;
  spec.max_tokens = 1;
  spec.eos_token.reset();
  spec.stop_token_ids.clear();
  if (num_tokens < spec.prompt.size()) {
    TokenRun& last = spec.prompt.runs.back();
    if (--last.count == 0) spec.prompt.runs.pop_back();
  }
  sender_.expect(spec.name, traveller.transfer);
  prefill_->add(std::move(spec), traveller.ticket);
}

// From the prefill engine, which keeps its blocks, to the decode engine.
void Travellers::go_on(Traveller& traveller, std::int64_t now_ns) {
  std::vector<ContentId> contents = contents_of(traveller.spec.prompt);
  contents.resize(num_prefilled(traveller));
  auto num_tokens = static_cast<std::int32_t>(contents.size());
  if (options_.offer_percent < 100) {
    const auto size =
        static_cast<std::int32_t>(options_.decode.backend.plan.groups.front().spec.block_size);
    num_tokens = num_tokens * options_.offer_percent / 100 / size * size;
  }
  ledger_.held(traveller.transfer, now_ns, std::move(contents));
  receiver_.offer(traveller.spec.name, traveller.transfer, num_tokens);
  decode_here(traveller);
}

void Travellers::decode_here(Traveller& traveller) {
  traveller.stage = Traveller::Stage::decode;
  decode_->add(traveller.spec, traveller.ticket);
}

void Travellers::ended(const PairedEngine& engine, const std::string& name, FinishReason reason,
                       std::int64_t now_ns) {
  Traveller& traveller = travellers_.find(name)->second;
  const bool has_finished = reason == FinishReason::stop || reason == FinishReason::length;
  if (&engine == prefill_ && has_finished) return go_on(traveller, now_ns);
  if (&engine == decode_) ledger_.not_needed(traveller.transfer);
  if (has_finished) return end(name, RequestEnd::finished);
  if (traveller.was_aborted) return end(name, RequestEnd::aborted);
  try_again(name, fmt::format("its blocks did not come over the network, in {} attempts",
                              traveller.transfer.attempt));
}

void Travellers::try_again(const std::string& name, const std::string& why) {
  Traveller& traveller = travellers_.find(name)->second;
  if (traveller.transfer.attempt >= static_cast<std::uint32_t>(options_.attempts_max))
    return end(name, RequestEnd::refused, why);
  ++counts_.prefilled_again;
  set_out(traveller);
}

void Travellers::refused(const PairedEngine& engine, const std::string& name, const Error& why) {
  if (&engine == prefill_) {
    sender_.forget(name);
  } else {
    receiver_.withdraw(name);
    ledger_.not_needed(transfer_of(name));
  }
  end(name, RequestEnd::refused, why.message);
}

void Travellers::take_out_failed() {
  for (const std::string& name : receiver_.take_failed())
    if (travellers_.contains(name)) decode_->abort_request(name);
}

void Travellers::end(const std::string& name, RequestEnd how, const std::string& why) {
  const auto traveller = travellers_.find(name);
  ledger_.ended(traveller->second.transfer.request, how);
  client_.request_left(name, traveller->second.ticket);
  travellers_.erase(traveller);
  if (how == RequestEnd::finished) ++counts_.finished_requests;
  if (how == RequestEnd::aborted) ++counts_.aborted_requests;
  if (how != RequestEnd::refused) return;
  if (++counts_.refused_requests <= kRefusedNamed) counts_.refused.push_back({name, why});
}

}  // namespace lockstep
