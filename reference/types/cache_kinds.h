// The kinds of caches, one per spec class of vLLM (vllm/v1/kv_cache_interface.py), with the traits
// of each kind in one table row. Code does not compare kinds: it calls a predicate below, and the
// predicates read the table. A new kind is an enumerator and a row; the static_assert below finds a
// missing one.
//
// Invariants
// (1) Row i of kCacheKinds describes enumerator i.
// (2) Several kinds may share a `word`. The first of them is the class that the others derive from,
//     and the one that cache_kind_from_name() returns.
// (3) Every predicate is a function of the row only. Traits that depend on a spec's fields
//     (bounded_replay, dcp_sharded, sink_len) are predicates of KVCacheSpec (kv_cache_spec.h).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace lockstep {

enum class CacheKind : std::uint8_t {
  full_attention,
  mla,           // one latent head per token, K and V in one row: num_kv_heads is 1
  hidden_state,  // rows of num_kv_heads * head_size elements, one row per token, no K/V pair
  rswa,          // full attention to the prompt, a window over the generated tokens
  sink_full,     // full attention, plus sink_len rows of the model that stay visible
  chunked_local,
  sliding_window,
  sliding_window_mla,
  circular_buffer,  // one block per request: a ring of keys not yet compressed
  cross_attention,  // rows of a request's encoder, one per encoder embedding
  encoder_only,
  mamba,  // Mamba1/2 and linear attention (GatedDeltaNet, KDA): states, not rows per token
  // HiSparse: device pages of rows whose home is a host pool, and a request's device copy of the
  // rows that it reads most (reference/types/host_pages.h).
  hisparse_resident,
  hisparse_hot,
};
inline constexpr std::size_t kNumCacheKinds = static_cast<std::size_t>(CacheKind::hisparse_hot) + 1;

// The part of a request's content that its blocks keep. This decides which blocks a manager frees
// while the request runs (group_managers.h).
enum class Keeps : std::uint8_t {
  every_token,   // until the request ends
  window,        // the last tokens; earlier table entries become the null block
  chunk,         // the current chunk; earlier table entries become the null block
  ring,          // the last tokens, overwritten in place
  encoder_rows,  // of the request's encoder inputs, allocated once
  states,        // recurrent: one set of tensors for all tokens before a point
  pages,         // HiSparse: device copies of rows that another group keeps
  nothing,
};

// The rows of one token in a block: a K row and a V row, or one row. single_if_keys_alone: a pair,
// or one row where KVCacheSpec::keys_alone is set (rings store keys without values).
enum class RowShape : std::uint8_t { none, pairs, single, single_if_keys_alone };

// Where a group's rows are stored. Host: in the host pool only; device groups hold copies.
enum class Residence : std::uint8_t { device, host, nowhere };

// One table row. The defaults are those of full attention, so a row states only the differences.
struct CacheKindTraits {
  CacheKind kind = CacheKind::full_attention;
  std::string_view word{};          // in cases, model files, reports; kinds may share a word
  std::string_view planned_word{};  // the class's word in recorded plans of 0.33.0; empty: `word`
  Keeps keeps = Keeps::every_token;
  RowShape rows = RowShape::pairs;
  bool is_attended = true;          // attention reads its rows
  bool is_prefix_cacheable = true;  // later requests may hit its blocks
  bool is_sharded = true;           // context parallelism may shard its tokens over ranks
  bool uses_slot_mapping = true;    // a token's slot decides where its row is written
  Residence residence = Residence::device;
};

inline constexpr std::array<CacheKindTraits, kNumCacheKinds> kCacheKinds = [] {
  using enum CacheKind;
  return std::array<CacheKindTraits, kNumCacheKinds>{{
      {.kind = full_attention, .word = "full"},
      {.kind = mla, .word = "mla", .rows = RowShape::single},
      {.kind = hidden_state,
       .word = "hidden_state",
       .rows = RowShape::single,
       .is_attended = false},
      {.kind = rswa, .word = "full", .planned_word = "rswa"},
      {.kind = sink_full, .word = "full", .planned_word = "sink_full"},
      {.kind = chunked_local, .word = "chunked_local", .keeps = Keeps::chunk},
      {.kind = sliding_window, .word = "sliding_window", .keeps = Keeps::window},
      {.kind = sliding_window_mla,
       .word = "sliding_window",
       .planned_word = "sliding_window_mla",
       .keeps = Keeps::window,
       .rows = RowShape::single},
      {.kind = circular_buffer,
       .word = "circular_buffer",
       .keeps = Keeps::ring,
       .rows = RowShape::single_if_keys_alone,
       .is_attended = false,
       .is_prefix_cacheable = false,
       .uses_slot_mapping = false},
      {.kind = cross_attention,
       .word = "cross_attention",
       .planned_word = "cross",
       .keeps = Keeps::encoder_rows,
       .is_prefix_cacheable = false},
      {.kind = encoder_only,
       .word = "encoder_only",
       .keeps = Keeps::nothing,
       .residence = Residence::nowhere},
      {.kind = mamba,
       .word = "mamba",
       .keeps = Keeps::states,
       .rows = RowShape::none,
       .is_attended = false,
       .is_sharded = false},
      {.kind = hisparse_resident,
       .word = "hisparse_resident",
       .keeps = Keeps::pages,
       .rows = RowShape::none,
       .is_prefix_cacheable = false},
      {.kind = hisparse_hot,
       .word = "hisparse_hot",
       .keeps = Keeps::pages,
       .rows = RowShape::none,
       .is_prefix_cacheable = false,
       .uses_slot_mapping = false},
  }};
}();
// Checks invariant (1) at compile time, and that no row lacks a word.
constexpr bool each_row_describes_its_kind() {
  for (std::size_t i = 0; i < kNumCacheKinds; ++i)
    if (kCacheKinds[i].kind != static_cast<CacheKind>(i) || kCacheKinds[i].word.empty())
      return false;
  return true;
}
static_assert(each_row_describes_its_kind(), "a kind without a row, or a row out of order");

