// The expected content of every byte of the cache, without storing pages: per block the group that
// owns it, per slot the content id of the token last written there, per state page the words of its
// state. The image of any page follows on demand. The fingerprint of every page is kept up to date
// at the cost of the rows written.
//
// Invariants
// (1) A block's bytes are the result of the last poison, zeroing, row write or state update.
// (2) fingerprint(page) always equals page_sum() of page_image(page).
// (3) Memory depends on the plan (num_blocks, block sizes), live states and the host tier, never on
//     the number of steps.
// (4) States of real numbers are exact once the device has shown them: settle_state() stores them
//     after a check within tolerance (sim/check/comparer.h). Until then their pages have no image.
// (5) Host pages: a block of the source group is a host block; the block of each resident group in
//     turn is a part of it. Rows of hot regions are written like any other.
// (6) A host block holds the bytes of the block stored there last, at the time of the store,
//     followed by its earlier bytes. Only host blocks keep bytes.
// (7) A writer's name stays valid as long as a slot, a state or a host block refers to it.
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

// A page of a tensor: bytes [index * page_size_bytes, (index + 1) * page_size_bytes) of its raw
// buffer. Where K and V of a block are apart, a page holds bytes of two blocks.
struct ModelPage {
  std::int32_t tensor = 0;
  std::int32_t index = 0;
  auto operator<=>(const ModelPage&) const = default;
};

// The writer of a row or state: a request, or the sinks. Ids are reused once no content refers to
// them.
using WriterId = std::uint32_t;
inline constexpr WriterId kNobody = 0;

// The token last written to one slot.
struct SlotContent {
  ContentId content = 0;
  WriterId writer = kNobody;  // kNobody: not written since the block's base
  std::int32_t position = 0;  // of the token in its request
  std::int64_t step = 0;      // of the write
};

// Shared by blocks with equal states: a copy costs no words.
using StateWords = std::shared_ptr<const std::vector<std::uint64_t>>;

// The state of a block. One state page per layer of a group stands for the same prefix.
struct StateContent {
  ContentId content = 0;  // of the prefix of num_tokens tokens
  std::int64_t num_tokens = 0;
  WriterId writer = kNobody;  // kNobody: no state here
  std::int64_t step = 0;
  // The words of all layers' state tensors, back to back; null: not settled yet.
  StateWords words;
};

// The content of one block, for all tensors.
struct BlockContent {
  std::int32_t group = -1;  // owner of the rows or the state; -1: none since the last poison
  Unwritten base = Unwritten::fresh;
  bool zeroed = false;  // true if the group's bytes were zeroed before any row was written
  // Token groups: [num_lanes, block_size], one token each, however many rows it has; empty: none
  // written.
  std::vector<SlotContent> slots;
  StateContent state;  // state groups
  // Bytes that a load or a copy of a block brought, unless they are all rows or a state; null:
  // none. They take the place of `base` in the group's bytes, in the order of a host block.
  std::shared_ptr<const std::vector<std::uint8_t>> loaded;
};

// The content of one host block.
struct HostContent {
  std::int32_t group = -1;         // owner of the block stored here; -1: none yet
  std::vector<SlotContent> slots;  // as in the block that was stored
  StateContent state;
  std::shared_ptr<const std::vector<std::uint8_t>> bytes;  // of the whole host block
  PageSum sum;                                             // of `bytes`
};

// The meaning of one byte of a page, for diagnoses. Fields that do not apply are -1.
struct ByteOwner {
  enum class What : std::uint8_t { row, state, unused };
  What what = What::unused;
  BlockId block{};
  std::int32_t group = -1;
  std::int32_t layer = -1;        // of the plan, group by group
  std::int64_t slot_offset = -1;  // in the block; of compressed rows: of a row's last token
  std::int64_t part = -1;         // kPartK, kPartV, kPartState + s
  std::int64_t head = -1;
  std::int64_t byte_in_row = -1;  // or in the state tensor
};

