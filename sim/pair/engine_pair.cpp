#include "sim/pair/engine_pair.h"

#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "base/stop_signal.h"

namespace lockstep {

// Refused requests that a report lists with their reasons. A bad network may refuse thousands.
constexpr std::int64_t kRefusedNamed = 20;

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
  // The engine also calls request_finished() for an aborted request. Without an expected transfer,
  // the sender then holds no blocks. vLLM decides by the request's status instead (0.22.1,
  // nixl/scheduler.py, request_finished()).
  sender_.forget(name);
  const bool prefills = traveller->second.stage == Traveller::Stage::prefill;
  (prefills ? prefill_ : decode_)->abort_request(name);
}

// Returns the prompt length, less one token if any group has a sliding window. A prompt of one
// token then has nothing to prefill, and set_out() decodes it directly.
std::int64_t Travellers::num_prefilled(const Traveller& traveller) const {
  const auto& groups = options_.decode.backend.plan.groups;
  const bool has_window = std::ranges::any_of(
      groups, [](const KVCacheGroupSpec& group) { return is_sliding_window(group.spec.kind); });
  return traveller.spec.prompt.size() - (has_window ? 1 : 0);
}

// Starts the next attempt in the prefill engine. The copy of the request stops after one sampled
// token, and the client's end-of-sequence and stop tokens do not apply to that token.
void Travellers::set_out(Traveller& traveller) {
  ++traveller.transfer.attempt;
  const std::int64_t num_tokens = num_prefilled(traveller);
  if (!options_.is_apart || num_tokens == 0) return decode_here(traveller);
  traveller.stage = Traveller::Stage::prefill;
  RequestSpec spec = traveller.spec;
  spec.max_tokens = 1;
  spec.eos_token.reset();
  spec.stop_token_ids.clear();
  // The prompt is stored as runs of tokens, so removing the last token shortens or removes the last
  // run.
  if (num_tokens < spec.prompt.size()) {
    TokenRun& last = spec.prompt.runs.back();
    if (--last.count == 0) spec.prompt.runs.pop_back();
  }
  sender_.expect(spec.name, traveller.transfer);
  prefill_->add(std::move(spec), traveller.ticket);
}

// Hands a prefilled request to the decode engine. The offer may cover only offer_percent of the
// tokens, in whole blocks of the first group: 100 tokens, block_size 16 and 50 % offer 48 tokens.
// The ledger still records the contents of all prefilled tokens, since all their blocks are held.
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

// A request that ended neither by itself nor by its client's abort failed in the decode engine,
// because its blocks did not arrive. Only that case is retried. A client may abort a request while
// its last prefill step runs: the decode engine then ends it, which releases the held blocks.
void Travellers::ended(const PairedEngine& engine, const std::string& name, FinishReason reason,
                       std::int64_t now_ns) {
  Traveller& traveller = travellers_.find(name)->second;
  const bool has_finished = reason == FinishReason::stop || reason == FinishReason::length;
  if (&engine == prefill_ && has_finished) {
    go_on(traveller, now_ns);
    if (traveller.was_aborted) decode_->abort_request(name);
    return;
  }
  if (has_finished) return end(name, RequestEnd::finished);
  if (traveller.was_aborted) return end(name, RequestEnd::aborted);
  try_again(name, fmt::format("its blocks did not arrive over the network in {} attempts",
                              traveller.transfer.attempt));
}

// `attempt` counts from 1, so the last permitted attempt has the number attempts_max.
void Travellers::try_again(const std::string& name, const std::string& why) {
  Traveller& traveller = travellers_.find(name)->second;
  if (traveller.transfer.attempt >= static_cast<std::uint32_t>(options_.attempts_max))
    return end(name, RequestEnd::refused, why);
  ++counts_.prefilled_again;
  set_out(traveller);
}

// A prefill engine that refuses a request has no blocks of it. A decode engine has an offer that no
// admission will use, and its blocks must be released.
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

