#include "reference/memory/page_image.h"

#include <fmt/core.h>

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "reference/memory/row_words.h"
#include "reference/plan/page_size.h"

namespace lockstep {

// In pieces of kWordsAtOnce words, so that sum_of_terms() can use wide registers.
PageSum page_sum(std::span<const std::uint8_t> image, std::span<const WordKeys> keys) {
  PageSum sum;
  std::array<std::uint64_t, kWordsAtOnce> words;
  for (std::size_t first = 0; 8 * first < image.size(); first += kWordsAtOnce) {
    const auto piece =
        image.subspan(8 * first, std::min(8 * kWordsAtOnce, image.size() - 8 * first));
    const std::size_t count = (piece.size() + 7) / 8;
    words[count - 1] = 0;  // a truncated last word is padded with zeros
    std::memcpy(words.data(), piece.data(), piece.size());
    const auto whole = std::span(words).first(count);
    sum += first + count <= keys.size() ? sum_of_terms(whole, keys.subspan(first))
                                        : sum_of_terms(whole, first);
  }
  return sum;
}

// The shape of the row is computed once, then its words in pieces.
void draw_row(ContentId content, std::uint64_t coord, WordShape shape,
              std::span<std::uint8_t> row) {
  const std::uint64_t key = row_key(content, coord);
  shape = shape_of_row(key, shape);
  std::array<std::uint64_t, kWordsAtOnce> words;
  for (std::size_t first = 0; 8 * first < row.size(); first += kWordsAtOnce) {
    const auto piece = row.subspan(8 * first, std::min(8 * kWordsAtOnce, row.size() - 8 * first));
    fill_row_words(key, first, shape, std::span(words).first((piece.size() + 7) / 8));
    std::memcpy(piece.data(), words.data(), piece.size());
  }
}

// Latent rows have byte layouts of their own; all others consist of words.
void draw_row(const ModelLayer& layer, ContentId content, std::size_t coord,
              std::span<std::uint8_t> row) {
  if (layer.latent != LatentFormat::none)
    return draw_latent_row(row_key(content, layer.coords[coord]), layer.latent, row);
  draw_row(content, layer.coords[coord], layer.words, row);
}

// In order: scales per row, scales per group, int4, one scale per layer, and words without a scale.
WordShape row_words(Numbers numbers, const KVCacheSpec& spec, std::int64_t layer) {
  if (const StoredNumbers* own = numbers_by_largest(numbers, spec.kv_quant_mode))
    return {.by_largest = own, .scale_at = static_cast<std::uint64_t>(spec.head_size)};
  const StoredNumbers* groups = numbers_by_group(numbers, spec.kv_quant_mode, layer);
  if (groups != nullptr && !has_single_rows(spec))
    return {.by_group = groups, .scale_at = static_cast<std::uint64_t>(spec.head_size / 2)};
  if (numbers == Numbers::real && spec.kv_quant_mode == KVQuantMode::int4_per_token_head)
    return {.is_int4 = true, .scale_at = static_cast<std::uint64_t>(spec.head_size / 2)};
  if (const StoredNumbers* stored = stored_numbers(numbers, spec.dtype, layer))
    return {.stored = stored};
  return word_shape(spec.dtype);
}

// Tensors with K and V apart: K regions of all blocks come first, then V regions.
std::int64_t MemoryModel::region_block(const Tensor& tensor, std::int64_t region) const {
  return tensor.regions_per_page == 1 || region < num_blocks_ ? region : region - num_blocks_;
}

// The region that contains the byte, and its block.
BlockId MemoryModel::block_at(ModelPage page, std::int64_t byte) const {
  const Tensor& tensor = tensors_[page.tensor];
  const std::int64_t region = page.index * tensor.regions_per_page +
                              byte / (tensor.page_size_bytes / tensor.regions_per_page);
  return static_cast<BlockId>(region_block(tensor, region));
}

std::vector<std::uint8_t> MemoryModel::page_image(ModelPage page) const {
  std::vector<std::uint8_t> image(static_cast<std::size_t>(page_size_bytes(page.tensor)));
  draw_page(page, image);
  return image;
}

// Each region is filled for its own block: base first, then loaded bytes, then rows or states, as
// they were written over each other.
void MemoryModel::draw_page(ModelPage page, std::span<std::uint8_t> image) const {
  const Tensor& tensor = tensors_[page.tensor];
  LS_CHECK(tensor.page_size_bytes % tensor.regions_per_page == 0, "{} regions in {} bytes",
           tensor.regions_per_page, tensor.page_size_bytes);
  for (std::int64_t r = 0; r < tensor.regions_per_page; ++r) {
    const std::int64_t region = page.index * tensor.regions_per_page + r;
    const auto id = static_cast<BlockId>(region_block(tensor, region));
    const BlockContent& content = block(id);
    fill_base(page, r, content, image);
    for (const std::int32_t index : tensor.layers) {
      const ModelLayer& layer = layers_[index];
      if (layer.group != content.group) continue;
      if (content.loaded != nullptr) draw_loaded(page, layer, id, *content.loaded, image);
      if (is_state_group(layer.group))
        draw_state(layer, content, image);
      else
        draw_layer(page, layer, id, content, image);
    }
  }
}

// Words of poison are numbered over the whole page, so a region may begin or end inside a word.
// Whole words are written at once, the edges byte by byte.
void MemoryModel::fill_base(ModelPage page, std::int64_t region_in_page,
                            const BlockContent& content, std::span<std::uint8_t> image) const {
  const Tensor& tensor = tensors_[page.tensor];
  const std::int64_t size = tensor.page_size_bytes / tensor.regions_per_page;
  const std::uint64_t key = poison_key(content.base, page.tensor, page.index);
  const std::int64_t begin = region_in_page * size;
  const auto whole_words = [&](std::int64_t word, std::int64_t count) {
    std::uint8_t* at = image.data() + 8 * word;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint64_t now = poison_word(key, static_cast<std::uint64_t>(word + i));
      std::memcpy(at + 8 * i, &now, sizeof(now));
    }
  };
  const auto bytes = [&](std::int64_t byte, std::int64_t end) {
    for (; byte < end; ++byte)
      image[byte] = static_cast<std::uint8_t>(
          poison_word(key, static_cast<std::uint64_t>(byte / 8)) >> (8 * (byte % 8)));
  };
  const std::int64_t end = begin + size, first = (begin + 7) / 8, last = end / 8;
  // A region inside one word.
  if (first >= last) return bytes(begin, end);
  bytes(begin, 8 * first);
  whole_words(first, last - first);
  bytes(8 * last, end);
}

