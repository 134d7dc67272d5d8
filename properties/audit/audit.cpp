#include "properties/audit/audit.h"

#include <fmt/core.h>

#include <algorithm>
#include <span>
#include <utility>

#include "base/check.h"
#include "base/stop_signal.h"
#include "properties/audit/audit_impl.h"
#include "reference/plan/limits.h"

namespace lockstep {

std::span<const std::int32_t> sampled_of(const RecordedStep& step, const std::string& name) {
  const auto found = std::ranges::find(step.sampled, name, &RecordedTokens::id);
  if (found == step.sampled.end()) return {};
  return found->tokens;
}

std::string_view name_of(AuditRule rule) {
  constexpr std::string_view kNames[] = {
      "attention_read", "state_read",     "handed_out",    "token_write",    "scheduled_tokens",
      "conservation",   "common_prefix",  "transfer",      "standstill",     "draft_read",
      "zeroing",        "sampled",        "queues",        "planned_blocks", "draft_slots",
      "cache_events",   "hits",           "drafts",        "stale_output",   "victim",
      "inputs",         "computed_again", "excess_blocks", "limits",         "worker_batch",
      "worker_table",   "worker_slot",    "worker_page",   "worker_zeroing", "recording",
  };
  const auto index = static_cast<std::size_t>(rule);
  LS_CHECK(index < std::size(kNames), "audit rule {}", index);
  return kNames[index];
}

RuleGroup group_of(AuditRule rule) {
  const bool is_policy = rule == AuditRule::hits || rule == AuditRule::victim ||
                         rule == AuditRule::standstill || rule == AuditRule::limits;
  return is_policy ? RuleGroup::policy : RuleGroup::memory;
}

std::string line_of(const AuditFinding& finding) {
  std::string line = fmt::format("audit.{}", name_of(finding.rule));
  const auto add = [&](std::string_view what, std::int64_t value) {
    if (value >= 0) line += fmt::format(" {} {}", what, value);
  };
  add("step", finding.step);
  if (!finding.request.empty()) line += " request " + finding.request;
  add("group", finding.group);
  add("token", finding.token);
  add("entry", finding.entry);
  add("block", finding.block);
  return line + ": " + finding.what;
}

// What a broken block does to whoever reads or writes it is one cause.
static bool spoils_the_rest(AuditRule rule) {
  return rule == AuditRule::attention_read || rule == AuditRule::state_read ||
         rule == AuditRule::handed_out || rule == AuditRule::token_write;
}

void Auditor::Impl::tell(AuditFinding finding, std::string cause) {
  if (rules_ == AuditedRules::memory && group_of(finding.rule) == RuleGroup::policy) return;
  finding.last_step = finding.step;
  const auto [told, is_first] = told_.try_emplace(std::move(cause), num_taken_ + findings_.size());
  if (is_first) {
    findings_.push_back(std::move(finding));
  } else if (told->second >= num_taken_) {
    AuditFinding& first = findings_[told->second - num_taken_];
    ++first.count;
    first.last_step = finding.step;
  }
}

std::string Auditor::Impl::cause_of(AuditRule rule, const std::string& request,
                                    std::string_view detail) const {
  const auto found = requests_.find(request);
  return fmt::format("{} {} {} {}", static_cast<int>(rule), request,
                     found == requests_.end() ? -1 : found->second.index, detail);
}

// "; request b has had the block since step 7, request a before it, since step 2"
void Auditor::Impl::name_holders(AuditFinding& finding) const {
  if (finding.block <= 0 || finding.block >= ledger_.num_blocks()) return;
  const auto& [last, before] = ledger_.holders(BlockId{finding.block});
  if (last.request < 0) return;
  finding.holder = {name_at(last.request), last.since};
  finding.what += fmt::format("; request {} has had the block since step {}",
                              finding.holder.request, last.since);
  if (before.request < 0) return;
  finding.holder_before = {name_at(before.request), before.since};
  finding.what += fmt::format(", request {} before it, since step {}",
                              finding.holder_before.request, before.since);
}

void Auditor::Impl::report(AuditRule rule, const AuditedRequest& request, std::size_t group,
                           std::int64_t token, BlockId block, std::string what) {
  AuditedRequest& mine = requests_.at(request.name);
  if (mine.wrong[group]) return;
  const bool spoils = spoils_the_rest(rule);
  mine.wrong[group] = spoils;
  AuditFinding finding{.rule = rule,
                       .step = step_,
                       .request = request.name,
                       .group = static_cast<std::int32_t>(group),
                       .token = token,
                       .block = index_of(block),
                       .what = std::move(what)};
  // The state after n tokens lies where the last of them does.
  const std::int64_t position = rule == AuditRule::state_read ? token - 1 : token;
  if (position >= 0) finding.entry = static_cast<std::int32_t>(position / block_size(group));
  name_holders(finding);
  std::string detail = fmt::format("group {}", group);
  const bool is_of_block = spoils && finding.holder.since >= 0;
  if (is_of_block) detail += fmt::format(" block {} {}", finding.block, finding.holder.since);
  tell(std::move(finding), cause_of(rule, is_of_block ? std::string() : request.name, detail));
}

void Auditor::Impl::report(AuditRule rule, const std::string& request, std::string what,
                           std::string_view cause) {
  AuditFinding finding{.rule = rule, .step = step_, .request = request, .what = std::move(what)};
  // The one behind those that are known.
  const bool is_of_tokens = rule == AuditRule::sampled || rule == AuditRule::scheduled_tokens;
  if (const auto found = requests_.find(request); is_of_tokens && found != requests_.end())
    finding.token = std::ssize(found->second.tokens);
  tell(std::move(finding), cause_of(rule, request, cause));
}

const std::string& Auditor::Impl::name_at(std::int32_t index) const {
  static const std::string kForgotten = "?";
  const auto found = names_.find(index);
  return found == names_.end() ? kForgotten : found->second.name;
}

// Names of requests that have left no trace go, so that memory does not grow with a recording.
void Auditor::Impl::forget_names() {
  if (names_.size() < num_names_max_) return;
  std::set<std::int32_t> kept;
  ledger_.for_each_request([&](std::int32_t index) { kept.insert(index); });
  for (const auto& [name, request] : requests_) kept.insert(request.index);
  std::erase_if(names_, [&](const auto& name) { return !kept.contains(name.first); });
  num_names_max_ = std::max(num_names_max_, 2 * names_.size());
}

void Auditor::Impl::take_events(const RecordedStep& step,
                                const std::vector<RecordedEvent>& events) {
  for (const RecordedEvent& event : events) {
    if (event.kind == RecordedEvent::Kind::pause_state) pause_state_ = event.pause_state;
    if (event.kind == RecordedEvent::Kind::output) last_output_ = event.output_of_step;
    if (event.resets_running) send_back_running();
    epoch_ += event.kind == RecordedEvent::Kind::reset_prefix_cache && event.reset_succeeded;
    take_input_event(event);
    if (event.kind == RecordedEvent::Kind::chunk || event.kind == RecordedEvent::Kind::close) {
      take_session_event(event);
      continue;
    }
    const bool is_add = event.kind == RecordedEvent::Kind::add;
    const auto same = requests_.find(is_add ? event.request.name : event.name);
    if (event.kind == RecordedEvent::Kind::abort && same != requests_.end())
      same->second.has_ended = true;
    if (!is_add) continue;
    // A name is free once its bearer has ended; the worker hears of that end with the next step.
    if (same != requests_.end() && same->second.has_ended && !same->second.has_left) {
      ends_to_come_.insert(event.request.name);
      leave(step, event.request.name);
    }
    add(event);
    if (const auto added = requests_.find(event.request.name);
        added != requests_.end() && &events == &step.during)
      ++added->second.first_step;
  }
}

// All who run lose their blocks, and their output that is still in flight is dropped.
void Auditor::Impl::send_back_running() {
  const std::int64_t last_output = config_.async_scheduling ? last_output_ : step_ - 1;
  for (auto& [name, request] : requests_) {
    if (!request.running || request.has_ended) continue;
    request.running = false;
    for (auto& table : request.tables) table.clear();
    request.drafts.clear();
    const auto dropped = std::ranges::find_if(
        request.sampled_in, [&](const auto& sampled) { return sampled.first > last_output; });
    if (dropped != request.sampled_in.end())
      withdraw_output(request, static_cast<std::size_t>(dropped - request.sampled_in.begin()),
                      "a reset had sent back all who ran");
  }
}

void Auditor::Impl::add(const RecordedEvent& event) {
  // The engine refuses it, and nothing of it is ever scheduled.
  if (event.request.prompt.size() > config_.max_model_len) return;
  const auto same = requests_.find(event.request.name);
  if (same != requests_.end() && !same->second.has_left)
    report(AuditRule::recording, event.request.name, "two live requests are called so");
  AuditedRequest request;
  request.name = event.request.name;
  request.index = num_requests_++;
  request.first_step = step_;
  request.tokens = event.request.prompt.materialize();
  request.num_prompt = static_cast<std::int32_t>(request.tokens.size());
  request.max_tokens = event.is_pooling ? 1 : event.request.max_tokens;
  request.first_max_tokens = request.max_tokens;
  request.is_session = event.is_session;
  request.awaits_grammar = event.needs_grammar;
  request.priority = event.request.priority;
  request.has_min_tokens = event.request.min_tokens > 0;
  request.eos_token = event.request.eos_token;
  request.stop_token_ids = event.request.stop_token_ids;
  request.detects_repetition = event.request.repetition_detection.max_pattern_size > 0;
  request.reads_cache = !event.request.skip_reading_prefix_cache;
  request.keyed = {event.request.name, event.request.cache_salt, event.request.keys};
  request.root = empty_prefix(request.keyed);
  request.contents = contents_of(request.keyed, request.tokens);
  request.tables.resize(groups_.size());
  request.wrong.resize(groups_.size());
  names_.emplace(request.index, request.keyed);
  forget_names();
  requests_.insert_or_assign(event.request.name, std::move(request));
}

// The first entry of the table that is not left behind by a request that has come to `reached`. A
// load writes all that its table names, and who waits with it lets go of nothing.
std::size_t Auditor::Impl::first_needed(const AuditedRequest& request, std::size_t group,
                                        std::int32_t reached) const {
  if (request.transfer != Transfer::none) return 0;
  return static_cast<std::size_t>(first_read(group, reached) / block_size(group));
}

// Whether an entry of a table that has just come in was there before the request.
bool Auditor::Impl::is_hit(std::size_t group, std::size_t index, std::int32_t hit) const {
  const KVCacheSpec& spec = groups_[group].spec;
  return !is_ring(spec) && !spec.bounded_replay &&
         static_cast<std::int64_t>(index) * block_size(group) < hit;
}

// Who, but for `holder`, can still read the block, or has a transfer that does; null: nobody.
const AuditedRequest* Auditor::Impl::reader_of(BlockId block, const AuditedRequest* holder) const {
  if (scope_ == AuditScope::hits_only) return nullptr;
  for (const auto& [name, other] : requests_) {
    if (!other.keeps_blocks() || &other == holder) continue;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      if (is_state(groups_[g].spec))
        continue;  // a state that is needed is checked where it is read
      const std::vector<BlockId>& table = other.tables[g];
      // Who has left may have let go of what drafts in flight were past.
      const std::int32_t reached =
          other.has_left ? std::max(other.computed, other.scheduled_to) : other.computed;
      const auto first = std::min(first_needed(other, g, reached), table.size());
      const auto last = std::min(
          static_cast<std::size_t>(ceil_div32(other.computed, block_size(g))), table.size());
      const std::int32_t gap_last = gap_end(other, g, reached);
      for (std::size_t i = first; i < last; ++i) {
        const auto begin = static_cast<std::int32_t>(i) * block_size(g);
        const bool is_in_gap = begin >= other.num_prompt && begin + block_size(g) <= gap_last;
        if (table[i] == block && !is_in_gap) return &other;
      }
    }
  }
  return nullptr;
}