namespace {

// Runs both engines, the network and the client on one virtual clock, event by event.
//
// Invariants
// (1) now_ns_ never decreases. An engine whose step is still in progress receives its events before
//     its next step, not during the current one.
// (2) Within one moment the order is fixed: timers, messages, arrivals, ends of requests, aborts of
//     failed requests, prefill step, decode step. Runs with the same options are therefore
//     identical.
// (3) A step's blocks leave the prefill engine when the step's time has passed (take_staged()),
//     although the simulated step computes at once.
class Pair final : public EngineOwner {
 public:
  Pair(const PairOptions& options, Workload& client, HoldsContents holds_contents)
      : options_(options),
        client_(client),
        network_(options.network),
        ledger_(groups(), options.times.lease_ns, std::move(holds_contents)),
        sender_(link(kPrefillEndpoint, kDecodeEndpoint), static_cast<std::int32_t>(groups().size()),
                options.staging_blocks,
                [this](TransferId id, BlockPlace place, const BlockTransfer& staged) {
                  return read_block(id, place, staged);
                }),
        receiver_(
            link(kDecodeEndpoint, kPrefillEndpoint), groups(), options.staging_blocks,
            [this](TransferId id, BlockPlace place, BlockId block,
                   std::span<const std::uint8_t> bytes) { take_block(id, place, block, bytes); }),
        watched_(receiver_, ledger_, groups(),
                 [this](std::string_view name) { return travellers_.transfer_of(name); }),
        travellers_(options, client, sender_, receiver_, ledger_) {}

  // Creates both engines and connects them. The engines hold references to the sender and the
  // receiver, and these read the engines' schedulers, so attach() follows creation. Messages of
  // errors name the engine.
  Result<void> start() {
    const auto start = [&](const LockstepConfig& config, const PairedParts& parts,
                           std::string_view who,
                           std::unique_ptr<PairedEngine>& engine) -> Result<void> {
      auto created = PairedEngine::create(config, parts, options_.step_time, *this);
      if (!created) return fail("{} engine: {}", who, created.error().message);
      engine = std::move(*created);
      return {};
    };
    const KVLoadFailurePolicy policy = options_.load_failure_policy;
    if (auto started = start(options_.prefill,
                             {.transfer = {&sender_, policy},
                              .transfers = &sender_,
                              .ranks = options_.prefill_ranks},
                             "prefill", prefill_);
        !started)
      return started;
    if (auto started = start(options_.decode,
                             {.transfer = {&watched_, policy},
                              .transfers = &receiver_.transfers(),
                              .ranks = options_.decode_ranks},
                             "decode", decode_);
        !started)
      return started;
    sender_.attach(prefill_->scheduler());
    receiver_.attach(decode_->scheduler());
    watched_.attach(decode_->scheduler());
    travellers_.attach(*prefill_, *decode_);
    return take_arrivals();
  }

  // Runs until nothing can happen, the ledger has a finding, steps_max is reached, or a signal
  // stops it.
  Result<PairReport> run(const std::function<void(const PairProgress&)>& progress) {
    for (;;) {
      LS_ASSIGN_OR_RETURN(const auto moved, turn());
      if (progress)
        progress({.steps = num_steps(), .requests_ended = travellers_.counts().ended()});
      if (!moved || ledger_.finding() || report_.is_cut_short) break;
    }
    LS_RETURN_IF_ERROR(close());
    return std::move(report_);
  }

  // Supplies the tokens of a step. Only the decode engine's tokens reach the client. The prefill
  // engine samples token 0, which no request reads: the decode engine computes that position again.
  Result<void> sample(PairedEngine& engine, std::int64_t step, std::span<const SampledRow> rows,
                      ModelOutput& output) override {
    if (&engine == decode_.get()) return client_.sample(step, rows, output);
    for (const SampledRow& row : rows) {
      if (row.samples) output.tokens.push_back(0);  // not used, see above
      output.token_ends.push_back(static_cast<std::uint32_t>(output.tokens.size()));
    }
    return {};
  }

