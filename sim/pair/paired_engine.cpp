#include "sim/pair/paired_engine.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "sim/pair/transfer_receiver.h"
#include "sim/step/model_step.h"

namespace lockstep {

// Returns true if both engines use one layout for the bytes of a host block. Everything that
// decides the order of bytes is compared. The pool sizes are not: a host block has the same layout
// in each.
static bool lay_out_alike(const BackendConfig& a, const BackendConfig& b) {
  return a.layout == b.layout && a.attention_backend == b.attention_backend &&
         a.layout_rule == b.layout_rule && a.numbers == b.numbers &&
         a.parallel.tp_size == b.parallel.tp_size;
}

// Checks what only runs with backends need: equal layouts, and host tiers that hold a staging
// buffer.
static Result<void> check_pages(const PairOptions& options) {
  LS_CHECK(std::ssize(options.prefill_ranks) == num_ranks(options.prefill.backend) &&
               std::ssize(options.decode_ranks) == num_ranks(options.decode.backend),
           "{} and {} backends for {} and {} ranks", options.prefill_ranks.size(),
           options.decode_ranks.size(), num_ranks(options.prefill.backend),
           num_ranks(options.decode.backend));
  if (!lay_out_alike(options.prefill.backend, options.decode.backend))
    return fail(
        "disaggregated prefill: both engines must use the same block layout, because blocks are "
        "sent as bytes");
  for (const LockstepConfig* config : {&options.prefill, &options.decode})
    if (config->backend.num_host_blocks < options.staging_blocks)
      return fail("disaggregated prefill: a host tier of {} blocks for a staging buffer of {}",
                  config->backend.num_host_blocks, options.staging_blocks);
  return {};
}

Result<void> check_pair(const PairOptions& options) {
  const auto& groups = options.prefill.backend.plan.groups;
  for (const LockstepConfig* config : {&options.prefill, &options.decode})
    LS_RETURN_IF_ERROR(supported(facts_of(config->engine, groups).with({RunTrait::pair})));
  if (groups != options.decode.backend.plan.groups)
    return fail("disaggregated prefill: both engines need the same groups and block sizes");
  // An offer ends at a block of the first group. Other groups may have other block sizes, or no
  // longer have the window before that end.
  if (options.offer_percent < 100 && !can_compute_lost_blocks(groups))
    return fail(
        "disaggregated prefill: partial offers need one group that keeps all blocks; omit --offer");
  for (const LockstepConfig* config : {&options.prefill, &options.decode})
    if (num_ranks(config->backend) != config->backend.parallel.tp_size ||
        config->backend.context.num_ranks > 1 || config->data_parallel.dp_size > 1)
      return fail("disaggregated prefill: only blocks of tensor parallel ranks are transferred");
  if (options.staging_blocks < 1)
    return fail("disaggregated prefill: a staging buffer holds at least one block");
  return options.has_pages() ? check_pages(options) : Result<void>();
}

Result<std::unique_ptr<PairedEngine>> PairedEngine::create(const LockstepConfig& config,
                                                           const PairedParts& parts,
                                                           StepTimeModel step_time,
                                                           EngineOwner& owner) {
  std::unique_ptr<PairedEngine> engine(
      new PairedEngine(config, parts, std::move(step_time), owner));
  // The session reads the failure policy from the configuration, the pair from its own options.
  LockstepConfig alone = config;
  alone.connector.load_failure_policy = parts.transfer.kv_load_failure_policy;
  SessionParts session;
  session.borrowed = parts.ranks;
  session.attach = [&engine](std::int32_t, Workload*) {
    return Onlooker{.workload = engine.get(), .observer = engine.get()};
  };
  LS_ASSIGN_OR_RETURN(engine->session_, Session::open(alone, std::move(session)));
  LS_ASSIGN_OR_RETURN(engine->run_, engine->session_->start());
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

void PairedEngine::control(const WorkloadEvent& event) { inbox_.push_back(event); }

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
  LS_RETURN_IF_ERROR(run_->advance());
  return {};
}

Result<Turn> PairedEngine::next_turn(const LoopState& state, std::vector<WorkloadEvent>& events) {
  if (is_closing_) return state.unfinished ? Turn::stuck : Turn::end;
  events = std::exchange(inbox_, {});
  return Turn::step;
}

// Tracks a request from its first scheduled step on: before that its RequestId is not known here,
// so the prompt waits under the request's name. Ids of finished requests are released first,
// because a new request may reuse one.
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
  if (auto checked = memory_.step(view.decision, view.model()); !checked)
    owner_.misread(*this, std::move(checked.divergence().message));
  return true;
}

