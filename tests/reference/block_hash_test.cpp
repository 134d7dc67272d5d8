// Block hashes are bit for bit what vLLM computes, and the model's own chain tells the same blocks
// apart.
#include "reference/cache/block_hash.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace lockstep {
namespace {

std::string hex(const ExternalBlockHash& hash) {
  std::string text;
  for (const std::uint8_t byte : hash) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

Prompt literal(std::vector<std::int32_t> tokens) {
  Prompt prompt;
  prompt.append({TokenRun::Kind::literal, 0, 0, static_cast<std::uint32_t>(tokens.size())});
  prompt.tokens = std::move(tokens);
  return prompt;
}

BlockHashChain chain_of(HashAlgorithm algorithm, std::int32_t block_size, Prompt prompt,
                        const std::string& salt = {}, std::int32_t num_lookahead_tokens = 0,
                        bool tags_extra_keys = false) {
  BlockHashChain chain;
  chain.extend({algorithm, block_size, num_lookahead_tokens, tags_extra_keys},
               TokenSequence(std::move(prompt)), salt);
  return chain;
}

TEST(BlockHash, EqualsEveryRecordedChainOfVllm) {
  std::ifstream file(std::string(LOCKSTEP_SOURCE_DIR) +
                     "/traces/samples/recordings/vllm-0.22.1/block_hashes.jsonl");
  ASSERT_TRUE(file) << "the bundled block_hashes.jsonl is missing";
  std::string line;
  int num_chains = 0;
  while (std::getline(file, line)) {
    const auto recorded = nlohmann::json::parse(line);
    const auto algorithm =
        recorded["hash"] == "sha256_cbor" ? HashAlgorithm::sha256_cbor : HashAlgorithm::xxhash_cbor;
    EXPECT_EQ(hex(none_hash(algorithm)), recorded["none_hash"]);
    const std::string salt =
        recorded["cache_salt"].is_null() ? "" : recorded["cache_salt"].get<std::string>();
    Prompt prompt;
    for (const auto& segment : recorded["tokens"])
      prompt.append({TokenRun::Kind::seeded, segment[0], 0, segment[1]});
    if (!recorded["token_ids"].is_null()) {
      if (recorded["tokens"].empty()) prompt = literal(recorded["token_ids"]);
      EXPECT_EQ(prompt.materialize(), recorded["token_ids"].get<std::vector<std::int32_t>>());
    }
    const BlockHashChain chain =
        chain_of(algorithm, recorded["block_size"], std::move(prompt), salt);
    ASSERT_EQ(chain.external().size(), recorded["block_hashes"].size()) << line;
    for (std::size_t i = 0; i < chain.external().size(); ++i)
      EXPECT_EQ(hex(chain.external()[i]), recorded["block_hashes"][i]) << "block " << i;
    ++num_chains;
  }
  EXPECT_EQ(num_chains, 80);
}

TEST(BlockHash, AChainExtendedTokenByTokenEqualsOneMadeAtOnce) {
  for (const HashAlgorithm algorithm : {HashAlgorithm::content, HashAlgorithm::sha256_cbor}) {
    for (const std::int32_t num_lookahead_tokens : {0, 1}) {
      const HashRule rule{algorithm, 16, num_lookahead_tokens};
      std::vector<std::int32_t> tokens;
      for (std::uint32_t i = 0; i < 100; ++i) tokens.push_back(seeded_token(3, i));
      TokenSequence growing(literal({tokens.begin(), tokens.begin() + 10}));
      BlockHashChain grown;
      grown.extend(rule, growing, "salt");
      for (std::size_t i = 10; i < tokens.size(); ++i) {
        growing.append(tokens[i]);
        grown.extend(rule, growing, "salt");
      }
      const BlockHashChain whole =
          chain_of(algorithm, 16, literal(tokens), "salt", num_lookahead_tokens);
      ASSERT_EQ(grown.size(), 6u);
      for (std::size_t i = 0; i < grown.size(); ++i) EXPECT_EQ(grown[i], whole[i]) << "block " << i;
    }
  }
}

TEST(BlockHash, TheContentChainTellsTokensPrefixesAndSaltsApart) {
  const auto key = [](std::vector<std::int32_t> tokens, const std::string& salt) {
    const BlockHashChain chain =
        chain_of(HashAlgorithm::content, 2, literal(std::move(tokens)), salt);
    return chain[chain.size() - 1];
  };
  const BlockKey base = key({1, 2, 3, 4}, "");
  EXPECT_EQ(base, key({1, 2, 3, 4}, ""));
  EXPECT_NE(base, key({1, 2, 3, 5}, ""));  // another token
  EXPECT_NE(base, key({1, 7, 3, 4}, ""));  // another prefix
  EXPECT_NE(base, key({3, 4}, ""));        // no prefix
  EXPECT_NE(base, key({1, 2, 3, 4}, "a"));
  EXPECT_NE(key({1, 2, 3, 4}, "a"), key({1, 2, 3, 4}, "b"));
}

TEST(BlockHash, SymbolicRunsAreEqualWhereSeedAndPlaceAreAndOnlyThere) {
  const auto last = [](std::vector<TokenRun> runs) {
    Prompt prompt;
    for (const TokenRun& run : runs) prompt.append(run);
    const BlockHashChain chain = chain_of(HashAlgorithm::content, 16, std::move(prompt));
    return chain[chain.size() - 1];
  };
  constexpr auto symbolic = TokenRun::Kind::symbolic;
  const BlockKey base = last({{symbolic, 5, 0, 32}});
  EXPECT_EQ(base, last({{symbolic, 5, 0, 20}, {symbolic, 5, 20, 12}}));  // the same, in two pieces
  EXPECT_NE(base, last({{symbolic, 5, 1, 32}}));
  EXPECT_NE(base, last({{symbolic, 6, 0, 16}, {symbolic, 5, 16, 16}}));
  EXPECT_NE(base, last({{TokenRun::Kind::seeded, 5, 0, 32}}));
}

// Computed by get_request_block_hasher of vLLM 0.33.0 with num_hash_lookahead_tokens.
TEST(BlockHash, Of0330CoversTokensAfterTheBlockAndTagsTheSaltAsVllmDoes) {
  struct Case {
    HashAlgorithm algorithm;
    std::int32_t num_lookahead_tokens;
    std::string salt;
    std::vector<std::string> hashes;
  };
  const Case cases[] = {
      {HashAlgorithm::sha256_cbor,
       1,
       "",
       {"a209359df8854b7b969ec453c1b83b50aada6819b4950c64685439862ea0900b",
        "ea693968520a9a7384d58746246f5a6039fe42f61069bd2b65bbbfcf31711ede"}},
      {HashAlgorithm::sha256_cbor,
       2,
       "s",
       {"c757f585ac20954eacae345fcb6d48cd7b55d2e458ff6dafe284f952abd205c7"}},
      {HashAlgorithm::xxhash_cbor,
       1,
       "s",
       {"3cef46ca650413488eead93e30d0b080", "15ddcc5b5eb874d623b4e063a775ae86"}},
      {HashAlgorithm::sha256_cbor,
       0,
       "s",
       {"942d2a7601168cd8083fd34088e159a5bb033059a968c1dee8551c894811a7d4",
        "533deec0c8a0c6a7d17b710e4b181cb20531f5f95089c1d2e8a9215e670d806b"}},
      {HashAlgorithm::xxhash_cbor,
       0,
       "",
       {"62a3b412f7e8981dbd2f4c824fc9e619", "9444b6873228a0752faf96be8a78e266"}},
  };
  const std::vector<std::int32_t> tokens = {7, 1, 300, 70000, 5, 6, -1, 8, 9};
  for (const Case& c : cases) {
    const BlockHashChain chain =
        chain_of(c.algorithm, 4, literal(tokens), c.salt, c.num_lookahead_tokens, true);
    std::vector<std::string> hashes;
    for (const ExternalBlockHash& hash : chain.external()) hashes.push_back(hex(hash));
    EXPECT_EQ(hashes, c.hashes) << "lookahead " << c.num_lookahead_tokens << " salt " << c.salt;
  }
}

// Computed by generate_block_hash_extra_keys and hash_block_tokens of vLLM 0.33.0 and 0.22.1.
TEST(BlockHash, CoversAdaptersImagesAndEmbeddingsAsVllmDoes) {
  RequestKeys keys{.lora = {"sql", 1, "/adapters/sql"}, .mm = {{"cat", 2, 4}}};
  keys.embeds.digest_tokens = 4;
  keys.embeds.digests = {"01ab", "02", "03"};
  const std::vector<std::int32_t> tokens = {7, 1, 300, 70000, 5, 6, -1, 8, 9};
  const auto hashes = [&](bool tags_extra_keys) {
    BlockHashChain chain;
    chain.extend({HashAlgorithm::sha256_cbor, 4, 0, tags_extra_keys},
                 TokenSequence(literal(tokens)), "s", keys);
    std::vector<std::string> found;
    for (const ExternalBlockHash& hash : chain.external()) found.push_back(hex(hash));
    return found;
  };
  EXPECT_EQ(hashes(true), (std::vector<std::string>{
                              "17d0f7c1fb0faaec2a85295757d97d68a84a723de10dc95fc561714636107ec6",
                              "257e3716e858638aa4f7ef929e088854ab58b990119790ba7d7af4214463dcbe"}));
  EXPECT_EQ(hashes(false),
            (std::vector<std::string>{
                "5bd656d4c6abd6fef1ed0a738722ced93a869f7bfc7196f8a462164f76cc70f5",
                "b8f67d2bd4411b5ddbe0126922aaed6a5478c6bb3f91e165c57e3b74c79a84db"}));
}

TEST(BlockHash, OfTheModelTellsKeysApartFromTheBlockOnThatHasThem) {
  const auto chain = [](const RequestKeys& keys) {
    BlockHashChain made;
    made.extend({HashAlgorithm::content, 2}, TokenSequence(literal({1, 2, 3, 4, 5, 6})), "", keys);
    return std::vector<BlockKey>(made.keys().begin(), made.keys().end());
  };
  const std::vector<BlockKey> bare = chain({});
  EXPECT_NE(chain({.lora = {"a"}})[0], bare[0]);
  EXPECT_NE(chain({.lora = {"a"}})[0], chain({.lora = {"b"}})[0]);
  EXPECT_NE(chain({.lora = {"a"}})[0], (chain({.lora = {"a", 0, "p"}})[0]));
  const std::vector<BlockKey> image = chain({.mm = {{"cat", 2, 2}}});
  EXPECT_EQ(image[0], bare[0]);
  EXPECT_NE(image[1], bare[1]);
  EXPECT_NE(image[2], bare[2]);
  EXPECT_NE(image[1], chain({.mm = {{"dog", 2, 2}}})[1]);
  EXPECT_NE(image[1], chain({.mm = {{"cat", 3, 1}}})[1]);
  RequestKeys embedded;
  embedded.embeds.width = 2;
  embedded.embeds.rows = {{.seed = 1, .count = 2}};
  embedded.embeds.places = {{2, 2}};
  RequestKeys otherwise = embedded;
  otherwise.embeds.rows[0].seed = 2;
  EXPECT_NE(chain(embedded)[1], bare[1]);
  EXPECT_NE(chain(embedded)[1], chain(otherwise)[1]);
}

TEST(BlockHash, WithLookaheadTellsBlocksApartThatOnlyTheirNextTokenTellsApart) {
  const auto keys = [](std::vector<std::int32_t> tokens, std::int32_t num_lookahead_tokens) {
    return chain_of(HashAlgorithm::content, 2, literal(std::move(tokens)), "",
                    num_lookahead_tokens);
  };
  EXPECT_EQ(keys({1, 2, 3}, 0)[0], keys({1, 2, 4}, 0)[0]);
  EXPECT_NE(keys({1, 2, 3}, 1)[0], keys({1, 2, 4}, 1)[0]);
  EXPECT_EQ(keys({1, 2, 3, 4}, 1)[0], keys({1, 2, 3, 5}, 1)[0]);
  EXPECT_EQ(keys({1, 2, 3, 4}, 1).size(), 1u);  // the token after the second block is not there yet
}

TEST(TokenSequence, CopiesAcrossRunsAndOutput) {
  Prompt prompt;
  prompt.append({TokenRun::Kind::seeded, 9, 100, 5});
  prompt.tokens = {11, 12, 13};
  prompt.append({TokenRun::Kind::literal, 0, 0, 3});
  TokenSequence tokens(prompt);
  tokens.append(77);
  ASSERT_EQ(tokens.size(), 9);
  std::vector<std::int32_t> copied(6);
  tokens.copy(3, 6, copied.data());
  EXPECT_EQ(copied, (std::vector<std::int32_t>{seeded_token(9, 103), seeded_token(9, 104), 11, 12,
                                               13, 77}));
  EXPECT_EQ(tokens[8], 77);
  EXPECT_EQ(tokens[0], seeded_token(9, 100));
}

}  // namespace
}  // namespace lockstep