static std::string_view what_needs_it(const AuditedRequest& reader) {
  if (reader.transfer == Transfer::loading) return "still loads it";
  return reader.is_sent ? "still sends it" : "still reads it";
}

// A block becomes part of a table without being a hit: nobody else may need what it holds.
void Auditor::Impl::hand_out(const AuditedRequest& request, std::size_t group, std::size_t index,
                             BlockId block) {
  if (const AuditedRequest* reader = reader_of(block, &request); reader != nullptr) {
    report(
        AuditRule::handed_out, request, group, static_cast<std::int64_t>(index) * block_size(group),
        block,
        fmt::format(
            "block {} becomes entry {} of the table, beyond the hit of {} tokens, while request {} "
            "{}: it will be written while shared",
            index_of(block), index, request.computed, reader->name, what_needs_it(*reader)));
    return;
  }
  const auto first = static_cast<std::int32_t>(index) * block_size(group);
  const auto g = static_cast<std::int32_t>(group);
  // A hit that is longer than the other groups' holds what it should.
  const bool is_own =
      std::cmp_less(first, request.contents.size()) && ledger_.belongs_to(block, g) &&
      ledger_.read(block, 0).content == request.contents[static_cast<std::size_t>(first)];
  if (is_zeroed_[group] && !is_own && !zeroed_now_.contains(block))
    report(
        AuditRule::zeroing, request, group, first, block,
        fmt::format("block {} becomes entry {} of the table and is not zeroed: a kernel may read "
                    "what a state left in it as numbers",
                    index_of(block), index));
  // A group may keep a hit that is longer than the other groups'.
  std::int32_t& reserved_to = requests_.at(request.name).reserved_to;
  if (is_own) reserved_to = std::max(reserved_to, first + block_size(group));
  ledger_.hand_out(block, g, block_size(group), request.index, step_);
  in_use_.insert(block);
}

