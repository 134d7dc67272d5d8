// Whole blocks in the memory model: the host tier and copies of blocks, rules (12) and (17) of
// sim/protocol/backend.h; and states, rules (2) and (15).
//
// A host block has no layout of its own: it holds the bytes of a block of one group, layer by layer
// and each layer's bytes in ascending order. HostRun maps contiguous bytes of the plan to bytes of
// the host block. Copies use the same order, so `loaded` of a block reads like a host block.
#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/parallel.h"
#include "reference/memory/memory_model.h"
#include "reference/memory/page_image.h"
#include "reference/memory/row_words.h"

namespace lockstep {

// The tensor number in the poison of host blocks: no plan has that many tensors. More than 4 GiB of
// host memory is refused, since the model stores every byte of it.
constexpr std::int64_t kTierAsTensor = std::int64_t{1} << 31;
constexpr std::int64_t kHostBytesMax = std::int64_t{4} << 30;

// Collects the bytes of the group's block 0, in the order of the plan, and merges adjacent pieces.
// Other blocks follow by the layer's block stride.
void MemoryModel::add_host_runs(Group& group) {
  for (std::int32_t i = 0; i < group.num_layers; ++i) {
    const ModelLayer& layer = layers_[group.first_layer + i];
    std::vector<HostRun> parts;
    const auto add = [&](std::int64_t begin, std::int64_t size_bytes) {
      parts.push_back({.layer = i, .begin = begin, .end = begin + size_bytes});
    };
    for (std::size_t s = 0; s < layer.num_states(); ++s)
      add(layer.memory.parts[s].offset, layer.state_bytes(s));
    for (std::int64_t kv = 0; kv < layer.num_kv; ++kv)
      for (std::int64_t slot = 0; slot < layer.rows_per_block; ++slot)
        for (std::int64_t head = 0; head < layer.num_kv_heads; ++head)
          for (const RowPiece& piece : row_pieces(layer, kNullBlock, kv, slot, head))
            add(piece.offset, piece.size_bytes);
    // Ascending bytes, so that adjacent pieces can merge; a layer's pieces never overlap.
    std::ranges::sort(parts, {}, &HostRun::begin);
    for (HostRun& part : parts) {
      const std::int64_t size_bytes = part.end - part.begin;
      HostRun* last = group.host_runs.empty() ? nullptr : &group.host_runs.back();
      // Runs of two layers stay apart even if they are adjacent: host_layer_at() distinguishes
      // them.
      if (last != nullptr && last->layer == i && last->end == part.begin) {
        last->end = part.end;
      } else {
        part.offset = group.host_bytes;
        group.host_runs.push_back(part);
      }
      group.host_bytes += size_bytes;
    }
  }
}

// A host block of the source holds the pages of all resident groups in sequence. The resident
// groups' runs get their offset in it.
void MemoryModel::add_source_runs() {
  Group& source = groups_[source_];
  for (Group& group : groups_) {
    if (!group.is_resident) continue;
    for (HostRun& run : group.host_runs) {
      run.offset += source.host_bytes;
      HostRun& whole = source.host_runs.emplace_back(run);
      whole.layer += group.first_layer - source.first_layer;
    }
    source.host_bytes += group.host_bytes;
  }
}

// All host blocks have the size of the largest group's block. They start with poison, as fresh
// device memory does.
Result<void> MemoryModel::add_host_blocks(std::int64_t count) {
  if (count == 0) return {};
  for (Group& group : groups_) add_host_runs(group);
  if (source_ >= 0) add_source_runs();
  for (const Group& group : groups_)
    host_block_bytes_ = std::max(host_block_bytes_, group.host_bytes);
  if (host_block_bytes_ > 0 && count > kHostBytesMax / host_block_bytes_)
    return fail(
        "memory model: {} host blocks of {} bytes, each byte of which it keeps; expected at most "
        "{} GiB: give a smaller host pool, or run only the decisions (--backend none)",
        count, host_block_bytes_, kHostBytesMax >> 30);
  for (std::int64_t block = 0; block < count; ++block) {
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(host_block_bytes_));
    const std::uint64_t key = poison_key(Unwritten::fresh, kTierAsTensor, block);
    for (std::int64_t i = 0; i < num_words(host_block_bytes_); ++i)
      store_word(bytes, static_cast<std::size_t>(i),
                 poison_word(key, static_cast<std::uint64_t>(i)));
    set_host_bytes(host_blocks_.emplace_back(), std::move(bytes));
  }
  return {};
}

