#include "properties/invariants/host_pages.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/seeded_random.h"
#include "reference/plan/page_groups.h"

namespace lockstep {

HostPages::HostPages(std::span<const KVCacheGroupSpec> groups) {
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto group = static_cast<std::int32_t>(g);
    const KVCacheSpec& spec = groups[g].spec;
    if (groups[g].role == kPageSourceRole) source_ = group;
    if (is_resident_pages(spec.kind)) {
      resident_.push_back(group);
      block_size_ = static_cast<std::int32_t>(spec.block_size);
    }
    if (!is_hot_pages(spec.kind)) continue;
    hot_.push_back(group);
    hot_blocks_.push_back(spec.blocks_per_request);
  }
}

void HostPages::fail(std::string_view name, const std::string& request, std::string what) {
  if (!violation_) violation_ = {name, step_, request, std::move(what)};
}

HostPages::Page& HostPages::page_of(std::map<BlockId, Page>& pages, BlockId block) {
  Page& page = pages[block];
  page.resize(static_cast<std::size_t>(block_size_));
  return page;
}

HostPages::Row HostPages::row_of(const std::map<BlockId, Page>& pages, BlockId block,
                                 std::int32_t row) const {
  const auto page = pages.find(block);
  return page == pages.end() ? Row{} : page->second[static_cast<std::size_t>(row)];
}

// One number per prefix of the known tokens.
void HostPages::learn_prefixes(Reader& reader, const Scheduler& scheduler, RequestId id) const {
  for (auto at = std::ssize(reader.prefixes); at < scheduler.num_tokens(id); ++at) {
    const std::uint64_t before = at == 0 ? 0 : reader.prefixes.back();
    const auto token = static_cast<std::uint64_t>(scheduler.token(id, at));
    reader.prefixes.push_back(splitmix64(before ^ splitmix64(token)));
  }
}

// Accepted drafts are known now; rejected ones are written again.
void HostPages::learn_rows(Reader& reader, std::int32_t num_computed) {
  const std::size_t computed = std::min(static_cast<std::size_t>(num_computed), reader.rows.size());
  reader.rows.resize(computed);
  for (std::size_t at = computed; at-- > 0 && at < reader.prefixes.size();) {
    std::uint64_t& prefix = written_[reader.rows[at].stamp].prefix;
    if (prefix != 0) break;
    prefix = reader.prefixes[at];
  }
}

// Written at once, or of the same tokens.
bool HostPages::is_same(Row a, Row b) const {
  if (a == b) return a.stamp != 0;
  const auto of_a = written_.find(a.stamp), of_b = written_.find(b.stamp);
  return of_a != written_.end() && of_b != written_.end() && of_a->second.prefix != 0 &&
         of_a->second.prefix == of_b->second.prefix;
}

// What lay in blocks that now have another owner is gone.
void HostPages::hand_out(const SchedulerOutput& decision, const Scheduler& scheduler,
                         std::size_t row) {
  const std::string name(scheduler.name(decision.scheduled[row].id));
  for (std::int32_t g = 0; g < decision.num_groups; ++g) {
    const bool is_host = g == source_;
    for (const BlockId block : decision.blocks(row, g)) {
      if (block == kNullBlock) continue;
      for (const auto& [id, transfer] : under_way_) {
        const bool is_held =
            is_host ? transfer.host == block && !decision.scheduled[row].is_new
                    : std::ranges::find(transfer.resident, block) != transfer.resident.end();
        const bool is_own =
            std::ranges::find(resident_, g) != resident_.end() && decision.scheduled[row].is_new;
        if (is_held && !is_own)
          fail("page_under_way", name,
               fmt::format("block {} is allocated, and transfer {} is in flight", index_of(block),
                           id));
      }
      // A request that loaded has its page already when it enters.
      const bool is_resident = std::ranges::find(resident_, g) != resident_.end();
      if (!is_host && !(is_resident && decision.scheduled[row].is_new)) device_.erase(block);
    }
  }
}

void HostPages::load(const Load& load, const Scheduler& scheduler, RequestId id) {
  Reader reader;
  learn_prefixes(reader, scheduler, id);
  const auto table = scheduler.block_table(id, source_);
  for (std::int32_t at = load.first; at < load.last; ++at) {
    const BlockId block = table[static_cast<std::size_t>(at / block_size_)];
    const Row row{++last_stamp_};
    written_[row.stamp] = {reader.prefixes[static_cast<std::size_t>(at)], load.name};
    page_of(host_, block)[static_cast<std::size_t>(at % block_size_)] = row;
  }
}