constexpr const CacheKindTraits& traits_of(CacheKind kind) {
  return kCacheKinds[static_cast<std::size_t>(kind)];
}

// Predicates on what the kind keeps.
constexpr bool is_full_attention(CacheKind kind) {  // FullAttentionSpec and its subclasses
  return traits_of(kind).keeps == Keeps::every_token;
}
constexpr bool is_sliding_window(CacheKind kind) { return traits_of(kind).keeps == Keeps::window; }
constexpr bool is_chunked(CacheKind kind) { return traits_of(kind).keeps == Keeps::chunk; }
// True if the manager frees blocks from the head of the table while the request runs.
constexpr bool is_windowed(CacheKind kind) { return is_sliding_window(kind) || is_chunked(kind); }
constexpr bool is_ring(CacheKind kind) { return traits_of(kind).keeps == Keeps::ring; }
constexpr bool is_cross_attention(CacheKind kind) {
  return traits_of(kind).keeps == Keeps::encoder_rows;
}
constexpr bool is_state_kind(CacheKind kind) { return traits_of(kind).keeps == Keeps::states; }
constexpr bool keeps_pages(CacheKind kind) { return traits_of(kind).keeps == Keeps::pages; }
constexpr bool uses_slot_mapping(CacheKind kind) { return traits_of(kind).uses_slot_mapping; }
// HiSparse's two device kinds differ only in their writes: a resident page is written by slots, as
// any cache; rows of a hot region are copied from the host on demand.
constexpr bool is_hot_pages(CacheKind kind) {
  return keeps_pages(kind) && !uses_slot_mapping(kind);
}
constexpr bool is_resident_pages(CacheKind kind) {
  return keeps_pages(kind) && uses_slot_mapping(kind);
}
constexpr bool keeps_nothing(CacheKind kind) { return traits_of(kind).keeps == Keeps::nothing; }

// Predicates on the rows that the kind stores.
constexpr bool is_attention(CacheKind kind) { return traits_of(kind).rows != RowShape::none; }
// False for HiSparse's device kinds: a plan gives them whole pages (page_copy_bytes), no view per
// layer.
constexpr bool has_layer_views(CacheKind kind) { return !keeps_pages(kind); }
constexpr bool is_mla(CacheKind kind) {  // MLAAttentionSpec and its subclasses
  return is_full_attention(kind) && traits_of(kind).rows == RowShape::single;
}
constexpr bool is_mla_window(CacheKind kind) {
  return is_sliding_window(kind) && traits_of(kind).rows == RowShape::single;
}
constexpr bool is_hidden_state(CacheKind kind) {
  return is_full_attention(kind) && !traits_of(kind).is_attended;
}
// Full attention to K/V pairs, with or without sinks or a gap; to latent rows; to either. Hidden
// states keep every token, but no attention reads them.
constexpr bool is_full_of_pairs(CacheKind kind) { return is_full_attention(kind) && !is_mla(kind); }
constexpr bool is_full_of_latents(CacheKind kind) { return is_mla(kind) && !is_hidden_state(kind); }
constexpr bool attends_to_all(CacheKind kind) {
  return is_full_attention(kind) && !is_hidden_state(kind);
}

constexpr std::string_view name_of(CacheKind kind) { return traits_of(kind).word; }
constexpr std::string_view planned_name_of(CacheKind kind) {
  const std::string_view own = traits_of(kind).planned_word;
  return own.empty() ? name_of(kind) : own;
}
// The first kind with that word: the class that the others derive from. Absent: no kind has the
// word. "full" returns full_attention, never sink_full; settle_full_attention() refines it.
std::optional<CacheKind> cache_kind_from_name(std::string_view word);
std::optional<CacheKind> cache_kind_from_planned_name(std::string_view word);

}  // namespace lockstep
