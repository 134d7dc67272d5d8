#include "sim/pair/engine_pair.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "reference/check.h"
#include "sim/model_step.h"
#include "sim/pair/paired_engine.h"
#include "sim/pair/transfer_receiver.h"
#include "sim/pair/transfer_sender.h"

namespace lockstep {
namespace {

constexpr std::size_t kRefusedNamed = 20;

bool is_kind_known(CacheKind kind) {
  return kind == CacheKind::full_attention || kind == CacheKind::mla ||
         kind == CacheKind::sliding_window;
}

Result<void> check_options(const PairOptions& options) {
  const auto& groups = options.prefill.device.plan.groups;
  for (const KVCacheGroupSpec& group : groups)
    if (!is_kind_known(group.spec.kind))
      return fail(
          fmt::format("prefill and decode apart: blocks of {} are not transferred; full "
                      "attention, MLA and sliding windows are",
                      name_of(group.spec.kind)));
  if (groups != options.decode.device.plan.groups)
    return fail("prefill and decode apart: both engines must have the same groups and block sizes");
  if (options.offer_percent < 100 && !can_compute_lost_blocks(groups))
    return fail(
        "prefill and decode apart: parts of prompts can be offered to one group that keeps "
        "all blocks; leave the offers whole");
  if (options.prefill.engine.num_spec_tokens > 0 || options.decode.engine.num_spec_tokens > 0)
    return fail("prefill and decode apart: draft tokens are not modelled");
  return {};
}

std::vector<std::int64_t> block_sizes(const KVCacheConfig& plan) {
  std::vector<std::int64_t> sizes;
  for (const KVCacheGroupSpec& group : plan.groups) sizes.push_back(group.spec.block_size);
  return sizes;
}

// One client's request on its way.
struct Traveller {
  RequestSpec spec;
  std::uint64_t ticket = 0;  // the client's
  TransferId transfer;
  enum class Stage : std::uint8_t { prefill, decode } stage = Stage::prefill;
  bool was_aborted = false;  // by its client
};

// Sees the decode engine's loads before the receiver does, for the ledger.
class WatchedReceiver final : public KVConnector {
 public:
  using Begin = std::function<void(RequestId, const ExternalQuery&, std::int32_t)>;
  WatchedReceiver(TransferReceiver& receiver, Begin begin)
      : receiver_(receiver), begin_(std::move(begin)) {}

  ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) override {
    asked_[query.request] = {std::string(query.name), query.num_tokens, query.num_local_tokens};
    return receiver_.get_num_new_matched_tokens(query);
  }
  void update_state_after_alloc(RequestId request, std::span<const BlockId> blocks,
                                std::int32_t num_external_tokens) override {
    if (const auto asked = asked_.extract(request)) {
      const auto& [name, num_tokens, num_local] = asked.mapped();
      begin_(request, {request, name, num_tokens, num_local}, num_external_tokens);
    }
    receiver_.update_state_after_alloc(request, blocks, num_external_tokens);
  }
  bool request_finished(RequestId request, std::string_view name) override {
    asked_.erase(request);
    return receiver_.request_finished(request, name);
  }

 private:
  TransferReceiver& receiver_;
  const Begin begin_;
  std::map<RequestId, std::tuple<std::string, std::int32_t, std::int32_t>> asked_;
};

class Pair final : public EngineOwner {
 public:
  Pair(const PairOptions& options, Workload& client)
      : options_(options),
        groups_(options.decode.device.plan.groups),
        client_(client),
        network_(options.network),
        ledger_(block_sizes(options.decode.device.plan), options.times.lease_ns),
        sender_(link(kPrefillEndpoint, kDecodeEndpoint), static_cast<std::int32_t>(groups_.size()),
                [this](TransferId id, BlockPlace place, BlockId block) {
                  return read_block(id, place, block);
                }),
        receiver_(
            link(kDecodeEndpoint, kPrefillEndpoint), groups_,
            [this](TransferId id, BlockPlace place, BlockId block,
                   std::span<const std::uint8_t> bytes) { write_block(id, place, block, bytes); }),
        watched_(receiver_, [this](RequestId id, const ExternalQuery& query, std::int32_t tokens) {
          begin_load(id, query, tokens);
        }) {}

  Result<void> start();
  Result<PairReport> run(const std::function<void(const PairProgress&)>& progress);

  Result<void> sample(PairedEngine& engine, std::int64_t step, std::span<const SampledRow> rows,
                      ModelOutput& output) override;
  void report(PairedEngine& engine, KVConnectorOutput& report) override;
  void ended(PairedEngine& engine, const std::string& name, FinishReason reason) override;
  void refused(PairedEngine& engine, const std::string& name, const Error& why) override;
  void misread(PairedEngine& engine, std::string what) override {
    ledger_.found("memory.computed", (&engine == prefill_.get() ? "prefill engine: "
                                                                : "decode "
                                                                  "engine: ") +
                                         what);
  }

