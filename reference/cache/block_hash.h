// Block hashes: a chain over full blocks of tokens. The hash of a block stands for its tokens,
// every token before it, and the extra keys: the adapter, images and embeddings in the block, and
// in the first block the cache salt.
//
// Invariants
// (1) `content` is the model's own chain: XXH3 over 128 bits, O(1) for a block of a symbolic run.
// (2) `sha256_cbor` and `xxhash_cbor` are bit for bit vLLM's (vllm/utils/hashing.py,
//     hash_block_tokens in vllm/v1/core/kv_cache_utils.py, PYTHONHASHSEED=0); they cost more and
//     decide the same, unless one of them collides.
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

// The parent hash of a first block.
ExternalBlockHash none_hash(HashAlgorithm algorithm);

// What a hash covers in addition to tokens. A tagged key is (tag, value, ...), so a salt cannot be
// mistaken for a key of another kind.
struct ExtraKey {
  std::string tag;  // empty: the rest alone, bare where it is one value
  std::string value;
  std::optional<std::string> detail = {};  // of an adapter, its path
  // of an image: offset of its first token from the block's first token
  std::optional<std::int64_t> place = {};
  std::vector<std::uint8_t> digest = {};  // of embeddings, in place of a value
};

// REQUIRES: algorithm is sha256_cbor or xxhash_cbor. `extra_keys`: empty for none. `lookahead`: the
// tokens after the block that its hash covers too (get_request_block_hasher,
// num_hash_lookahead_tokens).
ExternalBlockHash hash_block_tokens(HashAlgorithm algorithm, const ExternalBlockHash& parent,
                                    std::span<const std::int32_t> tokens,
                                    std::span<const ExtraKey> extra_keys,
                                    std::span<const std::int32_t> lookahead = {});

// The tokens of one live request: a prompt as runs, then sampled tokens.
class TokenSequence {
 public:
  explicit TokenSequence(Prompt prompt);

  std::int64_t size() const { return prompt_size_ + static_cast<std::int64_t>(output_.size()); }
  std::int64_t prompt_size() const { return prompt_size_; }
  std::int32_t operator[](std::int64_t position) const;
  void append(std::int32_t token) { output_.push_back(token); }

  // tokens[0 .. count) = the tokens from `first` on. REQUIRES: first + count <= size().
  void copy(std::int64_t first, std::int64_t count, std::int32_t* tokens) const;

  // Pieces of [first, first + count) that are symbolic, as (seed, place) pairs, when the whole
  // range is. False: at least one token is identified by its id.
  bool symbolic_pieces(std::int64_t first, std::int64_t count,
                       std::vector<std::uint64_t>& pieces) const;

 private:
  std::size_t run_at(std::int64_t position) const;

  std::int64_t prompt_size_ = 0;  // this and the output: asked in every step
  std::vector<std::int32_t> output_;
  Prompt prompt_;
  std::vector<std::int64_t> run_begins_;  // position of each run's first token
  bool any_symbolic_ = false;
};

// What the hashes of one engine are made with.
struct HashRule {
  HashAlgorithm algorithm = HashAlgorithm::content;
  std::int32_t hash_block_size = 16;      // tokens in one hashed block
  std::int32_t num_lookahead_tokens = 0;  // tokens after it that its hash covers too
  bool tags_extra_keys = false;
};

// The chain of one request at the granularity of hash_block_size.
class BlockHashChain {
 public:
  // Appends the hashes of the blocks that have become full, and whose lookahead tokens are known.
  void extend(const HashRule& rule, const TokenSequence& tokens, std::string_view cache_salt,
              const RequestKeys& keys = {}) {
    if (tokens.size() >= next_size_) extend_to(tokens.size(), rule, tokens, {cache_salt, keys});
  }

  std::size_t size() const { return keys_.size(); }
  // The key of the block of `scale` hash blocks that ends with hash block `index`: in a chain the
  // last hash stands for all before it.
  const BlockKey& operator[](std::size_t index) const { return keys_[index]; }
  std::span<const BlockKey> keys() const { return keys_; }
  // Empty unless the algorithm is one of vLLM's.
  const std::vector<ExternalBlockHash>& external() const { return external_; }

 private:
  struct Keys {
    std::string_view cache_salt;
    const RequestKeys& others;
  };
  void extend_to(std::int64_t num_tokens, const HashRule& rule, const TokenSequence& tokens,
                 const Keys& keys);
  void extend_external(std::size_t num_full, const HashRule& rule, const TokenSequence& tokens,
                       const Keys& keys);
  void extend_content(std::size_t num_full, const HashRule& rule, const TokenSequence& tokens,
                      const Keys& keys);

  std::int64_t next_size_ = 0;  // tokens that the next hash needs; asked with every sampled token
  std::vector<BlockKey> keys_;
  std::vector<ExternalBlockHash> external_;
};

// What a block hash covers of a prompt that is given as embeddings: the SHA-256 of their bytes
// (_gen_prompt_embeds_extra_hash_keys in vllm/v1/core/kv_cache_utils.py).

std::vector<std::uint8_t> sha256(std::span<const std::uint8_t> bytes);

// Row `row` of the embeddings, float32: [width]. Seeded; column j of row i of a run is
// (splitmix64(seed * 2^32 + i * width + j) mod 65536 - 32768) / 256.
// REQUIRES: seeded rows, 0 <= row < as many as there are.
std::vector<float> embedding_row(const PromptEmbeds& embeds, std::int64_t row);

// The digest of the embeddings of tokens [first, first + count) of a prompt of `prompt_size`
// tokens. Positions past the prompt contribute nothing. Returns an engine's own digest where one
// covers exactly these tokens; otherwise hashes its digests together.
std::vector<std::uint8_t> embeds_digest(const PromptEmbeds& embeds, std::int64_t prompt_size,
                                        std::int64_t first, std::int64_t count);

}  // namespace lockstep
