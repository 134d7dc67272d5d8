// Checks host pages row by row: runs the workers' messages as the engine's worker does, on
// rows that record their writer, and checks every read for the row that it needs. It uses decisions
// and reports only, not the scheduler's state.
//
// Invariants
//   hit_row         what a request counts as computed holds its own prefix, on the host
//   written_page    a step writes rows of pages that are on the device
//   read_page       every row that attention reads is the last one written there for it, on
//                   the device or, where the page is not resident, on the host
//   hot_region      a row that reads from the host has its complete hot region
//   all_resident    set exactly for steps that read nothing from the host
//   clean_page      a page whose transfer is reported complete is equal on both sides
//   page_under_way  no block is allocated while a transfer reads or writes it
//   page_leak       with no request left and no transfer in flight, both pools are free
//
// A row goes to the host in the step that writes it (eager_host_mirror, the engine's default), so a
// spill moves nothing. Not followed: the rows in a hot region, drafts of asynchronous scheduling
// (only the worker has the positions of their rows), rows that a draft model writes ahead.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "properties/invariants/invariants.h"

namespace lockstep {

class HostPages {
 public:
  // REQUIRES: the groups of an engine with host pages.
  explicit HostPages(std::span<const KVCacheGroupSpec> groups);

  // Tokens of a request that peers write to the host: within the step, or by a report.
  struct Load {
    std::string name;
    std::int32_t first = 0, last = 0;
  };
  // A step has been decided. `loads`: within it.
  void decided(const SchedulerOutput& decision, const Scheduler& scheduler,
               std::span<const Load> loads = {});
  // ... and this is reported with it: `loads` have completed.
  void reported(const KVConnectorOutput& report, const Scheduler& scheduler,
                std::span<const RequestId> loading, std::span<const Load> loads = {});
  // Checks nothing while a request is live or a transfer is in flight.
  void end(const Scheduler& scheduler, std::int64_t num_host_blocks);

  // The first one; later calls look at nothing once there is one.
  const std::optional<Violation>& violation() const { return violation_; }
  std::int64_t rows_read() const { return rows_read_; }
  std::int64_t rows_read_from_host() const { return rows_read_from_host_; }

 private:
  struct Row {
    std::int64_t stamp = 0;  // of the write; 0: nothing
    bool operator==(const Row&) const = default;
  };
  using Page = std::vector<Row>;
  struct Reader {
    std::vector<std::vector<BlockId>> residency;  // per resident group, as workers know it
    std::vector<Row> rows;                        // by position: what it has to find
    std::vector<std::uint64_t> prefixes;          // by position, of its tokens
  };
  struct Written {
    std::uint64_t prefix = 0;
    std::string by;
  };

  void fail(std::string_view name, const std::string& request, std::string what);
  Page& page_of(std::map<BlockId, Page>& pages, BlockId block);
  Row row_of(const std::map<BlockId, Page>& pages, BlockId block, std::int32_t row) const;
  void learn_prefixes(Reader& reader, const Scheduler& scheduler, RequestId id) const;
  void learn_rows(Reader& reader, std::int32_t num_computed);
  bool is_same(Row a, Row b) const;
  void hand_out(const SchedulerOutput& decision, const Scheduler& scheduler, std::size_t row);
  void load(const Load& load, const Scheduler& scheduler, RequestId id);
  void enter(Reader& reader, const ScheduledRequest& row, const Scheduler& scheduler);
  void restore(const SchedulerOutput& decision);
  void write(Reader& reader, const ScheduledRequest& row, const Scheduler& scheduler);
  void mirror(const HostPageRow& row, const ScheduledRequest& scheduled);
  bool read(const Reader& reader, const ScheduledRequest& row, const Scheduler& scheduler);

  std::int32_t source_ = 0;
  std::vector<std::int32_t> resident_, hot_;
  std::vector<std::int64_t> hot_blocks_;
  std::int32_t block_size_ = 0;
  std::map<BlockId, Page> host_;
  std::map<BlockId, Page> device_;  // a block belongs to one group at a time
  std::map<std::string, Reader> readers_;
  std::map<std::int64_t, Written> written_;  // by stamp
  std::map<std::int64_t, PageTransfer> under_way_;
  std::map<std::int64_t, std::int32_t> expected_, completed_;  // workers, by transfer
  std::int64_t last_stamp_ = 0, step_begin_ = 0;
  std::int64_t step_ = -1;
  std::int64_t rows_read_ = 0, rows_read_from_host_ = 0;
  std::optional<Violation> violation_;
};

// ... as a run sees it, with its connector's queries and reports in a recording's terms. Checks
// nothing of a cache without groups of host pages.
class RunPages {
 public:
  explicit RunPages(std::span<const KVCacheGroupSpec> groups);

  // After the decision, and at the end of the step. Loads within a step are followed.
  void decided(const StepView& view, const RecordedStep& step);
  void finished(const StepView& view, const RecordedStep& step);
  void end(const Scheduler& scheduler, std::int64_t num_host_blocks);

  const std::optional<Violation>& violation() const;
  const HostPages* pages() const { return pages_ ? &*pages_ : nullptr; }

 private:
  std::optional<HostPages> pages_;
  std::map<std::string, HostPages::Load> asked_;  // by the last question of each request
};

}  // namespace lockstep