void Auditor::Impl::take_tables(const RecordedStep& step, const RecordedScheduled& scheduled,
                                AuditedRequest& request) {
  const std::int32_t hit = num_hit(step, scheduled, request);
  request.transfer = Transfer::none;
  std::vector<std::vector<BlockId>> own(groups_.size());  // that a session has kept
  const bool is_session_again = request.is_between_chunks;
  if (scheduled.is_new) {
    request.computed = scheduled.computed;
    request.state_idx = -1;
    request.num_accepted = 1;
    own = std::exchange(request.is_between_chunks, false) ? std::move(request.tables) : own;
    request.tables.resize(groups_.size());
    // Hits that are no longer than what is computed again are not taken.
    request.first_replayed = num_replayed_ > 0 ? scheduled.computed : 0;
    request.last_replayed = request.first_replayed == 0 ? 0 : scheduled.computed + num_replayed_;
    for (auto& table : request.tables) table.clear();
    if (!is_session_again)
      count_hit(request, hit + num_replayed_ * (request.first_replayed > 0 ? 1 : 0));
  }
  request.running = true;
  if (!scheduled.blocks) return;
  if (scheduled.blocks->size() != groups_.size()) {
    report(AuditRule::recording, request.name,
           fmt::format("blocks of {} groups handed over; the engine has {}",
                       scheduled.blocks->size(), groups_.size()));
    return;
  }
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    std::vector<BlockId>& table = request.tables[g];
    // Speculative state blocks move on to the new end of the table; they are handed over once more.
    const std::size_t num_movable =
        std::min(table.size(), static_cast<std::size_t>(groups_[g].spec.num_speculative_blocks));
    const std::vector<BlockId> movable(table.end() - static_cast<std::ptrdiff_t>(num_movable),
                                       table.end());
    for (const BlockId block : (*scheduled.blocks)[g]) {
      if (index_of(block) < 0 || index_of(block) >= ledger_.num_blocks()) {
        report(AuditRule::recording, request, g, -1, block,
               fmt::format("block {} is not in the pool", index_of(block)));
        continue;
      }
      const std::size_t index = table.size();
      const bool is_own = is_state(groups_[g].spec)
                              ? std::ranges::find(own[g], block) != own[g].end()
                              : index < own[g].size() && own[g][index] == block;
      const bool moved = is_own || std::ranges::find(movable, block) != movable.end();
      table.push_back(block);
      // What this step zeroes was new to the first that has it; those behind may have hit it.
      const bool is_fresh = fresh_.erase(block) > 0;
      const bool was_there =
          scheduled.is_new && !is_fresh && is_hit(g, index, std::max(hit, request.last_replayed));
      // Of a block that a hit ends in, the request has a copy.
      const bool is_copy = !tells_copies_ && is_state(groups_[g].spec) &&
                           hit % block_size(g) != 0 && std::cmp_equal(index, hit / block_size(g));
      if (block == kNullBlock || (was_there && !is_copy) || moved) continue;
      hand_out(request, g, index, block);
    }
  }
  for (std::size_t g = 0; g < groups_.size() && scheduled.is_new && !tells_copies_; ++g)
    if (is_state(groups_[g].spec) && hit % block_size(g) != 0)
      load_states(request, g, hit - 1, hit, {});
  if (!scheduled.is_new || hit == scheduled.computed) return;
  write_loaded(request, hit, scheduled.computed,
               step.worker ? std::span<const BlockId>(step.worker->invalid_blocks)
                           : std::span<const BlockId>());
}