 private:
  TransferLink link(Endpoint self, Endpoint peer) {
    return {network_, self, peer, options_.times, options_.defect, report_.transfers};
  }
  std::optional<std::int64_t> next_ns() const;
  Result<bool> turn();
  Result<void> take_arrivals();
  void deliver();
  void take_out_failed();
  void set_out(Traveller& traveller);
  void go_on(Traveller& traveller);
  void decode_here(Traveller& traveller);
  void end(const std::string& name, RequestEnd how, const std::string& why = {});
  void try_again(const std::string& name, const std::string& why);
  void begin_load(RequestId id, const ExternalQuery& query, std::int32_t num_external_tokens);
  std::vector<std::uint8_t> read_block(TransferId id, BlockPlace place, BlockId block);
  void write_block(TransferId id, BlockPlace place, BlockId block,
                   std::span<const std::uint8_t> bytes);
  std::int64_t num_prefilled(const Traveller& traveller) const;
  Result<void> close();

  const PairOptions& options_;
  const std::vector<KVCacheGroupSpec>& groups_;
  Workload& client_;
  PairReport report_;
  Network network_;
  TransferLedger ledger_;
  TransferSender sender_;
  TransferReceiver receiver_;
  WatchedReceiver watched_;
  std::unique_ptr<PairedEngine> prefill_;
  std::unique_ptr<PairedEngine> decode_;
  std::map<std::string, Traveller> travellers_;
  std::map<RequestId, TransferId> loading_;  // of the decode engine
  std::int64_t now_ns_ = 0;
};

Result<void> Pair::start() {
  if (auto sound = check_options(options_); !sound) return sound;
  const auto start = [&](const LockstepConfig& config, KVConnector& connector, std::string_view who,
                         std::unique_ptr<PairedEngine>& engine) -> Result<void> {
    auto created = PairedEngine::create(
        config, {.connector = &connector, .kv_load_failure_policy = options_.load_failure_policy},
        options_.step_time, *this);
    if (!created) return fail(fmt::format("{} engine: {}", who, created.error().message));
    engine = std::move(*created);
    return {};
  };
  if (auto started = start(options_.prefill, sender_, "prefill", prefill_); !started)
    return started;
  if (auto started = start(options_.decode, watched_, "decode", decode_); !started) return started;
  sender_.attach(prefill_->decisions());
  receiver_.attach(decode_->decisions());
  return take_arrivals();
}

Result<PairReport> Pair::run(const std::function<void(const PairProgress&)>& progress) {
  for (;;) {
    const auto moved = turn();
    if (!moved) return tl::unexpected(moved.error());
    if (progress)
      progress({.steps = prefill_->summary().steps + decode_->summary().steps,
                .requests_ended = report_.finished_requests + report_.aborted_requests +
                                  report_.refused_requests});
    if (!*moved || ledger_.finding() || report_.is_cut_short) break;
  }
  if (auto closed = close(); !closed) return tl::unexpected(closed.error());
  return std::move(report_);
}

// When something can happen next.
std::optional<std::int64_t> Pair::next_ns() const {
  std::optional<std::int64_t> next;
  const auto sooner = [&next](std::optional<std::int64_t> at_ns) {
    if (at_ns) next = std::min(next.value_or(*at_ns), *at_ns);
  };
  sooner(client_.next_due_ns());
  sooner(network_.next_due_ns());
  sooner(sender_.next_timer_ns());
  sooner(receiver_.next_timer_ns());
  if (prefill_->wants_step(sender_.has_news())) sooner(prefill_->ready_ns());
  if (decode_->wants_step(receiver_.has_news())) sooner(decode_->ready_ns());
  return next;
}

// Everything that happens at the next moment. False: nothing will.
Result<bool> Pair::turn() {
  const auto next = next_ns();
  if (!next) return false;
  now_ns_ = std::max(now_ns_, *next);
  sender_.at(now_ns_);
  receiver_.at(now_ns_);
  deliver();
  if (auto taken = take_arrivals(); !taken) return tl::unexpected(taken.error());
  take_out_failed();
  const auto step = [&](PairedEngine& engine, bool has_news) -> Result<bool> {
    if (!engine.wants_step(has_news) || engine.ready_ns() > now_ns_ || report_.is_cut_short)
      return true;
    auto goes_on = engine.step(now_ns_);
    const std::int64_t steps = prefill_->summary().steps + decode_->summary().steps;
    report_.is_cut_short = options_.steps_max > 0 && steps >= options_.steps_max;
    return goes_on;
  };
  const auto prefilled = step(*prefill_, sender_.has_news());
  if (!prefilled || !*prefilled) return prefilled;
  return step(*decode_, receiver_.has_news());
}

void Pair::deliver() {
  while (const auto packet = network_.deliver(now_ns_)) {
    const auto message = decode(packet->bytes);
    if (!message)
      ++report_.transfers.damaged;
    else if (packet->to == kPrefillEndpoint)
      sender_.take(*message);
    else
      receiver_.take(*message);
  }
}

Result<void> Pair::take_arrivals() {
  client_.advance_to(now_ns_);
  std::vector<WorkloadEvent> events;
  const LoopState state{.step = 0, .idle = false, .unfinished = !travellers_.empty()};
  if (const auto turn = client_.next_turn(state, events); !turn)
    return tl::unexpected(turn.error());
  for (WorkloadEvent& event : events) {
    if (event.kind == WorkloadEvent::Kind::reset_prefix_cache) {
      prefill_->reset_prefix_cache();
      decode_->reset_prefix_cache();
      continue;
    }
    if (event.kind == WorkloadEvent::Kind::add) {
      const std::string name = event.request.name;
      const auto number = static_cast<std::uint64_t>(report_.requests++);
      ledger_.arrived(number, name);
      Traveller& traveller = travellers_[name];
      traveller = {.spec = std::move(event.request),
                   .ticket = event.ticket,
                   .transfer = {.request = number, .attempt = 0}};
      set_out(traveller);
      continue;
    }
    const auto traveller = travellers_.find(event.name);
    if (traveller == travellers_.end()) continue;  // it has ended
    traveller->second.was_aborted = true;
    sender_.forget(event.name);
    const bool prefills = traveller->second.stage == Traveller::Stage::prefill;
    (prefills ? prefill_ : decode_)->abort_request(event.name);
  }
  return {};
}

std::int64_t Pair::num_prefilled(const Traveller& traveller) const {
  const bool has_window = std::ranges::any_of(groups_, [](const KVCacheGroupSpec& group) {
    return group.spec.kind == CacheKind::sliding_window;
  });
  return traveller.spec.prompt.size() - (has_window ? 1 : 0);
}

// To the prefill engine, for another attempt.
void Pair::set_out(Traveller& traveller) {
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
void Pair::go_on(Traveller& traveller) {
  std::vector<ContentId> contents = contents_of(traveller.spec.prompt);
  contents.resize(static_cast<std::size_t>(num_prefilled(traveller)));
  auto num_tokens = static_cast<std::int32_t>(contents.size());
  if (options_.offer_percent < 100) {
    const auto size = static_cast<std::int32_t>(groups_.front().spec.block_size);
    num_tokens = num_tokens * options_.offer_percent / 100 / size * size;
  }
  ledger_.held(traveller.transfer, now_ns_, std::move(contents));
  receiver_.offer(traveller.spec.name, traveller.transfer, num_tokens);
  decode_here(traveller);
}

void Pair::decode_here(Traveller& traveller) {
  traveller.stage = Traveller::Stage::decode;
  decode_->add(traveller.spec, traveller.ticket);
}

Result<void> Pair::sample(PairedEngine& engine, std::int64_t step, std::span<const SampledRow> rows,
                          ModelOutput& output) {
  if (&engine == decode_.get()) return client_.sample(step, rows, output);
  for (const SampledRow& row : rows) {
    if (row.samples) output.tokens.push_back(0);  // it goes nowhere
    output.token_ends.push_back(static_cast<std::uint32_t>(output.tokens.size()));
  }
  return {};
}

void Pair::report(PairedEngine& engine, KVConnectorOutput& report) {
  if (&engine == prefill_.get()) {
    sender_.report(report);
    for (const TransferId transfer : sender_.take_freed()) ledger_.given_back(transfer, now_ns_);
    return;
  }
  receiver_.report(report);
  const std::vector<HeldRequest> held = decode_->decisions().held();
  for (const RequestId id : report.finished_recving) {
    const auto load = loading_.find(id);
    LS_CHECK(load != loading_.end(), "request {} has received what it never loaded", index_of(id));
    const bool has_left = std::ranges::find(held, id, &HeldRequest::id) != held.end();
    ledger_.load_over(load->second, report.invalid_block_ids, has_left);
    loading_.erase(load);
  }
}

void Pair::ended(PairedEngine& engine, const std::string& name, FinishReason reason) {
  Traveller& traveller = travellers_.at(name);
  const bool has_finished = reason == FinishReason::stop || reason == FinishReason::length;
  if (&engine == prefill_.get() && has_finished) return go_on(traveller);
  if (&engine == decode_.get()) ledger_.not_needed(traveller.transfer);
  if (has_finished) return end(name, RequestEnd::finished);
  if (traveller.was_aborted) return end(name, RequestEnd::aborted);
  try_again(name, fmt::format("its blocks did not come over the network, in {} attempts",
                              traveller.transfer.attempt));
}

void Pair::try_again(const std::string& name, const std::string& why) {
  Traveller& traveller = travellers_.at(name);
  if (traveller.transfer.attempt >= static_cast<std::uint32_t>(options_.attempts_max))
    return end(name, RequestEnd::refused, why);
  ++report_.prefilled_again;
  set_out(traveller);
}

void Pair::refused(PairedEngine& engine, const std::string& name, const Error& why) {
  if (&engine == prefill_.get()) {
    sender_.forget(name);
  } else {
    receiver_.withdraw(name);
    ledger_.not_needed(travellers_.at(name).transfer);
  }
  end(name, RequestEnd::refused, why.message);
}

void Pair::end(const std::string& name, RequestEnd how, const std::string& why) {
  const auto traveller = travellers_.find(name);
  ledger_.ended(traveller->second.transfer.request, how);
  client_.request_left(name, traveller->second.ticket);
  travellers_.erase(traveller);
  if (how == RequestEnd::finished) ++report_.finished_requests;
  if (how == RequestEnd::aborted) ++report_.aborted_requests;
  if (how != RequestEnd::refused) return;
  if (++report_.refused_requests <= static_cast<std::int64_t>(kRefusedNamed))
    report_.refused.push_back({name, why});
}

// Whose blocks were lost in an engine that cannot compute them: they must not run.
void Pair::take_out_failed() {
  for (const std::string& name : receiver_.take_failed()) {
    if (travellers_.contains(name)) decode_->abort_request(name);
  }
}

void Pair::begin_load(RequestId id, const ExternalQuery& query, std::int32_t num_external_tokens) {
  const TransferId transfer = travellers_.at(std::string(query.name)).transfer;
  if (num_external_tokens == 0) return ledger_.not_needed(transfer);
  const std::int32_t first = query.num_local_tokens;
  const std::int32_t last = first + num_external_tokens;
  std::vector<LoadPiece> pieces;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const auto table = decode_->decisions().block_table(id, static_cast<std::int32_t>(g));
    const auto size = static_cast<std::int32_t>(groups_[g].spec.block_size);
    const std::int64_t needed =
        first_attended(groups_[g].spec, std::min(last, query.num_tokens - 1));
    for (std::int32_t p = first; p < last; ++p) {
      const BlockId block = table[static_cast<std::size_t>(p / size)];
      const BlockPlace place{static_cast<std::int32_t>(g), p / size};
      if (p / size < needed / size || block == kNullBlock) continue;
      if (pieces.empty() || pieces.back().place != place) pieces.push_back({place, block});
    }
  }
  ledger_.loading(transfer, first, last, pieces);
  loading_[id] = transfer;
}

std::vector<std::uint8_t> Pair::read_block(TransferId id, BlockPlace place, BlockId block) {
  std::vector<std::uint8_t> bytes = prefill_->memory().read_block(place.group, block);
  ledger_.read(id, place, bytes);
  return bytes;
}

void Pair::write_block(TransferId id, BlockPlace place, BlockId block,
                       std::span<const std::uint8_t> bytes) {
  ledger_.delivered(id, place, block, bytes);
  decode_->memory().write_block(place.group, block, bytes);
}

// The engines say whether anybody waits for ever.
Result<void> Pair::close() {
  const bool is_whole = !ledger_.finding() && !report_.is_cut_short;
  for (PairedEngine* engine : {prefill_.get(), decode_.get()})
    if (is_whole)
      if (auto closed = engine->close(); !closed) return closed;
  auto prefill = prefill_->finish();
  if (!prefill) return tl::unexpected(prefill.error());
  auto decode = decode_->finish();
  if (!decode) return tl::unexpected(decode.error());
  report_.prefill = std::move(prefill->summary);
  report_.decode = std::move(decode->summary);
  report_.network = network_.counts();
  report_.simulated_ns = now_ns_;
  report_.blocks_checked = ledger_.num_deliveries();
  const bool is_stuck =
      report_.prefill.verdict == Verdict::liveness || report_.decode.verdict == Verdict::liveness;
  if (is_whole && !is_stuck) ledger_.finish();
  report_.finding = ledger_.finding();
  if (report_.finding)
    report_.verdict = PairVerdict::broken;
  else if (is_stuck)
    report_.verdict = PairVerdict::liveness;
  return {};
}

}  // namespace

Result<PairReport> run_pair(const PairOptions& options, Workload& client,
                            const std::function<void(const PairProgress&)>& progress) {
  Pair pair(options, client);
  if (auto started = pair.start(); !started) return tl::unexpected(started.error());
  return pair.run(progress);
}

}  // namespace lockstep
