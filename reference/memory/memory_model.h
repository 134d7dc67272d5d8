// What every byte of the cache should hold, without storing pages: per block the group that owns
// it, per slot the content id of the token last written there, per state page the words of its
// state. The image of any page follows on demand, and the fingerprint of every page is kept up to
// date at the cost of the rows written.
//
// Invariants
// (1) A block's bytes are the result of the last poison, zeroing, row write or state update.
// (2) fingerprint(page) always equals the sum over page_image(page).
// (3) Memory depends on the plan (num_blocks, block sizes), live states and the host tier, never on
//     the number of steps.
// (4) States of real numbers are exact once the device has shown them: settle_state() stores them
//     after a check within tolerance (sim/check/comparer.h). Until then their pages have no
//     image.
// (5) Host pages: a block of the source group is a host block; the block of each resident
//     group in turn is a part of it. Rows of hot regions are written like any other.
// (6) A host block holds the bytes of the block stored there last, at the time of the store,
//     followed by its earlier bytes. Only host blocks keep bytes.
//
// Not checked here: whether the writes make sense (sim/step/program_builder.h) and whether device
// memory agrees (sim/check/comparer.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/result.h"
#include "reference/memory/content.h"
#include "reference/memory/numbers.h"
#include "reference/memory/state_numbers.h"
#include "reference/plan/memory_plan.h"
#include "reference/plan/rank_plan.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/token_rows.h"
#include "reference/types/view_types.h"

namespace lockstep {

// A page of a tensor: bytes [index * page_size, (index + 1) * page_size) of its raw buffer.
struct ModelPage {
  std::int32_t tensor = 0;
  std::int32_t index = 0;
  auto operator<=>(const ModelPage&) const = default;
};

// The writer of a row or state. Requests are named by writers, which live while any of their
// content is in the cache.
using WriterId = std::uint32_t;
inline constexpr WriterId kNobody = 0;

struct SlotContent {
  ContentId content = 0;
  WriterId writer = kNobody;  // kNobody: not written since the block's base
  std::int32_t position = 0;  // of the token in its request
  std::int64_t step = 0;
};

using StateWords = std::shared_ptr<const std::vector<std::uint64_t>>;

// One state page per layer of a group stands for the same prefix.
struct StateContent {
  ContentId content = 0;  // of the prefix of num_tokens tokens
  std::int64_t num_tokens = 0;
  WriterId writer = kNobody;  // kNobody: no state here
  std::int64_t step = 0;
  // The words of all layers' state tensors, one after the other; null: to be settled.
  StateWords words;
};

struct BlockContent {
  std::int32_t group = -1;  // owner of the rows or the state; -1: none since the last poison
  Unwritten base = Unwritten::fresh;
  bool zeroed = false;  // the bytes that the group uses were zeroed before any row was written
  // Token groups: [num_lanes, block_size], a token each, whatever rows it has; empty: none written.
  std::vector<SlotContent> slots;
  StateContent state;  // state groups
  // What a load brought when it was not all rows or a state, or a copy of a block: in place of
  // `base` where the group has its bytes. In the order of a host block.
  std::shared_ptr<const std::vector<std::uint8_t>> loaded;
};

struct HostContent {
  std::int32_t group = -1;         // owner of the block stored here; -1: none yet
  std::vector<SlotContent> slots;  // as in the block that was stored
  StateContent state;
  std::shared_ptr<const std::vector<std::uint8_t>> bytes;  // of the whole host block
  PageSum sum;                                             // of `bytes`
};

// What belongs at one byte of a page.
struct ByteOwner {
  enum class What : std::uint8_t { row, state, unused };
  What what = What::unused;
  BlockId block{};
  std::int32_t group = -1;
  std::int32_t layer = -1;        // of the plan, group by group
  std::int64_t slot_offset = -1;  // inside the block; of compressed rows: of a row's last token
  std::int64_t part = -1;         // kPartK, kPartV, kPartState + s
  std::int64_t head = -1;
  std::int64_t byte_in_row = -1;  // or in the state tensor
};

// One layer of the plan, with what its rows need.
struct ModelLayer {
  std::int32_t index = 0;  // of the plan, group by group
  std::int32_t group = 0;
  // Whose rows: 0 the model's, 1 + m those of the drafter's module m, which are written apart.
  std::int32_t lane = 0;
  std::string name;
  DType dtype = DType::bf16;
  WordShape words;                           // of rows
  LatentFormat latent = LatentFormat::none;  // of rows of numbers in a layout of bytes
  std::int64_t head_size = 0;  // elements of a row that attention reads; a scale may follow them
  CacheKind kind{};
  LayerMemory memory;       // without parts: its rows are those of resident layers
  std::int64_t num_kv = 0;  // rows of a token: 2 (K, V), 1 (MLA, hidden states), 0 (states)
  std::int64_t num_kv_heads = 0;
  std::int64_t rows_per_block = 0;
  LayerShare share;  // position of the layer and its heads in the whole model
  std::int64_t row_size_bytes = 0;
  // Bytes of elements in a row with a separate scale area, or in a row generated as a whole; 0: its
  // words are contiguous.
  std::int64_t data_bytes = 0;
  bool is_dealt_out = true;                    // its tokens, over the ranks of a context
  TokensPerState tokens_per_state;             // its rows and their tokens: token_rows.h
  std::int64_t num_sinks = 0;                  // rows of the model's own in front of all tokens
  bool words_aligned = false;                  // every row starts and ends on a word of its page
  std::vector<std::uint64_t> coords;           // [num_kv][num_kv_heads]
  std::vector<std::int64_t> state_first_word;  // of each state tensor in StateContent::words
  std::vector<StateNumbers> state_numbers;     // of each; empty: states are words

