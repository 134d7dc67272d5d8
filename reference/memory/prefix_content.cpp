#include "reference/memory/prefix_content.h"

#include "base/check.h"
#include "reference/plan/rank_plan.h"
#include "reference/types/token_rows.h"

namespace lockstep {

void PrefixContent::append(std::int32_t token) {
  contents_.push_back(next_content(content(size() - 1), token));
}

void PrefixContent::truncate(std::int64_t size) {
  LS_CHECK(size >= 0 && size <= this->size(), "{} of {} tokens", size, this->size());
  contents_.resize(size);
  for (std::vector<std::uint64_t>& sums : digests_)
    if (static_cast<std::int64_t>(sums.size()) > size + 1) sums.resize(size + 1);
}

std::uint64_t token_digest(const ModelLayer& layer, ContentId content, std::int64_t position) {
  const LayerLayout& at = layer.layout;
  const std::int64_t words = num_words(layer.row_size_bytes);
  std::uint64_t sum = 0;
  for (std::int64_t kv = 0; kv < at.num_kv; ++kv) {
    for (std::int64_t head = 0; head < at.num_kv_heads; ++head) {
      const std::uint64_t key = row_key(content, layer.coords[kv * at.num_kv_heads + head]);
      const WordShape shape = shape_of_row(key, layer.words);
      std::uint64_t row = 0;
      for (std::int64_t i = 0; i < words; ++i) {
        const auto index = static_cast<std::uint64_t>(i);
        const std::uint64_t word =
            first_bytes(row_word(key, index, shape), layer.row_size_bytes - 8 * i);
        row += row_digest_term(word, index);
      }
      sum += placed_digest(row, position, kv, head);
    }
  }
  return sum;
}

std::uint64_t PrefixContent::attention_digest(const ModelLayer& layer, std::int64_t first,
                                              std::int64_t last) {
  LS_CHECK(first >= 0 && first <= last && last <= size() + layer.num_sinks, "[{}, {}) of {}", first,
           last, size());
  const auto index = static_cast<std::size_t>(layer.index);
  if (index >= digests_.size()) digests_.resize(index + 1);
  std::vector<std::uint64_t>& sums = digests_[index];
  if (sums.empty()) sums.push_back(0);
  while (static_cast<std::int64_t>(sums.size()) <= last) {
    const auto position = static_cast<std::int64_t>(sums.size()) - 1;
    sums.push_back(sums.back());
    const ContextRank rank = layer.is_dealt_out ? rank_ : ContextRank{};
    if (!keeps(rank, position)) continue;
    const ContentId content = content_in(layer, position);
    const RowRange rows = rows_of_token(layer.tokens_per_state, num_kept(rank, position));
    for (std::int64_t row = rows.first; row < rows.last; ++row)
      sums.back() += token_digest(layer, row_content(layer.tokens_per_state, content, row), row);
  }
  return sums[last] - sums[first];
}

}  // namespace lockstep
