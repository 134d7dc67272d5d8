#include "sim/worker/page_map.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace lockstep {
namespace {

// One wrong stride makes every row a finding; the first few show the pattern.
constexpr std::size_t kFindingsMax = 8;

// Returns the offset of a row of block 0 in the model's page.
std::int64_t in_page(const LayerMemory& model, std::int64_t part, std::int64_t slot,
                     std::int64_t head) {
  return model.row_begin(BlockId{0}, part, slot, head) - model.begin;
}

// Returns the offset of a row of block 0 in the worker's page, for kernel blocks of `tokens`. Each
// kernel block is ordered like a whole block: with block_size 32 and kernel blocks of 16, slot 17
// is token 1 of the second half. Layouts from 0.26.0 have K and V of a head adjacent; 0.22.1 has
// all K rows before all V rows.
std::int64_t expected_offset(const LayerMemory& model, std::string_view order, std::int64_t tokens,
                             std::int64_t part, std::int64_t slot, std::int64_t head) {
  if (order.empty() && tokens == model.rows_per_block()) return in_page(model, part, slot, head);
  const auto& [row, heads] = std::pair(model.parts.front().row_bytes, model.parts.front().heads);
  const std::int64_t plane = tokens * heads;  // rows of K or V in a kernel block
  const std::int64_t first = slot / tokens * plane * model.num_kv();
  const std::int64_t token = slot % tokens;
  const std::int64_t place = order.ends_with("HNC") ? head * tokens + token : token * heads + head;
  if (order.empty()) return (first + part * plane + place) * row;
  return (first + place * model.num_kv() + part) * row;
}

// Returns true if the views have K of all blocks before V of all blocks: a block's K then covers
// half a page.
bool keeps_pairs_apart(const LayerMemory& model, const WorkerLayer& layer, std::string_view order) {
  if (!order.empty() || model.num_kv() != 2 || layer.parts.empty()) return false;
  const WorkerView& keys = layer.parts.front();
  return 2 * keys.block_stride * keys.kernel_blocks == layer.page_stride;
}

constexpr std::array<std::string_view, 4> kOrders = {"LBNHC", "LBHNC", "BLNHC", "BLHNC"};

}  // namespace

std::int64_t PageMap::row_offset(const WorkerLayer& layer, BlockId block, std::int64_t part,
                                 std::int64_t slot, std::int64_t head) {
  const WorkerView& view = layer.parts[part];
  const std::int64_t kernel_block = index_of(block) * view.kernel_blocks + slot / view.tokens;
  return view.offset + kernel_block * view.block_stride + slot % view.tokens * view.token_stride +
         head * view.head_stride;
}

// Block-outer layouts have one block of all tensors after another, so the stride is the sum of all
// pages.
Result<PageMap> PageMap::create(const KVCacheConfig& plan, const MemoryPlan& layout,
                                std::span<const WorkerLayer> layers, std::string_view order,
                                std::int64_t memory_bytes) {
  if (!order.empty() && std::ranges::find(kOrders, order) == kOrders.end())
    return fail(fmt::format("the worker's page layout is {}; expected {} or 0.22.1's", order,
                            fmt::join(kOrders, ", ")));
  PageMap map;
  map.num_blocks_ = plan.num_blocks;
  std::int64_t block_bytes = 0;  // of all tensors
  for (const KVCacheTensor& tensor : plan.tensors)
    block_bytes += tensor.size_bytes / plan.num_blocks;
  for (const KVCacheTensor& tensor : plan.tensors)
    map.tensors_.push_back(
        {.page_bytes = tensor.size_bytes / plan.num_blocks,
         .stride = order.starts_with('B') ? block_bytes : tensor.size_bytes / plan.num_blocks,
         .offset = -1,
         .order = std::vector<Order>(plan.groups.size()),
         .used_by_any = {}});
  std::size_t next = 0;
  for (const LayerMemory& model : layout.layers) {
    LS_CHECK(next < layers.size(), "{} layers of the worker", layers.size());
    LS_RETURN_IF_ERROR(map.add_layer(model, layers[next++], order, memory_bytes));
  }
  for (Tensor& tensor : map.tensors_)
    for (std::size_t g = 0; g < plan.groups.size(); ++g) map.complete(tensor, g);
  return map;
}