  std::size_t num_states() const { return num_kv == 0 ? memory.parts.size() : 0; }
  // In its page.
  std::int64_t state_offset(std::size_t state) const {
    return memory.parts[state].offset - memory.begin;
  }
  std::int64_t state_bytes(std::size_t state) const { return bytes_of(memory.parts[state]); }
  std::int64_t block_stride() const { return memory.parts.front().block_stride; }
  bool is_spread() const { return memory.last_tensor != memory.tensor; }
};

// The bytes of one of a layer's states within the words of its group.
std::span<const std::uint8_t> bytes_of_state(const std::vector<std::uint64_t>& words,
                                             const ModelLayer& layer, std::size_t state);
std::span<std::uint8_t> bytes_of_state(std::vector<std::uint64_t>& words, const ModelLayer& layer,
                                       std::size_t state);

class MemoryModel {
 public:
  // Refused: plans that layout_of() refuses, caches that keep nothing (encoder_only), or that
  // have no whole number of rows in a block, and two groups with sinks. `shares`: of the layers,
  // where the plan is a rank's (see rank_plan.h); none: the plan is the whole model's.
  static Result<MemoryModel> create(const KVCacheConfig& given, AttentionBackend backend,
                                    CacheLayout layout, LayoutRule rule,
                                    std::int64_t num_host_blocks = 0,
                                    Numbers numbers = Numbers::words,
                                    std::span<const LayerShare> shares = {});

  // Forgets which pages were written; `step` is written into everything from now on.
  void begin_step(std::int64_t step);

  // Names a writer; stays valid until retire_writer() and nothing of it is in the cache.
  WriterId add_writer(std::string_view name);
  void retire_writer(WriterId writer);
  std::string_view writer_name(WriterId writer) const;