// One layer of the plan, with everything that its rows need.
struct ModelLayer {
  std::int32_t index = 0;  // of the plan, group by group
  std::int32_t group = 0;
  // 0: the model's rows; 1 + m: rows of the draft model's module m, which are written separately.
  std::int32_t lane = 0;
  std::string name;
  DType dtype = DType::bf16;
  WordShape words{};                         // of rows
  LatentFormat latent = LatentFormat::none;  // format of sparse MLA rows as numbers
  std::int64_t head_size = 0;  // elements of a row that attention reads, scales excluded
  CacheKind kind{};
  LayerMemory memory{};     // without parts: a page source, with rows of resident layers
  std::int64_t num_kv = 0;  // rows per token: 2 (K, V), 1 (MLA, hidden states), 0 (states)
  std::int64_t num_kv_heads = 0;
  std::int64_t rows_per_block = 0;
  LayerShare share;  // position of the layer and its heads in the whole model
  std::int64_t row_size_bytes = 0;
  // Bytes of elements in a row whose scales are stored apart, or in a latent row; 0: the row's
  // words are contiguous.
  std::int64_t data_bytes = 0;
  bool is_dealt_out = true;           // true if its tokens are sharded over context parallel ranks
  TokensPerState tokens_per_state{};  // its rows and their tokens: token_rows.h
  std::int64_t num_sinks = 0;         // rows of the model before all tokens
  bool words_aligned = false;         // true if every row starts and ends on a word of its page
  std::vector<std::uint64_t> coords{};           // [num_kv][num_kv_heads]
  std::vector<std::int64_t> state_first_word{};  // per tensor, first word in StateContent::words
  std::vector<StateNumbers> state_numbers{};     // per state tensor; empty: states are words

  std::size_t num_states() const { return num_kv == 0 ? memory.parts.size() : 0; }
  // Byte of the state in its page.
  std::int64_t state_offset(std::size_t state) const {
    return memory.parts[state].offset - memory.begin;
  }
  std::int64_t state_bytes(std::size_t state) const { return bytes_of(memory.parts[state]); }
  std::int64_t block_stride() const { return memory.parts.front().block_stride; }
  // True if the layer's heads have tensors of their own.
  bool is_spread() const { return memory.last_tensor != memory.tensor; }
};

// The bytes of one of a layer's states within the words of its group's states.
std::span<const std::uint8_t> bytes_of_state(const std::vector<std::uint64_t>& words,
                                             const ModelLayer& layer, std::size_t state);
std::span<std::uint8_t> bytes_of_state(std::vector<std::uint64_t>& words, const ModelLayer& layer,
                                       std::size_t state);

// The model of one rank's device memory, and of its host tier.
class MemoryModel {
 public:
  // Errors: plans that layout_of() refuses, caches that keep nothing (encoder_only), and blocks
  // without a whole number of rows. `shares`: per layer, if the plan is a rank's (rank_plan.h);
  // empty: the plan is the whole model's. num_host_blocks 0: no host tier.
  static Result<MemoryModel> create(const KVCacheConfig& given, AttentionBackend backend,
                                    CacheLayout layout, LayoutRule rule,
                                    std::int64_t num_host_blocks = 0,
                                    Numbers numbers = Numbers::words,
                                    std::span<const LayerShare> shares = {});

  // Starts a step: forgets which pages were written. Everything written from now on carries `step`.
  void begin_step(std::int64_t step);

  // Registers a writer. Its id stays valid until retire_writer() was called and no content of it is
  // in the cache.
  WriterId add_writer(std::string_view name);
  void retire_writer(WriterId writer);
  std::string_view writer_name(WriterId writer) const;

