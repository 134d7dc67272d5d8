#include "traces/exporters/prefix_ids.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string_view>
#include <utility>

#include "base/check.h"

namespace lockstep {
namespace {

// A token's identity: (hash id, place) of a symbolic one, which is no other's, else what it is.
struct TokenIdentity {
  bool is_symbolic = false;
  std::uint64_t seed = 0;
  std::int64_t token = 0;
  auto operator<=>(const TokenIdentity&) const = default;
};

TokenIdentity identity_of(const Prompt& prompt, const TokenRun& run, std::uint32_t i) {
  switch (run.kind) {
    case TokenRun::Kind::symbolic:
      return {true, run.seed, run.first + i};
    case TokenRun::Kind::seeded:
    case TokenRun::Kind::repeated:
      return {false, 0, token_of(run, run.first + i)};
    case TokenRun::Kind::literal:
      break;
  }
  return {false, 0, prompt.tokens[run.first + i]};
}

// A place in a prompt that moves forward.
class Walk {
 public:
  explicit Walk(const Prompt& prompt) : prompt_(prompt) {}
  bool at_end() const { return run_ == prompt_.runs.size(); }
  std::uint32_t left() const { return prompt_.runs[run_].count - i_; }  // in this run
  TokenIdentity token() const { return identity_of(prompt_, prompt_.runs[run_], i_); }
  // True if both are equal to the end of the shorter of the two runs.
  bool runs_like(const Walk& other) const {
    const TokenRun& mine = prompt_.runs[run_];
    const TokenRun& theirs = other.prompt_.runs[other.run_];
    return mine.kind == theirs.kind && mine.kind != TokenRun::Kind::literal &&
           mine.seed == theirs.seed && mine.first + i_ == theirs.first + other.i_;
  }
  void forward(std::uint32_t tokens) {
    i_ += tokens;
    if (i_ < prompt_.runs[run_].count) return;
    i_ = 0;
    ++run_;
  }

 private:
  const Prompt& prompt_;
  std::size_t run_ = 0;
  std::uint32_t i_ = 0;
};

// Where two prompts part: how many tokens they share, and how they compare there.
std::pair<std::int64_t, std::strong_ordering> parting(const Prompt& a, const Prompt& b) {
  std::int64_t shared = 0;
  Walk mine(a), theirs(b);
  while (!mine.at_end() && !theirs.at_end()) {
    std::uint32_t tokens = 1;
    if (mine.runs_like(theirs))
      tokens = std::min(mine.left(), theirs.left());
    else if (const auto order = mine.token() <=> theirs.token(); order != 0)
      return {shared, order};
    shared += tokens;
    mine.forward(tokens);
    theirs.forward(tokens);
  }
  return {shared, theirs.at_end() <=> mine.at_end()};
}

// What identifies a block: the previous block, its length, and its content.
std::vector<std::uint64_t> content_of(Walk& walk, std::uint64_t parent, std::int64_t tokens) {
  std::vector<std::uint64_t> content = {parent, static_cast<std::uint64_t>(tokens)};
  TokenIdentity next{};
  bool has_next = false;
  for (std::int64_t i = 0; i < tokens; ++i) {
    const TokenIdentity token = walk.token();
    walk.forward(1);
    // A symbolic run goes in as its beginning.
    if (!has_next || token != next) {
      content.push_back(token.is_symbolic ? ~token.seed : static_cast<std::uint64_t>(token.token));
      if (token.is_symbolic) {
        content.push_back(static_cast<std::uint64_t>(token.token));
        content.push_back(static_cast<std::uint64_t>(i));
      }
    }
    has_next = token.is_symbolic;
    next = {true, token.seed, token.token + 1};
  }
  return content;
}

// What two requests must have in common to share anything: salt, adapter, images, embeddings.
std::vector<std::string> keys_of(const RequestSpec& spec) {
  std::vector<std::string> keys = {spec.cache_salt, spec.keys.lora.name, spec.keys.lora.path};
  const auto add_number = [&](std::int64_t number) { keys.push_back(std::to_string(number)); };
  add_number(std::ssize(spec.keys.mm));
  for (const PromptItem& item : spec.keys.mm) {
    keys.push_back(item.identifier);
    add_number(item.first);
    add_number(item.count);
  }
  const PromptEmbeds& embeds = spec.keys.embeds;
  add_number(embeds.width);
  for (const TokenRun& run : embeds.rows)
    for (const std::uint64_t number :
         {run.seed, std::uint64_t{run.first}, std::uint64_t{run.count}})
      add_number(static_cast<std::int64_t>(number));
  keys.insert(keys.end(), embeds.digests.begin(), embeds.digests.end());
  return keys;
}

}  // namespace

SharedPrefixes shared_prefixes(const std::vector<const TraceRequest*>& requests) {
  std::vector<const TraceRequest*> sorted = requests;
  std::ranges::stable_sort(sorted, [](const TraceRequest* a, const TraceRequest* b) {
    const auto a_keys = keys_of(a->spec);
    const auto b_keys = keys_of(b->spec);
    if (a_keys != b_keys) return a_keys < b_keys;
    return parting(a->spec.prompt, b->spec.prompt).second < 0;
  });
  SharedPrefixes shared;
  // What any two share is the least of what neighbours between them share.
  for (std::size_t i = 1; i < sorted.size(); ++i) {
    if (keys_of(sorted[i - 1]->spec) != keys_of(sorted[i]->spec)) continue;
    const auto [tokens, order] = parting(sorted[i - 1]->spec.prompt, sorted[i]->spec.prompt);
    if (order == 0 || tokens == 0) continue;
    shared.unit = std::gcd(shared.unit, tokens);
    shared.pairs.push_back({sorted[i - 1]->spec.name, sorted[i]->spec.name, tokens});
  }
  return shared;
}

std::int32_t block_that_tells_all(const SharedPrefixes& shared, std::int32_t block_max) {
  std::int32_t block = 1;
  while (block * 2 <= block_max && shared.unit % (block * 2) == 0) block *= 2;
  return block;
}

std::vector<std::vector<std::uint64_t>> prefix_ids(const std::vector<const TraceRequest*>& requests,
                                                   std::int32_t block_tokens) {
  LS_CHECK(block_tokens > 0, "blocks of {} tokens", block_tokens);
  std::map<std::vector<std::string>, std::uint64_t> salts;
  std::map<std::vector<std::uint64_t>, std::uint64_t> id_of;
  std::vector<std::vector<std::uint64_t>> ids;
  for (const TraceRequest* request : requests) {
    std::vector<std::uint64_t>& mine = ids.emplace_back();
    Walk walk(request->spec.prompt);
    const std::uint64_t salt =
        salts.try_emplace(keys_of(request->spec), salts.size()).first->second;
    std::uint64_t parent = ~salt;  // no id of a block
    for (std::int64_t left = request->spec.prompt.size(); left > 0; left -= block_tokens) {
      const std::int64_t tokens = std::min<std::int64_t>(left, block_tokens);
      parent = id_of.try_emplace(content_of(walk, parent, tokens), id_of.size()).first->second;
      mine.push_back(parent);
    }
  }
  return ids;
}

}  // namespace lockstep