  void poison(BlockId block, Unwritten kind);
  void zero(std::int32_t group, BlockId block);
  // Copies the state of `source` to `target`. Returns an error message if there is none. Real
  // numbers: inputs of convolutions come from rows [conv_offset, ...) of `conv_source`.
  std::optional<std::string> copy_state(std::int32_t group, BlockId source, BlockId target,
                                        BlockId conv_source, std::int64_t conv_offset);
  // Copies all bytes of the group in `source`, rows or a state, to `target`. Only the first
  // num_rows rows count as written there. Returns an error message if one of the blocks is not the
  // group's.
  std::optional<std::string> copy_block(std::int32_t group, BlockId source, BlockId target,
                                        std::int64_t num_rows);
  // The rows that a token completes in every layer of the group and lane.
  // REQUIRES: the block is not the null block and belongs to the group or to none.
  void write_token(std::int32_t group, BlockId block, std::int64_t slot_offset, ContentId content,
                   WriterId writer, std::int64_t position, std::int32_t lane = 0);
  // Reads the state after first_position tokens (content `before`) from `source` (the null block:
  // the zero state), advances it by `contents` and stores it in `target`. Returns an error message
  // if `source` holds anything else.
  std::optional<std::string> advance_state(std::int32_t group, BlockId source, BlockId target,
                                           std::int64_t first_position, ContentId before,
                                           std::span<const ContentId> contents, WriterId writer);
  // The words at the place of the group's states in a block, states or not.
  std::vector<std::uint64_t> state_words(std::int32_t group, BlockId block) const;
  // The words of a state that advance_state() has left to be settled.
  void settle_state(std::int32_t group, BlockId block, StateWords words);

  // The host tier. Returns an error message, without a change, if the block or host block is not
  // the group's.
  std::optional<std::string> load(std::int32_t group, BlockId block, HostBlockId host);
  std::optional<std::string> store(std::int32_t group, BlockId block, HostBlockId host);
  // After settle_state(): the bytes of a state that was stored before it was settled.
  void settle_store(std::int32_t group, BlockId block, HostBlockId host);
  // Filled from outside the engine: the rows of tokens [first_position, ...), and of other bytes
  // of the group what `sent` has, or what was there where nothing is sent.
  // REQUIRES: a group with rows, a block's worth of contents at most; nothing or a block is sent.
  void fill_host_block(std::int32_t group, HostBlockId host, std::int64_t first_position,
                       std::span<const ContentId> contents, WriterId writer,
                       std::span<const std::uint8_t> sent = {});
  // Rows [first_row, first_row + num_rows) of a resident block are now in the host block, too.
  // REQUIRES: they are written.
  void mirror_rows(std::int32_t resident, BlockId block, HostBlockId host, std::int64_t first_row,
                   std::int64_t num_rows);
  const HostContent& host_block(HostBlockId host) const;
  std::int64_t num_host_blocks() const { return std::ssize(host_blocks_); }
  std::int64_t host_block_bytes() const { return host_block_bytes_; }
  std::int64_t host_bytes_of(std::int32_t group) const;  // that a block of the group takes
  // The layer of the plan whose byte this is in a host block. REQUIRES: below host_bytes_of(group).
  std::int32_t host_layer_at(std::int32_t group, std::int64_t byte) const;
  // Written since begin_step(), in the order of the writes.
  std::span<const HostBlockId> written_hosts() const { return written_hosts_; }

  // Pages that a byte was written to since begin_step(), ascending.
  std::span<const ModelPage> written_pages();
  // The pages that hold a block's bytes, appended to `pages`.
  void pages_of(BlockId block, std::vector<ModelPage>& pages) const;