// The bytes are shared with blocks that load them, so a change replaces the vector.
void MemoryModel::set_host_bytes(HostContent& host, std::vector<std::uint8_t> bytes) {
  host.sum = page_sum(bytes);
  host.bytes = std::make_shared<const std::vector<std::uint8_t>>(std::move(bytes));
}

const HostContent& MemoryModel::host_block(HostBlockId host) const {
  LS_CHECK(index_of(host) >= 0 && index_of(host) < num_host_blocks(), "host block {} of {}",
           index_of(host), num_host_blocks());
  return host_blocks_[host];
}

std::int64_t MemoryModel::host_bytes_of(std::int32_t group) const {
  return groups_[group].host_bytes;
}

// The run with the largest offset that is not above the byte.
std::int32_t MemoryModel::host_layer_at(std::int32_t group, std::int64_t byte) const {
  const Group& of = groups_[group];
  LS_CHECK(byte >= 0 && byte < of.host_bytes, "byte {} of {}", byte, of.host_bytes);
  const auto after = std::ranges::upper_bound(of.host_runs, byte, {}, &HostRun::offset);
  return of.first_layer + std::prev(after)->layer;
}

// Marks every page in which the group's layers use bytes of the block as written.
void MemoryModel::touch_layers(std::int32_t group, BlockId id) {
  for (const ModelLayer& layer : layers_of(group))
    for (const BlockRegion& region : layer.memory.regions) {
      const std::int64_t begin = region.begin + index_of(id) * region.block_stride;
      const auto [tensor, page] = place_of(layer, begin).page;
      tensors_[tensor].known[page] = 0;
      touch(tensor, page);
    }
}

// Ends the meaning of a host block. Bytes that the new content does not reach stay, as in memory.
HostContent& MemoryModel::begin_host_write(std::int32_t group, HostBlockId host) {
  LS_CHECK(index_of(host) >= 0 && index_of(host) < num_host_blocks(), "host block {} of {}",
           index_of(host), num_host_blocks());
  HostContent& target = host_blocks_[host];
  for (const SlotContent& slot : target.slots) release(slot.writer);
  release(target.state.writer);
  target.slots.clear();
  target.state = {};
  target.group = group;
  written_hosts_.push_back(host);
  return target;
}

// The block's bytes in the order of a host block. Consecutive runs in one page share its image.
std::vector<std::uint8_t> MemoryModel::block_bytes(std::int32_t group, BlockId block) const {
  const Group& of = groups_[group];
  std::vector<std::uint8_t> bytes;
  bytes.reserve(of.host_bytes);
  ModelPage drawn{-1, -1};
  std::vector<std::uint8_t> image;
  for (const HostRun& run : of.host_runs) {
    const ModelLayer& layer = layers_[of.first_layer + run.layer];
    const PagedByte at = place_of(layer, run.begin + index_of(block) * layer.block_stride());
    if (at.page != drawn) image = page_image(at.page);
    drawn = at.page;
    const auto first = image.begin() + at.byte;
    bytes.insert(bytes.end(), first, first + (run.end - run.begin));
  }
  return bytes;
}

