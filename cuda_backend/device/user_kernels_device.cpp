#include "cuda_backend/device/simt_device.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "cuda_backend/device/forwarding_device.h"

namespace lockstep::cuda {
namespace {

bool is_one_row_per_token(const TokenRows& rows) {
  return rows.tokens_per_row.value == 1 && rows.rows_per_token.value == 1;
}

// Whether the position range follows from the position, the window and the chunk.
bool is_implied(const KeyRange& keys, const SplitAttentionParams& params) {
  std::int32_t first = 0;
  if (params.window > 0) first = std::max(first, keys.last - params.window);
  if (params.chunk > 0) first = (keys.last - 1) / params.chunk * params.chunk;
  return keys.gap == 0 && keys.first == first;
}

bool changes_states(const LaunchParams& params) {
  return std::holds_alternative<StateUpdateParams*>(params) ||
         std::holds_alternative<ConvParams*>(params) ||
         std::holds_alternative<SelectiveStateParams*>(params) ||
         std::holds_alternative<GatedDeltaParams*>(params);
}

// Bytes of a region in blocks of the cache. Blocks of the host tier have no such view.
const std::byte* base_in_cache(const BlockRegion& region) { return region.base; }
const std::byte* base_in_cache(const CopyRegion& region) {
  return region.source == region.target ? region.source : nullptr;
}
std::int64_t stride_of(const BlockRegion& region) { return region.block_stride; }
std::int64_t stride_of(const CopyRegion& region) { return region.source_stride; }

class UserKernelsDevice final : public ForwardingDevice {
 public:
  UserKernelsDevice(std::unique_ptr<Device> device, std::shared_ptr<UserKernels> kernels)
      : ForwardingDevice(std::move(device)), kernels_(std::move(kernels)) {
    LS_CHECK(inner().memory_begin() != nullptr, "{} shares no memory", inner().name());
    edit_launches([this](LaunchParams params, Operation&) {
      if (has_failed_) return;
      if (auto** write = std::get_if<WritePartsParams*>(&params)) take_write(**write);
      if (auto** attend = std::get_if<SplitAttentionParams*>(&params)) take_attention(**attend);
      if (auto** zero = std::get_if<ZeroBlocksParams*>(&params)) take_blocks("zero_blocks", **zero);
      if (auto** copy = std::get_if<CopyBlocksParams*>(&params)) take_blocks("copy_blocks", **copy);
      if (changes_states(params)) takes("states", {});
    });
  }

  std::string_view name() const override { return kernels_->name(); }
  std::string description() const override {
    return fmt::format("cache writes and attention of the class, all else on the {}",
                       inner().description());
  }
  bool attends_to_ranges() const override {
    return !kernels_->has("attend") && !kernels_->has("attend_latent");
  }
  DType query_dtype() const override {
    for (const DType dtype : {DType::bf16, DType::fp16})
      if (kernels_->has(fmt::format("query:{}", name_of(dtype)))) return dtype;
    return DType::fp32;
  }
  std::vector<std::string> not_checked() const override {
    std::vector<std::string> sentences{not_taken_.begin(), not_taken_.end()};
    if (!lacking_.empty())
      sentences.push_back(
          fmt::format("{}: the class has no such function; the executor's own kernels ran",
                      fmt::join(lacking_, ", ")));
    sentences.emplace_back(
        "single accesses, races and stream order of the class's kernels: they run outside of the "
        "executor, one call at a time");
    return sentences;
  }
  void take_reports(std::vector<DeviceReport>& reports) override {
    inner().take_reports(reports);
    std::ranges::move(reports_, std::back_inserter(reports));
    reports_.clear();
  }

 private:
  // True if the class has the function. Otherwise the executor's kernel runs, and not_checked()
  // lists it.
  bool takes(std::string_view function, std::string_view why_not) {
    if (why_not.empty() && kernels_->has(function)) return true;
    if (why_not.empty())
      lacking_.emplace(function);
    else
      not_taken_.insert(fmt::format("{}: {}; the executor's own kernel ran", function, why_not));
    return false;
  }

