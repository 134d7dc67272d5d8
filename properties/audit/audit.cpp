#include "properties/audit/audit.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <span>
#include <utility>

#include "base/check.h"
#include "properties/audit/audit_impl.h"
#include "reference/plan/limits.h"

namespace lockstep {

std::span<const std::int32_t> sampled_of(const RecordedStep& step, const std::string& name) {
  const auto found = std::ranges::find(step.sampled, name, &RecordedTokens::id);
  if (found == step.sampled.end()) return {};
  return found->tokens;
}

std::string_view name_of(AuditRule rule) {
  switch (rule) {
    case AuditRule::attention_read:
      return "attention_read";
    case AuditRule::state_read:
      return "state_read";
    case AuditRule::handed_out:
      return "handed_out";
    case AuditRule::token_write:
      return "token_write";
    case AuditRule::scheduled_tokens:
      return "scheduled_tokens";
    case AuditRule::conservation:
      return "conservation";
    case AuditRule::common_prefix:
      return "common_prefix";
    case AuditRule::transfer:
      return "transfer";
    case AuditRule::standstill:
      return "standstill";
    case AuditRule::draft_read:
      return "draft_read";
    case AuditRule::recording:
      return "recording";
  }
  LS_CHECK(false, "audit rule {}", static_cast<int>(rule));
}

void Auditor::Impl::report(AuditRule rule, const AuditedRequest& request, std::size_t group,
                           std::int64_t token, BlockId block, std::string what) {
  AuditedRequest& mine = requests_.at(request.name);
  if (mine.wrong[group]) return;
  mine.wrong[group] = true;
  findings_.push_back({rule,
                       {},
                       step_,
                       request.name,
                       static_cast<std::int32_t>(group),
                       token,
                       index_of(block),
                       std::move(what)});
}

void Auditor::Impl::report(AuditRule rule, const std::string& request, std::string what) {
  findings_.push_back({rule, {}, step_, request, -1, -1, -1, std::move(what)});
}

void Auditor::Impl::add(const RecordedEvent& event) {
  // The engine refuses it, and nothing of it is ever scheduled.
  if (event.request.prompt.size() > config_.max_model_len) return;
  const auto same = requests_.find(event.request.name);
  if (same != requests_.end() && !same->second.has_left)
    report(AuditRule::recording, event.request.name, "two live requests are called so");
  AuditedRequest request;
  request.name = event.request.name;
  request.index = static_cast<std::int32_t>(names_.size());
  request.tokens = event.request.prompt.materialize();
  std::uint64_t content = request.root = empty_prefix(event.request.cache_salt);
  for (const std::int32_t token : request.tokens)
    request.contents.push_back(content = content_after(content, token));
  request.tables.resize(groups_.size());
  request.wrong.resize(groups_.size());
  names_.push_back(request.name);
  requests_.insert_or_assign(event.request.name, std::move(request));
}

// The first entry of the table that is not left behind by a request that has come to `reached`. A
// load writes all that its table names, and who waits with it lets go of nothing.
std::size_t Auditor::Impl::first_needed(const AuditedRequest& request, std::size_t group,
                                        std::int32_t reached) const {
  if (request.transfer != Transfer::none) return 0;
  return static_cast<std::size_t>(first_read(group, reached) / block_size(group));
}

// Who can still read the block, or has a transfer that does; null: nobody.
const AuditedRequest* Auditor::Impl::reader_of(BlockId block) const {
  for (const auto& [name, other] : requests_) {
    if (!other.keeps_blocks()) continue;
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
      if (std::find(table.begin() + static_cast<std::ptrdiff_t>(first),
                    table.begin() + static_cast<std::ptrdiff_t>(std::max(first, last)),
                    block) != table.begin() + static_cast<std::ptrdiff_t>(std::max(first, last)))
        return &other;
    }
  }
  return nullptr;
}

// A block becomes part of a table without being a hit: nobody else may need what it holds.
void Auditor::Impl::hand_out(const AuditedRequest& request, std::size_t group, std::size_t index,
                             BlockId block) {
  if (const AuditedRequest* reader = reader_of(block); reader != nullptr && reader != &request) {
    report(
        AuditRule::handed_out, request, group, static_cast<std::int64_t>(index) * block_size(group),
        block,
        fmt::format(
            "block {} becomes entry {} of the table, beyond the hit of {} tokens, while request {} "
            "still reads it: it will be written while shared",
            index_of(block), index, request.computed, reader->name));
    return;
  }
  ledger_.hand_out(block, static_cast<std::int32_t>(group), block_size(group));
}

