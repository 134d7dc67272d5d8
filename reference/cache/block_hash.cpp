#include "reference/cache/block_hash.h"

#include <openssl/evp.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/seeded_random.h"

namespace lockstep {
namespace {

// Writes CBOR (RFC 8949) for the types that a block hash consists of: integers, byte strings, text
// strings, arrays and null, each in its shortest form. vLLM serializes with cbor2 in canonical
// mode, so other encodings of the same value would give other hashes.
class CborWriter {
 public:
  // Major type 0, or 1 for negative values: -1 - value. Offsets of images are negative if the image
  // began in an earlier block.
  void integer(std::int64_t value) {
    if (value >= 0)
      head(0, static_cast<std::uint64_t>(value));
    else
      head(1, static_cast<std::uint64_t>(-1 - value));
  }
  void bytes(std::span<const std::uint8_t> value) {
    head(2, value.size());
    out_.insert(out_.end(), value.begin(), value.end());
  }
  void text(std::string_view value) {
    head(3, value.size());
    out_.insert(out_.end(), value.begin(), value.end());
  }
  void array(std::uint64_t size) { head(4, size); }
  // 0xF6: Python's None, for a block without extra keys.
  void null() { out_.push_back(0xF6); }
  std::span<const std::uint8_t> view() const { return out_; }

 private:
  // The first byte of an item, and its value: in the byte itself below 24, else in the next 1, 2, 4
  // or 8 bytes, big-endian.
  void head(std::uint8_t major, std::uint64_t value) {
    const auto type = static_cast<std::uint8_t>(major << 5);
    if (value < 24) {
      out_.push_back(static_cast<std::uint8_t>(type | value));
      return;
    }
    const int width = value <= 0xFF ? 0 : value <= 0xFFFF ? 1 : value <= 0xFFFFFFFF ? 2 : 3;
    out_.push_back(static_cast<std::uint8_t>(type | (24 + width)));
    for (int byte = (1 << width) - 1; byte >= 0; --byte)
      out_.push_back(static_cast<std::uint8_t>(value >> (8 * byte)));
  }

  std::vector<std::uint8_t> out_;
};

// XXH128_canonicalFromHash() gives the big-endian bytes that Python's xxh3_128_digest returns.
ExternalBlockHash digest(HashAlgorithm algorithm, std::span<const std::uint8_t> data) {
  if (algorithm == HashAlgorithm::sha256_cbor) return sha256(data);
  LS_CHECK(algorithm == HashAlgorithm::xxhash_cbor, "the content chain has no external hash");
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(data.data(), data.size()));
  return {canonical.digest, canonical.digest + sizeof canonical.digest};
}

// The first 16 bytes of the hash. Of sha256 this drops half of it: a lookup compares 128 bits,
// events report all 256.
BlockKey key_of(const ExternalBlockHash& hash) {
  BlockKey key;
  std::memcpy(&key.low, hash.data(), 8);
  std::memcpy(&key.high, hash.data() + 8, 8);
  return key;
}

// XXH3 over 128 bits of the content chain.
BlockKey xxh3(const void* data, std::size_t size) {
  const XXH128_hash_t hash = XXH3_128bits(data, size);
  return {hash.low64, hash.high64};
}

// A key after its parent in the content chain. `kind` separates keys of different types with equal
// text, as tags do in vLLM's hashes.
BlockKey behind(const BlockKey& parent, std::uint64_t kind, std::string_view text) {
  const BlockKey own = xxh3(text.data(), text.size());
  const std::uint64_t words[] = {parent.low, parent.high, kind, own.low, own.high};
  return xxh3(words, sizeof words);
}

// The parent of the first block: the salt, distinguished from "no salt" by the constants, then the
// adapter's name and path (kinds 1 and 2).
BlockKey content_root(std::string_view cache_salt, const RequestKeys& keys) {
  BlockKey key{0x6C6F636B73746570ull, 0};
  if (!cache_salt.empty()) {
    key = xxh3(cache_salt.data(), cache_salt.size());
    key.low ^= 0x73616C74ull;
  }
  if (!keys.lora.name.empty()) key = behind(behind(key, 1, keys.lora.name), 2, keys.lora.path);
  return key;
}

// Visits the items that overlap [first, first + count), each with the offset of its first token
// from `first` (negative: it began earlier). REQUIRES: items in the order of their positions,
// without overlap.
template <class Take>
void for_each_item(const std::vector<PromptItem>& items, std::int64_t first, std::int64_t count,
                   Take take) {
  auto item = std::ranges::partition_point(
      items, [&](const PromptItem& before) { return before.first + before.count <= first; });
  for (; item != items.end() && item->first < first + count; ++item)
    take(*item, item->first - first);
}

// Adds the items and embeddings of a block to its key, as kinds 3 to 5 of behind().
BlockKey with_items(BlockKey key, const RequestKeys& keys, std::int64_t prompt_size,
                    std::int64_t first, std::int64_t count) {
  for_each_item(keys.mm, first, count, [&](const PromptItem& item, std::int64_t place) {
    key = behind(behind(key, 3, item.identifier), 4, std::to_string(place));
  });
  if (!keys.embeds.empty()) {
    const std::vector<std::uint8_t> of_block =
        embeds_digest(keys.embeds, prompt_size, first, count);
    key = behind(key, 5, {reinterpret_cast<const char*>(of_block.data()), of_block.size()});
  }
  return key;
}

// Extra keys in vLLM's order: adapter, images, salt, embeddings (generate_block_hash_extra_keys in
// vllm/v1/core/kv_cache_utils.py). They also cover the lookahead tokens of the block's hash.
std::vector<ExtraKey> extra_keys_of(const HashRule& rule, std::string_view cache_salt,
                                    const RequestKeys& keys, std::int64_t prompt_size,
                                    std::int64_t first) {
  const std::int64_t count = rule.hash_block_size + rule.num_lookahead_tokens;
  const auto tag = [&](const char* name) {
    return rule.tags_extra_keys ? std::string(name) : std::string();
  };
  std::vector<ExtraKey> extra;
  if (!keys.lora.name.empty()) {
    extra.push_back({tag("lora"), keys.lora.name});
    if (rule.tags_extra_keys) extra.back().detail = keys.lora.path;
  }
  for_each_item(keys.mm, first, count, [&](const PromptItem& item, std::int64_t place) {
    extra.push_back({tag("mm"), item.identifier});
    extra.back().place = place;
  });
  if (first == 0 && !cache_salt.empty())
    extra.push_back({tag("cache_salt"), std::string(cache_salt)});
  if (!keys.embeds.empty()) {  // also past the prompt: the digest of nothing
    extra.push_back({tag("prompt_embeds"), {}});
    extra.back().digest = embeds_digest(keys.embeds, prompt_size, first, count);
  }
  return extra;
}

// An array of the key's parts, or the part itself if it has only one.
void write_extra_key(CborWriter& cbor, const ExtraKey& key) {
  const std::uint64_t num_parts =
      1 + !key.tag.empty() + key.detail.has_value() + key.place.has_value();
  if (num_parts > 1) cbor.array(num_parts);
  if (!key.tag.empty()) cbor.text(key.tag);
  if (!key.digest.empty())
    cbor.bytes(key.digest);
  else
    cbor.text(key.value);
  if (key.detail) cbor.text(*key.detail);
  if (key.place) cbor.integer(*key.place);
}

}  // namespace