// Rows that were written, and zeros for other rows of a zeroed block. Rows whose page is another
// are skipped.
void MemoryModel::draw_layer(ModelPage page, const ModelLayer& layer, BlockId id,
                             const BlockContent& content, std::span<std::uint8_t> image) const {
  if (content.slots.empty() && !content.zeroed) return;
  const std::int64_t page_begin = begin_of(page);
  const auto is_here = [&](std::int64_t address) {
    return address >= page_begin && address < page_begin + std::ssize(image);
  };
  std::vector<std::uint8_t> drawn(static_cast<std::size_t>(layer.row_size_bytes));
  for (std::int64_t kv = 0; kv < layer.num_kv; ++kv) {
    // All rows of K, or of V, are in one page, unless heads have tensors of their own.
    if (!layer.is_spread() && !is_here(layer.memory.row_begin(id, kv, 0, 0))) continue;
    for (std::int64_t slot = 0; slot < layer.rows_per_block; ++slot) {
      const SlotContent* row =
          slot_content(layer.group, id, token_of_row(layer.tokens_per_state, slot), layer.lane);
      if (row == nullptr && !content.zeroed) continue;
      const ContentId of_row =
          row == nullptr ? 0 : row_content(layer.tokens_per_state, row->content, slot);
      for (std::int64_t head = 0; head < layer.num_kv_heads; ++head) {
        if (layer.is_spread() && !is_here(layer.memory.row_begin(id, kv, slot, head))) continue;
        const RowPieces pieces = row_pieces(layer, id, kv, slot, head);
        const auto bytes_of = [&](const RowPiece& piece) {
          return image.subspan(piece.offset - page_begin, piece.size_bytes);
        };
        const auto coord = static_cast<std::size_t>(kv * layer.num_kv_heads + head);
        if (row != nullptr && layer.data_bytes == 0) {
          draw_row(layer, of_row, coord, bytes_of(*pieces.begin()));
          continue;
        }
        // Rows in two pieces, and zeroed rows: through a buffer.
        std::fill(drawn.begin(), drawn.end(), std::uint8_t{0});
        if (row != nullptr) draw_row(layer, of_row, coord, drawn);
        for (const RowPiece& piece : pieces)
          std::copy_n(drawn.begin() + piece.in_row, piece.size_bytes, bytes_of(piece).begin());
      }
    }
  }
}

// A zeroed block without a state has zeros in the states' bytes only.
void MemoryModel::draw_state(const ModelLayer& layer, const BlockContent& content,
                             std::span<std::uint8_t> image) const {
  for (std::size_t s = 0; s < layer.num_states(); ++s) {
    const auto bytes = image.subspan(layer.state_offset(s), layer.state_bytes(s));
    if (content.state.writer == kNobody) {
      if (content.zeroed) std::memset(bytes.data(), 0, bytes.size());
      continue;
    }
    LS_CHECK(content.state.words != nullptr, "a state of {} is generated before it is settled",
             layer.name);
    std::memcpy(bytes.data(), content.state.words->data() + layer.state_first_word[s],
                bytes.size());
  }
}

