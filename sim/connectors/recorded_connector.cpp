#include "sim/connectors/recorded_connector.h"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <utility>

namespace lockstep {
namespace {

// SipHash-1-3 with a zero key: the initial values are the constants of SipHash itself.
struct SipState {
  std::uint64_t v0 = 0x736f6d6570736575ull;
  std::uint64_t v1 = 0x646f72616e646f6dull;
  std::uint64_t v2 = 0x6c7967656e657261ull;
  std::uint64_t v3 = 0x7465646279746573ull;

  void round() {
    v0 += v1;
    v2 += v3;
    v1 = std::rotl(v1, 13) ^ v0;
    v3 = std::rotl(v3, 16) ^ v2;
    v0 = std::rotl(v0, 32);
    v2 += v1;
    v0 += v3;
    v1 = std::rotl(v1, 17) ^ v2;
    v3 = std::rotl(v3, 21) ^ v0;
    v2 = std::rotl(v2, 32);
  }
};

// A set of names with CPython's open addressing: linear probes within a run, then a jump that mixes
// in higher hash bits. The iteration order is that of the table.
class NamesOfIds {
 public:
  void insert(std::string name) {
    const std::uint64_t hash = python_hash(name);
    Place& place = free_place(hash, name);
    // A name that is in the set stays where it is.
    if (place.is_used) return;
    place = {std::move(name), hash, true};
    ++used_;
    // CPython resizes when three fifths of the table are in use: 8 entries hold 4 names, the 5th
    // makes the table grow to 32.
    if (used_ * 5 >= (places_.size() - 1) * 3) grow();
  }
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const Place& place : places_)
      if (place.is_used) names.push_back(place.name);
    return names;
  }

 private:
  struct Place {
    std::string name;
    std::uint64_t hash = 0;
    bool is_used = false;
  };
  static constexpr std::size_t kLinearProbes = 9;
  static constexpr int kPerturbShift = 5;

  // Returns the entry of `name`, or the free entry at which it would be inserted. Ends because at
  // least two fifths of the table are free.
  Place& free_place(std::uint64_t hash, std::string_view name) {
    const std::size_t mask = places_.size() - 1;
    std::uint64_t perturb = hash;
    std::size_t i = hash & mask;
    while (true) {
      // Linear probes never wrap around: near the end of the table only entry i is tried.
      const std::size_t last = i + kLinearProbes <= mask ? i + kLinearProbes : i;
      for (std::size_t at = i; at <= last; ++at)
        if (!places_[at].is_used || places_[at].name == name) return places_[at];
      perturb >>= kPerturbShift;
      i = (i * 5 + 1 + perturb) & mask;
    }
  }

  void grow() {
    std::vector<Place> old = std::exchange(places_, {});
    // The smallest power of two above 4 * used_.
    places_.resize(std::bit_ceil(used_ * 4 + 1));
    // Reinserted in table order, as CPython does; so the order may depend on the old table.
    for (Place& place : old)
      if (place.is_used) free_place(place.hash, place.name) = std::move(place);
  }

  std::vector<Place> places_ = std::vector<Place>(8);
  std::size_t used_ = 0;
};

}  // namespace

std::uint64_t python_hash(std::string_view name) {
  if (name.empty()) return 0;
  SipState state;
  std::uint64_t word = 0;
  for (std::size_t i = 0; i < name.size(); ++i) {
    word |= static_cast<std::uint64_t>(static_cast<unsigned char>(name[i])) << (i % 8 * 8);
    // Each full word of 8 bytes is one message word, with one round (the 1 of SipHash-1-3).
    if (i % 8 != 7) continue;
    state.v3 ^= word;
    state.round();
    state.v0 ^= word;
    word = 0;
  }
  // The last word: the remaining 0 to 7 bytes, and the length in its highest byte.
  word |= static_cast<std::uint64_t>(name.size()) << 56;
  state.v3 ^= word;
  state.round();
  state.v0 ^= word;
  state.v2 ^= 0xff;
  for (int i = 0; i < 3; ++i) state.round();
  const std::uint64_t hash = state.v0 ^ state.v1 ^ state.v2 ^ state.v3;
  // CPython reserves -1 for errors: a hash of -1 becomes -2.
  return hash == ~0ull ? ~1ull : hash;
}

