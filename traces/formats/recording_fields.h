// The structs of a recording's step as JSON: a form or a list of fields for each.
// recording_lines.cpp and worker_facts.cpp combine them into lines.
//
// Invariants
// (1) A context (the header, the step's number) only limits what is read; writing ignores it, so
//     that any_header() serves.
// (2) A form reads exactly what it writes; limits are those of reference/plan/limits.h and of the
//     header's pool and groups.
#pragma once

#include <fmt/format.h>

#include "base/json_fields.h"
#include "reference/plan/limits.h"
#include "traces/formats/prompt_json.h"
#include "traces/formats/recording.h"

namespace lockstep {

// Counts without a natural limit, such as hashes or transfers: 2^40 keeps sums of them within 63
// bits.
inline constexpr form::Between kCount{0, std::int64_t{1} << 40};
inline constexpr form::Between kTokens{0, kTokensMax};

// A header for writing, which needs none: forms take it by reference, hence the static object.
inline const RecordingHeader& any_header() {
  static const RecordingHeader header;
  return header;
}

inline constexpr TokenIds kDrafts{-1};  // -1 is a placeholder
// {"r0":[5,6],"r1":[]}: tokens by request, in the file's order.
inline constexpr form::ById<TokenIds> kTokensByRequest{kDrafts};

// A block id of a pool of num_blocks blocks, the null block included.
struct Block {
  std::int64_t num_blocks = 0;
  void read(JsonValue value, BlockId& block) const {
    block = BlockId{value.integer<std::int32_t>(0, num_blocks - 1)};
  }
  static void write(JsonWriter& out, BlockId block) { out.integer(index_of(block)); }
};
// Lists of blocks of the device pool, and one block of the host pool.
inline form::Each<Block> blocks_of(const RecordingHeader& header) { return {{header.num_blocks}}; }
inline Block host_block_of(const RecordingHeader& header) {
  return {header.options.config.host_pool_num_blocks};
}

// One list of block ids per group, [[..],..]. The group with the role kPageSourceRole has ids of
// the host pool, all others ids of the device pool.
struct BlockLists {
  const RecordingHeader& header;
  void read(JsonValue value, BlocksPerGroup& groups) const {
    groups.reserve(header.groups.size());
    for (JsonValue group : value.array()) {
      const std::size_t g = groups.size();
      const bool is_host = header.options.config.host_pool_num_blocks > 0 &&
                           g < header.groups.size() && header.groups[g].role == kPageSourceRole;
      const Block block = is_host ? host_block_of(header) : Block{header.num_blocks};
      form::Each<Block>{block}.read(group, groups.emplace_back());
    }
    if (groups.size() != header.groups.size())
      value.refuse(
          fmt::format("one list of blocks for each of the {} groups", header.groups.size()));
  }
  static void write(JsonWriter& out, const BlocksPerGroup& groups) {
    form::Each<form::Each<Block>>{}.write(out, groups);
  }
};

// [["r0","WAITING"],...]
inline constexpr form::Each<form::Pair<form::Plain, form::Plain>> kPairs{{"[request, word]"}};

// null for a block without extra keys, or [key, ...]; a key is a text, or [text, place] for an
// image. The array is never empty: vLLM publishes null then.
struct ExtraKeys {
  static void read(JsonValue value, std::vector<RecordedExtraKey>& keys) {
    if (value.is_null()) return;
    for (JsonValue element : value.array()) {
      RecordedExtraKey& key = keys.emplace_back();
      if (!element.is_array()) {
        key.value = element.nonempty_string();
        continue;
      }
      const JsonArray pair = element.array();
      if (pair.size() != 2) return element.refuse("a text, or [text, place]");
      key.value = pair[0].nonempty_string();
      key.place = pair[1].integer(-kTokensMax, kTokensMax);
    }
    if (keys.empty()) value.refuse("at least one key, or null");
  }
  static void write(JsonWriter& out, const std::vector<RecordedExtraKey>& keys) {
    if (keys.empty()) return static_cast<void>(out.null());
    out.begin_array();
    for (const RecordedExtraKey& key : keys) {
      if (key.place)
        out.begin_array().string(key.value).integer(*key.place).end_array();
      else
        out.string(key.value);
    }
    out.end_array();
  }
};

// True if the array has `size` elements; otherwise refuses it as not `expected`.
inline bool has_size(JsonValue value, std::size_t size, std::string_view expected) {
  if (value.array().size() == size) return true;
  value.refuse(expected);
  return false;
}

inline constexpr form::Each<form::Between> kRowNumbers{kCount};
inline constexpr JsonWord<bool> kTransferWays[] = {{"spill", false}, {"restore", true}};

// [number, host block, [device block per resident group], "spill" or "restore"]: one page's copy to
// the host or back.
struct TransferEntry {
  const RecordingHeader& header;
  void read(JsonValue value, PageTransfer& transfer) const {
    if (!has_size(value, 4, "[number, host block, [blocks], \"spill\" or \"restore\"]")) return;
    const JsonArray parts = value.array();
    kCount.read(parts[0], transfer.id);
    host_block_of(header).read(parts[1], transfer.host);
    blocks_of(header).read(parts[2], transfer.resident);
    transfer.restores = parts[3].word<bool>(kTransferWays);
  }
  void write(JsonWriter& out, const PageTransfer& transfer) const {
    out.begin_array().integer(transfer.id).integer(index_of(transfer.host));
    blocks_of(header).write(out, transfer.resident);
    out.string(transfer.restores ? "restore" : "spill").end_array();
  }
};

// [[first device row per resident group], first host row, number of rows]: rows that a step writes
// to both places.
struct MirrorEntry {
  static void read(JsonValue value, RowMirror& mirror) {
    if (!has_size(value, 3, "[[first rows], first host row, rows]")) return;
    const JsonArray parts = value.array();
    kRowNumbers.read(parts[0], mirror.sources);
    kCount.read(parts[1], mirror.destination);
    mirror.num_rows = parts[2].integer<std::int32_t>(1, kTokensMax);
  }
  static void write(JsonWriter& out, const RowMirror& mirror) {
    out.begin_array().integers(mirror.sources);
    out.integer(mirror.destination).integer(mirror.num_rows).end_array();
  }
};

// [[page, ...], [[device block per page], ... per resident group]]: new places of a request's
// pages; block 0: on the host only.
struct ResidencyEntry {
  const RecordingHeader& header;
  void read(JsonValue value, ResidencyUpdate& update) const {
    if (!has_size(value, 2, "[[pages], [[blocks], ...]]")) return;
    const JsonArray parts = value.array();
    form::Each{kTokens}.read(parts[0], update.pages);
    for (JsonValue blocks : parts[1].array()) {
      blocks_of(header).read(blocks, update.blocks.emplace_back());
      if (update.blocks.back().size() != update.pages.size())
        blocks.refuse(fmt::format("a block for each of the {} pages", update.pages.size()));
    }
  }
  void write(JsonWriter& out, const ResidencyUpdate& update) const {
    out.begin_array().integers(update.pages);
    form::Each<form::Each<Block>>{blocks_of(header)}.write(out, update.blocks);
    out.end_array();
  }
};

// [[number, workers], ...]
inline constexpr form::Each<form::Pair<form::Between, form::Between>> kTransferCounts{
    {"[number, workers]", kCount, {1, kTokensMax}}};

template <class Io>
void fields(Io& io, FieldsOf<Io, RecordedScheduled>& row, const RecordingHeader& header) {
  io.required("id", row.id);
  io.required("tokens", row.tokens, kTokens);
  io.optional("new", row.is_new);
  io.optional("resumed", row.resumed);
  // `new` and `resumed` are flags that the engine omits when false; `blocks` is always present, as
  // null where no group got a block.
  io.required("computed", row.computed, kTokens);
  io.nullable("blocks", row.blocks, BlockLists{header});
  io.optional("spec", row.spec, kDrafts);
  io.optional("encode", row.encode, TokenIds{});
}

template <class Io>
void fields(Io& io, FieldsOf<Io, RecordedConnectorAnswer>& answer) {
  io.required("id", answer.id);
  io.required("local", answer.local, kTokens);
  io.nullable("external", answer.external, kTokens);
  io.required("async", answer.async);
}

template <class Io>
void fields(Io& io, FieldsOf<Io, RecordedWorker>& worker, const RecordingHeader& header) {
  io.required("received", worker.received);
  io.required("sent", worker.sent);
  io.required("invalid_blocks", worker.invalid_blocks, blocks_of(header));
  io.optional("failed", worker.failed);
  io.optional("jobs", worker.jobs, kRowNumbers);
  io.optional("store_events", worker.store_events, kRowNumbers);
  io.optional("enqueued", worker.enqueued, kTransferCounts);
  io.optional("completed", worker.completed, kTransferCounts);
}

// `step` is the number of the line: an output cannot be of a later step.
template <class Io>
void fields(Io& io, FieldsOf<Io, RecordedStaleOutput>& output, const std::int64_t& step) {
  io.required("id", output.id);
  io.required("of_step", output.of_step, form::Between{0, step});
  io.required("taken", output.taken, kTokens);
}

template <class Io>
void fields(Io& io, FieldsOf<Io, RecordedGrammar>& answer) {
  io.required("id", answer.id);
  io.required("asked", answer.asked, kTokens);
  io.required("valid", answer.valid, form::Between{0, answer.asked});
}

template <class Io>
void fields(Io& io, FieldsOf<Io, RecordedPartReport>& report) {
  io.required("received", report.received);
  io.required("sent", report.sent);
}

template <class Io>
void fields(Io& io, FieldsOf<Io, RecordedPages>& pages, const RecordingHeader& header) {
  io.required("transfers", pages.transfers, form::Each{TransferEntry{header}});
  io.required("mirrors", pages.mirrors, form::ById<form::Each<MirrorEntry>>{});
  io.required("all_resident", pages.all_resident);
  io.required("residency", pages.residency, form::ById<ResidencyEntry>{{header}});
  io.required("free_host_blocks", pages.free_host_blocks,
              form::Between{0, header.options.config.host_pool_num_blocks});
}

// Keys are vLLM's names of the event's fields (distributed/kv_events.py), so that a recorder can
// dump them.
template <class Io>
void fields(Io& io, FieldsOf<Io, RecordedCacheEvent>& event, const RecordingHeader& header) {
  using Kind = RecordedCacheEvent::Kind;
  static constexpr JsonWord<Kind> kKinds[] = {{"BlockStored", Kind::stored},
                                              {"BlockRemoved", Kind::removed},
                                              {"AllBlocksCleared", Kind::cleared}};
  io.required("type", event.kind, form::Word<Kind>{kKinds});
  // The kinds have the fields of vLLM's event classes: a removed block has group, hash and medium
  // only.
  if (event.kind == Kind::cleared) return;
  io.required("group_idx", event.group, form::Between{0, std::ssize(header.groups) - 1});
  io.required("block_hashes", event.block_hashes);
  if (event.kind == Kind::removed) return io.optional("medium", event.medium);
  io.nullable("parent_block_hash", event.parent);
  io.required("token_ids", event.token_ids, TokenIds{});
  io.required("block_size", event.block_size, form::Between{1, kTokensMax});
  io.optional("lora_id", event.lora_id, form::Between{0, INT64_MAX});
  io.optional("lora_name", event.lora_name);
  io.optional("medium", event.medium);
  io.optional("extra_keys", event.extra_keys, form::Each<ExtraKeys>{});
  io.optional("kv_cache_spec_kind", event.kv_cache_spec_kind);
  io.optional("kv_cache_spec_sliding_window", event.kv_cache_spec_sliding_window,
              form::Between{1, kTokensMax});
  io.optional("session_id", event.session_id);
}

template <class Io>
void fields(Io& io, FieldsOf<Io, RecordedConnectorConfig>& config) {
  static constexpr JsonWord<bool> kPolicies[] = {{"recompute", false}, {"fail", true}};
  io.required("kv_load_failure_policy", config.fail_on_load_error, form::Word<bool>{kPolicies});
  io.required("supports_hybrid_groups", config.supports_hybrid_groups);
  static const JsonWord<std::string> kRoles[] = {
      {"kv_both", "kv_both"}, {"kv_producer", "kv_producer"}, {"kv_consumer", "kv_consumer"}};
  io.optional("kv_role", config.kv_role, form::Word<std::string>{kRoles});
  io.optional("name", config.name);
  // Options of vLLM's own connectors keep their JSON text: they are listed here so that an unknown
  // key is still refused.
  if constexpr (Io::kReads) {
    for (const char* key : {"host_blocks", "eviction_policy", "lazy", "store_threshold",
                            "blocks_per_chunk", "sync_load_tokens"})
      if (auto option = io.object.optional(key)) config.options.emplace_back(key, option.text());
  } else {
    for (const auto& [key, json] : config.options) io.out.key(key).raw(json);
  }
  io.optional("parts", config.parts, form::Between{1, 64});
  io.optional("requires_kv_delivery", config.requires_kv_delivery);
  io.optional("divergent_hits", config.divergent_hits);
  io.optional("waits_for_sends", config.waits_for_sends);
}

}  // namespace lockstep