// Slots and states keep their writers. An open state has no bytes yet: settle_store() adds them.
std::optional<std::string> MemoryModel::store(std::int32_t group, BlockId id, HostBlockId host) {
  const BlockContent& source = block(id);
  if (source.group != group)
    return fmt::format("block {} is stored for group {}, but holds {}", index_of(id), group,
                       source.group < 0 ? "nothing" : fmt::format("group {}'s", source.group));
  HostContent& target = begin_host_write(group, host);
  target.slots = source.slots;
  target.state = source.state;
  for (const SlotContent& slot : target.slots) use(slot.writer);
  use(target.state.writer);
  // A state of real numbers has no bytes until the check of this step has settled it.
  const bool to_be_settled = source.state.writer != kNobody && source.state.words == nullptr;
  if (!to_be_settled) settle_store(group, id, host);
  return std::nullopt;
}

// Overwrites the head of the host block; bytes past the group's stay.
void MemoryModel::settle_store(std::int32_t group, BlockId id, HostBlockId host) {
  HostContent& target = host_blocks_[host];
  const std::vector<std::uint8_t> own = block_bytes(group, id);
  std::vector<std::uint8_t> bytes = *target.bytes;
  std::ranges::copy(own, bytes.begin());
  target.state.words = block(id).state.words;
  set_host_bytes(target, std::move(bytes));
}

// The block takes over slots and state. It keeps the loaded bytes only if they are more than that:
// rows that were not written, or bytes between rows.
std::optional<std::string> MemoryModel::load(std::int32_t group, BlockId id, HostBlockId host) {
  const HostContent& source = host_block(host);
  if (id == kNullBlock) return "a load writes to the null block";
  if (source.group != host_owner(group))
    return fmt::format("host block {} is loaded for group {}, but holds {}", index_of(host), group,
                       source.group < 0 ? "nothing" : fmt::format("group {}'s", source.group));
  BlockContent& target = blocks_[id];
  if (target.group != -1 && target.group != group)
    return fmt::format("block {} is loaded for group {} while it belongs to group {}", index_of(id),
                       group, target.group);
  // Before forget_content(), which may drop the last reference of the same writer.
  for (const SlotContent& slot : source.slots) use(slot.writer);
  use(source.state.writer);
  forget_content(target);
  target.group = group;
  target.zeroed = false;
  target.slots = source.slots;
  target.state = source.state;
  // If every slot was written, rows alone give the bytes; otherwise the block keeps the loaded
  // ones.
  const bool whole = is_state_group(group)
                         ? source.state.writer != kNobody
                         : !source.slots.empty() &&
                               std::ranges::count(source.slots, kNobody, &SlotContent::writer) == 0;
  if (!whole) target.loaded = source.bytes;
  touch_layers(group, id);
  return std::nullopt;
}

// The target may belong to no group yet; the source must be the group's. Bytes past num_rows rows
// are copied but do not count as written, so reading them is an error.
std::optional<std::string> MemoryModel::copy_block(std::int32_t group, BlockId source,
                                                   BlockId target, std::int64_t num_rows) {
  const BlockContent& from = block(source);
  if (target == kNullBlock) return "a block is copied to the null block";
  for (const BlockId id : {source, target})
    if (const std::int32_t owner = block(id).group; owner != group && (owner != -1 || id == source))
      return fmt::format("block {} is copied to block {} for group {}, but block {} holds {}",
                         index_of(source), index_of(target), group, index_of(id),
                         owner < 0 ? "nothing" : fmt::format("group {}'s", owner));
  if (is_state_group(group)) {
    if (from.state.writer == kNobody)
      return fmt::format("block {} is copied to block {}, but holds no state", index_of(source),
                         index_of(target));
    set_state(group, target, from.state);
    return std::nullopt;
  }
  // Without a host tier the runs do not exist yet.
  if (groups_[group].host_runs.empty()) add_host_runs(groups_[group]);
  auto bytes = std::make_shared<const std::vector<std::uint8_t>>(block_bytes(group, source));
  std::vector<SlotContent> slots = from.slots;
  const std::int64_t size = block_size(group);
  for (std::int64_t row = 0; row < std::ssize(slots); ++row)
    if (row % size >= num_rows) slots[row] = {};
  for (const SlotContent& slot : slots) use(slot.writer);
  BlockContent& to = blocks_[target];
  forget_content(to);
  to.group = group;
  to.zeroed = false;
  to.slots = std::move(slots);
  to.loaded = std::move(bytes);
  touch_layers(group, target);
  return std::nullopt;
}