  KernelTensor tensor(std::string name, const void* address, std::string_view dtype,
                      std::vector<std::int64_t> shape, std::vector<std::int64_t> strides) {
    return {.name = std::move(name),
            .offset = static_cast<const std::byte*>(address) - inner().memory_begin(),
            .dtype = dtype,
            .shape = std::move(shape),
            .strides = std::move(strides)};
  }
  // [2, num_blocks, block_size, num_heads, head_size]; [num_blocks, block_size, head_size] of rows
  // of one part.
  KernelTensor cache(const PartLayout& key, const PartLayout* value) {
    const std::int64_t blocks = key.num_blocks, tokens = key.block_size.value;
    const std::int64_t itemsize = itemsize_bytes(key.dtype);
    if (value == nullptr)
      return tensor("kv_cache", key.base, name_of(key.dtype), {blocks, tokens, key.head_size},
                    {key.block_stride, key.token_stride, itemsize});
    return tensor(
        "kv_cache", key.base, name_of(key.dtype), {2, blocks, tokens, key.num_heads, key.head_size},
        {value->base - key.base, key.block_stride, key.token_stride, key.head_stride, itemsize});
  }
  void add_scale(const PartLayout& part, KernelCall& call) {
    if (part.scaling == Scaling::per_tensor)
      call.tensors.push_back(tensor("scale", part.scales, name_of(DType::fp32), {1}, {4}));
  }

  void take_write(WritePartsParams& params) {
    const PartLayout& key = params.parts[0].to;
    const bool is_latent = params.num_parts == 1;
    if (params.num_rows == 0) return;
    std::string_view why_not;
    if (!is_one_row_per_token(params.token_rows)) why_not = "rows are not one per token";
    if (key.scaling > Scaling::per_tensor) why_not = "rows with their own scales";
    const std::string_view function = is_latent ? "write_latent" : "write";
    if (!takes(function, why_not)) return;
    KernelCall call{.function = function, .layer = key.layer};
    for (std::int32_t i = 0; i < params.num_parts; ++i) {
      const PartWrite& part = params.parts[i];
      call.tensors.push_back(tensor(
          i == 0 ? "key" : "value", part.source, name_of(part.source_dtype),
          {params.num_rows, key.num_heads, key.head_size},
          {part.source_row_stride, part.source_head_stride, itemsize_bytes(part.source_dtype)}));
    }
    call.tensors.push_back(cache(key, is_latent ? nullptr : &params.parts[1].to));
    call.tensors.push_back(
        tensor("slot_mapping", params.slots, "int64", {params.num_rows}, {sizeof(Slot)}));
    add_scale(key, call);
    make(call);
    params.num_rows = 0;
  }

  void take_attention(SplitAttentionParams& params) {
    const PartLayout& key = params.key;
    const bool is_latent = key.base == params.value.base;
    const auto count = static_cast<std::size_t>(params.num_tokens);
    if (count == 0) return;
    std::vector<std::int32_t> rows(count), seq_lens(count), query_start_loc(count + 1);
    std::string_view why_not;
    if (key.scaling > Scaling::per_tensor) why_not = "rows with their own scales";
    if (!read_ranges(params, rows, seq_lens))
      why_not = "rows outside of one block table, or a range that no window describes";
    const std::string_view function = is_latent ? "attend_latent" : "attend";
    if (!takes(function, why_not)) return;
    for (std::size_t i = 0; i <= count; ++i) query_start_loc[i] = static_cast<std::int32_t>(i);
    const std::int64_t table_rows = *std::ranges::max_element(rows) + 1;
    KernelCall call{.function = function, .layer = key.layer};
    const auto add_rows = [&](const char* name, const void* address, DType dtype,
                              std::int64_t head_size) {
      const std::int64_t heads = params.num_query_heads, itemsize = itemsize_bytes(dtype);
      call.tensors.push_back(
          tensor(name, address, name_of(dtype), {params.num_tokens, heads, head_size},
                 {itemsize * heads * head_size, itemsize * head_size, itemsize}));
    };
    add_rows("query", params.queries, params.query_dtype, key.head_size);
    add_rows("output", params.outputs, DType::fp32, params.value.head_size);
    call.tensors.push_back(cache(key, is_latent ? nullptr : &params.value));
    call.tensors.push_back(tensor("block_table", params.block_table, "int32",
                                  {table_rows, params.table_width}, {4 * params.table_width, 4}));
    add_scale(key, call);
    call.integers = {{"rows", std::move(rows)},
                     {"seq_lens", std::move(seq_lens)},
                     {"query_start_loc", std::move(query_start_loc)}};
    make(call);
    params.num_tokens = 0;
  }