// A block that is copied to is its new holder's alone. Checked before tables are taken in.
void Auditor::Impl::check_copies(const RecordedStep& step) {
  for (const KVCacheBlockCopy& copy : step.copies)
    if (const AuditedRequest* reader = reader_of(copy.to, nullptr); reader != nullptr)
      report(AuditRule::handed_out, reader->name,
             fmt::format("block {} is copied to block {}, which this request still reads",
                         index_of(copy.from), index_of(copy.to)),
             fmt::format("copy {}", index_of(copy.to)));
}

void Auditor::Impl::take_ends(const RecordedStep& step) {
  for (const std::string& name : step.finished) {
    const bool is_of_another = ends_to_come_.erase(name) > 0;
    const auto found = requests_.find(name);
    if (found == requests_.end() || (is_of_another && !found->second.has_ended)) continue;
    if (checks_ends_ && !is_of_another && !found->second.has_ended && !found->second.has_left)
      report(
          AuditRule::queues, name,
          fmt::format("is reported finished after {} of its {} tokens, and neither an output nor "
                      "its client has ended it: nobody is told",
                      found->second.computed, found->second.tokens.size()));
    leave(step, name);
  }
}

// What came out of a row.
void Auditor::Impl::take_sampled(const RecordedStep& step, AuditRow& row) {
  AuditedRequest& request = *row.request;
  check_sampled(step, row);
  const auto tokens = sampled_of(step, request.name);
  settle_states(row, static_cast<std::int32_t>(tokens.size()));
  const auto num_rejected = row.num_spec > 0 && !tokens.empty()
                                ? row.num_spec - (static_cast<std::int32_t>(tokens.size()) - 1)
                                : 0;
  request.computed = row.last - num_rejected;
  request.computed_in = step.step;
  request.scheduled_to = row.counted_to;
  if (tokens.empty() && row.last >= std::ssize(request.tokens)) request.unheard_step = step.step;
  std::erase_if(request.sampled_in, [&](const auto& s) { return s.first <= last_output_; });
  if (!tokens.empty()) request.sampled_in.emplace_back(step.step, request.tokens.size());
  for (const std::int32_t token : tokens) {
    request.tokens.push_back(token);
    request.contents.push_back(
        content_after(request.contents.empty() ? request.root : request.contents.back(), token));
  }
  note_limit(step, request);
}