// The rows of `contents` overwrite what was sent: the peer's rows must be those of the same tokens.
void MemoryModel::fill_host_block(std::int32_t group, HostBlockId host, std::int64_t first_position,
                                  std::span<const ContentId> contents, WriterId writer,
                                  std::span<const std::uint8_t> sent) {
  const Group& of = groups_[group];
  LS_CHECK(!of.states && std::ssize(contents) <= of.block_size, "{} rows for a block of {}",
           contents.size(), of.block_size);
  LS_CHECK(sent.empty() || std::ssize(sent) == of.host_bytes, "{} bytes are sent, a block has {}",
           sent.size(), of.host_bytes);
  std::vector<std::uint8_t> bytes = *host_block(host).bytes;
  std::ranges::copy(sent, bytes.begin());
  for (const HostRun& run : of.host_runs) draw_rows(of, run, contents, bytes);
  HostContent& target = begin_host_write(group, host);
  target.slots.resize(of.block_size);
  for (std::size_t i = 0; i < contents.size(); ++i) {
    use(writer);
    target.slots[i] = {
        .content = contents[i],
        .writer = writer,
        .position = static_cast<std::int32_t>(first_position) + static_cast<std::int32_t>(i),
        .step = step_};
  }
  set_host_bytes(target, std::move(bytes));
}

// A host block with other content starts without rows. Rows mirrored earlier stay.
void MemoryModel::mirror_rows(std::int32_t resident, BlockId block, HostBlockId host,
                              std::int64_t first_row, std::int64_t num_rows) {
  HostContent& target = host_blocks_[host];
  const Group& of = groups_[resident];
  // A host block that held something else starts without rows. It is listed once per step.
  if (target.group != source_)
    begin_host_write(source_, host).slots.resize(of.block_size);
  else if (std::ranges::find(written_hosts_, host) == written_hosts_.end())
    written_hosts_.push_back(host);
  std::vector<ContentId> contents;
  for (std::int64_t row = first_row; row < first_row + num_rows; ++row) {
    const SlotContent* from = slot_content(resident, block, row);
    LS_CHECK(from != nullptr, "row {} of block {} is mirrored, and not written", row,
             index_of(block));
    contents.push_back(from->content);
    use(from->writer);
    release(target.slots[row].writer);
    target.slots[row] = *from;
  }
  std::vector<std::uint8_t> bytes = *target.bytes;
  for (const HostRun& run : of.host_runs) draw_rows(of, run, contents, bytes, first_row);
  set_host_bytes(target, std::move(bytes));
}

// Writes the rows of one run, which holds whole pieces of rows of one layer. `contents` begin at
// row `first_row` of the block.
void MemoryModel::draw_rows(const Group& group, const HostRun& run,
                            std::span<const ContentId> contents, std::span<std::uint8_t> bytes,
                            std::int64_t first_row) const {
  const ModelLayer& layer = layers_[group.first_layer + run.layer];
  std::vector<std::uint8_t> drawn(static_cast<std::size_t>(layer.row_size_bytes));
  for (std::int64_t kv = 0; kv < layer.num_kv; ++kv)
    for (std::int64_t i = 0; token_of_row(layer.tokens_per_state, i) < std::ssize(contents); ++i)
      for (std::int64_t head = 0; head < layer.num_kv_heads; ++head) {
        const std::int64_t row = first_row + i;
        const ContentId content = row_content(
            layer.tokens_per_state, contents[token_of_row(layer.tokens_per_state, i)], row);
        const auto coord = static_cast<std::size_t>(kv * layer.num_kv_heads + head);
        for (const RowPiece& piece : row_pieces(layer, kNullBlock, kv, row, head)) {
          // Pieces of a row may be in several runs: data and scales.
          if (piece.offset < run.begin || piece.offset >= run.end) continue;
          draw_row(layer, content, coord, drawn);
          std::ranges::copy_n(drawn.begin() + piece.in_row, piece.size_bytes,
                              bytes.begin() + run.offset + piece.offset - run.begin);
        }
      }
}

