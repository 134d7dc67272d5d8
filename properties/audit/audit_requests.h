// The live requests of a recording, as a worker sees them, and those that have finished while a
// transfer still uses their blocks.
//
// Invariants:
// (1) A request has one content id per token; each stands for the token, all tokens before it and
//     the keys of the request.
// (2) A live request has a table per group. A request that keeps no blocks may have an old table;
//     no ledger reads it.
// (3) A slot belongs to one request at a time. Ledgers keep their state of a request in its slot.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "base/ids.h"
#include "base/seeded_random.h"
#include "reference/types/scheduler_types.h"

namespace lockstep {

// What a cached token stands for: the token, all tokens before it, and the keys of the request.
//
// Invariant: two requests share a content id only where all of these are equal.

inline std::uint64_t content_after(std::uint64_t before, std::int32_t token) {
  return splitmix64(before * 0x9E3779B97F4A7C15ull + static_cast<std::uint64_t>(token) + 1);
}

// The cache salt and the keys of a request, with its name.
struct KeyedRequest {
  std::string name;
  std::string cache_salt;
  RequestKeys keys;
};

// Content of the empty prefix under a salt.
std::uint64_t empty_prefix(std::string_view cache_salt);
// ... and under an adapter.
std::uint64_t empty_prefix(const KeyedRequest& request);

// Contents of `tokens`, the first ones of a request with these keys, one each.
std::vector<std::uint64_t> contents_of(const KeyedRequest& request,
                                       const std::vector<std::int32_t>& tokens);

// Content of `token` at `position`, after `before`.
std::uint64_t content_at_position(const KeyedRequest& request, std::uint64_t before,
                                  std::int32_t token, std::int32_t position);
// ... where an item begins, after the content of its first token.
std::uint64_t content_with_item(std::uint64_t content, std::string_view identifier);
// Of row `row` that an encoder computes of an item.
std::uint64_t content_of_encoder_row(const PromptItem& item, std::int32_t row);

// In which keys two requests differ up to `position`, where their tokens do not: " under another
// cache salt (a there, none here)"; empty: in none.
std::string key_difference(const KeyedRequest& here, const KeyedRequest& there,
                           std::int32_t position);

// What a KV connector does to a request that does not run.
enum class Transfer : std::uint8_t {
  none,
  loading,  // it writes into the request's blocks
  loaded,   // it has written them, and the request waits with them
};

struct AuditRequest {
  std::string name;
  KeyedRequest keyed;
  std::int32_t index = 0;                    // in order of arrival
  std::size_t slot = 0;                      // (3)
  std::vector<std::int32_t> tokens;          // prompt and sampled tokens, in order
  std::uint64_t root = 0;                    // content id of the empty prefix, with its keys
  std::vector<std::uint64_t> contents;       // (1)
  std::vector<std::vector<BlockId>> tables;  // per group, as handed over
  std::int32_t num_prompt = 0;
  std::int32_t computed = 0;      // tokens that stand after the last step that scheduled it
  std::int32_t scheduled_to = 0;  // end of that step's tokens, rejected drafts included
  std::int32_t counted_to = 0;    // ... less those whose output the engine has received
  std::int64_t preempted_in = -1;
  std::int64_t void_step = -1;  // last step that computed tokens after a lost block
  Transfer transfer = Transfer::none;
  bool running = false;
  bool is_reset = false;   // a reset has preempted it, and no step has reported that
  bool has_ended = false;  // by its last output or its client; the worker may not know yet
  bool has_left = false;
  bool is_sent = false;  // its blocks stay until they are sent
  bool is_between_chunks = false;
  bool is_unpredictable = false;  // a row of it was wrong: its samples are not checked
  bool is_adrift = false;         // it keeps tokens that were sampled after a lost block
  // True if no other request may write its blocks.
  bool keeps_blocks() const {
    return running || is_sent || is_between_chunks || transfer != Transfer::none;
  }
  // Appends a sampled token.
  void append(std::int32_t token) {
    tokens.push_back(token);
    contents.push_back(content_after(contents.empty() ? root : contents.back(), token));
  }
  // Drops the tokens from `num_tokens` onward.
  void cut(std::size_t num_tokens) {
    LS_CHECK(num_tokens <= tokens.size() && contents.size() == tokens.size(),
             "cut to {} of {} tokens with {} contents", num_tokens, tokens.size(), contents.size());
    tokens.resize(num_tokens);
    contents.resize(num_tokens);
  }
};

// One scheduled request of the current step.
struct AuditRow {
  AuditRequest* request = nullptr;
  std::int32_t first = 0;  // positions [first, last)
  std::int32_t last = 0;
  std::int32_t counted_to = 0;  // by the engine: rejected drafts in flight count
  std::int32_t num_spec = 0;
  std::span<const std::int32_t> spec;     // -1: a draft that only the worker has
  std::span<const std::int32_t> sampled;  // what the model returned for it
  std::vector<std::uint64_t> contents;    // of [first, last), drafts included
  bool is_void = false;                   // computed from a block that a load did not fill
  std::int32_t num_hit = 0;               // tokens before `first`, of a new request
  std::int32_t num_local_hit = 0;         // of these, from the prefix cache in this step
  // Drafts whose state is kept until the next step accepts or rejects them. The first chunk of a
  // prompt keeps none: its padding goes into the state.
  std::int32_t num_undone() const { return first == 0 ? 0 : num_spec; }
  // Content id of the first `count` tokens.
  std::uint64_t content_at(std::int32_t count) const {
    if (count == 0) return request->root;
    if (count > first) return contents[static_cast<std::size_t>(count - first) - 1];
    return request->contents[static_cast<std::size_t>(count) - 1];
  }
};

class AuditRequests {
 public:
  using Map = std::map<std::string, AuditRequest>;

