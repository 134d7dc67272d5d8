#include "reference/memory/memory_model.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "base/check.h"
#include "reference/memory/model_placement.h"
#include "reference/memory/page_image.h"
#include "reference/memory/row_words.h"
#include "reference/plan/page_groups.h"
#include "reference/plan/page_size.h"

namespace lockstep {
namespace {

// The reason why the model has no bytes for the group; absent: it has.
std::optional<std::string> why_not_modelled(const KVCacheGroupSpec& group) {
  const KVCacheSpec& spec = group.spec;
  if (keeps_nothing(spec.kind))
    return fmt::format("a cache of kind {} keeps nothing", name_of(spec.kind));
  for (std::size_t i = 0; i < group.layer_names.size(); ++i) {
    const std::string reason = why_no_rows(group.layer_spec(i));
    if (!reason.empty()) return fmt::format("{}: {}", group.layer_names[i], reason);
  }
  return std::nullopt;
}

// Copies what the rows need from spec, plan and rank, and computes the coordinate of each part and
// head. Coordinates count layers and heads of the whole model, so ranks agree on rows.
ModelLayer make_layer(std::int32_t index, std::int32_t group, const std::string& name,
                      const KVCacheSpec& spec, LayerMemory memory, const LayerShare& share) {
  ModelLayer layer{.index = index,
                   .group = group,
                   .name = name,
                   .dtype = spec.dtype,
                   .kind = spec.kind,
                   .share = share};
  if (memory.keeps_rows()) {
    layer.num_kv = memory.num_kv();
    layer.num_kv_heads = memory.parts.front().heads;
    layer.rows_per_block = memory.rows_per_block();
    layer.row_size_bytes = memory.parts.front().row_bytes;
  }
  layer.memory = std::move(memory);
  layer.is_dealt_out = is_dealt_out(spec);
  layer.tokens_per_state = spec.tokens_per_state;
  layer.num_sinks = spec.sink_len;
  for (std::int64_t kv = 0; kv < layer.num_kv; ++kv)
    for (std::int64_t head = 0; head < layer.num_kv_heads; ++head)
      layer.coords.push_back(coordinate(share.layer, kv, share.first_head + head));
  return layer;
}

// True if the layer keeps K and V apart in one tensor.
bool is_split(const ModelLayer& layer) {
  return layer.memory.regions.size() > 1 && !layer.is_spread();
}

}  // namespace

// Tensors are numbered as in the plan, and `begin` counts bytes over all of them. Host pages become
// layers with rows first (with_page_rows()).
Result<MemoryModel> MemoryModel::create(const KVCacheConfig& given, AttentionBackend backend,
                                        CacheLayout layout, LayoutRule rule,
                                        std::int64_t num_host_blocks, Numbers numbers,
                                        std::span<const LayerShare> shares) {
  LS_ASSIGN_OR_RETURN(const KVCacheConfig plan, with_page_rows(given));
  for (const KVCacheGroupSpec& group : plan.groups)
    if (const auto reason = why_not_modelled(group))
      return fail("memory model: {}; replay it with `--backend none`", *reason);
  LS_ASSIGN_OR_RETURN(const MemoryPlan memory, layout_of(plan, backend, layout, rule));
  MemoryModel model;
  model.num_blocks_ = plan.num_blocks;
  model.num_lanes_ = 1 + static_cast<std::int32_t>(plan.draft_modules.size());
  model.numbers_ = numbers;
  model.writers_.resize(1);
  model.blocks_.resize(plan.num_blocks);
  std::int64_t begin = 0;
  for (const std::int64_t size_bytes : memory.tensor_size_bytes) {
    // A tensor is num_blocks pages, rule (7): the page size follows from its size.
    LS_CHECK(size_bytes % plan.num_blocks == 0, "tensor of {} bytes, {} blocks", size_bytes,
             plan.num_blocks);
    Tensor& tensor = model.tensors_.emplace_back();
    tensor.begin = begin;
    begin += size_bytes;
    tensor.page_size_bytes = size_bytes / plan.num_blocks;
    tensor.sums.resize(plan.num_blocks);
    tensor.known.resize(plan.num_blocks);
    tensor.written_in.resize(plan.num_blocks);
  }
  LS_RETURN_IF_ERROR(model.add_layers(plan, memory, shares));
  model.set_alignment();
  LS_RETURN_IF_ERROR(model.add_host_blocks(num_host_blocks));
  return model;
}

// Layers in the order of the plan. The memory plan has no entry for layers of the page source, so
// `next` advances only for others.
Result<void> MemoryModel::add_layers(const KVCacheConfig& plan, const MemoryPlan& memory,
                                     std::span<const LayerShare> shares) {
  auto next = memory.layers.begin();
  for (std::size_t g = 0; g < plan.groups.size(); ++g) {
    const KVCacheGroupSpec& spec = plan.groups[g];
    Group& group = groups_.emplace_back();
    group.states = is_state_kind(spec.spec.kind);
    group.is_ring = is_ring(spec.spec);
    group.is_encoder = is_cross_attention(spec.spec);
    group.is_resident = spec.role == kResidentRole;
    group.is_hot = spec.role == kHotRole;
    if (is_page_source(spec)) source_ = static_cast<std::int32_t>(g);
    group.is_dealt_out = is_dealt_out(spec.spec);
    group.num_sinks = spec.spec.sink_len;
    group.block_size = spec.spec.block_size;
    group.first_layer = static_cast<std::int32_t>(layers_.size());
    group.num_layers = static_cast<std::int32_t>(spec.layer_names.size());
    for (std::size_t i = 0; i < spec.layer_names.size(); ++i) {
      const auto index = static_cast<std::int32_t>(layers_.size());
      LS_CHECK(shares.empty() || layers_.size() < shares.size(), "{} shares", shares.size());
      LayerShare share = shares.empty() ? LayerShare{.layer = index} : shares[layers_.size()];
      if (group.is_hot) share = resident_share(spec.layer_names[i]);
      layers_.push_back(make_layer(index, static_cast<std::int32_t>(g), spec.layer_names[i],
                                   spec.layer_spec(i),
                                   is_page_source(spec) ? LayerMemory{} : *next++, share));
      ModelLayer& layer = layers_.back();
      if (is_page_source(spec)) continue;  // its rows are those of resident layers
      layer.lane = 1 + draft_module_of(plan, layer.name);
      layer.words = row_words(numbers_, spec.layer_spec(i), layer.share.layer);
      // Rows with scales in them are longer than head_size: attention reads only the elements.
      const bool by_rows = layer.words.by_largest != nullptr, by_groups = layer.words.by_group;
      layer.head_size = by_rows || by_groups || layer.words.is_int4
                            ? spec.layer_spec(i).head_size
                            : row_elements(spec.layer_spec(i));
      layer.latent = latent_format(numbers_, spec.layer_spec(i));
      const bool is_latent = layer.latent != LatentFormat::none;
      if (is_latent) layer.head_size = latent_elements(layer.latent);
      // These rows have their scales in separate areas, which not every layout can hold.
      if (by_groups || is_latent) {
        layer.data_bytes = is_latent ? latent_data_bytes(layer.latent) : layer.head_size / 2;
        if (const auto reason = why_no_areas(layer)) return fail(*reason);
      }
      if (auto added = add_states(spec.layer_spec(i), layer, group); !added) return added;
      // Rule (7): with K and V apart, pages of the tensor are not pages of a block.
      Tensor& tensor = tensors_[layer.memory.tensor];
      if (!tensor.layers.empty() && is_split(layers_[tensor.layers.front()]) != is_split(layer))
        return fail(
            "memory model: {} and {} share a tensor, but one keeps K and V apart and the other in "
            "its page, so a block of one extends into pages of the other",
            layers_[tensor.layers.front()].name, layer.name);
      if (is_split(layer)) tensor.regions_per_page = 2;
      for (std::int32_t t = layer.memory.tensor; t <= layer.memory.last_tensor; ++t)
        tensors_[t].layers.push_back(index);
    }
  }
  return {};
}

// The share of the resident layer of the same source: rows of a hot region are copies of its rows,
// and must have the same coordinates.
LayerShare MemoryModel::resident_share(const std::string& hot_layer) const {
  const std::string name = source_layer_of(hot_layer);
  const auto at = std::ranges::find_if(layers_, [&](const ModelLayer& layer) {
    return groups_[layer.group].is_resident && source_layer_of(layer.name) == name;
  });
  LS_CHECK(at != layers_.end(), "{} stands before its resident layer", hot_layer);
  return at->share;
}

// Marks layers whose rows begin and end on words of their page: such a row can be exchanged in the
// page's sum on its own. Other rows share words with their neighbours. Also computes the keys of
// the longest page once, for all pages.
void MemoryModel::set_alignment() {
  std::int64_t words = 0;
  for (const Tensor& tensor : tensors_) {
    words = std::max(words, num_words(tensor.page_size_bytes));
    for (const std::int32_t index : tensor.layers) {
      ModelLayer& layer = layers_[index];
      layer.words_aligned = layer.data_bytes == 0 && tensor.page_size_bytes % 8 == 0;
      for (const PartRows& part : layer.memory.parts)
        for (const std::int64_t bytes :
             {part.offset - layer.memory.begin, part.block_stride, part.kernel_block_stride,
              part.head_stride, part.row_stride, part.row_bytes})
          layer.words_aligned &= bytes % 8 == 0;
    }
  }
  for (std::int64_t i = 0; i < words; ++i)
    word_keys_.push_back(word_keys(static_cast<std::uint64_t>(i)));
}

void MemoryModel::begin_step(std::int64_t step) {
  step_ = step;
  written_.clear();
  written_hosts_.clear();
  written_sorted_ = true;
  // A page counts as written if its epoch is the step's: no step has to clear the marks of all
  // pages, except when the counter wraps.
  if (++epoch_ != 0) return;
  for (Tensor& tensor : tensors_) std::ranges::fill(tensor.written_in, 0u);
  epoch_ = 1;
}

// One use is the caller's, until retire_writer().
WriterId MemoryModel::add_writer(std::string_view name) {
  WriterId id = static_cast<WriterId>(writers_.size());
  if (free_writers_.empty()) {
    writers_.emplace_back();
  } else {
    id = free_writers_.back();
    free_writers_.pop_back();
  }
  writers_[id] = {.name = std::string(name), .uses = 1, .live = true};
  return id;
}

void MemoryModel::retire_writer(WriterId writer) {
  // The name stays as long as content refers to it: a diagnosis names writers of finished requests.
  LS_CHECK(writers_[writer].live, "writer {}", writer);
  writers_[writer].live = false;
  release(writer);
}

// The id is free after its last use.
void MemoryModel::release(WriterId writer) {
  if (writer == kNobody) return;
  LS_CHECK(writers_[writer].uses > 0, "writer {}", writer);
  if (--writers_[writer].uses == 0) free_writers_.push_back(writer);
}

std::string_view MemoryModel::writer_name(WriterId writer) const {
  return writer == kNobody ? std::string_view("nobody") : writers_[writer].name;
}

// Each page is listed once per step, however many rows are written to it.
void MemoryModel::touch(std::int32_t tensor, std::int64_t page) {
  std::uint32_t& epoch = tensors_[tensor].written_in[page];
  if (epoch == epoch_) return;
  epoch = epoch_;
  written_.push_back({tensor, static_cast<std::int32_t>(page)});
  written_sorted_ = false;
}

// Sorted on demand, so that the comparison does not depend on the order of the writes.
std::span<const ModelPage> MemoryModel::written_pages() {
  if (!written_sorted_) std::ranges::sort(written_);
  written_sorted_ = true;
  return written_;
}

void MemoryModel::pages_of(BlockId block, std::vector<ModelPage>& pages) const {
  for (std::int32_t t = 0; t < num_tensors(); ++t) {
    const bool split = tensors_[t].regions_per_page == 2;
    if (!split) {
      pages.push_back({t, index_of(block)});
      continue;
    }
    // A tensor with K and V apart consists of half pages: K of block b is half b, V is half
    // num_blocks + b. With 3 blocks, block 1 has halves 1 and 4: pages 0 and 2.
    const std::int64_t first = index_of(block) / 2;
    const std::int64_t second = (num_blocks_ + index_of(block)) / 2;
    pages.push_back({t, static_cast<std::int32_t>(first)});
    if (second != first) pages.push_back({t, static_cast<std::int32_t>(second)});
  }
}

// Marks every page with bytes of the block: its sum is computed when fingerprint() needs it.
void MemoryModel::invalidate(BlockId block) {
  std::vector<ModelPage> pages;
  pages_of(block, pages);
  for (const ModelPage& page : pages) {
    tensors_[page.tensor].known[page.index] = 0;
    touch(page.tensor, page.index);
  }
}

// The slots stay allocated: the block is usually written again.
void MemoryModel::forget_content(BlockContent& block) {
  for (SlotContent& slot : block.slots) {
    release(slot.writer);
    slot = {};
  }
  release(block.state.writer);
  block.state = {};
  block.loaded.reset();
}

// Content of every group goes, since the block may be another group's next.
void MemoryModel::poison(BlockId id, Unwritten kind) {
  BlockContent& block = blocks_[id];
  forget_content(block);
  block.group = -1;
  block.base = kind;
  block.zeroed = false;
  block.slots.clear();
  invalidate(id);
}

// Only the group's bytes: padding and bytes of other layers keep the block's base.
void MemoryModel::zero(std::int32_t group, BlockId id) {
  BlockContent& block = blocks_[id];
  LS_CHECK(block.group == -1 || block.group == group, "block {} of group {} zeroed for group {}",
           index_of(id), block.group, group);
  forget_content(block);
  block.group = group;
  block.zeroed = true;
  touch_layers(group, id);
}

// slots is allocated with the first write: most blocks of a large pool are never written.
void MemoryModel::write_token(std::int32_t group, BlockId id, std::int64_t slot_offset,
                              ContentId content, WriterId writer, std::int64_t position,
                              std::int32_t lane) {
  const Group& of = groups_[group];
  LS_CHECK(!of.states && id != kNullBlock && slot_offset >= 0 && slot_offset < of.block_size,
           "group {} block {} offset {}", group, index_of(id), slot_offset);
  LS_CHECK(lane >= 0 && lane < num_lanes_, "lane {} of {}", lane, num_lanes_);
  BlockContent& block = blocks_[id];
  LS_CHECK(block.group == -1 || block.group == group, "block {} of group {} written for group {}",
           index_of(id), block.group, group);
  block.group = group;
  if (block.slots.empty()) block.slots.resize(num_lanes_ * of.block_size);
  SlotContent& slot = block.slots[lane * of.block_size + slot_offset];
  for (const ModelLayer& layer : layers_of(group)) {
    if (layer.lane != lane) continue;
    const RowRange rows = rows_of_token(layer.tokens_per_state, slot_offset);
    for (std::int64_t row = rows.first; row < rows.last; ++row)
      write_row(layer, block, id, row, slot, content);
  }
  // In this order: the slot's previous writer may be the same one, and must not reach zero uses.
  use(writer);
  release(slot.writer);
  slot = {.content = content,
          .writer = writer,
          .position = static_cast<std::int32_t>(position),
          .step = step_};
}

// Sinks fill blocks 1 to num_sinks / block_size.
bool MemoryModel::holds_sinks(BlockId block) const {
  return std::ranges::any_of(groups_, [&](const Group& group) {
    return index_of(block) >= 1 && index_of(block) * group.block_size <= group.num_sinks;
  });
}

// One writer for all sinks of a group. It is never retired.
std::optional<std::string> MemoryModel::write_sinks() {
  for (std::int32_t g = 0; g < num_groups(); ++g) {
    Group& group = groups_[g];
    if (group.num_sinks == 0 || group.has_sinks) continue;
    group.has_sinks = true;
    const WriterId writer = add_writer("the sinks");
    for (std::int64_t i = 0; i < group.num_sinks; ++i) {
      const auto block = static_cast<BlockId>(1 + i / group.block_size);
      if (blocks_[block].group != -1 && blocks_[block].group != g)
        return fmt::format("sinks are written to block {}, which holds something else",
                           index_of(block));
      write_token(g, block, i % group.block_size, sink_content(i), writer, i);
    }
  }
  return std::nullopt;
}

// Keeps the page's sum up to date in O(row): subtracts the terms of the row's old words and adds
// those of the new ones. The old words are the previous token's, zeros, or poison.
void MemoryModel::write_row(const ModelLayer& layer, const BlockContent& block, BlockId id,
                            std::int64_t row, const SlotContent& old, ContentId now) {
  const ContentId old_content = row_content(layer.tokens_per_state, old.content, row);
  const ContentId new_content = row_content(layer.tokens_per_state, now, row);
  for (std::int64_t kv = 0; kv < layer.num_kv; ++kv) {
    for (std::int64_t head = 0; head < layer.num_kv_heads; ++head) {
      const PagedByte at = place_of(layer, layer.memory.row_begin(id, kv, row, head));
      const auto [index, page] = at.page;
      Tensor& tensor = tensors_[index];
      touch(index, page);  // also if only a piece of the row is there
      // A row that shares words with another, and bytes from the host, have no term of their own in
      // the sum: the next fingerprint() sums the whole page.
      if (!layer.words_aligned || block.loaded != nullptr) tensor.known[page] = 0;
      if (!tensor.known[page]) continue;
      const std::uint64_t coord = layer.coords[kv * layer.num_kv_heads + head];
      const std::uint64_t old_key = row_key(old_content, coord);
      const std::uint64_t new_key = row_key(new_content, coord);
      const WordShape old_shape = shape_of_row(old_key, layer.words);
      const WordShape new_shape = shape_of_row(new_key, layer.words);
      const std::uint64_t poison = poison_key(block.base, index, page);
      const auto first = static_cast<std::uint64_t>(at.byte / 8);
      const auto words = static_cast<std::uint64_t>(layer.row_size_bytes / 8);
      const auto keys = std::span(word_keys_).subspan(first, words);
      PageSum& sum = tensor.sums[page];
      std::array<std::uint64_t, kWordsAtOnce> buffer;
      for (std::uint64_t i = 0; i < words; i += kWordsAtOnce) {
        const auto piece = std::span(buffer).first(std::min(kWordsAtOnce, words - i));
        // The bytes that the row replaces: those of the previous token, zeros, or poison.
        if (old.writer != kNobody)
          fill_row_words(old_key, i, old_shape, piece);
        else
          for (std::size_t n = 0; n < piece.size(); ++n)
            piece[n] = block.zeroed ? 0 : poison_word(poison, first + i + n);
        sum -= sum_of_terms(piece, keys.subspan(i));
        fill_row_words(new_key, i, new_shape, piece);
        sum += sum_of_terms(piece, keys.subspan(i));
      }
    }
  }
}

// An unknown sum costs one image of the page; image_ keeps its memory.
PageSum MemoryModel::fingerprint(ModelPage page) {
  Tensor& tensor = tensors_[page.tensor];
  const auto index = static_cast<std::size_t>(page.index);
  if (!tensor.known[index]) {
    image_.resize(static_cast<std::size_t>(tensor.page_size_bytes));
    draw_page(page, image_);
    tensor.sums[index] = page_sum(image_, word_keys_);
    tensor.known[index] = 1;
  }
  return tensor.sums[index];
}

const BlockContent& MemoryModel::block(BlockId id) const {
  LS_CHECK(index_of(id) >= 0 && index_of(id) < num_blocks_, "block {}", index_of(id));
  return blocks_[id];
}

// A block of another group has no slots here, whatever its tables claim.
const SlotContent* MemoryModel::slot_content(std::int32_t group, BlockId id, std::int64_t offset,
                                             std::int32_t lane) const {
  const BlockContent& content = block(id);
  if (content.group != group || content.slots.empty()) return nullptr;
  const SlotContent& slot = content.slots[lane * groups_[group].block_size + offset];
  return slot.writer == kNobody ? nullptr : &slot;
}

std::int64_t MemoryModel::page_size_bytes(std::int32_t tensor) const {
  return tensors_[tensor].page_size_bytes;
}

std::int64_t MemoryModel::block_size(std::int32_t group) const { return groups_[group].block_size; }

bool MemoryModel::is_state_group(std::int32_t group) const { return groups_[group].states; }

std::span<const ModelLayer> MemoryModel::layers_of(std::int32_t group) const {
  const Group& of = groups_[group];
  return std::span(layers_).subspan(of.first_layer, of.num_layers);
}

}  // namespace lockstep
