#include "cuda_backend/plugin/plugin_backend.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "cuda_backend/device/protocol.h"
#include "cuda_backend/plugin/plugin_plan.h"

namespace lockstep {
namespace {

using namespace cuda;

constexpr std::size_t kErrorBytes = 1024;

class PluginBackend final : public Backend {
 public:
  PluginBackend(std::string path, BackendConfig config, std::unique_ptr<PluginLibrary> library,
                std::unique_ptr<PluginPlan> plan)
      : path_(std::move(path)),
        config_(std::move(config)),
        library_(std::move(library)),
        plan_(std::move(plan)),
        plugin_(library_->plugin()) {}
  ~PluginBackend() override {
    if (backend_ != nullptr) plugin_.destroy(backend_);
  }

  Result<void> start() {
    if (plan_->c_plan().num_states > 0 && plugin_.write_state == nullptr)
      return fail("{}: the plan has states, and the plugin has no read_state and write_state",
                  path_);
    char error[kErrorBytes] = {};
    backend_ = plugin_.create(&plan_->c_plan(), error, sizeof error);
    if (backend_ == nullptr)
      return fail("{}: refuses this plan: {}", path_,
                  error[0] != 0 ? error : "(it does not say why)");
    const auto num_tensors = static_cast<std::int32_t>(config_.plan.tensors.size());
    for (std::int32_t tensor = 0; tensor < num_tensors; ++tensor)
      for (std::int64_t block = 0; block < config_.plan.num_blocks; ++block)
        if (!poison_bytes(tensor, block * page_bytes(tensor), page_bytes(tensor), Poison::fresh))
          return failed("write_bytes");
    return {};
  }

  std::string_view name() const override { return path_; }
  std::string device() const override {
    return fmt::format("plugin {}", plugin_.name != nullptr ? plugin_.name : "without a name");
  }
  bool answers_queries() const override { return plugin_.attend != nullptr; }
  std::vector<std::string> not_checked() const override {
    if (plugin_.attend != nullptr) return {};
    return {"attention outputs: the plugin has no function attend"};
  }

  Result<void> execute(const StepProgram& program, StepReadback& readback) override;
  Result<void> fingerprint_pages(std::span<const PageId> pages,
                                 std::span<Fingerprint> fingerprints) override;
  Result<std::vector<std::uint8_t>> read_page(PageId page) override;
  std::optional<Writer> who_wrote(PageId, std::int64_t) override { return std::nullopt; }

 private:
  tl::unexpected<Error> failed(const char* function) {
    const char* why = plugin_.error_text != nullptr ? plugin_.error_text(backend_) : nullptr;
    return tl::unexpected(Error{fmt::format("{}: {} failed: {}", path_, function,
                                            why != nullptr ? why : "(it does not say why)")});
  }
  std::int64_t page_bytes(std::int32_t tensor) const {
    return config_.plan.tensors[tensor].size_bytes / config_.plan.num_blocks;
  }

  bool poison_bytes(std::int32_t tensor, std::int64_t offset, std::int64_t size_bytes, Poison kind);
  Result<void> copy_states(std::span<const BlockCopy> copies);
  Result<void> poison_and_move(const StepProgram& program);
  Result<void> update_tables(const StepProgram& program);
  Result<void> map_slots(const StepProgram& program, StepReadback& readback);
  Result<void> write_rows(const StepProgram& program);
  Result<void> update_states(const StepProgram& program);
  Result<void> read_tables(const StepProgram& program, StepReadback& readback);
  Result<std::uint64_t> digest(const AttentionProbe& probe);
  Result<void> attend(const AttentionQuery& query, std::vector<float>& outputs);
  Result<void> extract(const StepProgram& program, StepReadback& readback);

