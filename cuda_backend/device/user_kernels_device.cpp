#include "cuda_backend/device/simt_device.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "cuda_backend/device/forwarding_device.h"
#include "cuda_backend/device/user_rows.h"

namespace lockstep::cuda {
namespace {

// Whether the position range follows from the position, the window and the chunk.
bool is_implied(const KeyRange& keys, const SplitAttentionParams& params) {
  std::int32_t first = 0;
  if (params.window > 0) first = std::max(first, keys.last - params.window);
  if (params.chunk > 0) first = (keys.last - 1) / params.chunk * params.chunk;
  return keys.gap == 0 && keys.first == first;
}

// A request's tokens up to a stored state. The pieces of one request have rounds 0, 1, ...; each
// starts from the state that the previous one stored.
struct StatePiece {
  std::int32_t round, source, target, first_token, num_tokens;
};

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
      : ForwardingDevice(std::move(device)),
        kernels_(std::move(kernels)),
        in_process_(kernels_->in_process()),
        lists_(inner(), "lists of the user's kernels"),
        table_(inner(), "block table of the user's kernels") {
    LS_CHECK(in_process_ || inner().memory_begin() != nullptr, "{} shares no memory",
             inner().name());
    edit_launches([this](LaunchParams params, Operation&) {
      std::visit(
          [this](auto* launch) {
            if (!leaves_pool(*launch) && !has_failed_) take(*launch);
          },
          params);
    });
  }

  std::string_view name() const override { return kernels_->name(); }
  std::string description() const override {
    return fmt::format("your kernels, all else on the {}", inner().description());
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
    if (num_calls_ == 0) sentences.emplace_back("your kernels: none of their functions was called");
    if (kernels_->has("conv") || kernels_->has("ssm") || kernels_->has("delta"))
      sentences.emplace_back(
          "copies of recurrent states to other blocks by the executor's own kernel");
    sentences.emplace_back(
        "single accesses, races and stream order of your kernels: they run outside of the "
        "executor, one call at a time");
    return sentences;
  }
  void take_reports(std::vector<DeviceReport>& reports) override {
    inner().take_reports(reports);
    std::ranges::move(reports_, std::back_inserter(reports));
    reports_.clear();
  }

 private:
  // False: the user's kernels lack the function, decline the layer (-1: a group), or cannot be
  // called. The executor's kernel runs then, and not_checked() lists the function.
  bool takes(std::string_view function, std::int32_t layer, std::string_view why_not = {}) {
    if (why_not.empty() && layer >= 0) why_not = kernels_->layer(layer).declined;
    if (!kernels_->has(function)) why_not = "your kernels have no such function";
    if (why_not.empty()) return true;
    not_taken_.insert(fmt::format("{} by the executor's own kernel: {}", function, why_not));
    return false;
  }

  // True if a slot of the launch is outside of the pool: the launch must not run.
  bool leaves_pool(const auto&) { return false; }
  bool leaves_pool(WritePartsParams& params) {
    const PartLayout& to = params.parts[0].to;
    mapped_.set_rows(to.base, std::int64_t{to.num_blocks} * to.block_size.value);
    if (!mapped_.leave_pool(params.slots, params.token_rows, to.base)) return false;
    params.num_rows = 0;
    return true;
  }
  bool leaves_pool(GatherRowsParams& params) {
    if (!mapped_.leave_pool(params.slots, params.cache.token_rows, params.cache.base)) return false;
    params.num_tokens = 0;
    // The slots of an extraction are not compared.
    report("fault", "map_slots", "map_slots: a slot of an extraction is outside of the pool");
    return true;
  }

  // Launches that no function of the user's kernels can take.
  template <class Params>
  void take(Params&) {
    if constexpr (std::is_same_v<Params, StateUpdateParams>)
      not_taken_.insert(
          "conv, ssm, delta by the executor's own kernel: states of words (--numbers words)");
  }
  void take(ZeroBlocksParams& params) { take_blocks("zero_blocks", params); }
  void take(CopyBlocksParams& params) { take_blocks("copy_blocks", params); }