// Rows of `output` are in the order of scheduled_; token_ends[i] is the end of row i's tokens.
Result<void> PairedEngine::sample(std::int64_t step, std::span<const SampledRow> rows,
                                  ModelOutput& output) {
  LS_RETURN_IF_ERROR(owner_.sample(*this, step, rows, output));
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

// Reports the end with the reason of the step that stopped the request. A request that no step
// stopped was aborted, by its client or after a failed load.
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

// Each content id is a hash of all tokens up to its position, so equal ids mean equal prefixes.
std::vector<ContentId> contents_of(const Prompt& prompt) {
  std::vector<ContentId> contents;
  ContentId prefix = kEmptyPrefix;
  for (const std::int32_t token : prompt.materialize())
    contents.push_back(prefix = next_content(prefix, token));
  return contents;
}

// All groups share the blocks of one pool. Each block gets the slots of the largest block_size.
EngineMemory::EngineMemory(const KVCacheConfig& plan) : groups_(plan.groups) {
  for (const KVCacheGroupSpec& group : groups_)
    slots_per_block_ = std::max<std::int64_t>(slots_per_block_, group.spec.block_size);
  group_of_.assign(plan.num_blocks, -1);
  slots_.assign(plan.num_blocks * slots_per_block_, 0);
}

void EngineMemory::add_request(RequestId request, const Prompt& prompt) {
  contents_[request] = contents_of(prompt);
}

void EngineMemory::append_sampled(RequestId request, std::span<const std::int32_t> tokens) {
  std::vector<ContentId>& contents = contents_.at(request);
  for (const std::int32_t token : tokens)
    contents.push_back(next_content(contents.empty() ? kEmptyPrefix : contents.back(), token));
}

// REQUIRES: not the null block, which no request writes.
ContentId* EngineMemory::slots_of(std::int32_t group, BlockId block) {
  LS_CHECK(block != kNullBlock && index_of(block) < std::ssize(group_of_), "block {} is written",
           index_of(block));
  const std::span slots = std::span(slots_).subspan(index_of(block) * slots_per_block_,
                                                    static_cast<std::size_t>(slots_per_block_));
  std::int32_t& owner = group_of_[block];
  if (owner != group) std::ranges::fill(slots, 0);
  owner = group;
  return slots.data();
}

// A block of another group has other positions in its slots, even where the contents are equal.
const ContentId* EngineMemory::find(std::int32_t group, BlockId block) const {
  if (group_of_[block] != group) return nullptr;
  return &slots_[index_of(block) * slots_per_block_];
}

// Writes come first, since the attention kernels of a step write the KV entries of all rows before
// they read. A request may therefore hit a block that another row of the same step fills. If the
// step reassigns a hit block to a different request, the check below finds the other contents.
Checked EngineMemory::step(const SchedulerOutput& decision, const Scheduler& scheduler) {
  for (std::int32_t g = 0; g < decision.num_groups; ++g) {
    for (const ScheduledRequest& row : decision.scheduled) {
      const auto table = scheduler.block_table(row.id, g);
      const std::vector<ContentId>& contents = contents_.at(row.id);
      for (std::int64_t p = row.computed; p < row.computed + row.num_tokens; ++p)
        slots_of(g, table[p / block_size(g)])[p % block_size(g)] = contents[p];
    }
  }
  for (const ScheduledRequest& row : decision.scheduled) {
    // Only an admission takes tokens as computed without computing them: a prefix hit or a load.
    if (!row.is_new || row.computed == 0) continue;
    LS_RETURN_UNLESS_FINE(check_computed(row.id, row.computed, scheduler));
  }
  return {};
}

Checked EngineMemory::check_computed(RequestId request, std::int64_t num_computed,
                                     const Scheduler& scheduler) const {
  const std::vector<ContentId>& contents = contents_.at(request);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const auto group = static_cast<std::int32_t>(g);
    const auto table = scheduler.block_table(request, group);
    // A window reads only its last tokens: earlier entries may be the null block, or hold other
    // contents.
    for (std::int64_t p = first_attended(groups_[g].spec, num_computed); p < num_computed; ++p) {
      const BlockId block = table[p / block_size(group)];
      const ContentId* slots = find(group, block);
      if (slots != nullptr && slots[p % block_size(group)] == contents[p]) continue;
      Divergence found;
      found.request = std::string(scheduler.name(request));
      found.group = group;
      found.block = index_of(block);
      found.token = p;
      found.message = fmt::format(
          "token {} of {} counts as computed, and its slot in block {} of group {} holds {}", p,
          found.request, found.block, g,
          slots == nullptr ? "nothing of that group" : "something else");
      return found;
    }
  }
  return {};
}

std::vector<std::uint8_t> EngineMemory::read_block(std::int32_t group, BlockId block) const {
  const ContentId* slots = find(group, block);
  std::vector<std::uint8_t> bytes;
  for (std::int64_t i = 0; i < block_size(group); ++i)
    for (int shift = 0; shift < 64; shift += 8)
      bytes.push_back(slots == nullptr ? std::uint8_t{0}
                                       : static_cast<std::uint8_t>(slots[i] >> shift));
  return bytes;
}

void EngineMemory::write_block(std::int32_t group, BlockId block,
                               std::span<const ContentId> contents) {
  LS_CHECK(std::ssize(contents) <= block_size(group), "{} contents for a block of {} slots",
           contents.size(), block_size(group));
  std::ranges::copy(contents, slots_of(group, block));
}

}  // namespace lockstep