  // One call per group of a launch over whole blocks. The regions of a group are the bytes that its
  // layers use in a block.
  template <class Params>
  void take_blocks(std::string_view function, Params& params) {
    if (params.num_items == 0) return;
    std::vector<std::remove_cvref_t<decltype(*params.items)>> items(
        static_cast<std::size_t>(params.num_items));
    fetch(items, params.items);
    if (!finish_inner()) return;
    std::map<std::int32_t, KernelCall> calls;  // by group
    for (const auto& item : items) {
      const auto [call, is_new] = calls.try_emplace(item.group);
      if (is_new && !add_pages(params, item.group, call->second))
        return void(takes(function, "blocks of the host tier"));
      add_item(item, call->second);
    }
    if (!takes(function, {})) return;
    for (auto& [group, call] : calls) {
      call.function = function;
      call.layer = -1;
      call.integers.push_back({"group", {group}});
      std::int32_t last = 0;
      for (const auto& [name, blocks] : call.integers)
        if (name != "group") last = std::max(last, *std::ranges::max_element(blocks));
      for (KernelTensor& pages : call.tensors) pages.shape[0] = last + 1;
      make(call);
    }
    params.num_items = 0;
  }
  static void add_item(const GroupBlockItem& item, KernelCall& call) {
    if (call.integers.empty()) call.integers = {{"block_ids", {}}};
    call.integers[0].second.push_back(item.block);
  }
  static void add_item(const BlockCopyItem& item, KernelCall& call) {
    if (call.integers.empty()) call.integers = {{"sources", {}}, {"targets", {}}};
    call.integers[0].second.push_back(item.source);
    call.integers[1].second.push_back(item.target);
  }
  // Adds the group's regions, each [num_blocks, bytes]. False: one is not in the cache.
  template <class Params>
  bool add_pages(const Params& params, std::int32_t group, KernelCall& call) {
    std::vector<RegionRange> range(1);
    fetch(range, params.groups + group);
    if (!finish_inner()) return false;
    std::vector<std::remove_cvref_t<decltype(*params.regions)>> regions(
        static_cast<std::size_t>(range[0].end - range[0].begin));
    fetch(regions, params.regions + range[0].begin);
    if (!finish_inner()) return false;
    for (std::size_t i = 0; i < regions.size(); ++i) {
      if (base_in_cache(regions[i]) == nullptr) return false;
      call.tensors.push_back(tensor(fmt::format("pages{}", i), base_in_cache(regions[i]), "uint8",
                                    {0, regions[i].size_bytes}, {stride_of(regions[i]), 1}));
    }
    return true;
  }

  // Starts the download of as many items as `to` has.
  template <class T>
  void fetch(std::vector<T>& to, const T* from) {
    inner().download(to.data(), from, static_cast<std::int64_t>(to.size() * sizeof(T)));
  }

  // The block table's row and the length of each query's context. False: some query reads what no
  // causal attention over its block table reads.
  bool read_ranges(const SplitAttentionParams& params, std::vector<std::int32_t>& rows,
                   std::vector<std::int32_t>& seq_lens) {
    const std::size_t count = rows.size();
    fetch(rows, params.token_rows);
    if (params.ranges == nullptr) {
      fetch(seq_lens, params.positions);
      for (std::int32_t& length : seq_lens) ++length;
      return finish_inner().has_value();
    }
    std::vector<KeyRange> ranges(count);
    std::vector<RowCache> layer(1);
    fetch(ranges, params.ranges);
    fetch(layer, params.rows);
    if (!finish_inner() || layer[0].is_ring || layer[0].sink_blocks > 0 || layer[0].away != nullptr)
      return false;
    for (std::size_t i = 0; i < count; ++i) {
      if (!is_implied(ranges[i], params)) return false;
      seq_lens[i] = ranges[i].last;
    }
    return true;
  }

  void make(const KernelCall& call) {
    auto failure = kernels_->call(call);
    if (!failure) return;
    has_failed_ = true;
    const std::string where = call.layer < 0 ? "" : fmt::format(" of layer {}", call.layer);
    std::string what = fmt::format("{}{}: {}", call.function, where, failure->what);
    if (failure->kind == "harness") return fail_with(std::move(what));
    reports_.push_back({.kind = failure->kind,
                        .kernel = std::string(call.function),
                        .message = fmt::format("{}: {}", failure->kind, what),
                        .allocation = {},
                        .byte_offset = 0,
                        .sanitizer_words = {}});
  }

  std::shared_ptr<UserKernels> kernels_;
  std::set<std::string> not_taken_, lacking_;
  std::vector<DeviceReport> reports_;
  bool has_failed_ = false;
};

}  // namespace

std::unique_ptr<Device> make_user_kernels_device(std::unique_ptr<Device> device,
                                                 std::shared_ptr<UserKernels> kernels) {
  return std::make_unique<UserKernelsDevice>(std::move(device), std::move(kernels));
}

}  // namespace lockstep::cuda
