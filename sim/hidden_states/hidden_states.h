// The hidden states of a request that has ended, as a trainer is given them, and the file that they
// are handed over in.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "reference/memory/content.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

// Of one layer.
struct HiddenStateRows {
  std::string layer;  // its name in the plan
  DType dtype = DType::bf16;
  std::int64_t num_heads = 0;
  std::int64_t row_size_bytes = 0;  // of a head
  std::vector<std::uint8_t> bytes;  // [num_tokens, num_heads, row]
};

struct HiddenStates {
  std::string request;
  std::vector<ContentId> contents;  // one for each token
  std::vector<HiddenStateRows> layers;
};

// A safetensors file: a tensor [num_tokens, num_heads, hidden_size] for each layer, under its name,
// and `content_ids`, [num_tokens].
std::vector<std::uint8_t> hidden_state_file(const HiddenStates& states);

// Names of files: that of the request with everything but letters, digits, '.', '_' and '-' as
// %XX, and a number behind it where another request of that name was before.
class HiddenStateFileNames {
 public:
  std::string next(std::string_view request);

 private:
  std::set<std::string> used_;
};

}  // namespace lockstep