  // Null: no live request has the name. Ledgers ask for the requests of a step again and again.
  AuditRequest* find(const std::string& name) {
    AuditRequest*& last = found_[name.empty() ? 0 : name.back() % found_.size()];
    if (last != nullptr && last->name == name) return last;
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : last = &found->second;
  }
  // Adds a request with the tokens of its prompt; a request of the same name is replaced. `in_use`
  // calls its argument with the index of each request that the pool still names.
  AuditRequest& add(const RequestSpec& spec, std::size_t num_groups,
                    const std::function<void(const std::function<void(std::int32_t)>&)>& in_use);
  void erase(const std::string& name);
  Map::iterator begin() { return by_name_.begin(); }
  Map::iterator end() { return by_name_.end(); }
  Map::const_iterator begin() const { return by_name_.begin(); }
  Map::const_iterator end() const { return by_name_.end(); }

  // "?" for a request that is forgotten.
  const std::string& name_at(std::int32_t index) const;
  // Null: forgotten.
  const KeyedRequest* keys_at(std::int32_t index) const;
  void set_keys(const AuditRequest& request) {
    keys_.insert_or_assign(request.index, request.keyed);
  }

 private:
  Map by_name_;
  std::array<AuditRequest*, 16> found_{};      // last ones, by the end of their names
  std::map<std::int32_t, KeyedRequest> keys_;  // by index: of live requests and of block holders
  std::size_t num_keys_max_ = 4096;            // when unused entries are removed
  std::int32_t num_requests_ = 0;
  std::vector<std::size_t> free_slots_;
  std::size_t num_slots_ = 0;
};

// A ledger's own state of each request.
template <typename State>
class PerRequest {
 public:
  // Starts with the initial state. Call it when the request arrives.
  State& begin(const AuditRequest& request) {
    if (request.slot >= states_.size()) states_.resize(request.slot + 1);
    return states_[request.slot] = State{};
  }
  State& operator[](const AuditRequest& request) { return states_[request.slot]; }
  const State& operator[](const AuditRequest& request) const { return states_[request.slot]; }

 private:
  std::vector<State> states_;
};

}  // namespace lockstep