ExternalBlockHash none_hash(HashAlgorithm algorithm) {
  // The text of PYTHONHASHSEED=0.
  CborWriter seed;
  seed.text("0");
  return digest(algorithm, seed.view());
}

// [parent, [tokens...], extra keys]. With lookahead tokens the third element is [extra keys,
// tokens...] instead, with null for no extra keys.
ExternalBlockHash hash_block_tokens(HashAlgorithm algorithm, const ExternalBlockHash& parent,
                                    std::span<const std::int32_t> tokens,
                                    std::span<const ExtraKey> extra_keys,
                                    std::span<const std::int32_t> lookahead) {
  CborWriter cbor;
  cbor.array(3);
  cbor.bytes(parent);
  cbor.array(tokens.size());
  for (const std::int32_t token : tokens) cbor.integer(token);
  if (!lookahead.empty()) cbor.array(1 + lookahead.size());  // [extra keys, tokens...]
  if (extra_keys.empty()) {
    cbor.null();
  } else {
    cbor.array(extra_keys.size());
    for (const ExtraKey& key : extra_keys) write_extra_key(cbor, key);
  }
  for (const std::int32_t token : lookahead) cbor.integer(token);
  return digest(algorithm, cbor.view());
}

TokenSequence::TokenSequence(Prompt prompt) : prompt_(std::move(prompt)) {
  run_begins_.reserve(prompt_.runs.size());
  for (const TokenRun& run : prompt_.runs) {
    run_begins_.push_back(prompt_size_);
    prompt_size_ += run.count;
    any_symbolic_ |= run.kind == TokenRun::Kind::symbolic;
  }
}

// The last run that begins at or before the position: empty runs before it are skipped.
std::size_t TokenSequence::run_at(std::int64_t position) const {
  const auto next = std::upper_bound(run_begins_.begin(), run_begins_.end(), position);
  return static_cast<std::size_t>(next - run_begins_.begin()) - 1;
}

std::int32_t TokenSequence::operator[](std::int64_t position) const {
  LS_CHECK(position >= 0 && position < size(), "token {} of {}", position, size());
  std::int32_t token = 0;
  copy(position, 1, &token);
  return token;
}

