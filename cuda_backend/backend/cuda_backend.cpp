#include "cuda_backend/backend/cuda_backend.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/check.h"
#include "cuda_backend/pool/cache_pool.h"
#include "cuda_backend/pool/host_tier.h"
#include "cuda_backend/step/attention_queries.h"
#include "cuda_backend/step/block_tables.h"
#include "cuda_backend/step/real_states.h"
#include "cuda_backend/step/row_parts.h"
#include "cuda_backend/step/row_writer.h"
#include "cuda_backend/step/sparse_pages.h"
#include "cuda_backend/streams/stream_device.h"
#include "cuda_backend/views/layer_caches.h"
#include "cuda_backend/views/overlaid_views.h"

namespace lockstep::cuda {
namespace {

constexpr std::int32_t kMaxStreams = 64;

class CudaBackend final : public Backend {
 public:
  // `row_widths`: entries that programs may give a row, per group.
  CudaBackend(std::unique_ptr<Device> device, BackendConfig config,
              std::vector<std::int32_t> row_widths, Seams seams)
      : device_(std::move(device)),
        config_(std::move(config)),
        row_widths_(std::move(row_widths)),
        seams_(std::move(seams)) {}

  Result<void> start() {
    LS_ASSIGN_OR_RETURN(auto share, share_of_rank(config_));
    if (seams_.share) seams_.share(config_, share);
    LS_ASSIGN_OR_RETURN(config_.plan, bind_sparse_groups(std::move(share.plan)));
    if (is_overlaid(config_.layout))
      config_.plan = overlaid_plan(std::move(config_.plan), view_options(config_));
    std::optional<PoolViews> given;
    if (seams_.views) {
      LS_ASSIGN_OR_RETURN(given, seams_.views(config_));
    }
    LS_ASSIGN_OR_RETURN(
        pool_, CachePool::create(*device_, config_, share.layers, given ? &*given : nullptr));
    LS_ASSIGN_OR_RETURN(host_, HostTier::create(*device_, config_, pool_->layers()));
    tables_ = std::make_unique<BlockTables>(*device_, config_, pool_->layers().blocks_per_kv_block,
                                            pool_->layers().mapped_tables);
    LS_ASSIGN_OR_RETURN(
        sparse_, SparsePages::create(*device_, config_, pool_->layers(), *tables_, host_.get()));
    if (config_.numbers == Numbers::real) {
      if (auto reason = RowParts::why_not(config_, pool_->layers())) return fail(*reason);
      if (auto reason = why_not_real(pool_->layers())) return fail(*reason);
      states_ = std::make_unique<RealStates>(*device_, config_, pool_->layers());
    }
    parts_ = std::make_unique<RowParts>(*device_, config_, pool_->layers());
    // A draft model's first pass has a token more than the step has, of each request.
    writer_ = std::make_unique<RowWriter>(*device_, pool_->layers(), *parts_,
                                          config_.max_tokens_per_step + config_.num_rows);
    drafter_ =
        std::make_unique<DraftPasses>(*device_, config_, pool_->layers(), *tables_, *writer_);
    reader_ = std::make_unique<AttentionReader>(*device_, pool_->layers(), *tables_, sparse_.get());
    queries_ = std::make_unique<AttentionQueries>(*device_, config_, pool_->layers(), *parts_,
                                                  *tables_, *reader_);
    extractor_ = std::make_unique<RowExtractor>(*device_, pool_->layers(), *tables_);
    return device_->finish();
  }

  std::string_view name() const override { return device_->name(); }
  std::string device() const override { return device_->description(); }

  Result<void> execute(const StepProgram& program, StepReadback& readback) override {
    check_widths(program);
    if (!seams_.program) return run(program, readback);
    StepProgram edited = program;
    seams_.program(edited);
    return run(edited, readback);
  }

  Result<void> fingerprint_pages(std::span<const PageId> pages,
                                 std::span<Fingerprint> fingerprints) override {
    return pool_->fingerprint_pages(pages, fingerprints);
  }

  Result<std::vector<std::uint8_t>> read_page(PageId page) override {
    return pool_->read_page(page);
  }

  std::optional<Writer> who_wrote(PageId page, std::int64_t byte) override {
    const auto writer = device_->who_wrote(pool_->address(page, byte));
    if (!writer) return std::nullopt;
    return Writer{.kernel = writer->kernel, .step = writer->step, .thread = writer->thread};
  }

  Result<void> fingerprint_host_blocks(std::span<const HostBlockId> hosts,
                                       std::span<Fingerprint> fingerprints) override {
    return tier().fingerprint(hosts, fingerprints);
  }
  Result<std::vector<std::uint8_t>> read_host_block(std::int32_t group, HostBlockId host) override {
    return tier().read(group, host);
  }
  Result<void> write_host_block(std::int32_t group, HostBlockId host,
                                std::span<const std::uint8_t> bytes) override {
    return tier().write(group, host, bytes);
  }

  std::vector<KernelStatistics> kernel_statistics() const override {
    return device_->kernel_statistics();
  }

  GraphStatistics graph_statistics() const override { return device_->graph_statistics(); }
  bool attends_to_ranges() const override { return device_->attends_to_ranges(); }
  DType query_dtype() const override { return device_->query_dtype(); }
  std::vector<std::string> not_checked() const override { return device_->not_checked(); }