void Auditor::Impl::step(const RecordedStep& step) {
  step_ = step.step;
  const std::int64_t last_output_before = last_output_;
  take_events(step, step.before);
  for (const std::string& name : step.preempted)
    if (const auto it = requests_.find(name); it != requests_.end()) {
      it->second.running = false;
      it->second.preempted_in = step.step;
      it->second.drafts.clear();
      for (auto& table : it->second.tables) table.clear();
    }
  check_victims(step);
  take_ends(step);
  release_failed_loads(step);
  check_copies(step);
  zeroed_now_ = fresh_ = {step.zero.begin(), step.zero.end()};
  for (const BlockId block : step.zero)
    if (index_of(block) > 0 && index_of(block) < ledger_.num_blocks()) ledger_.zero(block, step_);

  std::vector<AuditRow> rows;
  for (const RecordedScheduled& scheduled : step.scheduled) {
    AuditRow row;
    if (make_row(step, scheduled, row)) rows.push_back(std::move(row));
  }
  for (const KVCacheBlockCopy& copy : step.copies) ledger_.copy(copy.from, copy.to);
  begin_loads(step);
  check_adapters(step);
  run_encoder(step);
  for (const AuditRow& row : rows) check_encoded(row);
  void_rows(step, rows);
  for (AuditRow& row : rows) prepare_states(row);
  check_facts(step, rows);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (is_state(groups_[g].spec)) {
      for (const AuditRow& row : rows) advance_states(row, g);
    } else if (is_ring(groups_[g].spec)) {
      for (const AuditRow& row : rows) use_ring(row, g);
    } else if (groups_[g].spec.kind == CacheKind::cross_attention) {
      for (const AuditRow& row : rows) use_encoder_rows(row, g, step);
    } else {  // a layer writes the keys of the whole batch before it attends
      for (const AuditRow& row : rows) write_tokens(row, g);
      for (const AuditRow& row : rows)
        if (scope_ != AuditScope::hits_only) read_tokens(row, g);
    }
  }
  if (scope_ != AuditScope::hits_only) check_step(step);
  for (AuditRow& row : rows)
    if (!row.is_void) take_sampled(step, row);
  if (scope_ != AuditScope::hits_only) check_events(step, rows);
  if (hash_lookahead_ > 0) {  // the drafter too writes the whole batch before it attends
    for (const AuditRow& row : rows) finish_draft_rows(row);
    for (const AuditRow& row : rows) read_draft_rows(row);
    for (const AuditRow& row : rows) read_drafter_window(row);
  }
  take_drafts(step);
  take_pooled(step);
  take_events(step, step.during);
  check_order_of_outputs(step);
  take_stale_outputs(step, last_output_before);
  take_outputs(step);
  last_output_ = config_.async_scheduling ? step.output_of_step.value_or(last_output_) : step.step;
  last_ = step;
}

