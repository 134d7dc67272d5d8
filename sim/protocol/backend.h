// The backend interface: a backend is the worker under test. The simulator decides a step and
// writes it as a StepProgram (ids, counts and contents, never addresses). The backend executes it
// with its own address arithmetic on its own memory. The simulator then reads back tables, slot
// mappings, fingerprints of pages and attention results, and compares them with the memory model.
//
// The protocol, which both sides implement independently:
//
// (1) Words. K/V rows are made of 64-bit little-endian words; a row whose size is not a multiple of
//     8 bytes is truncated. mix(x) is splitmix64 (reference/types/token_rows.h says which).
//       coordinate(layer, part, head) = mix((layer << 32) | (part << 16) | head)
//       row_key = mix(content ^ coordinate)
//       word(i) = shape(mix(row_key + (i + 1) * 0x9E3779B97F4A7C15))
//     `content` is the token's 64-bit content id, a function of the whole prefix up to and
//     including it. part: 0 = K (also the MLA latent and hidden-state rows), 1 = V, 2 = Q.
//     layer: position of the layer in the plan's order, group by group.
//     shape() keeps sign and mantissa and sets the exponent, so that every element is a number in
//     +-[0.5, 1): and-mask / or-mask per element: bf16 0x807F/0x3F00, fp16 0x83FF/0x3800,
//     fp32 0x807FFFFF/0x3F000000, fp8_e4m3 0x87/0x30, fp8_e5m2 0x83/0x38; int8 and uint8 keep all
//     bits. Q elements are of the backend's query_dtype().
// (2) States (mamba). State tensor s of a layer holds words too, element by element from its first
//     byte:
//       word_n(i) = word_{n-1}(i) * 0xD1342543DE82EF95
//                   + mix(content_n ^ coordinate(layer, 16 + s, 0) ^ i)
//     modulo 2^64 with word_0(i) = 0, where content_n is that of the n-th token: the state after n
//     tokens.
// (3) Fingerprint of a page: with w the i-th word of the page (padding included; a last word is
//     filled with zero bytes), k = mix(2 * i), m = mix(2 * i + 1), lo/hi the 32-bit halves, sums of
//     halves modulo 2^32, everything else modulo 2^64:
//       a += (lo(w) + lo(k)) * (hi(w) + hi(k)) + w
//       b += (lo(w) + lo(m)) * (hi(w) + hi(m)) + rotl(w, 32)
//     A sum: any order, any split gives the same 128 bits.
// (4) Attention digest over positions [first, last) of a request in a layer: the sum over positions
//     p, parts (K and V; only K for MLA and hidden states) and KV heads h of
//       mix(r ^ mix((p << 16) | (part << 15) | h)),  r = sum over the row's words w_i of mix(w_i ^
//       (i + 1) * C)
//     with C = 0x9E3779B97F4A7C15, every row read from the cache through the block table.
// (5) Attention output: softmax over positions [first, last) of q.k / sqrt(head_size), times V, in
//     fp32; query head h reads KV head h / (num_query_heads / num_kv_heads). MLA uses the latent
//     row as K and V.
// (6) Poison. A page's unused bytes hold a pattern that no content has: the i-th word of the page
//     is
//       mix(0x706F69736F6E0000 + kind) ^ mix(tensor << 32 | block) ^ i      (kind: Poison)
// (7) A page is bytes [block * page_size, (block + 1) * page_size) of its tensor's raw buffer, with
//     page_size = tensor.size_bytes / num_blocks, whatever the layout: where a layout keeps K of
//     all blocks before V of all blocks, a block's own bytes are in two pages. Page numbers in
//     rules (3) and (6) follow this definition; a region may cut a word of (6) at any byte.
// (8) At start every byte of every tensor holds Poison::fresh. A PoisonBlock poisons all bytes that
//     belong to the block, in every tensor: the whole page, padding and unused bytes included (the
//     K and the V region of a layout that splits them). Zeroing and copying touch the bytes that
//     the group's layers use in that block, never padding, never a tensor where the group has no
//     layer.
// (9) Order within a step: the order of StepProgram's members. K/V rows of all layers with slots
//     (every kind except mamba) are written after the tables are up to date and before any probe or
//     query. Slot mappings are compared for groups with slots only. r in (4) pads a truncated last
//     word with zero bytes.
//
// (10) Context parallelism. With R ranks, rank r keeps the tokens at positions p with
//     (p / interleave) mod R == r; every other token has slot PAD_SLOT_ID there. The n-th token
//     that a rank keeps is at offset n mod block_size of entry n / block_size of the block table.
//     Probes and queries name positions of the whole request. The rank reads those that it keeps,
//     and p in rule (4) is then n. A group with dcp_sharded false is replicated: every rank keeps
//     all of its tokens, as without context parallelism.
// (11) An extraction reads rows of K (hidden states have no others): all tokens from 0, each once,
//     without padding.
// (12) Host tier: num_host_blocks blocks of pinned host memory, each as large as the largest group
//     needs. A block of a group fills the first bytes of a host block: the bytes that zeroing
//     touches by rule (8), layer after layer in the plan's order, within a layer in address order,
//     without gaps. The bytes after them are unchanged. At start host block h is filled as page h
//     of a tensor 2^31 by rule (6), kind fresh; its fingerprint is rule (3) over all its bytes.
//     Loads come after poison and zeroing, before copies and every read; stores after every write
//     of the step. The targets of a step's loads are distinct, and so are those of its stores. A
//     load from a host block that a store of the same step fills reads the bytes before the store.
// (13) Real numbers (BackendConfig::numbers). Rows of bf16, fp16, fp32 are those of rule (1).
//     Quantised caches receive rows that rule (1) makes in bf16 with the masks 0x8A7F/0x3500: four
//     exponents, from which stored elements saturate, are in the middle of the format, are among
//     its smallest, and are 0. fp8_e4m3, fp8_e5m2, int8: each element is divided by the layer's
//     scale in fp32, rounded to nearest, ties to even (int8: ties away from zero), and saturates at
//     448, 57344, -128 and 127. The scale is 0.81, 0.85, 0.89, 0.93 for layer modulo 4 = 0, 1, 2,
//     3, divided in fp32 by 448, 57344, 127 (nvfp4: 2688), with `layer` as in rule (1) on every
//     rank. With a scale per token and head (int8_per_token_head, fp8_per_token_head), the scale is
//     the row's largest |element| divided by 127 (fp8: 448), at least 1e-6; an element is stored as
//     element * (1 / scale), each operation in fp32, then rounded likewise. The fp32 scale follows
//     the row's elements. int4_per_token_head: with lo and hi the row's extremes, scale = max((hi -
//     lo) / 15, 1e-6) and zero = n(-lo / scale); elements are stored as n(element * (1 / scale) +
//     zero), two per byte, the even one in its low half, n to nearest, ties away from zero, clamped
//     to 0 to 15. The zero replaces the scale's lowest four bits, which read as 0 in (stored -
//     zero) * scale. nvfp4, with s the layer's scale and g = 1 / s: 16 elements of a row share the
//     scale e4m3(g * (their largest |element| * (1/6))), and are stored as e2m1(element * (1 /
//     (scale * (1 / g)))), 0 where the scale is 0, two per byte, the even one in its low half, each
//     operation in fp32. A block in its layer (dense, or the run is refused) starts with the
//     elements of all its K rows, then their scales, then those of V, each in the order that rows
//     of words have. Rows of MLA in byte layouts hold a latent in tiles and a rope of 64, made in
//     bf16. 656 bytes: 512 e4m3 elements x / scale, an fp32 scale per 128 elements, the rope. 584
//     bytes: 448 such elements and the rope; after these 576 bytes of all rows of a page come 8
//     bytes per row, the exponents + 127 of the scales of every 64 elements and a 0. These scales
//     are the least powers of two not below max(largest * (1/448), 1e-4) and max(largest, 1e-4) /
//     448. 352 bytes: 512 e2m1 elements x * (1 / scale), two per byte, the rope in e4m3, and the
//     scales e4m3(max(largest * (1/6), 2^-9)) of every 16 elements, that of tile t at byte 320 + 8
//     (t mod 4) + t / 4. Rule (5) takes stored elements times scales. Its range follows from the
//     layer's kind and the query's position last - 1; `first` agrees with it.
//     In a query whose content is a multiple of 8, the first element of every row is 4096 times
//     that of rule (1): its scores exceed the range of exp() in fp32.
// (14) Tensor and pipeline parallelism. BackendConfig::plan is the whole model's; its num_blocks is
//     that of every rank. A backend derives its rank's own plan from it: the same groups and block
//     sizes, but its own heads, states, layers, tensors and pages (reference/plan/rank_plan.h
//     states the rules). In rule (1) `layer` is the layer's position in the whole plan and `head`
//     the head's number in the whole model, also for query heads. In rule (2) the rank's tp_rank
//     replaces head 0 in its part of a state. Everything else (layers of probes, queries and
//     extractions; tensors of pages; h in rule (4)) uses the rank's own plan, and rule (5) answers
//     for the rank's own query heads.
//
// (15) States of real numbers, instead of rule (2). A state tensor [n, channels] with
//     2 <= w <= 4 for w = n + 1 - num_speculative_blocks keeps inputs of a causal convolution of
//     width w, row after row. Any other is a recurrence, [heads, rows, columns], where missing
//     leading dimensions are 1: Mamba2's selective update where `layer` is even, the gated delta
//     rule where it is odd.
//     Inputs of a token are made by rule (1) with part 64 + 8 s + j for state tensor s and head t =
//     tp_rank, or t * heads + i for head i:
//       convolution, in its own dtype: j 0 inputs [channels]. Weights [channels, w] are fp32, j 1,
//         of content 0, without bias; silu follows.
//       selective, in fp32: j 0 x [heads, rows] by head, 1 B, 2 C [columns], 3 dt [heads];
//         A = -(1 + head mod 4) / 4, D = 1/2, dt_bias = -1, no gate.
//       gated delta, in fp32: j 0 q, 1 k [columns], 2 v [heads, rows] by head, 3 g and 4 beta
//         [heads], with the masks 0x007FFFFF/0xBE000000 and 0x007FFFFF/0x3F000000; q and k are
//         normalised, scale is 1/8.
//     A convolution keeps one sequence of inputs for all states of a chain of updates. It reads a
//     step's tokens after rows [conv_offset, conv_offset + w - 1) of conv_source; this
//     sequence, from input num_tokens on, goes to the rows of the target from row 0 on. With
//     drafts, updates leave inputs unchanged. A copy moves rows [conv_offset, n) of conv_source to
//     rows 0, 1, ...
//     Outputs of a convolution or recurrence are read back for tokens 0 to 3 of each update, where
//     a wrong start shows, the last one, and every 61st, a prime to the pieces of kernels.
// (16) A checkpoint is one of a chunk's two updates: its target receives the state after its
//     tokens, inputs of convolutions included, and the chunk continues in the same pass. The next
//     update names that target as its source but does not read it: the chunk ends with the right
//     state whatever happens to the checkpoint.
// (17) A part is a block that is copied as a whole, rows outside the hit included: every byte that
//     zeroing touches (8), states of real numbers unchanged. Parts come after poison, zeroing and
//     loads, before copies of states and every read.
// (18) Bounded replay. Where windows of the plan are computed again after a hit, replay_start of a
//     row, not 0, is the first token that its request computed since admission. Tokens from there,
//     as many as the window has, are written to those windows and to rings. Every other group has
//     them in hit blocks, and their slot is PAD_SLOT_ID. Nothing reads such a window before
//     replay_start.
// (19) Rings (circular_buffer). The token at position p is in the block of the table's first
//     entry, in row p mod block_size. A step writes only the last block_size tokens of a
//     request; the slot of the earlier ones is PAD_SLOT_ID. A step never reads overwritten rows.
// (20) Compressed rows (tokens_per_state r > 1). A block has block_size / r rows. Row n of a
//     request covers its tokens [n r, (n + 1) r) and is written with the last of them, with that
//     token's content. Slots count tokens, as in other groups. Positions [first, last) in rules (4)
//     and (5) mean rows [first / r, last / r): incomplete rows are not read; p in rule (4) is the
//     row's number.
// (21) Cross attention. The group keeps rows of a request's encoder instead of its tokens: row e is
//     where another group keeps the token at position e. The step writes the rows of encoder_slices
//     to every such group, and no tokens. The slot mapping has one slot per entry of
//     encoder_contents, in their order, without padding. Positions [first, last) of probes and
//     queries are rows.
// (22) Sinks. Where a layer's sink_len is not 0, blocks 1 to sink_len / block_size hold rows of the
//     model itself from the first program on: row i has content mix(0x73696E6B00000000 + i). They
//     are in no table. Positions of probes and queries include them: sink row i is position i, the
//     request's token p position sink_len + p.
// (23) A query reads nothing of positions [gap_first, gap_last), between a prompt and a reference
//     window (rswa_window). Probes name the positions on either side.
// (24) Draft models (BackendConfig::drafter; shape none: this rule does not apply). The step's
//     tokens write nothing into layers of KVCacheConfig::draft_modules. After updates of states and
//     before stores, the draft model runs its passes in sequence, for all draft_rows at once. A
//     pass writes rows in the layers of one module and nothing else. The n-th content of a row of
//     `draft_rows` belongs to the n-th position that its passes reach.
//       one_by_one, standalone: module 0. The first pass writes positions [first_position,
//         first_position + num_tokens). Pass k of the num_drafts - 1 further ones writes
//         position L + k, L = first_position + num_tokens - 1 - num_rejected, or the last position
//         of max_model_len if that is smaller, whatever is there.
//       modules: pass m, for m below num_drafts, belongs to module m and writes positions
//         [first_position, first_position + num_tokens).
//     A position past the row's block table has no slot: nothing is written.
// (25) Host pages. Rows of the layers of a page source (reference/types/host_pages.h) are in the
//     host tier (12):
//     the group's block h is host block h, which holds the pages of all resident groups in
//     sequence. The group has no device memory. Resident and hot layers have rows like its own,
//     with the content of rule (1) as resident layers. In addition to its block table, a row has
//     one residency table per resident group.
//     Tokens are written to resident groups, by their block tables; hot groups have only
//     PAD_SLOT_ID. Rows of `mirrors` that the step has written are copied to the host.
//     A row's hot region is the blocks of its tables of hot groups, as many as its row of these
//     has. Slot s is row s mod block_size of entry s / block_size, in every hot group. A read uses
//     the slots that hold its positions. Every other position, in order, is copied from the host to
//     the least recently used slot that the read does not use. At first, and after clear_rows, the
//     slots are empty and in index order; the slots that one read uses are ordered by position.
//     Probes and queries name resident layers. A position is read from the page that residency
//     names; if that is the null block, from the slot that holds it; otherwise from the host block.
// (26) Several rows per token (tokens_per_state 1/n). A block has n * block_size rows, and the
//     token at slot s has rows n s to n s + n - 1. The first one has the token's content c, the
//     j-th after it has mix(c + j). Slots count tokens, as in other groups. Positions [first, last)
//     in rules (4) and (5) mean rows [n * first, n * last); p in rule (4) is the row's number. A
//     query is that of its token's last row. A window of w tokens is n w rows.
//
// Not specified here: how a backend lays anything out; that is what is checked.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/result.h"
#include "reference/types/engine_config.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/scheduler_types.h"
#include "reference/types/view_types.h"
#include "sim/protocol/step_program.h"