// Checks one layer's page and adds its rows or states to the order of its group. Differences that
// make a comparison meaningless are errors; wrong positions are findings.
Result<void> PageMap::add_layer(const LayerMemory& model, const WorkerLayer& layer,
                                std::string_view order, std::int64_t memory_bytes) {
  Tensor& tensor = tensors_[model.tensor];
  if (model.regions.size() > 1)
    return fail(
        fmt::format("{}: K and V of a block are not adjacent in the model; the worker is compared "
                    "with --attention-backend triton_attn",
                    layer.name));
  if (layer.page_stride != tensor.stride || model.page_bytes() != tensor.page_bytes)
    return fail(fmt::format("{}: the page stride is {} bytes in the worker, {} in the model",
                            layer.name, layer.page_stride, tensor.stride));
  if (std::ssize(layer.parts) != model.num_kv())
    return fail(fmt::format("{}: the worker writes {} rows per token, the model {}", layer.name,
                            layer.parts.size(), model.num_kv()));
  if (tensor.offset >= 0 && tensor.offset != layer.page_offset)
    return find(layer,
                fmt::format("its pages begin at byte {}, those of another layer of its tensor at "
                            "byte {}",
                            layer.page_offset, tensor.offset)),
           Result<void>();
  const bool is_first = tensor.offset < 0;
  tensor.offset = layer.page_offset;
  const bool is_apart = keeps_pairs_apart(model, layer, order);
  const std::int64_t half = is_apart ? tensor.page_bytes / 2 : 0;
  if (!is_first && is_apart != (tensor.from_k_to_v > 0))
    return find(layer, "K and V of its blocks are apart, and not those of its tensor's layers"),
           Result<void>();
  tensor.from_k_to_v = half * num_blocks_;
  if (layer.page_offset < 0 ||
      layer.page_offset + (num_blocks_ - 1) * tensor.stride + tensor.page_bytes > memory_bytes)
    return find(layer, "its pages exceed the worker's memory"), Result<void>();
  Order& made = tensor.order[model.group];
  made.used.resize(tensor.page_bytes);
  if (model.num_kv() == 0 || !layer.states.empty()) return add_states(model, layer, tensor, made);
  for (std::int64_t part = 0; part < model.num_kv(); ++part)
    add_rows(model, layer, part, order, tensor, made);
  return {};
}