// Its computed tokens are what the host holds of them.
void HostPages::enter(Reader& reader, const ScheduledRequest& row, const Scheduler& scheduler) {
  reader = {};
  reader.residency.resize(resident_.size());
  learn_prefixes(reader, scheduler, row.id);
  const auto table = scheduler.block_table(row.id, source_);
  for (std::int32_t at = 0; at < row.computed; ++at) {
    const BlockId block = table[static_cast<std::size_t>(at / block_size_)];
    const Row found = row_of(host_, block, at % block_size_);
    const auto written = written_.find(found.stamp);
    if (written == written_.end() ||
        written->second.prefix != reader.prefixes[static_cast<std::size_t>(at)])
      return fail("hit_row", std::string(scheduler.name(row.id)),
                  fmt::format("token {} in host block {} is {}", at, index_of(block),
                              written == written_.end() ? "nothing" : written->second.by));
    reader.rows.push_back(found);
  }
}

void HostPages::restore(const SchedulerOutput& decision) {
  for (const PageTransfer& transfer : decision.host_pages.transfers) {
    under_way_[transfer.id] = transfer;
    if (!transfer.restores) continue;
    for (const BlockId block : transfer.resident)
      page_of(device_, block) = page_of(host_, transfer.host);
  }
}

void HostPages::write(Reader& reader, const ScheduledRequest& row, const Scheduler& scheduler) {
  for (std::int32_t at = row.computed; at < row.computed + row.num_tokens; ++at) {
    const auto i = static_cast<std::size_t>(at);
    const Row written{++last_stamp_};
    // A draft has no prefix yet: no request hits it before it is known.
    written_[written.stamp] = {i < reader.prefixes.size() ? reader.prefixes[i] : 0,
                               std::string(scheduler.name(row.id))};
    reader.rows.push_back(written);
    for (std::size_t g = 0; g < resident_.size(); ++g) {
      const auto page = static_cast<std::size_t>(at / block_size_);
      const auto& residency = reader.residency[g];
      if (page >= residency.size() || residency[page] == kNullBlock)
        return fail("written_page", std::string(scheduler.name(row.id)),
                    fmt::format("token {} goes to page {}, which is not on the device", at, page));
      page_of(device_, residency[page])[static_cast<std::size_t>(at % block_size_)] = written;
    }
  }
}

// Rows of the mirrors that the step has written; the others are left as they are.
void HostPages::mirror(const HostPageRow& row, const ScheduledRequest&) {
  for (const RowMirror& mirror : row.mirrors)
    for (std::int32_t i = 0; i < mirror.num_rows; ++i) {
      const std::int64_t from = mirror.sources[0] + i, to = mirror.destination + i;
      const Row found = row_of(device_, BlockId{static_cast<std::int32_t>(from / block_size_)},
                               static_cast<std::int32_t>(from % block_size_));
      if (found.stamp <= step_begin_) continue;
      page_of(host_, BlockId{static_cast<std::int32_t>(
                         to / block_size_)})[static_cast<std::size_t>(to % block_size_)] = found;
    }
}

// Whether it reads something from the host.
bool HostPages::read(const Reader& reader, const ScheduledRequest& row,
                     const Scheduler& scheduler) {
  const std::string name(scheduler.name(row.id));
  const auto table = scheduler.block_table(row.id, source_);
  bool reads_host = false;
  for (std::int32_t at = 0; at < row.computed + row.num_tokens; ++at) {
    const auto page = static_cast<std::size_t>(at / block_size_);
    for (const std::vector<BlockId>& residency : reader.residency) {
      const BlockId block = page < residency.size() ? residency[page] : kNullBlock;
      const bool is_on_host = block == kNullBlock;
      const Row found = is_on_host ? row_of(host_, table[page], at % block_size_)
                                   : row_of(device_, block, at % block_size_);
      ++rows_read_;
      rows_read_from_host_ += is_on_host ? 1 : 0;
      reads_host |= is_on_host;
      if (is_same(found, reader.rows[static_cast<std::size_t>(at)])) continue;
      const auto written = written_.find(found.stamp);
      fail("read_page", name,
           fmt::format("token {} is read from {} block {}, which holds {}", at,
                       is_on_host ? "host" : "device", index_of(is_on_host ? table[page] : block),
                       written == written_.end() ? "nothing" : "a row of " + written->second.by));
      return reads_host;
    }
  }
  for (std::size_t g = 0; reads_host && g < hot_.size(); ++g)
    if (std::ssize(scheduler.block_table(row.id, hot_[g])) != hot_blocks_[g])
      fail("hot_region", name,
           fmt::format("{} of {} blocks", scheduler.block_table(row.id, hot_[g]).size(),
                       hot_blocks_[g]));
  return reads_host;
}