namespace lockstep {

class EngineWorker;  // below

struct BackendConfig {
  KVCacheConfig plan{};  // of the whole model
  CacheLayout layout = CacheLayout::NHD;
  AttentionBackend attention_backend = AttentionBackend::flash_attn;
  LayoutRule layout_rule = LayoutRule::isolated;
  // Tokens, per group; divides the group's block_size.
  std::vector<std::int64_t> kernel_block_sizes{};
  // Tokens, by layer: kernel block size of layers of compressed rows that have their own block
  // table, because their kernels take only a part of their group's blocks. Only with overlaid
  // layouts.
  std::map<std::string, std::int64_t> mapped_kernel_blocks{};
  std::int32_t num_rows = 0;                       // rows of the block tables: max_num_seqs
  std::vector<std::int32_t> max_blocks_per_row{};  // manager blocks, per group
  std::int32_t max_tokens_per_step = 0;
  std::int32_t queries_per_kv = 1;  // query heads per KV head of the whole model
  ContextRank context{};            // which of the ranks this backend is, by tokens
  ParallelRank parallel{};          // ... and by heads and layers
  CheckMode check = CheckMode::fast;
  std::uint64_t seed = 0;
  // OS threads of the run: of a CPU backend in mode fast, and of expectations. Results do not
  // depend on it.
  std::int32_t num_threads = 1;
  // Streams over which a step's operations are spread. Each operation is ordered only after those
  // that it depends on.
  std::int32_t num_streams = 1;
  // On the CPU: operations run as late as their stream and events allow, in an order that the seed
  // determines. Mode hunt always does this.
  bool delay_streams = false;
  std::int64_t num_host_blocks = 0;  // of the host tier, rule (12); 0: no host tier
  // Captures parts of steps of up to this many tokens once per size that vLLM captures, and replays
  // them with the batch padded to that size; 0: issues every launch.
  std::int32_t max_cudagraph_capture_size = 0;
  // real: an engine's kernels write the rows and attend to them, rule (13).
  Numbers numbers = Numbers::words;
  DrafterConfig drafter{};  // of the plan's draft_modules, rule (24)
  std::string mutant{};     // name of a planted defect; empty: none
};

// The page of one block in one tensor of the plan.
struct PageId {
  std::int32_t tensor = 0;
  BlockId block{};
  auto operator<=>(const PageId&) const = default;
};

struct Fingerprint {
  std::uint64_t a = 0;
  std::uint64_t b = 0;
  bool operator==(const Fingerprint&) const = default;
};

// A finding of the backend's own memory checker (SIMT check and hunt modes,
// compute-sanitizer-like).
struct MemoryReport {
  std::string kind;  // "out of bounds", "race", "uninitialised read", ...
  std::string kernel;
  std::string message;         // one line with launch, cta, thread and the other access
  std::optional<PageId> page;  // page of the cache; absent: the address is elsewhere
  std::int64_t byte_in_page = 0;
  // Lines as compute-sanitizer prints them; may be null or return an empty text. Called only to
  // print: it reads debug information.
  std::function<std::string()> sanitizer_words;
};

struct StepReadback {
  // Per group, the rows of StepProgram::rows in order: manager block ids as the device holds them,
  // row after row; table_ends[g][i] is the end of row i.
  std::vector<std::vector<std::int32_t>> tables;
  std::vector<std::vector<std::uint32_t>> table_ends;
  std::vector<std::vector<Slot>> slot_mappings;  // per group, num_padded_tokens entries
  std::vector<std::uint64_t> digests;            // per probe
  std::vector<float> outputs;                    // per query: num_query_heads * head_size floats
  // Rule (15): per state update, layer of its group, state tensor and token read, in this order:
  // [channels] or [heads, rows].
  std::vector<float> state_outputs;
  // Per extraction [num_tokens, num_kv_heads, row bytes], one after the other.
  std::vector<std::uint8_t> extracted;
  std::vector<MemoryReport> reports;
};

// The last known writer of a byte.
struct Writer {
  std::string kernel;
  std::int64_t step = -1;
  std::string thread;  // "cta 3 thread 17"
};

// Totals over all launches of one kernel, since the backend's creation.
struct KernelStatistics {
  std::string kernel;
  std::int64_t launches = 0;
  std::int64_t ctas = 0;
  std::int64_t threads = 0;
  std::int64_t accesses = 0;  // to device and shared memory; 0 in mode fast
  std::int64_t switches = 0;  // from one simulated thread to another
  std::int64_t barriers = 0;
  bool operator==(const KernelStatistics&) const = default;
};

// Counts of captured graphs, over the parts of steps that can be captured.
struct GraphStatistics {
  std::int64_t captured = 0;  // graphs
  std::int64_t replayed = 0;  // runs of a graph in place of its launches
  std::int64_t dropped = 0;   // graphs invalidated because their memory has moved
  bool operator==(const GraphStatistics&) const = default;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;  // "simt", "cuda"
  // Name for a person: "CPU executor, check mode", or the GPU's name.
  virtual std::string device() const = 0;