// Checks every row of block 0 against the derived position. Other blocks follow by the block
// stride.
void PageMap::add_rows(const LayerMemory& model, const WorkerLayer& layer, std::int64_t part,
                       std::string_view order, const Tensor& tensor, Order& made) {
  const WorkerView& view = layer.parts[part];
  const PartRows& rows = model.parts.front();
  const std::int64_t row_bytes = rows.row_bytes, rows_per_block = model.rows_per_block();
  const std::int64_t half = tensor.from_k_to_v > 0 ? tensor.page_bytes / 2 : 0;
  if (view.blocks != num_blocks_ * view.kernel_blocks ||
      view.tokens * view.kernel_blocks != rows_per_block || view.heads != rows.heads ||
      view.row_bytes != row_bytes)
    return find(layer,
                fmt::format("part {} is [{}, {}, {}] rows of {} bytes; expected [{}, {}, {}] of {}",
                            part, view.blocks, view.tokens, view.heads, view.row_bytes,
                            num_blocks_ * view.kernel_blocks, rows_per_block / view.kernel_blocks,
                            rows.heads, row_bytes));
  if (view.block_stride * view.kernel_blocks != layer.page_stride - half)
    return find(layer,
                fmt::format("part {}: the block stride is {} bytes; {} of them in a page of {}",
                            part, view.block_stride, view.kernel_blocks, layer.page_stride));
  for (std::int64_t slot = 0; slot < rows_per_block; ++slot)
    for (std::int64_t head = 0; head < rows.heads; ++head) {
      const std::int64_t found = row_offset(layer, BlockId{0}, part, slot, head) -
                                 layer.page_offset - part * (tensor.from_k_to_v - half);
      const std::int64_t wanted =
          half > 0 ? part * half + (slot * rows.heads + head) * row_bytes
                   : expected_offset(model, order, view.tokens, part, slot, head);
      if (found != wanted)
        return find(layer,
                    fmt::format("part {}, slot {}, head {} is at byte {} of a page; expected {}",
                                part, slot, head, found, wanted));
      if (found < 0 || found + row_bytes > tensor.page_bytes)
        return find(layer, fmt::format("part {}, slot {}, head {} exceeds its page, byte {} of {}",
                                       part, slot, head, found, tensor.page_bytes));
      const std::int64_t own = in_page(model, part, slot, head);
      LS_CHECK(own >= 0 && own + row_bytes <= tensor.page_bytes, "byte {} of {}", own,
               tensor.page_bytes);
      made.segments.push_back({.in_page = own, .in_memory = found, .size = row_bytes});
      std::fill_n(made.used.begin() + own, row_bytes, true);
    }
}

Result<void> PageMap::add_states(const LayerMemory& model, const WorkerLayer& layer,
                                 const Tensor& tensor, Order& made) {
  const std::size_t num_states = model.keeps_rows() ? 0 : model.parts.size();
  if (layer.states.size() != num_states)
    return fail(fmt::format("{}: the worker keeps {} states, the model {}", layer.name,
                            layer.states.size(), num_states));
  for (std::size_t s = 0; s < layer.states.size(); ++s) {
    const WorkerState& found = layer.states[s];
    const std::int64_t bytes = bytes_of(model.parts[s]);
    const std::int64_t in_page = found.offset - layer.page_offset;
    const std::int64_t wanted = model.parts[s].offset - model.begin;
    if (found.blocks != num_blocks_ || found.bytes != bytes)
      find(layer, fmt::format("state {} is {} blocks of {} bytes; expected {} of {}", s,
                              found.blocks, found.bytes, num_blocks_, bytes));
    else if (found.block_stride != layer.page_stride)
      find(layer, fmt::format("state {}: the block stride is {} bytes; its page has {}", s,
                              found.block_stride, layer.page_stride));
    else if (in_page != wanted)
      find(layer, fmt::format("state {} is at byte {} of a page; expected {}", s, in_page, wanted));
    else if (in_page + bytes > tensor.page_bytes)
      find(layer, fmt::format("state {} exceeds its page, byte {} of {}", s, in_page + bytes,
                              tensor.page_bytes));
    else {
      made.segments.push_back({.in_page = in_page, .in_memory = in_page, .size = bytes});
      std::fill_n(made.used.begin() + in_page, bytes, true);
      continue;
    }
    return {};
  }
  return {};
}

void PageMap::find(const WorkerLayer& layer, std::string_view what) {
  if (findings_.size() < kFindingsMax) findings_.push_back(fmt::format("{}: {}", layer.name, what));
}