  // Appends what the engine's connector reports with this step. A request in finished_sending frees
  // its blocks in this step, so the ledger checks the release now.
  void report(PairedEngine& engine, KVConnectorOutput& report) override {
    if (&engine == decode_.get()) return watched_.report(report);
    sender_.report(report);
    for (const TransferId transfer : sender_.take_freed()) ledger_.given_back(transfer, now_ns_);
  }
  // The engine reports ends when its step starts in virtual time. They take effect when it ends: no
  // block is read before the step has computed it. The ledger is notified at once: later, it would
  // report the release as too early.
  void ended(PairedEngine& engine, const std::string& name, FinishReason reason) override {
    if (&engine == decode_.get()) ledger_.not_needed(travellers_.transfer_of(name));
    ended_.push_back({engine.ready_ns(), &engine, name, reason});
  }
  void refused(PairedEngine& engine, const std::string& name, const Error& why) override {
    travellers_.refused(engine, name, why);
  }
  void misread(PairedEngine& engine, std::string what) override {
    ledger_.found("memory.computed",
                  (&engine == prefill_.get() ? "prefill engine: " : "decode engine: ") + what);
  }

 private:
  const std::vector<KVCacheGroupSpec>& groups() const {
    return options_.decode.backend.plan.groups;
  }
  TransferLink link(Endpoint self, Endpoint peer) {
    return {network_, self, peer, options_.times, options_.defect, report_.transfers};
  }
  std::int64_t num_steps() const { return prefill_->summary().steps + decode_->summary().steps; }
  // Returns the time of the next event; absent if none can ever happen again. An engine is an event
  // source only while it wants a step: an idle engine with no event in its inbox would step forever
  // without progress.
  std::optional<std::int64_t> next_ns() const {
    std::optional<std::int64_t> next;
    take_sooner(next, client_.next_due_ns());
    take_sooner(next, network_.next_due_ns());
    take_sooner(next, sender_.next_timer_ns());
    take_sooner(next, receiver_.next_timer_ns());
    for (const Ended& ended : ended_) take_sooner(next, ended.at_ns);
    if (prefill_->wants_step(sender_.has_news())) take_sooner(next, prefill_->ready_ns());
    if (decode_->wants_step(receiver_.has_news())) take_sooner(next, decode_->ready_ns());
    return next;
  }

  // Processes everything that is due at the next event's time. Returns false if no event remains or
  // if an engine's run has ended.
  Result<bool> turn() {
    const auto next = next_ns();
    if (!next) return false;
    now_ns_ = std::max(now_ns_, *next);
    sender_.at(now_ns_);
    receiver_.at(now_ns_);
    deliver();
    LS_RETURN_IF_ERROR(take_arrivals());
    take_ended();
    travellers_.take_out_failed();
    const auto prefilled = step(*prefill_, sender_.has_news());
    if (!prefilled || !*prefilled) return prefilled;
    LS_RETURN_IF_ERROR(sender_.take_staged(prefill_->ready_ns()));
    return step(*decode_, receiver_.has_news());
  }

  // Runs one step if the engine wants one and has completed its previous step. Returns false if the
  // engine's run has ended, with a divergence for example. Does nothing after a finding, so that
  // the state of the run is the state at that finding.
  Result<bool> step(PairedEngine& engine, bool has_news) {
    if (!engine.wants_step(has_news) || engine.ready_ns() > now_ns_) return true;
    if (report_.is_cut_short || ledger_.finding()) return true;
    auto goes_on = engine.step(now_ns_);
    report_.is_cut_short =
        stop_requested() || (options_.steps_max > 0 && num_steps() >= options_.steps_max);
    return goes_on;
  }

  // Applies the client's events up to now. Resets and pauses reach both engines, each before its
  // own next step.
  Result<void> take_arrivals() {
    client_.advance_to(now_ns_);
    std::vector<WorkloadEvent> events;
    const LoopState state{.step = 0, .idle = false, .unfinished = !travellers_.is_empty()};
    LS_RETURN_IF_ERROR(client_.next_turn(state, events));
    for (WorkloadEvent& event : events) {
      switch (event.kind) {
        case WorkloadEvent::Kind::add:
          travellers_.arrived(std::move(event.request), event.ticket);
          break;
        case WorkloadEvent::Kind::abort:
          travellers_.abort_request(event.name);
          break;
        case WorkloadEvent::Kind::reset_prefix_cache:
        case WorkloadEvent::Kind::pause_state:
          prefill_->control(event);
          decode_->control(event);
          break;
        case WorkloadEvent::Kind::output:
          LS_CHECK(false, "an output, which no request trace has");
      }
    }
    return {};
  }