  // Makes every byte of the block unwritten, in all tensors and groups.
  void poison(BlockId block, Unwritten kind);
  // Zeroes the bytes that the group's layers use in the block; padding stays. REQUIRES: the block
  // belongs to the group or to none.
  void zero(std::int32_t group, BlockId block);
  // Copies the state of `source` to `target`. Returns an error message if `source` has none. With
  // real numbers, inputs of convolutions come from rows [conv_offset, ...) of `conv_source`.
  std::optional<std::string> copy_state(std::int32_t group, BlockId source, BlockId target,
                                        BlockId conv_source, std::int64_t conv_offset);
  // Copies all bytes of the group in `source`, rows or a state, to `target`. Only the first
  // num_rows rows count as written there. Returns an error message if one of the blocks is not the
  // group's.
  std::optional<std::string> copy_block(std::int32_t group, BlockId source, BlockId target,
                                        std::int64_t num_rows);
  // Writes the rows that the token completes, in every layer of the group and lane. REQUIRES: the
  // block is not the null block and belongs to the group or to none.
  void write_token(std::int32_t group, BlockId block, std::int64_t slot_offset, ContentId content,
                   WriterId writer, std::int64_t position, std::int32_t lane = 0);
  // Reads the state after first_position tokens (content `before`) from `source` (the null block:
  // the zero state), advances it by `contents` and stores it in `target`. Returns an error message
  // if `source` holds anything else: the worker would continue a wrong state.
  std::optional<std::string> advance_state(std::int32_t group, BlockId source, BlockId target,
                                           std::int64_t first_position, ContentId before,
                                           std::span<const ContentId> contents, WriterId writer);
  // The words in the place of the group's states in a block, whatever is stored there.
  std::vector<std::uint64_t> state_words(std::int32_t group, BlockId block) const;
  // Threads that advance long chunks in parallel, layer by layer; 1 until it is called.
  void use_threads(int num_threads) { num_threads_ = num_threads; }
  // Sets the words of a state that advance_state() left open.
  void settle_state(std::int32_t group, BlockId block, StateWords words);

  // The host tier: copies a block from, or to, a host block. Returns an error message, without a
  // change, if the block or host block is not the group's.
  std::optional<std::string> load(std::int32_t group, BlockId block, HostBlockId host);
  std::optional<std::string> store(std::int32_t group, BlockId block, HostBlockId host);
  // Sets the bytes of a state that was stored before it was settled. REQUIRES: settle_state() was
  // called.
  void settle_store(std::int32_t group, BlockId block, HostBlockId host);
  // Fills a host block from outside the engine: the rows of tokens [first_position, ...); other
  // bytes of the group become those of `sent`, or stay if nothing is sent. REQUIRES: a group with
  // rows; at most a block of contents; `sent` is empty or a whole block.
  void fill_host_block(std::int32_t group, HostBlockId host, std::int64_t first_position,
                       std::span<const ContentId> contents, WriterId writer,
                       std::span<const std::uint8_t> sent = {});
  // Copies rows [first_row, first_row + num_rows) of a resident block to the host block. REQUIRES:
  // they are written.
  void mirror_rows(std::int32_t resident, BlockId block, HostBlockId host, std::int64_t first_row,
                   std::int64_t num_rows);
  const HostContent& host_block(HostBlockId host) const;
  std::int64_t num_host_blocks() const { return std::ssize(host_blocks_); }
  std::int64_t host_block_bytes() const { return host_block_bytes_; }
  std::int64_t host_bytes_of(std::int32_t group) const;  // bytes that a block of the group takes
  // The layer of the plan that a byte of a host block belongs to. REQUIRES: byte <
  // host_bytes_of(group).
  std::int32_t host_layer_at(std::int32_t group, std::int64_t byte) const;
  // Host blocks written since begin_step(), in the order of the writes; one may occur several
  // times.
  std::span<const HostBlockId> written_hosts() const { return written_hosts_; }

  // Pages with a byte written since begin_step(), ascending.
  std::span<const ModelPage> written_pages();
  // Appends the pages that hold the block's bytes: one per tensor, or two where K and V are apart.
  void pages_of(BlockId block, std::vector<ModelPage>& pages) const;