std::vector<std::string> in_python_set_order(const std::vector<std::string>& names) {
  NamesOfIds table;
  for (const std::string& name : names) table.insert(name);
  return table.names();
}

KVConnectorTraits traits_of(const RecordedConnectorConfig& config) {
  return {.is_kv_producer = config.kv_role != "kv_consumer",
          .is_kv_consumer = config.kv_role != "kv_producer",
          .requires_kv_delivery = config.requires_kv_delivery,
          .completes_divergent_hits = config.divergent_hits,
          .waits_for_sends = config.waits_for_sends};
}

KVTransfer kv_transfer(const RecordingHeader& header, KVConnector* connector) {
  const bool fails = header.connector && header.connector->fail_on_load_error;
  return {
      .connector = connector,
      .kv_load_failure_policy = fails ? KVLoadFailurePolicy::fail : KVLoadFailurePolicy::recompute};
}

ExternalHit RecordedConnector::get_num_new_matched_tokens(const ExternalQuery& query) {
  const std::string name(query.name);
  // A new query ends an earlier transfer of the name: the request was preempted, or is another one.
  names_.insert_or_assign(query.request, name);
  moving_.erase(name);
  if (!step_.connector) return {.num_tokens = std::nullopt};
  const auto answer = std::ranges::find(*step_.connector, name, &RecordedConnectorAnswer::id);
  if (answer == step_.connector->end() || !answer->external) return {.num_tokens = std::nullopt};
  // Tokens after a different local hit: the difference in the hit is the one to report.
  if (answer->local != query.num_local_tokens) return {.num_tokens = std::nullopt};
  // A load within the step begins and ends in it, and no report names its request.
  const bool loads = answer->async && *answer->external > 0;
  // A load within the step leaves at least one token to compute.
  const std::int32_t limit = query.num_tokens - query.num_local_tokens - (loads ? 0 : 1);
  if (*answer->external > limit) {
    error_ = Error{
        fmt::format("step {}: connector: {} external tokens of request {}; expected at most {}",
                    step_.step, *answer->external, name, limit)};
    return {.num_tokens = std::nullopt};
  }
  if (loads) begins(name, query.request);
  return {.num_tokens = answer->external, .is_async = loads};
}

bool RecordedConnector::request_finished(RequestId request, std::string_view name) {
  const bool keeps = std::ranges::find(step_.held, name) != step_.held.end();
  if (keeps) begins(std::string(name), request);
  return keeps;
}

void RecordedConnector::order_failed_requests(std::vector<RequestId>& requests) {
  // The position in the recorded list; requests that the recording does not name come last.
  const auto place = [&](RequestId id) {
    return std::ranges::find(step_.stopped, names_[id], &RecordedStopped::id);
  };
  std::ranges::stable_sort(requests, {}, place);
}

Result<RequestId> RecordedConnector::take(std::string_view key, const std::string& name) {
  const auto request = moving_.find(name);
  if (request != moving_.end()) return request->second.request;
  return fail("step {}: worker.{}: nothing of request {} is being transferred", step_.step, key,
              name);
}

void RecordedConnector::begins(const std::string& name, RequestId request) {
  moving_.insert_or_assign(name, Transfer{request, num_begun_++});
}

// The workers of one connector put their transfers into the set in the order begun. Unknown names
// come last; take() reports them.
std::vector<std::string> RecordedConnector::in_set_order(std::vector<std::string> names) const {
  std::ranges::stable_sort(names, {}, [&](const std::string& name) {
    const auto transfer = moving_.find(name);
    return transfer == moving_.end() ? num_begun_ : transfer->second.number;
  });
  return in_python_set_order(names);
}

std::vector<std::string> RecordedConnector::received() const {
  if (step_.transfers.parts_worker.empty()) return in_set_order(step_.worker->received);
  std::vector<std::string> names;
  for (const RecordedPartReport& part : step_.transfers.parts_worker)
    names.insert(names.end(), part.received.begin(), part.received.end());
  return in_python_set_order(names);
}