// Writes the bytes of a block that a load brought. draw_layer() then writes newer rows over them.
void MemoryModel::draw_loaded(ModelPage page, const ModelLayer& layer, BlockId block,
                              std::span<const std::uint8_t> loaded,
                              std::span<std::uint8_t> image) const {
  const Group& group = groups_[layer.group];
  for (const HostRun& run : group.host_runs) {
    if (group.first_layer + run.layer != layer.index) continue;
    const std::int64_t begin = run.begin + index_of(block) * layer.block_stride() - begin_of(page);
    if (begin < 0 || begin >= std::ssize(image)) continue;
    const auto size = static_cast<std::size_t>(run.end - run.begin);
    std::ranges::copy(loaded.subspan(run.offset, size), image.begin() + begin);
  }
}

// States: rules (2) and (15) of sim/protocol/backend.h.

std::span<const std::uint8_t> bytes_of_state(const std::vector<std::uint64_t>& words,
                                             const ModelLayer& layer, std::size_t state) {
  const auto* first =
      reinterpret_cast<const std::uint8_t*>(words.data() + layer.state_first_word[state]);
  return {first, static_cast<std::size_t>(layer.state_bytes(state))};
}

std::span<std::uint8_t> bytes_of_state(std::vector<std::uint64_t>& words, const ModelLayer& layer,
                                       std::size_t state) {
  const auto bytes = bytes_of_state(std::as_const(words), layer, state);
  return {const_cast<std::uint8_t*>(bytes.data()), bytes.size()};
}

// Each state tensor begins at a word, whatever its size in bytes.
Result<void> MemoryModel::add_states(const KVCacheSpec& spec, ModelLayer& layer,
                                     Group& group) const {
  for (std::size_t s = 0; s < layer.num_states(); ++s) {
    layer.state_first_word.push_back(group.state_words);
    group.state_words += num_words(layer.state_bytes(s));
    if (numbers_ == Numbers::words) continue;
    auto of = state_numbers(spec, s, layer.share);
    if (!of) return fail("numbers: {}: {}", layer.name, of.error().message);
    layer.state_numbers.push_back(*of);
  }
  return {};
}

// Words are copied as they are. Of real numbers, the inputs of convolutions come from another block
// and offset: after rejected drafts the worker reads them from the last accepted position.
std::optional<std::string> MemoryModel::copy_state(std::int32_t group, BlockId source,
                                                   BlockId target, BlockId conv_source,
                                                   std::int64_t conv_offset) {
  LS_CHECK(is_state_group(group), "group {}", group);
  const BlockContent& from = block(source);
  if (from.group != group || from.state.writer == kNobody)
    return fmt::format("a state is copied from block {}, which holds none", index_of(source));
  if (numbers_ == Numbers::words) {
    set_state(group, target, from.state);
    return std::nullopt;
  }
  const BlockContent& inputs_from = block(conv_source);
  if (inputs_from.group != group || inputs_from.state.words == nullptr)
    return fmt::format("the inputs of convolutions are copied from block {}, which holds none",
                       index_of(conv_source));
  StateContent copied = from.state;
  std::vector<std::uint64_t> words = *from.state.words;
  const std::vector<std::uint64_t>& inputs = *inputs_from.state.words;
  const std::vector<std::uint64_t> before = state_words(group, target);
  for (const ModelLayer& layer : layers_of(group))
    for (std::size_t s = 0; s < layer.state_numbers.size(); ++s) {
      const StateNumbers& of = layer.state_numbers[s];
      if (of.rule != StateRule::convolution) continue;
      const auto moved = bytes_of_state(inputs, layer, s).subspan(conv_offset * of.row_bytes());
      const auto rows = bytes_of_state(words, layer, s);
      std::ranges::copy(bytes_of_state(before, layer, s), rows.begin());
      std::ranges::copy(moved, rows.begin());
    }
  copied.words = std::make_shared<std::vector<std::uint64_t>>(std::move(words));
  set_state(group, target, std::move(copied));
  return std::nullopt;
}