void Auditor::Impl::take_tables(const RecordedStep& step, const RecordedScheduled& scheduled,
                                AuditedRequest& request) {
  const std::int32_t hit = num_hit(step, scheduled, request);
  request.transfer = Transfer::none;
  if (scheduled.is_new) {
    request.computed = scheduled.computed;
    request.state_idx = -1;
    request.num_accepted = 1;
    for (auto& table : request.tables) table.clear();
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
      const bool moved = std::ranges::find(movable, block) != movable.end();
      table.push_back(block);
      const bool is_hit =
          scheduled.is_new && static_cast<std::int64_t>(index) * block_size(g) < hit;
      if (block == kNullBlock || is_hit || moved) continue;
      hand_out(request, g, index, block);
    }
  }
  if (!scheduled.is_new || hit == scheduled.computed) return;
  write_loaded(request, hit, scheduled.computed,
               step.worker ? std::span<const BlockId>(step.worker->invalid_blocks)
                           : std::span<const BlockId>());
}

void Auditor::Impl::step(const RecordedStep& step) {
  step_ = step.step;
  for (const RecordedEvent& event : step.before)
    if (event.kind == RecordedEvent::Kind::add) add(event);
  for (const std::string& name : step.preempted)
    if (const auto it = requests_.find(name); it != requests_.end()) {
      it->second.running = false;
      for (auto& table : it->second.tables) table.clear();
    }
  for (const std::string& name : step.finished) leave(step, name);
  release_failed_loads(step);

  std::vector<AuditRow> rows;
  for (const RecordedScheduled& scheduled : step.scheduled) {
    AuditRow row;
    if (make_row(step, scheduled, row)) rows.push_back(std::move(row));
  }
  begin_loads(step);
  void_rows(step, rows);
  for (AuditRow& row : rows) prepare_states(row);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (is_state(groups_[g].spec)) {
      for (const AuditRow& row : rows) advance_states(row, g);
    } else {  // a layer writes the keys of the whole batch before it attends
      for (const AuditRow& row : rows) write_tokens(row, g);
      for (const AuditRow& row : rows) read_tokens(row, g);
    }
  }
  check_conservation(step);
  check_common_prefix(step);

  for (AuditRow& row : rows) {
    if (row.is_void) continue;
    AuditedRequest& request = *row.request;
    const auto tokens = sampled_of(step, request.name);
    settle_states(row, static_cast<std::int32_t>(tokens.size()));
    const auto num_rejected = row.num_spec > 0 && !tokens.empty()
                                  ? row.num_spec - (static_cast<std::int32_t>(tokens.size()) - 1)
                                  : 0;
    request.computed = row.last - num_rejected;
    request.scheduled_to = row.counted_to;
    for (const std::int32_t token : tokens) {
      request.tokens.push_back(token);
      request.contents.push_back(
          content_after(request.contents.empty() ? request.root : request.contents.back(), token));
    }
  }
  if (hashes_look_ahead_) {  // the drafter too writes the whole batch before it attends
    for (const AuditRow& row : rows) finish_draft_rows(row);
    for (const AuditRow& row : rows) read_draft_row(row);
  }
  for (const RecordedEvent& event : step.during)
    if (event.kind == RecordedEvent::Kind::add) add(event);
  take_outputs(step);
  last_ = step;
}

void Auditor::Impl::end(const RecordingEnd& end) {
  step_ = -1;
  for (const std::string& name : end.unfinished)
    if (!requests_.contains(name))
      report(AuditRule::recording, name, "never finished by the end line, and not live");
  check_standstill(last_);
}

Auditor::Auditor(const RecordingHeader& header) : impl_(std::make_unique<Impl>(header)) {}
Auditor::~Auditor() = default;
Auditor::Auditor(Auditor&&) noexcept = default;

void Auditor::step(const RecordedStep& step) { impl_->step(step); }

void Auditor::end(const RecordingEnd& end) { impl_->end(end); }

std::vector<AuditFinding> Auditor::take_findings() { return impl_->take(); }

std::int64_t Auditor::reads_checked() const { return impl_->reads_checked(); }

std::string why_not_audited(const RecordingHeader& header) {
  const EngineConfig& config = header.options.config;
  const bool keeps_states = std::ranges::any_of(
      header.groups, [](const KVCacheGroupSpec& group) { return is_state(group.spec); });
  if (keeps_states && config.async_scheduling && config.num_spec_tokens > 0)
    return "with drafts in flight the worker, and not the recording, says which entry of the table "
           "holds a running state";
  return {};
}

// The first key of the header that changes who reads what in a way that is not followed; empty:
// none.
std::string unfollowed_key(const RecordingHeader& header) {
  const EngineConfig& config = header.options.config;
  if (config.num_prefill_lookahead_tokens != 1) return "num_prefill_lookahead_tokens";
  if (config.prefix_match_unit != 0) return "prefix_match_unit";
  for (const KVCacheGroupSpec& group : header.groups) {
    const KVCacheSpec& spec = group.spec;
    if (spec.num_prefill_checkpoint_blocks != 0) return "num_prefill_checkpoint_blocks";
    if (spec.extra_retained_tokens != 0) return "extra_retained_tokens";
    if (spec.bounded_replay) return "bounded_replay";
    if (spec.kind == CacheKind::circular_buffer) return "circular_buffer";
    if (!group.role.empty()) return "role";
  }
  return {};
}