  std::string path_;
  BackendConfig config_;
  std::unique_ptr<PluginLibrary> library_;
  std::unique_ptr<PluginPlan> plan_;
  const lockstep_plugin& plugin_;
  lockstep_backend* backend_ = nullptr;
  // Kept from step to step.
  std::vector<std::byte> bytes_, keys_, values_;
  std::vector<std::int32_t> positions_, token_rows_;
  std::vector<Slot> slots_;
};

Result<void> PluginBackend::execute(const StepProgram& program, StepReadback& readback) {
  LS_RETURN_IF_ERROR(poison_and_move(program));
  LS_RETURN_IF_ERROR(update_tables(program));
  LS_RETURN_IF_ERROR(map_slots(program, readback));
  LS_RETURN_IF_ERROR(write_rows(program));
  LS_RETURN_IF_ERROR(update_states(program));
  readback.digests.clear();
  for (const AttentionProbe& probe : program.probes) {
    LS_ASSIGN_OR_RETURN(const auto sum, digest(probe));
    readback.digests.push_back(sum);
  }
  readback.outputs.clear();
  for (const AttentionQuery& query : program.queries)
    LS_RETURN_IF_ERROR(attend(query, readback.outputs));
  readback.reports.clear();
  LS_RETURN_IF_ERROR(extract(program, readback));
  return read_tables(program, readback);
}

bool PluginBackend::poison_bytes(std::int32_t tensor, std::int64_t offset, std::int64_t size_bytes,
                                 Poison kind) {
  const std::int64_t page = offset / page_bytes(tensor);
  bytes_.resize(size_bytes);
  fill_poison(static_cast<std::uint64_t>(kind), tensor, page, offset - page * page_bytes(tensor),
              bytes_);
  return plugin_.write_bytes(backend_, tensor, offset, bytes_.data(), size_bytes) == 0;
}

Result<void> PluginBackend::copy_states(std::span<const BlockCopy> copies) {
  for (const BlockCopy& item : copies) {
    const std::int32_t source = index_of(item.source), target = index_of(item.target);
    if (plugin_.copy_blocks(backend_, item.group, &source, &target, 1) != 0)
      return failed("copy_blocks");
  }
  return {};
}

Result<void> PluginBackend::poison_and_move(const StepProgram& program) {
  LS_RETURN_IF_ERROR(copy_states(program.settled));
  for (const PoisonBlock& item : program.poison)
    for (const BlockRegion& region : plan_->layers().poison_regions)
      if (!poison_bytes(region.tensor,
                        region.tensor_offset + index_of(item.block) * region.block_stride,
                        region.size_bytes, item.kind))
        return failed("write_bytes");
  // One block at a time, so that no call needs to see what another one did.
  for (const GroupBlock& item : program.zero) {
    const std::int32_t block = index_of(item.block);
    if (plugin_.zero_blocks(backend_, item.group, &block, 1) != 0) return failed("zero_blocks");
  }
  for (const PartCopy& item : program.parts) {
    const std::int32_t source = index_of(item.source), target = index_of(item.target);
    if (plugin_.copy_blocks(backend_, item.group, &source, &target, 1) != 0)
      return failed("copy_blocks");
  }
  return copy_states(program.copies);
}

Result<void> PluginBackend::update_tables(const StepProgram& program) {
  static_assert(sizeof(BlockId) == sizeof(std::int32_t));
  const auto* ids = reinterpret_cast<const std::int32_t*>(program.table_block_ids.data());
  std::vector<lockstep_table_update> updates;
  for (const TableUpdate& update : program.table_updates)
    updates.push_back({update.row, update.group, update.first,
                       static_cast<std::int32_t>(update.count), ids + update.begin});
  std::vector<lockstep_table_edit> edits;
  for (const TableEdit& edit : program.table_edits)
    edits.push_back({edit.row, edit.group, edit.index, index_of(edit.block)});
  const auto size = [](const auto& list) { return static_cast<std::int32_t>(list.size()); };
  if (plugin_.update_tables(backend_, program.clear_rows.data(), size(program.clear_rows),
                            updates.data(), size(updates), edits.data(), size(edits)) != 0)
    return failed("update_tables");
  return {};
}

Result<void> PluginBackend::map_slots(const StepProgram& program, StepReadback& readback) {
  positions_.resize(program.contents.size());
  token_rows_.resize(program.contents.size());
  for (const RowSlice& slice : program.rows)
    for (std::int32_t i = 0; i < slice.num_tokens; ++i) {
      positions_[slice.first_token + i] = slice.first_position + i;
      token_rows_[slice.first_token + i] = slice.row;
    }
  const std::size_t num_groups = config_.plan.groups.size();
  const auto padded = static_cast<std::size_t>(program.num_padded_tokens);
  slots_.assign(num_groups * padded, 0);
  static_assert(sizeof(Slot) == sizeof(std::int64_t));
  if (padded > 0 && plugin_.map_slots(backend_, positions_.data(), token_rows_.data(),
                                      static_cast<std::int32_t>(positions_.size()),
                                      program.num_padded_tokens, slots_.data()) != 0)
    return failed("map_slots");
  readback.slot_mappings.resize(num_groups);
  for (std::size_t g = 0; g < num_groups; ++g) {
    const auto first = slots_.begin() + static_cast<std::ptrdiff_t>(g * padded);
    readback.slot_mappings[g].assign(first, first + static_cast<std::ptrdiff_t>(padded));
  }
  return {};
}

Result<void> PluginBackend::write_rows(const StepProgram& program) {
  const std::size_t num_tokens = program.contents.size();
  if (num_tokens == 0) return {};
  for (std::size_t layer = 0; layer < plan_->layers().rows.size(); ++layer) {
    const RowCache& rows = plan_->layers().rows[layer];
    if (rows.row_bytes == 0) continue;
    const auto row_bytes = static_cast<std::size_t>(rows.row_bytes);
    const auto heads = static_cast<std::size_t>(rows.num_kv_heads);
    keys_.resize(num_tokens * heads * row_bytes);
    values_.resize(rows.num_parts == 2 ? keys_.size() : 0);
    for (std::size_t token = 0; token < num_tokens; ++token)
      for (std::size_t head = 0; head < heads; ++head) {
        const std::size_t at = (token * heads + head) * row_bytes;
        const auto fill = [&](std::vector<std::byte>& inputs, std::uint32_t part) {
          fill_row(program.contents[token], rows.layer, part,
                   static_cast<std::uint32_t>(rows.first_head) + static_cast<std::uint32_t>(head),
                   rows.dtype, std::span(inputs).subspan(at, row_bytes));
        };
        fill(keys_, 0);
        if (rows.num_parts == 2) fill(values_, 1);
      }
    if (plugin_.write_rows(backend_, static_cast<std::int32_t>(layer), keys_.data(),
                           rows.num_parts == 2 ? values_.data() : nullptr,
                           static_cast<std::int32_t>(num_tokens)) != 0)
      return failed("write_rows");
  }
  return {};
}

Result<void> PluginBackend::update_states(const StepProgram& program) {
  for (const StateUpdate& update : program.state_updates) {
    const RegionRange states = plan_->layers().states_of_group[update.group];
    const auto contents =
        std::span(program.contents).subspan(update.first_token, update.num_tokens);
    for (std::int32_t s = states.begin; s < states.end; ++s) {
      const StateCache& state = plan_->layers().states[s];
      bytes_.assign(state.size_bytes, std::byte{0});
      if (update.source != kNullBlock &&
          plugin_.read_state(backend_, s, index_of(update.source), bytes_.data()) != 0)
        return failed("read_state");
      advance_state(contents, state.layer, state.state, state.first_head, bytes_);
      if (plugin_.write_state(backend_, s, index_of(update.target), bytes_.data()) != 0)
        return failed("write_state");
    }
  }
  return {};
}

Result<std::uint64_t> PluginBackend::digest(const AttentionProbe& probe) {
  const RowCache& rows = plan_->layers().rows[probe.layer];
  const auto row_bytes = static_cast<std::size_t>(rows.row_bytes);
  const auto heads = static_cast<std::size_t>(rows.num_kv_heads);
  const auto count = static_cast<std::size_t>(probe.last - probe.first);
  keys_.assign(count * heads * row_bytes, std::byte{0});
  values_.assign(rows.num_parts == 2 ? keys_.size() : 0, std::byte{0});
  if (plugin_.read_rows(backend_, probe.layer, probe.row, probe.first, probe.last, keys_.data(),
                        rows.num_parts == 2 ? values_.data() : nullptr) != 0)
    return failed("read_rows");
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < count; ++i)
    for (std::size_t head = 0; head < heads; ++head) {
      const std::size_t at = (i * heads + head) * row_bytes;
      const auto add = [&](const std::vector<std::byte>& part_rows, std::uint32_t part) {
        sum += row_digest(std::span(part_rows).subspan(at, row_bytes),
                          probe.first + static_cast<std::int64_t>(i), part,
                          static_cast<std::uint32_t>(head));
      };
      add(keys_, 0);
      if (rows.num_parts == 2) add(values_, 1);
    }
  return sum;
}

Result<void> PluginBackend::attend(const AttentionQuery& query, std::vector<float>& outputs) {
  LS_CHECK(plugin_.attend != nullptr, "a query, which this backend does not answer");
  const RowCache& rows = plan_->layers().rows[query.layer];
  const auto heads = static_cast<std::size_t>(rows.num_kv_heads * rows.queries_per_kv);
  const auto head_size = static_cast<std::size_t>(rows.head_size);
  std::vector<float> queries(heads * head_size);
  for (std::size_t head = 0; head < heads; ++head)
    fill_row(query.content, rows.layer, 2,
             static_cast<std::uint32_t>(rows.first_query_head) + static_cast<std::uint32_t>(head),
             DType::fp32,
             std::as_writable_bytes(std::span(queries).subspan(head * head_size, head_size)));
  const std::size_t begin = outputs.size();
  outputs.resize(begin + queries.size());
  if (plugin_.attend(backend_, query.layer, query.row, query.first, query.last, queries.data(),
                     outputs.data() + begin) != 0)
    return failed("attend");
  return {};
}

Result<void> PluginBackend::extract(const StepProgram& program, StepReadback& readback) {
  readback.extracted.clear();
  for (const RowExtraction& extraction : program.extractions) {
    const RowCache& rows = plan_->layers().rows[extraction.layer];
    const std::size_t begin = readback.extracted.size();
    readback.extracted.resize(begin + std::int64_t{extraction.num_tokens} * rows.num_kv_heads *
                                          rows.row_bytes);
    if (plugin_.read_rows(backend_, extraction.layer, extraction.row, 0, extraction.num_tokens,
                          readback.extracted.data() + begin, nullptr) != 0)
      return failed("read_rows");
  }
  return {};
}

Result<void> PluginBackend::read_tables(const StepProgram& program, StepReadback& readback) {
  const std::size_t num_groups = config_.plan.groups.size();
  readback.tables.resize(num_groups);
  readback.table_ends.resize(num_groups);
  for (std::size_t g = 0; g < num_groups; ++g) {
    std::vector<std::int32_t>& table = readback.tables[g];
    table.clear();
    readback.table_ends[g].clear();
    for (const RowSlice& slice : program.rows) {
      const std::int32_t width = config_.max_blocks_per_row[g];
      const std::size_t begin = table.size();
      table.resize(begin + width);
      std::int32_t length = 0;
      if (plugin_.read_table(backend_, static_cast<std::int32_t>(g), slice.row,
                             table.data() + begin, &length) != 0)
        return failed("read_table");
      table.resize(begin + std::clamp(length, 0, width));
      readback.table_ends[g].push_back(static_cast<std::uint32_t>(table.size()));
    }
  }
  return {};
}

Result<void> PluginBackend::fingerprint_pages(std::span<const PageId> pages,
                                              std::span<Fingerprint> fingerprints) {
  LS_CHECK(pages.size() == fingerprints.size(), "{} pages, {} fingerprints", pages.size(),
           fingerprints.size());
  if (plugin_.fingerprint_pages == nullptr) {
    for (std::size_t i = 0; i < pages.size(); ++i) {
      LS_ASSIGN_OR_RETURN(const auto page, read_page(pages[i]));
      const PageSums sums = page_sums(std::as_bytes(std::span(page)));
      fingerprints[i] = {sums.a, sums.b};
    }
    return {};
  }
  std::vector<std::int32_t> tensors, blocks;
  for (const PageId& page : pages) {
    tensors.push_back(page.tensor);
    blocks.push_back(index_of(page.block));
  }
  std::vector<std::uint64_t> sums(2 * pages.size());
  if (plugin_.fingerprint_pages(backend_, tensors.data(), blocks.data(),
                                static_cast<std::int32_t>(pages.size()), sums.data()) != 0)
    return failed("fingerprint_pages");
  for (std::size_t i = 0; i < pages.size(); ++i) fingerprints[i] = {sums[2 * i], sums[2 * i + 1]};
  return {};
}

Result<std::vector<std::uint8_t>> PluginBackend::read_page(PageId page) {
  const std::int64_t size = page_bytes(page.tensor);
  std::vector<std::uint8_t> bytes(size);
  if (plugin_.read_bytes(backend_, page.tensor, index_of(page.block) * size, bytes.data(), size) !=
      0)
    return failed("read_bytes");
  return bytes;
}

}  // namespace