  PageSum fingerprint(ModelPage page);
  std::vector<std::uint8_t> page_image(ModelPage page) const;
  ByteOwner owner_of(ModelPage page, std::int64_t byte) const;
  // The page that a layer's byte of the plan lies in, and its byte there.
  struct PagedByte {
    ModelPage page;
    std::int64_t byte = 0;
  };
  PagedByte place_of(const ModelLayer& layer, std::int64_t address) const {
    const std::int64_t size = tensors_[layer.memory.tensor].page_size_bytes;
    const std::int64_t in_tensors = address - layer.memory.begin;
    std::int64_t page = in_tensors / size;
    PagedByte at{{layer.memory.tensor, 0}, in_tensors - page * size};
    if (layer.is_spread()) {  // over equally large tensors
      at.page.tensor += static_cast<std::int32_t>(page / num_blocks_);
      page %= num_blocks_;
    }
    at.page.index = static_cast<std::int32_t>(page);
    return at;
  }
  // The block that holds the page's byte (another than the page's index where K and V are apart).
  BlockId block_at(ModelPage page, std::int64_t byte) const;

  const BlockContent& block(BlockId id) const;
  // The slot's content, or null when it was not written since the block's base.
  const SlotContent* slot_content(std::int32_t group, BlockId block, std::int64_t offset,
                                  std::int32_t lane = 0) const;

  std::int64_t num_blocks() const { return num_blocks_; }
  std::int32_t num_tensors() const { return static_cast<std::int32_t>(tensors_.size()); }
  std::int64_t page_size_bytes(std::int32_t tensor) const;
  std::int32_t num_groups() const { return static_cast<std::int32_t>(groups_.size()); }
  // Tokens in a block of the group.
  std::int64_t block_size(std::int32_t group) const;
  // One block a request, which its tokens go round.
  bool is_ring_group(std::int32_t group) const { return groups_[group].is_ring; }
  // Host pages: blocks of the host pool, which the source's table names; pages that are temporarily
  // on the device; regions of read rows.
  bool is_source_group(std::int32_t group) const { return group == source_; }
  bool is_resident_group(std::int32_t group) const { return groups_[group].is_resident; }
  bool is_hot_group(std::int32_t group) const { return groups_[group].is_hot; }
  std::int32_t source_group() const { return source_; }  // -1: none
  // Whether the ranks of a context keep tokens of their own in the group's blocks.
  bool is_dealt_out_group(std::int32_t group) const { return groups_[group].is_dealt_out; }
  // Rows of requests' encoders, not of their tokens.
  bool is_encoder_group(std::int32_t group) const { return groups_[group].is_encoder; }
  // Rule (22): writes the rows of sinks, once. Returns an error message if one of their blocks
  // holds anything else.
  std::optional<std::string> write_sinks();
  // Whether sinks lie in the block.
  bool holds_sinks(BlockId block) const;
  bool is_state_group(std::int32_t group) const;
  bool has_real_states() const { return numbers_ == Numbers::real; }
  std::span<const ModelLayer> layers() const { return layers_; }
  std::span<const ModelLayer> layers_of(std::int32_t group) const;

 private:
  // Where K and V of a tensor are kept apart a page is two regions of two blocks, otherwise one.
  struct Tensor {
    std::int64_t begin = 0;  // byte of the plan
    std::int64_t page_size_bytes = 0;
    std::int64_t regions_per_page = 1;
    std::vector<std::int32_t> layers;       // that lie in it
    std::vector<PageSum> sums;              // [num_blocks]
    std::vector<std::uint8_t> known;        // whether the sum is up to date
    std::vector<std::uint32_t> written_in;  // epoch of the last write
  };
  // Bytes of a block of a group that lie in one piece, for block 0 and in a host block.
  struct HostRun {
    std::int32_t layer = 0;           // of the group
    std::int64_t begin = 0, end = 0;  // bytes of the plan
    std::int64_t offset = 0;
  };
  struct Group {
    bool states = false;
    bool is_ring = false;
    bool is_encoder = false;
    bool is_resident = false;
    bool is_hot = false;
    bool is_dealt_out = true;
    std::int64_t num_sinks = 0;
    bool has_sinks = false;
    std::int64_t block_size = 0;
    std::int32_t first_layer = 0;
    std::int32_t num_layers = 0;
    std::int64_t state_words = 0;    // of all layers
    std::vector<HostRun> host_runs;  // in the order of the offsets
    std::int64_t host_bytes = 0;
  };
  struct Writer {
    std::string name;
    std::int64_t uses = 0;
    bool live = false;
  };