Result<AuditFile> audit_recording(const std::string& path) {
  Result<RecordingReader> reader = RecordingReader::open(path);
  if (!reader) return tl::unexpected(reader.error());
  AuditFile file;
  file.file = path;
  const RecordingHeader& header = reader->header();
  if (auto sound = check_limits(header.options.config, header.groups, header.num_blocks); !sound)
    return fail(fmt::format("{}:1: {}", path, sound.error().message));
  if (const std::string key = unfollowed_key(header); !key.empty())
    return fail(fmt::format("{}:1: {}: what it does to memory is not followed", path, key));
  file.skipped = why_not_audited(header);
  if (!file.skipped.empty()) return file;
  Auditor auditor(header);
  RecordedStep step;
  while (true) {
    const Result<bool> more = reader->next(step);
    if (!more) return tl::unexpected(more.error());
    if (!*more) break;
    auditor.step(step);
    ++file.steps;
  }
  auditor.end(reader->end());
  file.reads_checked = auditor.reads_checked();
  file.findings = auditor.take_findings();
  for (AuditFinding& finding : file.findings) finding.file = path;
  return file;
}

// What holds over all requests of a step.

void Auditor::Impl::check_common_prefix(const RecordedStep& step) {
  if (!step.common_prefix_blocks) return;
  for (std::size_t g = 0; g < std::min(groups_.size(), step.common_prefix_blocks->size()); ++g) {
    const auto num_common = static_cast<std::size_t>(std::max((*step.common_prefix_blocks)[g], 0));
    const std::vector<BlockId>* first = nullptr;
    for (const std::string& name : step.running) {
      const auto it = requests_.find(name);
      if (it == requests_.end() || num_common == 0) continue;
      const std::vector<BlockId>& table = it->second.tables[g];
      if (first == nullptr) first = &table;
      if (table.size() >= num_common && first->size() >= num_common &&
          std::equal(table.begin(), table.begin() + static_cast<std::ptrdiff_t>(num_common),
                     first->begin()))
        continue;
      report(
          AuditRule::common_prefix, it->second, g, -1, kNullBlock,
          fmt::format(
              "{} blocks are said to be common to all running requests; this one's table differs",
              num_common));
    }
  }
}

// Blocks of those that do not run: loading, loaded, or to be sent. Who has left has let go of what
// its window no longer reaches; whether drafts count there is said below.
std::set<BlockId> Auditor::Impl::kept_by_transfers(bool counts_drafts) const {
  std::set<BlockId> kept;
  for (const auto& [name, request] : requests_) {
    if (request.running || !request.keeps_blocks()) continue;
    const std::int32_t end =
        counts_drafts ? std::max(request.scheduled_to, request.computed) : request.computed;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      const std::size_t first = request.has_left ? first_needed(request, g, end) : 0;
      for (std::size_t i = first; i < request.tables[g].size(); ++i)
        if (request.tables[g][i] != kNullBlock) kept.insert(request.tables[g][i]);
    }
  }
  return kept;
}

// Who leaves while a step is in flight leaves before it is known which of its drafts stand, and a
// recording does not show when: the engine's count of each lies between the two.
void Auditor::Impl::check_conservation(const RecordedStep& step) {
  const std::set<BlockId> kept = kept_by_transfers(false);
  const auto adds_up = [&](std::int64_t held) {
    const std::int64_t excess = held + step.free_blocks + 1 - ledger_.num_blocks();
    if (excess == 0) return true;
    return excess > 0 && excess <= std::ssize(kept) - std::ssize(kept_by_transfers(true));
  };
  if (step.running.empty() && !adds_up(std::ssize(kept)))
    report(
        AuditRule::conservation, {},
        fmt::format("nobody runs, and {} of {} blocks are free besides the null block{}",
                    step.free_blocks, ledger_.num_blocks() - 1,
                    kept.empty() ? "" : fmt::format(", with {} kept for transfers", kept.size())));
  if (!step.tables) return;
  std::map<std::int32_t, std::int32_t> group_of;
  for (const RecordedTable& table : *step.tables) {
    for (std::size_t g = 0; g < table.blocks.size(); ++g) {
      for (const BlockId block : table.blocks[g]) {
        if (block == kNullBlock) continue;
        const auto [at, is_new] = group_of.emplace(index_of(block), static_cast<std::int32_t>(g));
        if (!is_new && at->second != static_cast<std::int32_t>(g))
          report(AuditRule::conservation, table.id,
                 fmt::format("block {} is in the tables of group {} and of group {}",
                             index_of(block), at->second, g));
      }
    }
  }
  const auto held = std::ssize(group_of) + std::ranges::count_if(kept, [&](BlockId block) {
                      return !group_of.contains(index_of(block));
                    });
  if (!adds_up(held))
    report(AuditRule::conservation, {},
           fmt::format("{} blocks are held and {} free, with the null block {} of {}", held,
                       step.free_blocks, held + step.free_blocks + 1, ledger_.num_blocks()));
}

}  // namespace lockstep