  void take_ended() {
    std::vector<Ended> due;
    std::erase_if(ended_, [&](const Ended& ended) {
      if (ended.at_ns > now_ns_) return false;
      due.push_back(ended);
      return true;
    });
    for (const Ended& ended : due)
      travellers_.ended(*ended.engine, ended.name, ended.reason, ended.at_ns);
  }

  // Passes every packet that has arrived to its endpoint. A damaged packet counts as lost: the
  // sender repeats it.
  void deliver() {
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

  // Returns the payload of a stored block: the host block's bytes of each rank in rank order, or
  // the content ids of its slots in runs without backends. The ledger checks it before it is sent.
  Result<std::vector<std::uint8_t>> read_block(TransferId id, BlockPlace place,
                                               const BlockTransfer& staged) {
    std::vector<std::uint8_t> bytes;
    if (!options_.has_pages()) bytes = prefill_->memory().read_block(staged.group, staged.block);
    for (Backend* rank : options_.prefill_ranks) {
      LS_ASSIGN_OR_RETURN(const auto part, rank->read_host_block(staged.group, staged.host));
      bytes.insert(bytes.end(), part.begin(), part.end());
    }
    ledger_.read(id, place, bytes);
    return bytes;
  }

  // Applies a delivered block. The ledger compares its bytes with the computed contents first and
  // ends the run if they differ. So the decode engine's memory model may write those contents, not
  // the bytes.
  void take_block(TransferId id, BlockPlace place, BlockId block,
                  std::span<const std::uint8_t> bytes) {
    ledger_.delivered(id, place, block, bytes);
    decode_->memory().write_block(place.group, block, ledger_.contents(id, place));
  }
  // Completes both runs and decides the verdict. Only an undisturbed run is checked for requests
  // that wait forever: after a finding or a cut, unfinished requests are expected. A stuck engine
  // explains requests that never end, so the ledger's final checks run only without one.
  Result<void> close() {
    const bool is_whole = !ledger_.finding() && !report_.is_cut_short;
    for (PairedEngine* engine : {prefill_.get(), decode_.get()})
      if (is_whole) LS_RETURN_IF_ERROR(engine->close());
    LS_ASSIGN_OR_RETURN(RunReport prefill, prefill_->finish());
    LS_ASSIGN_OR_RETURN(RunReport decode, decode_->finish());
    static_cast<TravellerCounts&>(report_) = travellers_.counts();
    report_.prefill = std::move(prefill.summary);
    report_.decode = std::move(decode.summary);
    report_.network = network_.counts();
    report_.simulated_ns = now_ns_;
    report_.blocks_checked = ledger_.num_deliveries();
    find_divergence("prefill", report_.prefill);
    find_divergence("decode", report_.decode);
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

  // Turns an engine's divergence from its backend into a finding that names the engine.
  void find_divergence(std::string_view who, const RunSummary& engine) {
    if (engine.divergence)
      ledger_.found(
          "memory.divergence",
          fmt::format("{} engine, {} of step {}: {}", who, name_of(engine.divergence->phase),
                      engine.divergence->step, engine.divergence->message));
  }

  const PairOptions& options_;
  Workload& client_;
  PairReport report_;
  Network network_;
  TransferLedger ledger_;
  TransferSender sender_;
  TransferReceiver receiver_;
  WatchedReceiver watched_;
  Travellers travellers_;
  std::unique_ptr<PairedEngine> prefill_;
  std::unique_ptr<PairedEngine> decode_;
  // Requests that a step has ended, until that step itself has ended.
  struct Ended {
    std::int64_t at_ns = 0;
    const PairedEngine* engine = nullptr;
    std::string name;
    FinishReason reason{};
  };
  std::vector<Ended> ended_;
  std::int64_t now_ns_ = 0;
};

}  // namespace

Result<PairReport> run_pair(const PairOptions& options, Workload& client,
                            const std::function<void(const PairProgress&)>& progress) {
  LS_RETURN_IF_ERROR(check_pair(options));
  HoldsContents holds_contents = content_id_payloads(options.decode.backend.plan.groups);
  if (options.has_pages()) {
    LS_ASSIGN_OR_RETURN(holds_contents, page_payloads(options.decode.backend));
  }
  Pair pair(options, client, std::move(holds_contents));
  LS_RETURN_IF_ERROR(pair.start());
  return pair.run(progress);
}

}  // namespace lockstep