  MemoryModel() = default;
  Result<void> add_layers(const KVCacheConfig& plan, const MemoryPlan& memory,
                          std::span<const LayerShare> shares);
  LayerShare resident_share(const std::string& hot_layer) const;
  Result<void> add_states(const KVCacheSpec& spec, ModelLayer& layer, Group& group) const;
  void set_alignment();
  void touch(std::int32_t tensor, std::int64_t page);
  void invalidate(BlockId block);
  void touch_layers(std::int32_t group, BlockId block);
  void forget_content(BlockContent& block);
  void use(WriterId writer) { ++writers_[writer].uses; }
  void release(WriterId writer);
  void write_row(const ModelLayer& layer, const BlockContent& content, BlockId block,
                 std::int64_t slot_offset, const SlotContent& old, ContentId now);
  void set_state(std::int32_t group, BlockId block, StateContent state);
  void advance_words(std::int32_t group, std::span<const ContentId> contents,
                     std::vector<std::uint64_t>& words) const;

  void add_host_runs(Group& group);
  void add_source_runs();
  // Whose content a host block with a block of the group has.
  std::int32_t host_owner(std::int32_t group) const {
    return groups_[group].is_resident ? source_ : group;
  }
  Result<void> add_host_blocks(std::int64_t count);
  HostContent& begin_host_write(std::int32_t group, HostBlockId host);
  static void set_host_bytes(HostContent& host, std::vector<std::uint8_t> bytes);
  std::vector<std::uint8_t> block_bytes(std::int32_t group, BlockId block) const;
  void draw_rows(const Group& group, const HostRun& run, std::span<const ContentId> contents,
                 std::span<std::uint8_t> bytes, std::int64_t first_row = 0) const;
  void draw_loaded(ModelPage page, const ModelLayer& layer, BlockId block,
                   std::span<const std::uint8_t> loaded, std::span<std::uint8_t> image) const;

  std::int64_t begin_of(ModelPage page) const {
    return tensors_[page.tensor].begin + page.index * tensors_[page.tensor].page_size_bytes;
  }
  std::int64_t region_block(const Tensor& tensor, std::int64_t region) const;
  // Writes every byte of the page. REQUIRES: image has its size.
  void draw_page(ModelPage page, std::span<std::uint8_t> image) const;
  void fill_base(ModelPage page, std::int64_t region_in_page, const BlockContent& content,
                 std::span<std::uint8_t> image) const;
  void draw_layer(ModelPage page, const ModelLayer& layer, BlockId block,
                  const BlockContent& content, std::span<std::uint8_t> image) const;
  void draw_state(const ModelLayer& layer, const BlockContent& content,
                  std::span<std::uint8_t> image) const;

  std::int64_t num_blocks_ = 0;
  std::int32_t num_lanes_ = 1;  // and one for each module of a drafter that the plan has
  std::int32_t source_ = -1;  // of the host pages; -1: there is none
  Numbers numbers_ = Numbers::words;
  std::int64_t step_ = 0;
  std::uint32_t epoch_ = 1;
  std::vector<Tensor> tensors_;
  std::vector<Group> groups_;
  std::vector<ModelLayer> layers_;
  IdVector<BlockId, BlockContent> blocks_;
  std::vector<Writer> writers_;  // [0]: no writer
  std::vector<WriterId> free_writers_;
  std::vector<ModelPage> written_;
  bool written_sorted_ = true;
  std::vector<WordKeys> word_keys_;  // of the longest page
  std::vector<std::uint8_t> image_;  // of the page that fingerprint() draws
  IdVector<HostBlockId, HostContent> host_blocks_;
  std::vector<HostBlockId> written_hosts_;
  std::int64_t host_block_bytes_ = 0;
};

}  // namespace lockstep