  KernelTensor tensor(std::string name, const void* address, std::string_view dtype,
                      std::vector<std::int64_t> shape, std::vector<std::int64_t> strides) {
    return {std::move(name), static_cast<const std::byte*>(address), dtype, std::move(shape),
            std::move(strides)};
  }
  // Contiguous numbers; first dimension 0: one entry per token.
  KernelTensor floats(std::string name, const void* address, std::vector<std::int64_t> shape) {
    std::vector<std::int64_t> strides(shape.size(), sizeof(float));
    for (std::size_t i = shape.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * shape[i];
    return tensor(std::move(name), address, name_of(DType::fp32), std::move(shape),
                  std::move(strides));
  }
  // [2, num_blocks, block_size, num_heads, head_size]; [num_blocks, block_size, num_heads *
  // head_size] of rows of one part, whose heads are adjacent.
  KernelTensor cache(const PartLayout& key, const PartLayout* value) {
    const std::int64_t blocks = key.num_blocks, tokens = key.block_size.value;
    const std::int64_t width = row_width(key), itemsize = itemsize_bytes(key.dtype);
    if (value == nullptr)
      return tensor("kv_cache", key.base, name_of(key.dtype),
                    {blocks, tokens, key.num_heads * width},
                    {key.block_stride, key.token_stride, itemsize});
    return tensor(
        "kv_cache", key.base, name_of(key.dtype), {2, blocks, tokens, key.num_heads, width},
        {value->base - key.base, key.block_stride, key.token_stride, key.head_stride, itemsize});
  }
  void add_scales(const PartLayout& key, const PartLayout& value, KernelCall& call) {
    const void* scale = key.scaling == Scaling::per_tensor ? key.scales : nullptr;
    if (key.scaling == Scaling::fp4_groups) scale = key.layer_scale;
    if (scale != nullptr) call.tensors.push_back(floats("scale", scale, {1}));
    add_scale_cache("k_scale_cache", key, call);
    add_scale_cache("v_scale_cache", value, call);
  }
  // [num_blocks, block_size, num_heads], or a scale per 16 elements.
  void add_scale_cache(const char* name, const PartLayout& part, KernelCall& call) {
    const bool by_group = part.scaling == Scaling::fp4_groups;
    if (!by_group && part.scaling != Scaling::per_token_head && part.scaling != Scaling::int4_rows)
      return;
    std::vector<std::int64_t> shape{part.num_blocks, part.block_size.value, part.num_heads};
    std::vector<std::int64_t> strides{part.scale_block_stride, part.scale_token_stride,
                                      part.scale_head_stride};
    if (by_group) {
      shape.push_back(part.head_size / 16);
      strides.push_back(1);
    }
    call.tensors.push_back(tensor(name, part.scales,
                                  name_of(by_group ? DType::fp8_e4m3 : DType::fp32),
                                  std::move(shape), std::move(strides)));
  }

  void take(WritePartsParams& params) {
    const PartLayout& key = params.parts[0].to;
    const bool is_latent = params.num_parts == 1;
    if (params.num_rows == 0) return;
    std::string_view why_not = why_no_view(key);
    if (why_not.empty() && is_latent) why_not = why_no_row(key);
    if (kernels_->has("begin_step") &&
        std::ranges::find(described_, params.slots) == described_.end())
      why_not = why_undescribed(params.slots);
    const std::string_view function = is_latent ? "write_latent" : "write";
    if (!takes(function, key.layer, why_not)) return;
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
    add_scales(key, params.parts[params.num_parts - 1].to, call);
    make(call);
    params.num_rows = 0;
  }

  void take(SplitAttentionParams& params) {
    const PartLayout& key = params.key;
    const bool is_latent = key.base == params.value.base;
    const auto count = static_cast<std::size_t>(params.num_tokens);
    if (count == 0) return;
    std::vector<std::int32_t> rows(count), seq_lens(count), query_start_loc;
    std::string_view why_not = why_no_view(key);
    if (!read_ranges(params, rows, seq_lens))
      why_not = "rows outside of one block table, or a range that no window describes";
    const std::string_view function = is_latent ? "attend_latent" : "attend";
    if (!takes(function, key.layer, why_not)) return;
    join_chunks(rows, seq_lens, query_start_loc);
    KernelCall call{.function = function, .layer = key.layer, .scale = params.scale};
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
    call.tensors.push_back(block_table(params, rows));
    add_scales(key, params.value, call);
    call.integers = {{"rows", std::move(rows)},
                     {"seq_lens", std::move(seq_lens)},
                     {"query_start_loc", std::move(query_start_loc)}};
    std::vector<std::int32_t> after(entries_.size());
    if (make(call) && in_process_ && fetch(after, table_.data()) && after != entries_)
      report("fault", function,
             fmt::format("{} of layer {}: it changed the block table", function, key.layer));
    params.num_tokens = 0;
  }

  // The slots of a draft model's pass; the inner device maps them.
  void take(DraftSlotsParams& params) {
    draft_slots_ = {params.slots, static_cast<std::size_t>(params.slots_stride) *
                                      static_cast<std::size_t>(params.num_groups)};
  }
  std::string_view why_undescribed(const Slot* slots) const {
    const auto end = draft_slots_.data() + draft_slots_.size();
    if (slots >= draft_slots_.data() && slots < end)
      return "tokens of a draft model's pass, which no begin_step describes";
    if (is_only_padding_) return "a step of padded tokens only, which no begin_step describes";
    return "slots that no block table gives, which no begin_step describes";
  }

  // One call per block table and function. The class's slots replace those of the inner device.
  void take(SlotMappingParams& params) {
    const bool begins = kernels_->has("begin_step"), maps = kernels_->has("map_slots");
    described_.clear();
    mapped_.clear();
    is_only_padding_ = params.num_tokens == 0;
    if ((!begins && !maps) || params.num_tokens == 0) return;
    std::vector<GroupTable> tables(static_cast<std::size_t>(params.num_groups));
    std::vector<std::int32_t> rows(static_cast<std::size_t>(params.num_tokens));
    if (!fetch(tables, params.groups, rows, params.token_rows)) return;
    const bool is_plain = params.context_ranks == 1 && params.reach == nullptr &&
                          !params.of_encoders && std::ranges::all_of(tables, gives_slots);
    if (!is_plain) {
      not_taken_.insert(
          "begin_step, map_slots by the executor's own kernel: slots that no block table gives");
      return;
    }
    const std::int64_t num_rows = *std::ranges::max_element(rows) + 1;
    for (std::int32_t t = 0; t < params.num_groups; ++t) {
      const GroupTable& table = tables[t];
      const std::int64_t width = std::int64_t{table.width} * table.blocks_per_kv_block;
      KernelCall call{.function = "begin_step", .layer = -1, .group = t};
      call.tensors = {
          tensor("positions", params.positions, "int32", {params.num_tokens}, {4}),
          tensor("batch_indices", params.token_rows, "int32", {params.num_tokens}, {4}),
          tensor("block_table", table.kernel_entries, "int32", {num_rows, width}, {4 * width, 4})};
      call.integers.push_back({"block_size", {table.slot_block_size}});
      if (begins) make(call);
      described_.push_back(params.slots + t * params.slots_stride);
      call.function = "map_slots";
      call.tensors.push_back(tensor("slot_mapping", params.slots + t * params.slots_stride, "int64",
                                    {params.num_padded_tokens}, {sizeof(Slot)}));
      if (!maps || !make(call)) continue;
      std::vector<Slot> slots(static_cast<std::size_t>(params.num_padded_tokens));
      if (fetch(slots, described_.back())) mapped_.add(described_.back(), slots);
    }
    // After a failed call its slots are undefined.
    if (maps && !has_failed_) params.num_tokens = params.num_padded_tokens = 0;
  }

  void take(ConvParams& params) {
    if (params.num_items == 0 || !takes("conv", params.layer)) return;
    std::vector<ConvItem> items(static_cast<std::size_t>(params.num_items));
    if (!fetch(items, params.items)) return;
    std::vector<StatePiece> pieces;
    for (const ConvItem& item : items) {
      if (item.num_tokens == 0) continue;
      if (item.offset != 0 || item.keep_from != item.num_tokens)
        return void(takes("conv", params.layer, "inputs that are kept for drafts"));
      const bool is_cut = item.checkpoint != 0;
      const std::int32_t cut = is_cut ? item.checkpoint_tokens : 0;
      if (is_cut) pieces.push_back({0, item.source, item.checkpoint, item.first_token, cut});
      pieces.push_back({is_cut ? 1 : 0, is_cut ? item.checkpoint : item.source, item.target,
                        item.first_token + cut, item.num_tokens - cut});
    }
    const std::int64_t size = itemsize_bytes(params.dtype), channels = params.num_channels;
    KernelCall call{.function = "conv", .layer = params.layer};
    const auto add = [&](const char* name, const void* address, std::vector<std::int64_t> shape,
                         std::vector<std::int64_t> strides) {
      call.tensors.push_back(
          tensor(name, address, name_of(params.dtype), std::move(shape), std::move(strides)));
    };
    add("x", params.inputs, {0, channels}, {params.input_token_stride, size});
    add("output", params.outputs, {0, channels}, {params.output_token_stride, size});
    add("conv_state", params.states, {params.num_blocks, channels, params.width - 1},
        {params.page_stride, params.channel_stride, params.position_stride});
    call.tensors.push_back(floats("weight", params.weights, {channels, params.width}));
    make_over_tokens(call, pieces);
    params.num_items = 0;
  }

  void take(SelectiveStateParams& params) {
    const RecurrentStates& states = params.states;
    const std::int64_t heads = states.num_heads, columns = states.columns;
    take_recurrence(
        params,
        {.function = "ssm",
         .layer = states.layer,
         .tensors = {floats("x", params.x, {0, heads, states.rows}),
                     floats("dt", params.dt, {0, heads}), floats("A", params.A, {heads}),
                     floats("B", params.B, {0, params.num_groups, columns}),
                     floats("C", params.C, {0, params.num_groups, columns}),
                     floats("D", params.D, {heads}), floats("dt_bias", params.dt_bias, {heads}),
                     floats("output", params.y, {0, heads, states.rows})}});
  }
  void take(GatedDeltaParams& params) {
    const RecurrentStates& states = params.states;
    const std::int64_t heads = states.num_heads, columns = states.columns;
    take_recurrence(params, {.function = "delta",
                             .layer = states.layer,
                             .tensors = {floats("q", params.q, {0, params.num_key_heads, columns}),
                                         floats("k", params.k, {0, params.num_key_heads, columns}),
                                         floats("v", params.v, {0, heads, states.rows}),
                                         floats("g", params.g, {0, heads}),
                                         floats("beta", params.beta, {0, heads}),
                                         floats("output", params.o, {0, heads, states.rows})},
                             .scale = params.scale});
  }

  // The call's tensors, then the states.
  template <class Params>
  void take_recurrence(Params& params, KernelCall call) {
    std::vector<StatePiece> pieces;
    if (!cut_at_targets(call.function, params, pieces)) return;
    const RecurrentStates& states = params.states;
    const std::int64_t size = itemsize_bytes(states.dtype), row = size * states.columns;
    call.tensors.push_back(
        tensor("ssm_state", states.base, name_of(states.dtype),
               {states.num_blocks, states.num_heads, states.rows, states.columns},
               {states.page_stride, row * states.rows, row, size}));
    make_over_tokens(call, pieces);
    params.num_items = 0;
  }

  // False: the inner device's kernel runs.
  template <class Params>
  bool cut_at_targets(std::string_view function, const Params& params,
                      std::vector<StatePiece>& pieces) {
    const std::int32_t layer = params.states.layer;
    if (params.num_items == 0 || !takes(function, layer)) return false;
    std::vector<RecurrentItem> items(static_cast<std::size_t>(params.num_items));
    if (!fetch(items, params.items)) return false;
    std::int32_t end = 0;
    for (const RecurrentItem& item : items) end = std::max(end, item.first_token + item.num_tokens);
    std::vector<std::int32_t> targets(static_cast<std::size_t>(end));
    if (!fetch(targets, params.state_targets)) return false;
    for (const RecurrentItem& item : items) {
      StatePiece piece{0, item.source, 0, item.first_token, 0};
      for (std::int32_t i = 0; i < item.num_tokens; ++i) {
        ++piece.num_tokens;
        piece.target = targets[item.first_token + i];
        if (piece.target == 0) continue;
        pieces.push_back(piece);
        piece = {piece.round + 1, piece.target, 0, item.first_token + i + 1, 0};
      }
      if (piece.num_tokens > 0) return takes(function, layer, "tokens after the last stored state");
      if (piece.round > 1 && params.states.dtype != DType::fp32)
        return takes(function, layer, "states narrower than fp32 that are stored inside a chunk");
    }
    return true;
  }

  // One call per round and run of adjacent tokens.
  void make_over_tokens(const KernelCall& all, std::vector<StatePiece>& pieces) {
    std::ranges::sort(pieces, {}, [](const StatePiece& piece) {
      return std::pair(piece.round, piece.first_token);
    });
    for (std::size_t first = 0, next = 0; first < pieces.size(); first = next) {
      std::vector<std::int32_t> starts, initial, has_initial, targets;
      const std::int32_t begin = pieces[first].first_token;
      std::int32_t end = begin;
      for (; next < pieces.size() && pieces[next].round == pieces[first].round &&
             pieces[next].first_token == end;
           ++next) {
        starts.push_back(end - begin);
        initial.push_back(pieces[next].source);
        has_initial.push_back(pieces[next].source != 0 ? 1 : 0);
        targets.push_back(pieces[next].target);
        end += pieces[next].num_tokens;
      }
      starts.push_back(end - begin);
      KernelCall call = all;
      for (KernelTensor& tensor : call.tensors) {
        if (tensor.shape.front() != 0) continue;
        tensor.address += begin * tensor.strides.front();
        tensor.shape.front() = end - begin;
      }
      call.integers = {{"query_start_loc", std::move(starts)},
                       {"initial_indices", std::move(initial)},
                       {"has_initial_state", std::move(has_initial)},
                       {"cache_indices", std::move(targets)}};
      make(call);
    }
  }

  // One call per group of a launch over whole blocks. The regions of a group are the bytes that its
  // layers use in a block.
  template <class Params>
  void take_blocks(std::string_view function, Params& params) {
    if (params.num_items == 0 || !takes(function, -1)) return;
    std::vector<std::remove_cvref_t<decltype(*params.items)>> items(
        static_cast<std::size_t>(params.num_items));
    if (!fetch(items, params.items)) return;
    std::map<std::int32_t, KernelCall> calls;  // by group
    for (const auto& item : items) {
      const auto [call, is_new] = calls.try_emplace(item.group);
      if (is_new && !add_pages(params, item.group, call->second))
        return void(takes(function, -1, "blocks of the host tier"));
      add_item(item, call->second);
    }
    for (auto& [group, call] : calls) {
      call.function = function;
      call.layer = -1;
      call.group = group;
      std::int32_t last = 0;
      for (const KernelIntegers& blocks : call.integers)
        last = std::max(last, *std::ranges::max_element(blocks.values));
      for (KernelTensor& pages : call.tensors) pages.shape[0] = last + 1;
      make(call);
    }
    params.num_items = 0;
  }
  static void add_item(const GroupBlockItem& item, KernelCall& call) {
    if (call.integers.empty()) call.integers = {{"block_ids", {}}};
    call.integers[0].values.push_back(item.block);
  }
  static void add_item(const BlockCopyItem& item, KernelCall& call) {
    if (call.integers.empty()) call.integers = {{"sources", {}}, {"targets", {}}};
    call.integers[0].values.push_back(item.source);
    call.integers[1].values.push_back(item.target);
  }
  // Adds the group's regions, each [num_blocks, bytes]. False: one is not in the cache.
  template <class Params>
  bool add_pages(const Params& params, std::int32_t group, KernelCall& call) {
    std::vector<RegionRange> range(1);
    if (!fetch(range, params.groups + group)) return false;
    std::vector<std::remove_cvref_t<decltype(*params.regions)>> regions(
        static_cast<std::size_t>(range[0].end - range[0].begin));
    if (!fetch(regions, params.regions + range[0].begin)) return false;
    for (std::size_t i = 0; i < regions.size(); ++i) {
      if (base_in_cache(regions[i]) == nullptr) return false;
      call.tensors.push_back(tensor(fmt::format("pages{}", i), base_in_cache(regions[i]), "uint8",
                                    {0, regions[i].size_bytes}, {stride_of(regions[i]), 1}));
    }
    return true;
  }

  // Downloads as many items as each vector has: fetch(to, from, ...). False: the device failed.
  bool fetch() { return finish_inner().has_value(); }
  template <class T, class... More>
  bool fetch(std::vector<T>& to, const T* from, More&&... more) {
    inner().download(to.data(), from, static_cast<std::int64_t>(to.size() * sizeof(T)));
    return fetch(std::forward<More>(more)...);
  }

  // The block table's row and the length of each query's context. False: some query reads what no
  // causal attention over its block table reads.
  bool read_ranges(const SplitAttentionParams& params, std::vector<std::int32_t>& rows,
                   std::vector<std::int32_t>& seq_lens) {
    if (params.ranges == nullptr) {
      if (!fetch(rows, params.token_rows, seq_lens, params.positions)) return false;
      for (std::int32_t& length : seq_lens) ++length;
      return true;
    }
    std::vector<KeyRange> ranges(rows.size());
    std::vector<RowCache> layer(1);
    if (!fetch(rows, params.token_rows, ranges, params.ranges, layer, params.rows) ||
        layer[0].is_ring || layer[0].sink_blocks > 0 || layer[0].away != nullptr)
      return false;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (!is_implied(ranges[i], params)) return false;
      seq_lens[i] = ranges[i].last;
    }
    return true;
  }