// Walks the runs that the range overlaps, then the sampled tokens.
void TokenSequence::copy(std::int64_t first, std::int64_t count, std::int32_t* tokens) const {
  LS_CHECK(first + count <= size(), "tokens [{}, {}) of {}", first, first + count, size());
  if (first < prompt_size_) {
    for (std::size_t r = run_at(first); count > 0 && r < prompt_.runs.size(); ++r) {
      const TokenRun& run = prompt_.runs[r];
      const auto skip = static_cast<std::uint32_t>(first - run_begins_[r]);
      const auto n = static_cast<std::uint32_t>(std::min<std::int64_t>(count, run.count - skip));
      if (run.kind == TokenRun::Kind::literal) {
        std::copy_n(prompt_.tokens.begin() + run.first + skip, n, tokens);
      } else {
        for (std::uint32_t i = 0; i < n; ++i) tokens[i] = token_of(run, run.first + skip + i);
      }
      tokens += n;
      first += n;
      count -= n;
    }
  }
  if (count > 0) std::copy_n(output_.begin() + (first - prompt_size_), count, tokens);
}

// A piece is two words: the seed, then the place in the source (upper half) and the number of
// tokens (lower half). Prompt::append() merges runs that continue each other, so a block of equal
// content has equal pieces however the prompt was built.
bool TokenSequence::symbolic_pieces(std::int64_t first, std::int64_t count,
                                    std::vector<std::uint64_t>& pieces) const {
  if (!any_symbolic_ || first + count > prompt_size_) return false;
  pieces.clear();
  for (std::size_t r = run_at(first); count > 0; ++r) {
    const TokenRun& run = prompt_.runs[r];
    if (run.kind != TokenRun::Kind::symbolic) return false;
    const std::int64_t skip = first - run_begins_[r];
    const std::int64_t n = std::min<std::int64_t>(count, run.count - skip);
    pieces.push_back(run.seed);
    pieces.push_back((static_cast<std::uint64_t>(run.first + skip) << 32) |
                     static_cast<std::uint64_t>(n));
    first += n;
    count -= n;
  }
  return true;
}

// A block counts once its lookahead tokens exist: with hash_block_size 16 and 1 lookahead token, 33
// tokens give 2 hashes and 32 tokens give 1.
void BlockHashChain::extend_to(std::int64_t num_tokens, const HashRule& rule,
                               const TokenSequence& tokens, const Keys& keys) {
  const std::int64_t num_sure = std::max<std::int64_t>(num_tokens - rule.num_lookahead_tokens, 0);
  const auto num_full = static_cast<std::size_t>(num_sure / rule.hash_block_size);
  next_size_ =
      static_cast<std::int64_t>(num_full + 1) * rule.hash_block_size + rule.num_lookahead_tokens;
  if (num_full <= keys_.size()) return;
  // Doubles the capacity: a decode adds one key per block, and an exact reserve would copy all of
  // them each time.
  if (num_full > keys_.capacity()) keys_.reserve(std::max(num_full, 2 * keys_.capacity()));
  if (rule.algorithm == HashAlgorithm::content)
    extend_content(num_full, rule, tokens, keys);
  else
    extend_external(num_full, rule, tokens, keys);
}

// vLLM's hashes, one block at a time; keys_ gets the first 16 bytes of each.
void BlockHashChain::extend_external(std::size_t num_full, const HashRule& rule,
                                     const TokenSequence& tokens, const Keys& keys) {
  std::vector<std::int32_t> block(
      static_cast<std::size_t>(rule.hash_block_size + rule.num_lookahead_tokens));
  const auto hash_block_size = static_cast<std::size_t>(rule.hash_block_size);
  while (keys_.size() < num_full) {
    const auto first = static_cast<std::int64_t>(keys_.size() * hash_block_size);
    tokens.copy(first, std::ssize(block), block.data());
    const std::vector<ExtraKey> extra_keys =
        extra_keys_of(rule, keys.cache_salt, keys.others, tokens.prompt_size(), first);
    const ExternalBlockHash parent =
        external_.empty() ? none_hash(rule.algorithm) : external_.back();
    const std::span<const std::int32_t> all(block);
    external_.push_back(hash_block_tokens(rule.algorithm, parent, all.first(hash_block_size),
                                          extra_keys, all.subspan(hash_block_size)));
    keys_.push_back(key_of(external_.back()));
  }
}

