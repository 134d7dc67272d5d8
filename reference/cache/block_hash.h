// Block hashes: a chain over full blocks of tokens. The hash of a block stands for its tokens, all
// tokens before it, and the extra keys: adapter, images and embeddings in the block, and in the
// first block the cache salt. Two requests may share a block exactly if the hashes are equal.
//
// Invariants
// (1) `content` is the model's own chain: XXH3 over 128 bits, O(1) for a block of a symbolic run.
// (2) `sha256_cbor` and `xxhash_cbor` equal vLLM's bit for bit (vllm/utils/hashing.py,
//     hash_block_tokens in vllm/v1/core/kv_cache_utils.py, PYTHONHASHSEED=0). They cost more and
//     lead to the same decisions, unless one of them collides.
// (3) A chain only grows: tokens are appended, never replaced, so a computed hash stays valid.
//
// Not checked here: whether a block with that hash exists (block_pool.h), and collisions, which
// count as equal content.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "reference/types/engine_config.h"
#include "reference/types/scheduler_types.h"
#include "reference/types/token_rows.h"

namespace lockstep {

// A hash as vLLM's event consumers see it: 32 bytes for sha256_cbor, 16 for xxhash_cbor.
using ExternalBlockHash = std::vector<std::uint8_t>;

// The parent hash of a first block: vLLM's NONE_HASH for PYTHONHASHSEED=0. REQUIRES: an algorithm
// of vLLM's.
ExternalBlockHash none_hash(HashAlgorithm algorithm);

// A key that a hash covers in addition to tokens. With a tag it is hashed as (tag, value, ...), so
// a salt cannot be mistaken for an adapter's name. Releases before 0.31.0 hash it without the tag
// (EngineProfile::tags_extra_keys).
struct ExtraKey {
  std::string tag;  // empty: untagged; a single value is then hashed bare
  std::string value;
  std::optional<std::string> detail = {};  // an adapter's path
  // An image: offset of its first token from the block's first token, negative if it began earlier.
  std::optional<std::int64_t> place = {};
  std::vector<std::uint8_t> digest = {};  // embeddings: their digest, in place of a value
};

// Hashes one block under its parent. `extra_keys`: empty for none. `lookahead`: the tokens after
// the block that its hash also covers (get_request_block_hasher, num_hash_lookahead_tokens).
// REQUIRES: algorithm is sha256_cbor or xxhash_cbor; parent is none_hash() for a first block.
ExternalBlockHash hash_block_tokens(HashAlgorithm algorithm, const ExternalBlockHash& parent,
                                    std::span<const std::int32_t> tokens,
                                    std::span<const ExtraKey> extra_keys,
                                    std::span<const std::int32_t> lookahead = {});

// The tokens of one live request: a prompt as runs, then sampled tokens. Positions count from 0
// over both. Memory is O(runs + output), not O(prompt).
class TokenSequence {
 public:
  explicit TokenSequence(Prompt prompt);

  std::int64_t size() const { return prompt_size_ + static_cast<std::int64_t>(output_.size()); }
  std::int64_t prompt_size() const { return prompt_size_; }
  // Generates or reads one token: O(log runs). REQUIRES: 0 <= position < size().
  std::int32_t operator[](std::int64_t position) const;
  void append(std::int32_t token) { output_.push_back(token); }

  // Writes tokens [first, first + count) to tokens[0 .. count). REQUIRES: first + count <= size().
  void copy(std::int64_t first, std::int64_t count, std::int32_t* tokens) const;

  // Describes [first, first + count) as (seed, place and length) pairs if the whole range is
  // symbolic. False: at least one token is identified by its id, and the caller hashes ids.
  // REQUIRES as copy().
  bool symbolic_pieces(std::int64_t first, std::int64_t count,
                       std::vector<std::uint64_t>& pieces) const;

 private:
  // Index of the run that holds the prompt position.
  std::size_t run_at(std::int64_t position) const;

  std::int64_t prompt_size_ = 0;  // next to output_: every step reads both
  std::vector<std::int32_t> output_;
  Prompt prompt_;
  std::vector<std::int64_t> run_begins_;  // position of each run's first token
  bool any_symbolic_ = false;
};

// The rule of one engine's hashes; the same for all its requests.
struct HashRule {
  HashAlgorithm algorithm = HashAlgorithm::content;
  std::int32_t hash_block_size = 16;      // tokens per hashed block
  std::int32_t num_lookahead_tokens = 0;  // tokens after a block that its hash also covers
  bool tags_extra_keys = false;           // ExtraKey::tag is hashed
};

// The hashes of one request, one per hash_block_size tokens. A group with longer blocks uses every
// n-th of them.
class BlockHashChain {
 public:
  // Appends the hashes of all blocks that are full and whose lookahead tokens exist. Costs one
  // comparison if there are none, which is the case for most sampled tokens. REQUIRES: the same
  // rule, salt and keys in every call.
  void extend(const HashRule& rule, const TokenSequence& tokens, std::string_view cache_salt,
              const RequestKeys& keys = {}) {
    if (tokens.size() >= next_size_) extend_to(tokens.size(), rule, tokens, {cache_salt, keys});
  }

  std::size_t size() const { return keys_.size(); }
  // The key of hash block `index`. Since a chained hash stands for all tokens before it, it is also
  // the key of any longer block that ends there: of group block i with `scale` hash blocks, index
  // is (i + 1) * scale - 1.
  const BlockKey& operator[](std::size_t index) const { return keys_[index]; }
  std::span<const BlockKey> keys() const { return keys_; }
  // vLLM's hashes, one per key; empty unless the algorithm is one of vLLM's.
  const std::vector<ExternalBlockHash>& external() const { return external_; }

 private:
  struct Keys {
    std::string_view cache_salt;
    const RequestKeys& others;
  };
  // Appends up to the blocks that num_tokens tokens fill; updates next_size_.
  void extend_to(std::int64_t num_tokens, const HashRule& rule, const TokenSequence& tokens,
                 const Keys& keys);
  void extend_external(std::size_t num_full, const HashRule& rule, const TokenSequence& tokens,
                       const Keys& keys);
  void extend_content(std::size_t num_full, const HashRule& rule, const TokenSequence& tokens,
                      const Keys& keys);

  std::int64_t next_size_ = 0;  // tokens that the next hash needs; read per sampled token
  std::vector<BlockKey> keys_;
  std::vector<ExternalBlockHash> external_;
};

// Digests of prompts that are given as embeddings: a block hash covers the SHA-256 of their bytes
// (_gen_prompt_embeds_extra_hash_keys in vllm/v1/core/kv_cache_utils.py).

std::vector<std::uint8_t> sha256(std::span<const std::uint8_t> bytes);

// Row `row` of the embeddings, float32: [width]. Seeded: column j of row i of a run is
// (splitmix64(seed * 2^32 + i * width + j) mod 65536 - 32768) / 256, a number that float32 holds
// exactly, in [-128, 128). REQUIRES: seeded rows, 0 <= row < number of rows.
std::vector<float> embedding_row(const PromptEmbeds& embeds, std::int64_t row);

// The digest of the embeddings of tokens [first, first + count) of a prompt of `prompt_size`
// tokens. Positions past the prompt contribute nothing; a range past it has the digest of no bytes.
// Returns an engine's own digest if one covers exactly these tokens. Otherwise hashes its digests
// together, which differs from vLLM's hash but is equal for equal embeddings.
std::vector<std::uint8_t> embeds_digest(const PromptEmbeds& embeds, std::int64_t prompt_size,
                                        std::int64_t first, std::int64_t count);

}  // namespace lockstep
