#include "reference/cache/embeds_digest.h"

#include <openssl/evp.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/seeded_random.h"

namespace lockstep {
namespace {

std::vector<std::uint8_t> bytes_of_hex(std::string_view digits) {
  const auto value = [](char c) { return c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10; };
  std::vector<std::uint8_t> bytes;
  for (std::size_t i = 0; i + 1 < digits.size(); i += 2)
    bytes.push_back(static_cast<std::uint8_t>(value(digits[i]) * 16 + value(digits[i + 1])));
  return bytes;
}

}  // namespace

std::vector<std::uint8_t> sha256(std::span<const std::uint8_t> bytes) {
  std::vector<std::uint8_t> digest(32);
  unsigned int size = 0;
  const int ok =
      EVP_Digest(bytes.data(), bytes.size(), digest.data(), &size, EVP_sha256(), nullptr);
  LS_CHECK(ok == 1 && size == 32, "sha256 gave {} bytes", size);
  return digest;
}

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