  // Executes `program` and fills `readback` (whose vectors are reused from step to step). An Error
  // is a failure of the device itself, not a finding.
  virtual Result<void> execute(const StepProgram& program, StepReadback& readback) = 0;

  // fingerprints[i] = rule (3) of pages[i]. REQUIRES: equal sizes, pages of the plan.
  virtual Result<void> fingerprint_pages(std::span<const PageId> pages,
                                         std::span<Fingerprint> fingerprints) = 0;

  // The bytes of one page, padding included.
  virtual Result<std::vector<std::uint8_t>> read_page(PageId page) = 0;

  // Returns the last writer of a byte. Absent: this backend does not record writers, or no kernel
  // has written the byte.
  virtual std::optional<Writer> who_wrote(PageId page, std::int64_t byte) = 0;

  // The host tier. fingerprints[i] = rule (3) of all bytes of hosts[i]; read, write: the bytes
  // that a block of `group` has there. REQUIRES: a host tier; to write, as many bytes as are read.
  virtual Result<void> fingerprint_host_blocks(std::span<const HostBlockId> /*hosts*/,
                                               std::span<Fingerprint> /*fingerprints*/) {
    return fail("this backend has no host tier");
  }
  virtual Result<std::vector<std::uint8_t>> read_host_block(std::int32_t /*group*/,
                                                            HostBlockId /*host*/) {
    return fail("this backend has no host tier");
  }
  virtual Result<void> write_host_block(std::int32_t /*group*/, HostBlockId /*host*/,
                                        std::span<const std::uint8_t> /*bytes*/) {
    return fail("this backend has no host tier");
  }