  // The page's sum: O(1) if it is up to date, otherwise O(page).
  PageSum fingerprint(ModelPage page);
  // All bytes of the page, padding included. REQUIRES: no state of it is open.
  std::vector<std::uint8_t> page_image(ModelPage page) const;
  // The row, state or unused part that a byte belongs to: O(rows), for diagnoses.
  ByteOwner owner_of(ModelPage page, std::int64_t byte) const;
  // A byte of the plan as a page and an offset in it.
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
  // The block that holds the page's byte. Differs from the page's index where K and V are apart.
  BlockId block_at(ModelPage page, std::int64_t byte) const;

  const BlockContent& block(BlockId id) const;
  // The slot's content; null: not written since the block's base.
  const SlotContent* slot_content(std::int32_t group, BlockId block, std::int64_t offset,
                                  std::int32_t lane = 0) const;

  std::int64_t num_blocks() const { return num_blocks_; }
  std::int32_t num_tensors() const { return static_cast<std::int32_t>(tensors_.size()); }
  std::int64_t page_size_bytes(std::int32_t tensor) const;
  std::int32_t num_groups() const { return static_cast<std::int32_t>(groups_.size()); }
  // Tokens per block of the group.
  std::int64_t block_size(std::int32_t group) const;
  // True if requests have one block each, which their tokens overwrite in turn.
  bool is_ring_group(std::int32_t group) const { return groups_[group].is_ring; }
  // Host pages: the group whose table names host blocks; groups of device copies of pages; groups
  // of hot regions.
  bool is_source_group(std::int32_t group) const { return group == source_; }
  bool is_resident_group(std::int32_t group) const { return groups_[group].is_resident; }
  bool is_hot_group(std::int32_t group) const { return groups_[group].is_hot; }
  std::int32_t source_group() const { return source_; }  // -1: none
  // True if context parallel ranks hold different tokens in the group's blocks.
  bool is_dealt_out_group(std::int32_t group) const { return groups_[group].is_dealt_out; }
  // True if the rows are those of requests' encoders, not of their tokens.
  bool is_encoder_group(std::int32_t group) const { return groups_[group].is_encoder; }
  // Rule (22): writes the rows of sinks; later calls do nothing. Returns an error message if one of
  // their blocks holds something else.
  std::optional<std::string> write_sinks();
  // True if the block holds sinks of any group.
  bool holds_sinks(BlockId block) const;
  bool is_state_group(std::int32_t group) const;
  bool has_real_states() const { return numbers_ == Numbers::real; }
  std::span<const ModelLayer> layers() const { return layers_; }
  std::span<const ModelLayer> layers_of(std::int32_t group) const;

 private:
  // A raw buffer. A page is one region of one block; where K and V are apart, two regions of two
  // blocks.
  struct Tensor {
    std::int64_t begin = 0;  // byte of the plan
    std::int64_t page_size_bytes = 0;
    std::int64_t regions_per_page = 1;
    std::vector<std::int32_t> layers;       // layers with bytes in it
    std::vector<PageSum> sums;              // [num_blocks]
    std::vector<std::uint8_t> known;        // [num_blocks], 1: the sum is up to date
    std::vector<std::uint32_t> written_in;  // [num_blocks], epoch of the last write
  };
  // Contiguous bytes of a block of a group: their place for block 0, and in a host block.
  struct HostRun {
    std::int32_t layer = 0;           // index in the group
    std::int64_t begin = 0, end = 0;  // bytes of the plan
    std::int64_t offset = 0;          // in the host block
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
    std::vector<HostRun> host_runs;  // in the order of their offsets; empty: no host tier
    std::int64_t host_bytes = 0;
  };
  // A name with its references; `live` until it is retired.
  struct Writer {
    std::string name;
    std::int64_t uses = 0;
    bool live = false;
  };

