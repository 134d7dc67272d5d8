#include "sim/pair/paired_engine.h"

#include <utility>

#include "base/check.h"

namespace lockstep {

Result<std::unique_ptr<PairedEngine>> PairedEngine::create(const LockstepConfig& config,
                                                           const PairedParts& parts,
                                                           StepTimeModel step_time,
                                                           EngineOwner& owner) {
  std::unique_ptr<PairedEngine> engine(
      new PairedEngine(config, parts, std::move(step_time), owner));
  LockstepConfig alone = config;
  alone.connector.load_failure_policy = parts.transfer.kv_load_failure_policy;
  SessionParts session;
  session.borrowed = parts.ranks;
  session.attach = [&engine](std::int32_t, Workload*) {
    return Onlooker{.workload = engine.get(), .observer = engine.get()};
  };
  auto opened = Session::open(alone, std::move(session));
  if (!opened) return tl::unexpected(opened.error());
  engine->session_ = std::move(*opened);
  auto run = engine->session_->start();
  if (!run) return tl::unexpected(run.error());
  engine->run_ = std::move(*run);
  return engine;
}

void PairedEngine::add(RequestSpec spec, std::uint64_t ticket) {
  prompts_[spec.name] = spec.prompt;
  WorkloadEvent& event = inbox_.emplace_back();
  event.kind = WorkloadEvent::Kind::add;
  event.request = std::move(spec);
  event.ticket = ticket;
}

void PairedEngine::abort_request(const std::string& name) {
  WorkloadEvent& event = inbox_.emplace_back();
  event.kind = WorkloadEvent::Kind::abort;
  event.name = name;
}

void PairedEngine::reset_prefix_cache() {
  inbox_.emplace_back().kind = WorkloadEvent::Kind::reset_prefix_cache;
}

bool PairedEngine::wants_step(bool connector_has_news) const {
  return !inbox_.empty() || !run_->is_idle() || has_reported_ || connector_has_news;
}

Result<bool> PairedEngine::step(std::int64_t now_ns) {
  LS_CHECK(now_ns >= ready_ns_, "a step at {} ns, the last one ends at {} ns", now_ns, ready_ns_);
  now_ns_ = now_ns;
  return run_->advance();
}

Result<void> PairedEngine::close() {
  if (run_->summary().verdict != Verdict::agreed) return {};
  is_closing_ = true;
  const auto goes_on = run_->advance();
  if (!goes_on) return tl::unexpected(goes_on.error());
  return {};
}

Result<Turn> PairedEngine::next_turn(const LoopState& state, std::vector<WorkloadEvent>& events) {
  if (is_closing_) return state.unfinished ? Turn::stuck : Turn::end;
  events = std::exchange(inbox_, {});
  return Turn::step;
}

bool PairedEngine::decided(const StepView& view) {
  for (const RequestId id : view.decision.finished) memory_.forget(id);
  scheduled_.clear();
  for (const ScheduledRequest& row : view.decision.scheduled) {
    scheduled_.push_back(row.id);
    const auto prompt = prompts_.find(view.name(row.id));
    if (prompt == prompts_.end()) continue;
    memory_.add_request(row.id, prompt->second);
    prompts_.erase(prompt);
  }
  auto wrong = memory_.step(view.decision, view.model());
  if (wrong) owner_.misread(*this, std::move(*wrong));
  return true;
}

Result<void> PairedEngine::sample(std::int64_t step, std::span<const SampledRow> rows,
                                  ModelOutput& output) {
  if (auto sampled = owner_.sample(*this, step, rows, output); !sampled) return sampled;
  std::uint32_t begin = 0;
  for (std::size_t i = 0; i < scheduled_.size(); ++i) {
    const std::uint32_t end = output.token_ends[i];
    memory_.append_sampled(scheduled_[i], std::span(output.tokens).subspan(begin, end - begin));
    begin = end;
  }
  return {};
}

Result<void> PairedEngine::connector_report(KVConnectorOutput& report) {
  owner_.report(*this, report);
  has_reported_ = !report.empty();
  return {};
}

bool PairedEngine::finished(const StepView& view) {
  for (const StoppedRequest& stopped : view.stopped)
    reasons_[std::string(view.name(stopped.id))] = stopped.reason;
  return true;
}

void PairedEngine::step_done(std::int64_t scheduled_tokens) {
  ready_ns_ = now_ns_ + (scheduled_tokens > 0 ? step_time_.step_ns(scheduled_tokens) : 0);
}

void PairedEngine::request_left(std::string_view name, std::uint64_t) {
  const std::string left(name);
  const auto reason = reasons_.find(left);
  const FinishReason why = reason == reasons_.end() ? FinishReason::abort : reason->second;
  if (reason != reasons_.end()) reasons_.erase(reason);
  prompts_.erase(left);
  owner_.ended(*this, left, why);
}

void PairedEngine::request_refused(std::string_view name, std::uint64_t, const Error& why) {
  prompts_.erase(std::string(name));
  owner_.refused(*this, std::string(name), why);
}

}  // namespace lockstep