  // In this process a row per sequence; another process picks the rows itself.
  KernelTensor block_table(const SplitAttentionParams& params, std::span<const std::int32_t> rows) {
    const std::int64_t width = params.table_width;
    std::int64_t count = *std::ranges::max_element(rows) + 1;
    const std::int32_t* table = params.block_table;
    if (in_process_) {
      count = std::ssize(rows);
      entries_.resize(rows.size() * static_cast<std::size_t>(width));
      for (std::int64_t i = 0; i < count; ++i)
        inner().download(entries_.data() + i * width, table + rows[i] * width, 4 * width);
      if (finish_inner()) table = table_.upload(entries_);
    }
    return tensor("block_table", table, "int32", {count, width}, {4 * width, 4});
  }

  // From queries to sequences: tokens of one row with consecutive lengths are one sequence, whose
  // length is that of its last token.
  static void join_chunks(std::vector<std::int32_t>& rows, std::vector<std::int32_t>& seq_lens,
                          std::vector<std::int32_t>& query_start_loc) {
    std::size_t count = 0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const bool continues =
          i > 0 && rows[i] == rows[count - 1] && seq_lens[i] == seq_lens[count - 1] + 1;
      if (!continues) query_start_loc.push_back(static_cast<std::int32_t>(i));
      count += continues ? 0 : 1;
      rows[count - 1] = rows[i];
      seq_lens[count - 1] = seq_lens[i];
    }
    query_start_loc.push_back(static_cast<std::int32_t>(rows.size()));
    rows.resize(count);
    seq_lens.resize(count);
  }