 private:
  Result<void> run(const StepProgram& program, StepReadback& readback) {
    device_->begin_step(program.step);
    device_->run_eagerly(program.agreed.is_eager);
    copy_states(program.settled);
    pool_->poison(program.poison);
    pool_->zero(program.zero);
    LS_CHECK(host_ != nullptr || (program.loads.empty() && program.stores.empty()),
             "{} loads and {} stores without a host tier", program.loads.size(),
             program.stores.size());
    if (host_ != nullptr) host_->load(program.loads);
    pool_->copy(program.parts);
    copy_states(program.copies);
    tables_->apply(program);
    if (sparse_ != nullptr) sparse_->apply(program);
    tables_->map_slots(program);
    upload_contents(program);
    if (!std::exchange(has_sinks_, true)) writer_->write_sinks(config_.plan);
    writer_->write(program, contents_, *tables_);
    if (!program.encoder_contents.empty()) encoder_contents_.upload(program.encoder_contents);
    writer_->write_encoder_rows(program, encoder_contents_, *tables_);
    if (sparse_ != nullptr) {
      sparse_->mirror(program);
      sparse_->swap_in(program);
    }
    if (states_ != nullptr)
      states_->update(program, contents_);
    else
      pool_->update_states(program.state_updates, contents_);
    drafter_->run(program);
    if (host_ != nullptr) host_->store(program.stores);
    attend(program, readback);
    pool_->download_guards();
    auto done = tables_->read_back(program, readback);
    if (done && states_ != nullptr) states_->read_back(program, readback);
    if (done) done = extractor_->run(program, readback);
    take_reports(readback.reports);
    if (done) pool_->check_guards(readback.reports);
    return done;
  }

  void check_widths(const StepProgram& program) const {
    for (const TableUpdate& update : program.table_updates)
      LS_CHECK(update.first + std::int64_t{update.count} <= row_widths_.at(update.group),
               "group {}: {} entries from {}, rows hold {}", update.group, update.count,
               update.first, row_widths_[update.group]);
  }
  void copy_states(std::span<const BlockCopy> copies) {
    if (states_ != nullptr)
      states_->copy(copies);
    else
      pool_->copy(copies);
  }
  void attend(const StepProgram& program, StepReadback& readback) {
    reader_->launch(program);
    queries_->launch(program);
    reader_->read_back(program, readback);
    queries_->read_back(program, readback);
  }
  HostTier& tier() {
    LS_CHECK(host_ != nullptr, "no host tier");
    return *host_;
  }
  // Padded tokens have a content too: their rows are made and go nowhere.
  void upload_contents(const StepProgram& program) {
    contents_.host = program.contents;
    const auto count = static_cast<std::int32_t>(program.contents.size());
    contents_.host.resize(std::max(count, step_batch(*device_, program)));
    contents_.upload();
  }
  void take_reports(std::vector<MemoryReport>& reports) {
    reports.clear();
    found_.clear();
    device_->take_reports(found_);
    for (DeviceReport& report : found_) reports.push_back(pool_->locate(std::move(report)));
  }

  // The device outlives everything that lies in its memory.
  std::unique_ptr<Device> device_;
  BackendConfig config_;
  std::vector<std::int32_t> row_widths_;
  Seams seams_;
  std::unique_ptr<CachePool> pool_;
  std::unique_ptr<HostTier> host_;  // null: none
  std::unique_ptr<BlockTables> tables_;
  std::unique_ptr<SparsePages> sparse_;  // null: no host pages
  std::unique_ptr<RowParts> parts_;
  std::unique_ptr<RealStates> states_;  // null: numbers are words
  std::unique_ptr<RowWriter> writer_;
  std::unique_ptr<DraftPasses> drafter_;
  std::unique_ptr<AttentionReader> reader_;
  std::unique_ptr<AttentionQueries> queries_;
  std::unique_ptr<RowExtractor> extractor_;
  StagedItems<std::uint64_t> contents_{*device_, "content ids"};
  DeviceArray<std::uint64_t> encoder_contents_{*device_, "content ids of encoders"};
  bool has_sinks_ = false;  // they are written
  std::vector<DeviceReport> found_;
};

}  // namespace

Result<std::unique_ptr<Backend>> make_backend(std::unique_ptr<Device> device, BackendConfig config,
                                              Seams seams) {
  std::vector<std::int32_t> row_widths = config.max_blocks_per_row;
  if (seams.config) seams.config(config);
  if (config.num_streams < 1 || config.num_streams > kMaxStreams)
    return fail("num_streams: {} is not from 1 to {}", config.num_streams, kMaxStreams);
  if (config.num_streams > 1)
    device = make_stream_device(std::move(device),
                                {.num_streams = config.num_streams, .edit_graph = seams.graph});
  if (config.max_cudagraph_capture_size < 0)
    return fail("max_cudagraph_capture_size: {}", config.max_cudagraph_capture_size);
  Device& base = *device;
  if (config.max_cudagraph_capture_size > 0)
    device = make_graph_device(
        std::move(device),
        cudagraph_capture_sizes(config.max_cudagraph_capture_size, config.max_tokens_per_step));
  if (seams.device) device = seams.device(std::move(device), base);
  auto backend = std::make_unique<CudaBackend>(std::move(device), std::move(config),
                                               std::move(row_widths), std::move(seams));
  LS_RETURN_IF_ERROR(backend->start());
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace lockstep::cuda