Result<std::unique_ptr<Backend>> make_plugin_backend(const std::string& path,
                                                     const BackendConfig& config) {
  if (config.check != CheckMode::fast)
    return fail("check: a plugin runs in mode fast; modes check and hunt are the SIMT executor's");
  if (!config.mutant.empty()) return fail("mutant: '{}' is not planted in a plugin", config.mutant);
  if (config.num_streams != 1 || config.delay_streams)
    return fail("num_streams: a plugin has one stream; use 1");
  if (config.max_cudagraph_capture_size != 0)
    return fail("max_cudagraph_capture_size: a plugin captures its own launches; use 0");
  if (config.numbers != Numbers::words)
    return fail("numbers: a plugin moves rows of words; use --numbers words");
  if (config.context.num_ranks != 1)
    return fail("a plugin runs one rank; context parallelism is for cuda and simt");
  if (config.num_host_blocks != 0)
    return fail("a plugin has no host tier; loads and stores are for cuda and simt");
  for (const KVCacheGroupSpec& group : config.plan.groups)
    if (!is_prefix_cacheable(group.spec) || !has_row_per_token(group) ||
        reads_beside_tokens(group.spec))
      return fail(
          "a plugin has one row per token and slots from block tables; rings, compressed rows, "
          "recomputed windows, cross attention, sinks and reference windows need cuda or simt");
  LS_ASSIGN_OR_RETURN(auto library, PluginLibrary::open(path));
  if (is_overlaid(config.layout))
    return fail(
        "{}: --layout {}: a plugin is given tensors of its own for each layer, in NHD or HND", path,
        name_of(config.layout));
  LS_ASSIGN_OR_RETURN(auto share, share_of_rank(config));
  BackendConfig own = config;
  own.plan = std::move(share.plan);
  if (!share.layers.empty()) own.queries_per_kv = share.layers.front().queries_per_kv;
  if (!std::ranges::all_of(share.layers, [&](const LayerOfModel& layer) {
        return layer.queries_per_kv == own.queries_per_kv;
      }))
    return fail("a plugin has one number of query heads per KV head, but the layers have several");
  LS_ASSIGN_OR_RETURN(auto plan, PluginPlan::create(own, share.layers));
  auto backend = std::make_unique<PluginBackend>(path, own, std::move(library), std::move(plan));
  LS_RETURN_IF_ERROR(backend->start());
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace lockstep
