#include "sim/hidden_states/hidden_states.h"

#include <fmt/format.h>

#include <cctype>

#include "base/check.h"
#include "traces/formats/safetensors.h"

namespace lockstep {

std::vector<std::uint8_t> hidden_state_file(const HiddenStates& states) {
  const std::int64_t num_tokens = std::ssize(states.contents);
  std::vector<SafeTensor> tensors;
  for (const HiddenStateRows& rows : states.layers) {
    LS_CHECK(std::ssize(rows.bytes) == num_tokens * rows.num_heads * rows.row_size_bytes,
             "{} bytes of hidden states for {} tokens", rows.bytes.size(), num_tokens);
    tensors.push_back(
        {.name = rows.layer,
         .dtype = std::string(safetensors_dtype(rows.dtype)),
         .shape = {num_tokens, rows.num_heads, rows.row_size_bytes / itemsize_bytes(rows.dtype)},
         .bytes = rows.bytes});
  }
  std::vector<std::uint8_t> ids;
  for (const ContentId content : states.contents)
    for (int shift = 0; shift < 64; shift += 8)
      ids.push_back(static_cast<std::uint8_t>(content >> shift));
  tensors.push_back({.name = "content_ids", .dtype = "U64", .shape = {num_tokens}, .bytes = ids});
  return safetensors_file(tensors);
}

std::string HiddenStateFileNames::next(std::string_view request) {
  std::string plain;
  for (const char c : request) {
    const bool is_plain =
        std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' || c == '_' || c == '-';
    plain += is_plain ? std::string(1, c) : fmt::format("%{:02X}", static_cast<unsigned char>(c));
  }
  std::string name = plain + ".safetensors";
  for (int number = 2; !used_.insert(name).second; ++number)
    name = fmt::format("{}-{}.safetensors", plain, number);
  return name;
}

}  // namespace lockstep