// Hashes [parent key, kind, content] with one XXH3 per block. Kind 1: symbolic pieces; kind 0:
// token ids. The kind separates symbolic content from token ids with the same bits.
void BlockHashChain::extend_content(std::size_t num_full, const HashRule& rule,
                                    const TokenSequence& tokens, const Keys& keys) {
  const std::int64_t num_covered = rule.hash_block_size + rule.num_lookahead_tokens;
  std::vector<std::uint64_t> pieces;
  std::vector<std::int32_t> token_ids(num_covered);
  std::vector<std::uint64_t> words(3 + (static_cast<std::size_t>(num_covered) + 1) / 2);
  BlockKey parent = keys_.empty() ? content_root(keys.cache_salt, keys.others) : keys_.back();
  while (keys_.size() < num_full) {
    const auto first = static_cast<std::int64_t>(keys_.size()) * rule.hash_block_size;
    std::size_t size_bytes = 0;
    if (tokens.symbolic_pieces(first, num_covered, pieces)) {
      words.resize(std::max(words.size(), 3 + pieces.size()));
      words[2] = 1;
      std::copy(pieces.begin(), pieces.end(), words.begin() + 3);
      size_bytes = 8 * (3 + pieces.size());
    } else {
      words[2] = 0;
      tokens.copy(first, num_covered, token_ids.data());
      std::memcpy(words.data() + 3, token_ids.data(), 4 * token_ids.size());
      size_bytes = 24 + 4 * token_ids.size();
    }
    words[0] = parent.low;
    words[1] = parent.high;
    parent = with_items(xxh3(words.data(), size_bytes), keys.others, tokens.prompt_size(), first,
                        num_covered);
    keys_.push_back(parent);
  }
}

// REQUIRES: an even number of hexadecimal digits; readers of traces check that.
static std::vector<std::uint8_t> bytes_of_hex(std::string_view digits) {
  const auto value = [](char c) { return c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10; };
  std::vector<std::uint8_t> bytes;
  for (std::size_t i = 0; i + 1 < digits.size(); i += 2)
    bytes.push_back(static_cast<std::uint8_t>(value(digits[i]) * 16 + value(digits[i + 1])));
  return bytes;
}

std::vector<std::uint8_t> sha256(std::span<const std::uint8_t> bytes) {
  std::vector<std::uint8_t> digest(32);
  unsigned int size = 0;
  // EVP_sha256() would be looked up in each call.
  static const EVP_MD* const method = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  const int ok = EVP_Digest(bytes.data(), bytes.size(), digest.data(), &size, method, nullptr);
  LS_CHECK(ok == 1 && size == 32, "sha256 gave {} bytes", size);
  return digest;
}

// `row` counts over all runs, so each run that ends before it is subtracted.
std::vector<float> embedding_row(const PromptEmbeds& embeds, std::int64_t row) {
  for (const TokenRun& run : embeds.rows) {
    if (row >= run.count) {
      row -= run.count;
      continue;
    }
    const std::uint64_t first = (run.seed << 32) + (run.first + static_cast<std::uint64_t>(row)) *
                                                       static_cast<std::uint64_t>(embeds.width);
    std::vector<float> values;
    for (std::int32_t j = 0; j < embeds.width; ++j) {
      const auto drawn =
          static_cast<std::int32_t>(splitmix64(first + static_cast<std::uint64_t>(j)) % 65536);
      values.push_back(static_cast<float>(drawn - 32768) / 256);
    }
    return values;
  }
  LS_CHECK(false, "no such row of embeddings: {} beyond the last", row);
  return {};
}

// An engine's digests cover digest_tokens tokens each. A range that is one of them returns it as
// is; any other range hashes those that it overlaps. Seeded rows are hashed as float32 bytes, with
// zeros for positions without a row, as vLLM hashes the bytes of its tensor.
std::vector<std::uint8_t> embeds_digest(const PromptEmbeds& embeds, std::int64_t prompt_size,
                                        std::int64_t first, std::int64_t count) {
  const std::int64_t last = std::min(first + count, prompt_size);
  std::vector<std::uint8_t> bytes;
  if (!embeds.digests.empty()) {
    const std::int64_t each = embeds.digest_tokens;
    const auto digest_at = [&](std::int64_t i) {
      return bytes_of_hex(embeds.digests[static_cast<std::size_t>(i)]);
    };
    if (first < last && first % each == 0 && last == std::min(first + each, prompt_size))
      return digest_at(first / each);
    for (std::int64_t i = first / each; i * each < last; ++i) {
      const std::vector<std::uint8_t> part = digest_at(i);
      bytes.insert(bytes.end(), part.begin(), part.end());
    }
    return sha256(bytes);
  }
  for (std::int64_t position = first; position < last; ++position) {
    const std::int64_t row = embeds.row_at(position);
    const std::vector<float> values =
        row < 0 ? std::vector<float>(static_cast<std::size_t>(embeds.width))
                : embedding_row(embeds, row);
    const std::size_t at = bytes.size();
    bytes.resize(at + values.size() * sizeof(float));
    std::memcpy(bytes.data() + at, values.data(), values.size() * sizeof(float));
  }
  return sha256(bytes);
}

}  // namespace lockstep