void Auditor::Impl::check_step(const RecordedStep& step) {
  // With a step in flight, the copies of two steps may not have run.
  num_copied_ = 2 * std::ssize(step.copies);
  if (config_.async_scheduling) num_copied_ += 2 * std::ssize(last_.copies);
  check_conservation(step);
  check_common_prefix(step);
  check_progress(step);
  check_planned(step);
  check_tables(step);
  check_batch(step);
  check_queues(step);
  check_held_drafts(step);
  check_sampled_of_nobody(step);
}

void Auditor::Impl::end(const RecordingEnd& end) {
  step_ = -1;
  // What was handed out again since was not lost.
  for (const Leak& leak : leaks_)
    if (leak.finding >= num_taken_)
      findings_[leak.finding - num_taken_].what = leak.what + lost_text(leak);
  for (const std::string& name : end.unfinished)
    if (!requests_.contains(name))
      report(AuditRule::recording, name, "never finished by the end line, and not live");
  check_standstill(last_);
  check_hits();
}

Auditor::Auditor(const RecordingHeader& header, AuditScope scope, AuditedRules rules)
    : impl_(std::make_unique<Impl>(header, scope, rules)) {}
Auditor::~Auditor() = default;
Auditor::Auditor(Auditor&&) noexcept = default;

void Auditor::step(const RecordedStep& step) { impl_->step(step); }

void Auditor::end(const RecordingEnd& end) { impl_->end(end); }

std::vector<AuditFinding> Auditor::take_findings() { return impl_->take(); }

std::int64_t Auditor::reads_checked() const { return impl_->reads_checked(); }

const HitTotals& Auditor::hits() const { return impl_->hits(); }

static bool has_roles(const RecordingHeader& header) {
  return std::ranges::any_of(header.groups,
                             [](const KVCacheGroupSpec& group) { return !group.role.empty(); });
}

std::string why_not_audited(const RecordingHeader& header) {
  if (has_roles(header)) return "who reads a group that has a role is not followed";
  const EngineConfig& config = header.options.config;
  const bool keeps_states = std::ranges::any_of(
      header.groups, [](const KVCacheGroupSpec& group) { return is_state(group.spec); });
  // The releases that retire by what has come back have a runner that counts on the device.
  const EngineProfile* profile = find_engine_profile(header.engine.profile());
  const bool counts_on_device =
      profile != nullptr && profile->retire_basis == RetireBasis::processed;
  if (keeps_states && config.async_scheduling && config.num_spec_tokens > 0 && !counts_on_device)
    return "with drafts in flight the worker, and not the recording, says which entry of the table "
           "holds a running state";
  return {};
}

Result<AuditFile> audit_recording(const std::string& path, AuditedRules rules,
                                  const TellFinding& tell) {
  Result<RecordingReader> reader = RecordingReader::open(path);
  if (!reader) return tl::unexpected(reader.error());
  AuditFile file;
  file.file = path;
  const RecordingHeader& header = reader->header();
  file.has_profile = find_engine_profile(header.options.config.engine) != nullptr;
  if (auto sound = check_limits(header.options.config, header.groups, header.num_blocks); !sound)
    return fail(fmt::format("{}:1: {}", path, sound.error().message));
  if (has_roles(header))
    return fail(fmt::format("{}:1: role: who reads a group of that role is not followed", path));
  file.skipped = why_not_audited(header);
  if (!file.skipped.empty()) return file;
  Auditor auditor(header, AuditScope::whole_recording, rules);
  const auto take = [&] {
    for (AuditFinding& finding : auditor.take_findings()) {
      finding.file = path;
      if (tell) tell(finding);
      file.findings.push_back(std::move(finding));
    }
  };
  RecordedStep step;
  while (!stop_requested()) {
    const Result<bool> more = reader->next(step);
    if (!more && stop_requested()) break;
    if (!more) return tl::unexpected(more.error());
    if (!*more) break;
    auditor.step(step);
    ++file.steps;
    if (tell) take();
  }
  if (stop_requested())
    file.skipped = fmt::format("interrupted after {} steps", file.steps);
  else
    auditor.end(reader->end());
  file.reads_checked = auditor.reads_checked();
  file.hits = auditor.hits();
  take();
  return file;
}

}  // namespace lockstep