std::vector<std::string> RecordedConnector::sent() const {
  const std::vector<RecordedPartReport>& parts = step_.transfers.parts_worker;
  if (parts.empty()) return in_set_order(step_.worker->sent);
  std::map<std::string, std::int64_t> reports;  // reports not visited yet, per name
  for (const RecordedPartReport& part : parts)
    for (const std::string& name : part.sent) ++reports[name];
  std::vector<std::string> names;
  // A request that several parts send joins the set with its last report, and only if the merged
  // report of this step names it: another part may still be sending.
  for (const RecordedPartReport& part : parts)
    for (const std::string& name : part.sent)
      if (--reports[name] == 0 &&
          std::ranges::find(step_.worker->sent, name) != step_.worker->sent.end())
        names.push_back(name);
  return in_python_set_order(names);
}

Result<void> RecordedConnector::take_report(KVConnectorOutput& report) {
  if (error_) return tl::unexpected(*error_);
  if (!step_.worker) return {};
  for (const std::string& name : received()) {
    LS_ASSIGN_OR_RETURN(const auto request, take("received", name));
    report.finished_recving.push_back(request);
  }
  for (const std::string& name : sent()) {
    LS_ASSIGN_OR_RETURN(const auto request, take("sent", name));
    report.finished_sending.push_back(request);
  }
  for (const std::string& name : step_.worker->failed) {
    LS_ASSIGN_OR_RETURN(const auto request, take("failed", name));
    report.failed_recving.push_back(request);
  }
  report.invalid_block_ids = step_.worker->invalid_blocks;
  report.enqueued = step_.worker->enqueued;
  report.completed = step_.worker->completed;
  return {};
}

// Returns the request that loads, or is sent, under that name; a later request may share it. A
// request that was aborted during its load is held and still loading.
static std::optional<RequestId> moving(const DecidedStep& step, std::string_view name,
                                       bool is_loading) {
  for (const HeldRequest& held : step.decisions.held())
    if (held.is_loading == is_loading && step.decisions.name(held.id) == name) return held.id;
  if (!is_loading) return std::nullopt;
  for (const SkippedRequest& skipped : step.decisions.skipped())
    if (skipped.is_loading && step.decisions.name(skipped.id) == name) return skipped.id;
  return std::nullopt;
}

// Returns the request that received blocks for its load in this step; absent: no block was free, so
// the load did not begin.
static std::optional<RequestId> loading_into(const DecidedStep& step,
                                             const RecordedConnectorAnswer& answer) {
  if (answer.external.value_or(0) <= 0) return std::nullopt;
  // A longer load moves the request to the skipped ones; a load within the step schedules it.
  if (answer.async) {
    for (const SkippedRequest& skipped : step.decisions.skipped())
      if (skipped.is_loading && step.decisions.name(skipped.id) == answer.id) return skipped.id;
    return std::nullopt;
  }
  for (const ScheduledRequest& scheduled : step.decision.scheduled)
    if ((scheduled.is_new || scheduled.is_resumed) &&
        step.decisions.name(scheduled.id) == answer.id)
      return scheduled.id;
  return std::nullopt;
}

void FollowedTransfers::plan(const DecidedStep& step, StepTransfers& transfers) {
  // A load covers the recorded external tokens, whatever the model would have found.
  for (const RecordedConnectorAnswer& answer :
       step_.connector.value_or(std::vector<RecordedConnectorAnswer>()))
    if (const auto request = loading_into(step, answer))
      peers_.begin({*request, answer.local, answer.local + *answer.external, answer.async});
  KVConnectorOutput report;
  const auto take = [&](const std::vector<std::string>& names, bool is_loading,
                        std::vector<RequestId>& requests) {
    for (const std::string& name : names)
      if (const auto request = moving(step, name, is_loading)) requests.push_back(*request);
  };
  if (const auto& worker = step_.worker) {
    take(worker->received, true, report.finished_recving);
    take(worker->sent, false, report.finished_sending);
    take(worker->failed, true, report.failed_recving);
    report.invalid_block_ids = worker->invalid_blocks;
  }
  // The report of the engine's run names ids of its own blocks: the followed decisions use the
  // same.
  transfers.lost = report.invalid_block_ids;
  peers_.plan({.decision = step.decision,
               .decisions = step.decisions,
               .report = report,
               .block_tokens = step.block_tokens},
              transfers);
  // Requests that this step holds finish with its output, after the plan. They count from the next
  // step, as with the other connectors.
  transfers.num_frees_delayed = num_frees_delayed_;
  num_frees_delayed_ += std::ssize(step_.held);
}

}  // namespace lockstep