// Without a settled state the words are read from the page's image: poison, zeros or loaded bytes.
std::vector<std::uint64_t> MemoryModel::state_words(std::int32_t group, BlockId id) const {
  const BlockContent& content = block(id);
  if (content.group == group && content.state.words != nullptr) return *content.state.words;
  std::vector<std::uint64_t> words(static_cast<std::size_t>(groups_[group].state_words));
  std::int32_t drawn = -1;  // layers may share a page
  std::vector<std::uint8_t> image;
  for (const ModelLayer& layer : layers_of(group)) {
    if (layer.memory.tensor != drawn) image = page_image({layer.memory.tensor, index_of(id)});
    drawn = layer.memory.tensor;
    for (std::size_t s = 0; s < layer.num_states(); ++s) {
      const auto bytes = bytes_of_state(words, layer, s);
      std::memcpy(bytes.data(), image.data() + layer.state_offset(s), bytes.size());
    }
  }
  return words;
}

void MemoryModel::settle_state(std::int32_t group, BlockId id, StateWords words) {
  BlockContent& content = blocks_[id];
  LS_CHECK(content.group == group && content.state.writer != kNobody,
           "block {} has no state of group {} to settle", index_of(id), group);
  content.state.words = std::move(words);
}

// Advances the words of all layers' states by the tokens, in order. A page with the states of one
// layer is summed tile by tile, while its words are in the CPU's caches.
void MemoryModel::advance_words(std::int32_t group, BlockId id, std::span<const ContentId> contents,
                                std::vector<std::uint64_t>& words) {
  constexpr std::size_t kMinWordsForThreads = std::size_t{1} << 20;  // 1 ms of one thread
  constexpr std::int64_t kTileWords = 4096;
  const std::span<const ModelLayer> layers = layers_of(group);
  const BlockContent& content = blocks_[id];
  const auto advance = [&](std::int64_t number) {
    const ModelLayer& layer = layers[static_cast<std::size_t>(number)];
    Tensor& tensor = tensors_[layer.memory.tensor];
    const auto is_own = [&](std::int32_t other) { return layers_[other].group == group; };
    const bool is_summed = layer.words_aligned && content.loaded == nullptr && !layer.is_spread() &&
                           tensor.regions_per_page == 1 &&
                           std::ranges::count_if(tensor.layers, is_own) == 1;
    PageSum sum;
    std::int64_t end = 0;  // words of the page in `sum`
    const auto add = [&](std::span<const std::uint64_t> next) {
      if (is_summed)
        sum += sum_of_terms(next, std::span(word_keys_).subspan(static_cast<std::size_t>(end)));
      end += std::ssize(next);
    };
    const std::uint64_t poison = poison_key(content.base, layer.memory.tensor, index_of(id));
    const auto add_poison = [&](std::int64_t last_byte) {
      std::vector<std::uint64_t> gap;
      for (std::int64_t i = end; is_summed && i < last_byte / 8; ++i)
        gap.push_back(poison_word(poison, static_cast<std::uint64_t>(i)));
      add(gap);
    };
    for (std::size_t s = 0; s < layer.num_states(); ++s) {
      add_poison(layer.state_offset(s));
      LS_CHECK(!is_summed || end == layer.state_offset(s) / 8, "states of {} overlap", layer.name);
      const std::int64_t count = num_words(layer.state_bytes(s));
      const std::uint64_t coord =
          coordinate(layer.share.layer, kPartState + static_cast<int>(s), layer.share.first_head);
      for (std::int64_t first = 0; first < count; first += kTileWords) {
        const auto tile = std::span(words).subspan(layer.state_first_word[s] + first,
                                                   std::min(kTileWords, count - first));
        advance_state_words(contents, coord, static_cast<std::uint64_t>(first), tile);
        add(tile);
      }
    }
    add_poison(tensor.page_size_bytes);
    if (!is_summed) return;
    tensor.sums[index_of(id)] = sum;
    tensor.known[index_of(id)] = 1;
  };
  const bool is_long = contents.size() * words.size() > kMinWordsForThreads;
  for_each_in_parallel(std::ssize(layers), is_long ? num_threads_ : 1, advance);
}