void HostPages::decided(const SchedulerOutput& decision, const Scheduler& scheduler,
                        std::span<const Load> loads) {
  if (violation_) return;
  step_ = decision.step;
  step_begin_ = last_stamp_;
  const std::vector<ScheduledRequest>& rows = decision.scheduled;
  for (std::size_t i = 0; i < rows.size(); ++i) hand_out(decision, scheduler, i);
  for (const ScheduledRequest& row : rows) {
    Reader& reader = readers_[std::string(scheduler.name(row.id))];
    for (const Load& one : loads)
      if (one.name == scheduler.name(row.id)) load(one, scheduler, row.id);
    if (row.is_new) enter(reader, row, scheduler);
    if (violation_) return;
    learn_prefixes(reader, scheduler, row.id);
    learn_rows(reader, row.computed);
  }
  step_begin_ = last_stamp_;
  restore(decision);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const ResidencyUpdate& update = decision.host_pages.rows[i].residency;
    Reader& reader = readers_[std::string(scheduler.name(rows[i].id))];
    for (std::size_t g = 0; g < update.blocks.size(); ++g)
      for (std::size_t p = 0; p < update.pages.size(); ++p) {
        const auto page = static_cast<std::size_t>(update.pages[p]);
        if (reader.residency[g].size() <= page) reader.residency[g].resize(page + 1, kNullBlock);
        reader.residency[g][page] = update.blocks[g][p];
      }
  }
  for (const ScheduledRequest& row : rows)
    if (!violation_) write(readers_[std::string(scheduler.name(row.id))], row, scheduler);
  for (std::size_t i = 0; i < rows.size(); ++i) mirror(decision.host_pages.rows[i], rows[i]);
  bool any_from_host = false;
  for (const ScheduledRequest& row : rows)
    if (!violation_)
      any_from_host |= read(readers_[std::string(scheduler.name(row.id))], row, scheduler);
  if (!violation_ && any_from_host && decision.host_pages.all_resident)
    fail("all_resident", "", "and a request reads from the host");
}

void HostPages::reported(const KVConnectorOutput& report, const Scheduler& scheduler,
                         std::span<const RequestId> loading, std::span<const Load> loads) {
  if (violation_) return;
  for (const Load& one : loads)
    for (const RequestId id : loading)
      if (scheduler.name(id) == one.name) load(one, scheduler, id);
  for (const auto& [id, count] : report.enqueued) expected_[id] = count;
  for (const auto& [id, count] : report.completed) completed_[id] += count;
  std::erase_if(under_way_, [&](const auto& entry) {
    const auto& [id, transfer] = entry;
    if (!expected_.contains(id) || completed_[id] < expected_[id]) return false;
    for (const BlockId block : transfer.resident)
      for (std::int32_t row = 0; row < block_size_ && !transfer.restores; ++row) {
        const Row found = row_of(device_, block, row);
        if (found.stamp == 0 || !(found == row_of(host_, transfer.host, row)))
          fail("clean_page", "",
               fmt::format("row {} of device block {} is not that of host block {}", row,
                           index_of(block), index_of(transfer.host)));
      }
    return true;
  });
}

void HostPages::end(const Scheduler& scheduler, std::int64_t num_host_blocks) {
  if (violation_ || scheduler.has_unfinished_requests() || scheduler.has_pages_under_way() ||
      !scheduler.held().empty() || scheduler.num_steps_in_flight() > 0)
    return;
  step_ = -1;
  if (scheduler.num_free_host_blocks() != num_host_blocks - 1)
    fail("page_leak", "",
         fmt::format("no request is live, and {} of {} host blocks are free",
                     scheduler.num_free_host_blocks(), num_host_blocks - 1));
}

RunPages::RunPages(std::span<const KVCacheGroupSpec> groups) {
  if (has_host_pages(groups)) pages_.emplace(groups);
}

void RunPages::decided(const StepView& view, const RecordedStep& step) {
  if (!pages_) return;
  std::vector<HostPages::Load> within;
  for (const RecordedConnectorAnswer& answer :
       step.connector.value_or(std::vector<RecordedConnectorAnswer>())) {
    const HostPages::Load load = {answer.id, answer.local,
                                  answer.local + answer.external.value_or(0)};
    asked_[answer.id] = load;
    const bool enters = std::ranges::any_of(
        view.decision.scheduled, [&](const auto& row) { return view.name(row.id) == answer.id; });
    if (enters && !answer.async && load.last > load.first) within.push_back(load);
  }
  pages_->decided(view.decision, view.model(), within);
}

// No request may read the blocks of a request that ended while it loaded.
void RunPages::finished(const StepView& view, const RecordedStep& step) {
  if (!pages_ || !step.worker) return;
  const RecordedWorker& worker = *step.worker;
  KVConnectorOutput report{.enqueued = worker.enqueued, .completed = worker.completed};
  std::vector<RequestId> loading;
  for (const SkippedRequest& request : view.decisions.skipped()) loading.push_back(request.id);
  std::vector<HostPages::Load> loads;
  for (const std::string& name : worker.received)
    if (std::ranges::find(worker.failed, name) == worker.failed.end())
      loads.push_back(asked_.at(name));
  pages_->reported(report, view.model(), loading, loads);
}

void RunPages::end(const Scheduler& scheduler, std::int64_t num_host_blocks) {
  if (pages_) pages_->end(scheduler, num_host_blocks);
}

const std::optional<Violation>& RunPages::violation() const {
  static const std::optional<Violation> kNone;
  return pages_ ? pages_->violation() : kNone;
}

}  // namespace lockstep