  MemoryModel() = default;
  Result<void> add_layers(const KVCacheConfig& plan, const MemoryPlan& memory,
                          std::span<const LayerShare> shares);
  // The share of the resident layer whose rows a hot region copies.
  LayerShare resident_share(const std::string& hot_layer) const;
  Result<void> add_states(const KVCacheSpec& spec, ModelLayer& layer, Group& group) const;
  void set_alignment();
  // Marks one page as written in this step.
  void touch(std::int32_t tensor, std::int64_t page);
  // Marks every page of the block as written, with an unknown sum.
  void invalidate(BlockId block);
  // The same for the bytes of one group's layers.
  void touch_layers(std::int32_t group, BlockId block);
  // Drops slots, state and loaded bytes, with the references to their writers.
  void forget_content(BlockContent& block);
  void use(WriterId writer) { ++writers_[writer].uses; }
  void release(WriterId writer);
  // Exchanges one row in the sums of its pages.
  void write_row(const ModelLayer& layer, const BlockContent& content, BlockId block,
                 std::int64_t slot_offset, const SlotContent& old, ContentId now);
  // Stores a state in a block of the group.
  void set_state(std::int32_t group, BlockId block, StateContent state);
  std::shared_ptr<std::vector<std::uint64_t>> take_words(std::int32_t group, BlockId source,
                                                         BlockId target) const;
  void advance_words(std::int32_t group, BlockId block, std::span<const ContentId> contents,
                     std::vector<std::uint64_t>& words);

  void add_host_runs(Group& group);
  void add_source_runs();
  // The group whose content a host block holds after a store of this group.
  std::int32_t host_owner(std::int32_t group) const {
    return groups_[group].is_resident ? source_ : group;
  }
  Result<void> add_host_blocks(std::int64_t count);
  // Clears the meaning of a host block before it receives other content. Its bytes stay.
  HostContent& begin_host_write(std::int32_t group, HostBlockId host);
  static void set_host_bytes(HostContent& host, std::vector<std::uint8_t> bytes);
  std::vector<std::uint8_t> block_bytes(std::int32_t group, BlockId block) const;
  // Write rows to the bytes of a host block, or loaded bytes to a page.
  void draw_rows(const Group& group, const HostRun& run, std::span<const ContentId> contents,
                 std::span<std::uint8_t> bytes, std::int64_t first_row = 0) const;
  void draw_loaded(ModelPage page, const ModelLayer& layer, BlockId block,
                   std::span<const std::uint8_t> loaded, std::span<std::uint8_t> image) const;

  std::int64_t begin_of(ModelPage page) const {
    return tensors_[page.tensor].begin + page.index * tensors_[page.tensor].page_size_bytes;
  }
  // The block of a region of the tensor.
  std::int64_t region_block(const Tensor& tensor, std::int64_t region) const;
  // Writes every byte of the page. REQUIRES: `image` has its size.
  void draw_page(ModelPage page, std::span<std::uint8_t> image) const;
  // The steps of draw_page(): poison, then each layer's rows or states on top of it.
  void fill_base(ModelPage page, std::int64_t region_in_page, const BlockContent& content,
                 std::span<std::uint8_t> image) const;
  void draw_layer(ModelPage page, const ModelLayer& layer, BlockId block,
                  const BlockContent& content, std::span<std::uint8_t> image) const;
  void draw_state(const ModelLayer& layer, const BlockContent& content,
                  std::span<std::uint8_t> image) const;

  std::int64_t num_blocks_ = 0;
  std::int32_t num_lanes_ = 1;  // and one per module of the plan's draft model
  std::int32_t source_ = -1;    // group of the host pages; -1: none
  Numbers numbers_ = Numbers::words;
  int num_threads_ = 1;
  std::int64_t step_ = 0;
  std::uint32_t epoch_ = 1;  // of the current step; never 0
  std::vector<Tensor> tensors_;
  std::vector<Group> groups_;
  std::vector<ModelLayer> layers_;
  IdVector<BlockId, BlockContent> blocks_;
  std::vector<Writer> writers_;  // by id; [0]: no writer
  std::vector<WriterId> free_writers_;
  std::vector<ModelPage> written_;  // in this step
  bool written_sorted_ = true;
  std::vector<WordKeys> word_keys_;  // of the longest page
  std::vector<std::uint8_t> image_;  // scratch of fingerprint()
  IdVector<HostBlockId, HostContent> host_blocks_;
  std::vector<HostBlockId> written_hosts_;
  std::int64_t host_block_bytes_ = 0;
};

}  // namespace lockstep