  // Statistics, ordered by kernel name. Empty if the backend counts nothing (a GPU, a backend of
  // plain loops).
  virtual std::vector<KernelStatistics> kernel_statistics() const { return {}; }
  virtual GraphStatistics graph_statistics() const { return {}; }
  // Returns false if programs must not contain queries.
  virtual bool answers_queries() const { return true; }
  // Returns false if attention processes the tokens of a request's step together, as kernels for
  // prefill chunks do. A query then reads every position that the layer's kind permits.
  virtual bool attends_to_ranges() const { return true; }
  // Type of the elements of queries. If it is narrower than fp32, weights and outputs are also
  // rounded to it.
  virtual DType query_dtype() const { return DType::fp32; }
  // Returns the engine's worker, which receives what an engine sends to its worker; null if the
  // backend is not one.
  virtual EngineWorker* engine_worker() { return nullptr; }
  // What this backend cannot check, one line each.
  virtual std::vector<std::string> not_checked() const { return {}; }
};

// What an engine sends to its worker in addition to a step's program: for backends that are a real
// engine's worker and derive the program's content themselves.
//
// Invariants
// (1) begin() is called first and once. A request is added before a decision names it.
// (2) decided() precedes the execute() of its step; what the step sampled follows it.

class EngineWorker {
 public:
  virtual ~EngineWorker() = default;
  // Errors: options that the engine's worker does not take.
  virtual Result<void> begin(const EngineConfig& engine) = 0;
  // Returns false if the worker's memory does not have the plan's layout, so that no page can be
  // read. The next execute() reports the first difference.
  virtual bool views_hold() const = 0;
  // Announces a request.
  virtual void add_request(RequestId id, const RequestSpec& spec) = 0;
  // Receives the decision of the next execute(). The reference is valid during the step.
  virtual void decided(const SchedulerOutput& decision) = 0;
  // Receives the tokens that a step sampled for a request, accepted drafts included.
  virtual void sampled(RequestId id, std::span<const std::int32_t> tokens) = 0;
  // Returns the failure if Lockstep's own code in the worker's process raised, and execute()
  // returned its error; else null.
  virtual const EngineFailure* harness_failure() const = 0;
  // The engine has dropped the tokens sampled after the request's first `num_tokens` tokens.
  virtual void dropped(RequestId id, std::int64_t num_tokens) = 0;
};

}  // namespace lockstep