// Completes a group's order: maps the bytes of no row, and joins adjacent rows to runs.
void PageMap::complete(Tensor& tensor, std::size_t group) {
  Order& order = tensor.order[group];
  order.used.resize(tensor.page_bytes);
  // The bytes of no row (padding) are mapped in address order, one to one, so that a page has the
  // same number of bytes in both orders and poison survives a conversion.
  tensor.used_by_any.resize(tensor.page_bytes);
  for (std::int64_t i = 0; i < tensor.page_bytes; ++i)
    if (order.used[i]) tensor.used_by_any[i] = true;
  if (order.segments.empty() || !findings_.empty()) return;
  std::vector<bool> taken(tensor.page_bytes);
  for (const Segment& segment : order.segments)
    for (std::int64_t i = 0; i < segment.size; ++i) {
      if (taken[segment.in_memory + i]) {
        findings_.push_back(fmt::format("rows of group {} overlap at byte {} of a page", group,
                                        segment.in_memory + i));
        return;
      }
      taken[segment.in_memory + i] = true;
    }
  std::int64_t in_memory = 0;
  for (std::int64_t in_page = 0; in_page < tensor.page_bytes; ++in_page) {
    if (order.used[in_page]) continue;
    while (taken[in_memory]) ++in_memory;
    order.segments.push_back({.in_page = in_page, .in_memory = in_memory++, .size = 1});
  }
  // Adjacent rows form long runs, and gather() copies a page with few calls.
  std::ranges::sort(order.segments, {}, &Segment::in_page);
  std::vector<Segment> runs;
  for (const Segment& segment : order.segments) {
    const bool goes_on = !runs.empty() &&
                         runs.back().in_page + runs.back().size == segment.in_page &&
                         runs.back().in_memory + runs.back().size == segment.in_memory;
    if (goes_on)
      runs.back().size += segment.size;
    else
      runs.push_back(segment);
  }
  order.segments = std::move(runs);
}

const std::vector<bool>& PageMap::used_bytes(std::int32_t tensor, std::int32_t group) const {
  return tensors_[tensor].order[group].used;
}

template <class Copy>
void PageMap::each_run(const Tensor& tensor, BlockId block, std::int32_t group,
                       const Copy& copy) const {
  // A page in two halves has its second half from_k_to_v bytes further on. A run that crosses the
  // middle is copied in two parts.
  const std::int64_t half = tensor.from_k_to_v > 0 ? tensor.page_bytes / 2 : tensor.page_bytes;
  const std::int64_t step = tensor.from_k_to_v > 0 ? half : tensor.stride;
  const std::int64_t first = tensor.offset + index_of(block) * step;
  const std::vector<Segment> whole = {{.in_page = 0, .in_memory = 0, .size = tensor.page_bytes}};
  const bool is_plain = group < 0 || tensor.order[group].segments.empty();
  for (const Segment& segment : is_plain ? whole : tensor.order[group].segments)
    for (std::int64_t done = 0; done < segment.size;) {
      const std::int64_t at = segment.in_memory + done;
      const std::int64_t size = std::min(segment.size - done, at < half ? half - at : segment.size);
      copy(segment.in_page + done, first + (at < half ? at : at - half + tensor.from_k_to_v), size);
      done += size;
    }
}

void PageMap::gather(std::span<const std::uint8_t> memory, std::int32_t tensor, BlockId block,
                     std::int32_t group, std::span<std::uint8_t> page) const {
  const Tensor& from = tensors_[tensor];
  LS_CHECK(std::ssize(page) == from.page_bytes, "{} bytes of {}", page.size(), from.page_bytes);
  each_run(from, block, group, [&](std::int64_t in_page, std::int64_t at, std::int64_t size) {
    std::memcpy(page.data() + in_page, memory.data() + at, size);
  });
}

void PageMap::scatter(std::span<std::uint8_t> memory, std::int32_t tensor, BlockId block,
                      std::int32_t group, std::span<const std::uint8_t> page) const {
  const Tensor& to = tensors_[tensor];
  LS_CHECK(std::ssize(page) == to.page_bytes, "{} bytes of {}", page.size(), to.page_bytes);
  each_run(to, block, group, [&](std::int64_t in_page, std::int64_t at, std::int64_t size) {
    std::memcpy(memory.data() + at, page.data() + in_page, size);
  });
}

}  // namespace lockstep