// The zero state or the source's. Words that no other block shares are advanced in place, since
// they may be many megabytes; others are copied.
std::shared_ptr<std::vector<std::uint64_t>> MemoryModel::take_words(std::int32_t group,
                                                                    BlockId source,
                                                                    BlockId target) const {
  using Words = std::vector<std::uint64_t>;
  if (source == kNullBlock)
    return std::make_shared<Words>(static_cast<std::size_t>(groups_[group].state_words));
  const StateWords& held = block(source).state.words;
  if (source == target && held.use_count() == 1) return std::const_pointer_cast<Words>(held);
  return std::make_shared<Words>(*held);
}

// Checks that the worker continues the right state: the same group, token count and prefix. Real
// numbers stay open until settle_state(), since the model has them only within a tolerance.
std::optional<std::string> MemoryModel::advance_state(std::int32_t group, BlockId source,
                                                      BlockId target, std::int64_t first_position,
                                                      ContentId before,
                                                      std::span<const ContentId> contents,
                                                      WriterId writer) {
  const Group& of = groups_[group];
  LS_CHECK(of.states && !contents.empty(), "group {}, {} tokens", group, contents.size());
  if (target == kNullBlock) return "a state is written to the null block";
  if (const std::int32_t owner = blocks_[target].group; owner != -1 && owner != group)
    return fmt::format("a state is written to block {}, which belongs to group {}",
                       index_of(target), owner);
  if (source != kNullBlock) {
    const BlockContent& from = block(source);
    if (from.group != group || from.state.writer == kNobody)
      return fmt::format("a state after {} tokens is read from block {}, which holds none",
                         first_position, index_of(source));
    if (from.state.num_tokens != first_position || from.state.content != before)
      return fmt::format(
          "a state after {} tokens is read from block {}, which holds {}'s after {} tokens",
          first_position, index_of(source), writer_name(from.state.writer), from.state.num_tokens);
  } else if (first_position != 0) {
    return fmt::format("a state after {} tokens is read from the null block", first_position);
  }
  StateContent now{.content = contents.back(),
                   .num_tokens = first_position + static_cast<std::int64_t>(contents.size()),
                   .writer = writer,
                   .step = step_,
                   .words = nullptr};
  // Real numbers stay null: settle_state() sets them after the check.
  std::shared_ptr<std::vector<std::uint64_t>> words;
  if (numbers_ == Numbers::words) now.words = words = take_words(group, source, target);
  set_state(group, target, std::move(now));
  if (words != nullptr) advance_words(group, target, contents, *words);
  return std::nullopt;
}

// States are whole pages, so their sums are computed when needed.
void MemoryModel::set_state(std::int32_t group, BlockId id, StateContent state) {
  BlockContent& block = blocks_[id];
  LS_CHECK(block.group == -1 || block.group == group, "block {} of group {} written for group {}",
           index_of(id), block.group, group);
  use(state.writer);
  release(block.state.writer);
  block.group = group;
  block.state = std::move(state);
  for (const ModelLayer& layer : layers_of(group)) {
    const std::int32_t tensor = layer.memory.tensor;
    tensors_[tensor].known[index_of(id)] = 0;
    touch(tensor, index_of(id));
  }
}

}  // namespace lockstep
