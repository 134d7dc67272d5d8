// Hashes of requests with adapters, images, salts and embeddings, read as recordings have them, are
// bit for bit what vLLM 0.22.1 and 0.33.0 computed.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>

#include "base/json_reader.h"
#include "reference/cache/block_hash.h"
#include "traces/formats/prompt_json.h"

namespace lockstep {
namespace {

std::string hex_of(const ExternalBlockHash& hash) {
  std::string text;
  for (const std::uint8_t byte : hash) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

TEST(KeyedHashes, EqualEveryRecordedChainOfVllm) {
  const std::string folder = LOCKSTEP_SOURCE_DIR "/tests/traces/keyed_hashes";
  for (const auto& [file, tags, expected] : {std::tuple("/vllm-0.33.0.jsonl", true, 216),
                                             std::tuple("/vllm-0.22.1.jsonl", false, 144)}) {
    std::ifstream lines(folder + file);
    ASSERT_TRUE(lines) << folder + file;
    int num_chains = 0;
    for (std::string line; std::getline(lines, line); ++num_chains) {
      const auto recorded = nlohmann::json::parse(line);
      JsonReader json("chain");
      ASSERT_TRUE(json.parse(line));
      JsonObject object = json.root().object();
      RequestSpec request;
      if (!read_embeds_alone(object, request))
        request.prompt = read_recorded_prompt(object.required("prompt"));
      read_rare_request_keys(object, request, {.zeroes_embedded = tags});
      ASSERT_TRUE(json.ok()) << json.error().message;
      const HashRule rule{recorded["hash"] == "sha256_cbor" ? HashAlgorithm::sha256_cbor
                                                            : HashAlgorithm::xxhash_cbor,
                          recorded["block_size"], recorded.value("num_hash_lookahead_tokens", 0),
                          tags};
      BlockHashChain chain;
      chain.extend(rule, TokenSequence(request.prompt), recorded.value("cache_salt", ""),
                   request.keys);
      std::vector<std::string> hashes;
      for (const ExternalBlockHash& hash : chain.external()) hashes.push_back(hex_of(hash));
      EXPECT_EQ(hashes, recorded["block_hashes"].get<std::vector<std::string>>()) << line;
    }
    EXPECT_EQ(num_chains, expected);
  }
}

}  // namespace
}  // namespace lockstep