// Tries the layers of the block's group: first their states, then rows near the byte. Padding and
// bytes of other groups' layers are `unused`.
ByteOwner MemoryModel::owner_of(ModelPage page, std::int64_t byte) const {
  const Tensor& tensor = tensors_[page.tensor];
  LS_CHECK(byte >= 0 && byte < tensor.page_size_bytes, "byte {} of a page of {}", byte,
           tensor.page_size_bytes);
  ByteOwner owner{.block = block_at(page, byte)};
  owner.group = block(owner.block).group;
  const std::int64_t target = begin_of(page) + byte;
  // At most one layer of the group has the byte: layers of a group do not overlap.
  for (const std::int32_t index : tensor.layers) {
    const ModelLayer& layer = layers_[index];
    if (layer.group != owner.group) continue;
    for (std::size_t s = 0; s < layer.num_states(); ++s) {
      const std::int64_t in_state = byte - layer.state_offset(s);
      if (in_state < 0 || in_state >= layer.state_bytes(s)) continue;
      owner.what = ByteOwner::What::state;
      owner.layer = index;
      owner.part = kPartState + static_cast<std::int64_t>(s);
      owner.byte_in_row = in_state;
      return owner;
    }
    // Every stride is positive, so the first and the last row enclose the others. Rows in areas are
    // not enclosed this way, so all of them are tried.
    const auto encloses = [&](std::int64_t kv, std::int64_t first_slot, std::int64_t last_slot) {
      const auto first = layer.memory.row_begin(owner.block, kv, first_slot, 0);
      const auto last = layer.memory.row_begin(owner.block, kv, last_slot, layer.num_kv_heads - 1);
      return layer.data_bytes > 0 || (target >= first && target < last + layer.row_size_bytes);
    };
    for (std::int64_t kv = 0; kv < layer.num_kv; ++kv) {
      if (!encloses(kv, 0, layer.rows_per_block - 1)) continue;
      for (std::int64_t slot = 0; slot < layer.rows_per_block; ++slot) {
        if (!encloses(kv, slot, slot)) continue;
        for (std::int64_t head = 0; head < layer.num_kv_heads; ++head)
          for (const RowPiece& piece : row_pieces(layer, owner.block, kv, slot, head)) {
            const std::int64_t in_piece = target - piece.offset;
            if (in_piece < 0 || in_piece >= piece.size_bytes) continue;
            owner.what = ByteOwner::What::row;
            owner.layer = index;
            owner.slot_offset = token_of_row(layer.tokens_per_state, slot);
            owner.part = kv;
            owner.head = head;
            owner.byte_in_row = piece.in_row + in_piece;
            return owner;
          }
      }
    }
  }
  return owner;
}

// True if the rows of a head are contiguous (HND), not those of a token.
static bool has_heads_outside(const ModelLayer& layer) {
  return layer.memory.parts.front().row_stride == layer.row_size_bytes;
}

// Areas need a dense block of the layer: rows of K back to back, then those of V, with nothing in
// between.
std::optional<std::string> why_no_areas(const ModelLayer& layer) {
  const PartRows& at = layer.memory.parts.front();
  const std::int64_t row = layer.row_size_bytes;
  if (layer.num_kv == 1 && at.heads == 1 && has_heads_outside(layer)) return std::nullopt;
  const std::int64_t from_k_to_v = layer.memory.parts.back().offset - at.offset;
  const std::int64_t next_head = at.heads > 1 ? at.head_stride : from_k_to_v;  // V follows K
  // Heads outside: each head's rows are contiguous, and the next head follows. Heads inside: a
  // token has all heads of K, then those of V.
  const bool is_dense = has_heads_outside(layer)
                            ? next_head == at.rows * row
                            : next_head == row && at.row_stride == 2 * at.heads * row;
  if (is_dense && from_k_to_v == at.heads * next_head) return std::nullopt;
  return fmt::format(
      "{}: its scales are in areas of a block that is dense in its layer, which this layout does "
      "not provide; choose LBNHC, LBHNC, BLNHC or BLHNC",
      layer.name);
}

// An area holds the data of all rows of K (or V) of a kernel block, then their scales. `before`
// counts the rows before this one in the area.
RowPieces row_pieces(const ModelLayer& layer, BlockId block, std::int64_t kv, std::int64_t slot,
                     std::int64_t head) {
  const std::int64_t row = layer.row_size_bytes;
  if (layer.data_bytes == 0)
    return RowPieces({layer.memory.row_begin(block, kv, slot, head), 0, row});
  const std::int64_t tokens = layer.memory.parts.front().rows, in_kernel_block = slot % tokens;
  const std::int64_t rows = tokens * layer.num_kv_heads;  // of K, and of V
  const std::int64_t before = has_heads_outside(layer)
                                  ? head * tokens + in_kernel_block
                                  : in_kernel_block * layer.num_kv_heads + head;
  const std::int64_t area =
      layer.memory.row_begin(block, 0, slot - in_kernel_block, 0) + kv * rows * row;
  const std::int64_t data = layer.data_bytes, scales = row - data;
  return RowPieces({area + before * data, 0, data},
                   {area + rows * data + before * scales, data, scales});
}

std::int64_t rest_of_piece(const ModelLayer& layer, std::int64_t in_row) {
  return (in_row < layer.data_bytes ? layer.data_bytes : layer.row_size_bytes) - in_row;
}

}  // namespace lockstep