  // Returns false if the call, or an earlier one, failed.
  bool make(KernelCall& call) {
    if (has_failed_) return false;
    if (!in_process_ && kernels_->on_gpu() && !finish_inner()) return false;  // other streams
    call.memory = inner().memory_begin();
    call.memory_handle = inner().memory_handle();
    call.stream = inner().place().stream;
    if (in_process_) upload_lists(call);
    ++num_calls_;
    auto failure = kernels_->call(call);
    if (!failure) return true;
    const std::string where = call.layer < 0 ? "" : fmt::format(" of layer {}", call.layer);
    std::string what = fmt::format("{}{}: {}", call.function, where, failure->what);
    has_failed_ = true;
    if (failure->kind == "harness")
      fail_with(std::move(what));
    else
      report(failure->kind, call.function, what);
    return false;
  }
  void report(const std::string& kind, std::string_view function, std::string_view what) {
    has_failed_ = true;
    DeviceReport& report = reports_.emplace_back();
    report.kind = kind;
    report.kernel = function;
    report.message = fmt::format("{}: {}", kind, what);
  }

  void upload_lists(KernelCall& call) {
    std::vector<std::int32_t> all;
    for (const KernelIntegers& list : call.integers)
      std::ranges::copy(list.values, std::back_inserter(all));
    const std::int32_t* at = lists_.upload(all);
    for (KernelIntegers& list : call.integers)
      list.on_device = std::exchange(at, at + list.values.size());
  }

  std::shared_ptr<UserKernels> kernels_;
  const bool in_process_;  // pointers of this process; else offsets in shared memory
  DeviceArray<std::int32_t> lists_, table_;
  std::vector<std::int32_t> entries_;  // of table_, as uploaded
  std::set<std::string> not_taken_;
  std::vector<DeviceReport> reports_;
  std::vector<const Slot*> described_;  // slots of the last begin_step, by table
  MappedSlots mapped_;                  // slots of the last map_slots
  std::span<const Slot> draft_slots_;   // of the last draft model's pass, all groups
  bool is_only_padding_ = false;        // True if the last slot mapping had no tokens
  std::int64_t num_calls_ = 0;
  bool has_failed_ = false;
};

}  // namespace

std::unique_ptr<Device> make_user_kernels_device(std::unique_ptr<Device> device,
                                                 std::shared_ptr<UserKernels> kernels) {
  return std::make_unique<UserKernelsDevice>(std::move(device), std::move(kernels));
}

}  // namespace lockstep::cuda
