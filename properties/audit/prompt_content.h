// What a cached token stands for: the token, all tokens before it, and the keys of the request.
//
// Invariant: two requests share a content id only where all of these are equal.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/seeded_random.h"
#include "reference/types/scheduler_types.h"

namespace lockstep {

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

}  // namespace lockstep
