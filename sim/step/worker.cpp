#include "sim/step/worker.h"

#include <algorithm>
#include <array>

#include "base/check.h"
#include "reference/memory/row_words.h"
#include "reference/plan/rank_plan.h"
#include "reference/types/token_rows.h"

namespace lockstep {

// Each content depends on the previous one, so equal tokens after different prefixes differ.
void PrefixContent::append(std::int32_t token) {
  contents_.push_back(next_content(content(size() - 1), token));
}

void PrefixContent::truncate(std::int64_t size) {
  LS_CHECK(size >= 0 && size <= this->size(), "{} of {} tokens", size, this->size());
  // Digests of the removed positions go with them: sums has one entry more than contents.
  contents_.resize(size);
  for (std::vector<std::uint64_t>& sums : digests_)
    if (static_cast<std::int64_t>(sums.size()) > size + 1) sums.resize(size + 1);
}

// Generates the words in pieces of kWordsAtOnce, since rows may be long. The last word is cut to
// the row's bytes: rule (4) pads it with zero bytes.
std::uint64_t token_digest(const ModelLayer& layer, ContentId content, std::int64_t position) {
  const auto words = static_cast<std::size_t>(num_words(layer.row_size_bytes));
  std::array<std::uint64_t, kWordsAtOnce> buffer;
  std::uint64_t sum = 0;
  for (std::int64_t kv = 0; kv < layer.num_kv; ++kv) {
    for (std::int64_t head = 0; head < layer.num_kv_heads; ++head) {
      const std::uint64_t key = row_key(content, layer.coords[kv * layer.num_kv_heads + head]);
      const WordShape shape = shape_of_row(key, layer.words);
      std::uint64_t row = 0;
      for (std::size_t i = 0; i < words; i += kWordsAtOnce) {
        const auto piece = std::span(buffer).first(std::min(kWordsAtOnce, words - i));
        fill_row_words(key, i, shape, piece);
        const auto last = static_cast<std::int64_t>(i + piece.size() - 1);
        piece.back() = first_bytes(piece.back(), layer.row_size_bytes - 8 * last);
        row += sum_of_digest_terms(piece, i);
      }
      sum += placed_digest(row, position, kv, head);
    }
  }
  return sum;
}

// Extends the layer's prefix sums up to `last`, then answers from two of them. A request that is
// probed in every step pays for each position once per layer.
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
    // Tokens of other ranks repeat the previous sum, so positions stay those of the whole request.
    const ContextRank rank = layer.is_dealt_out ? rank_ : ContextRank{};
    if (!keeps(rank, position)) continue;
    const ContentId content = content_in(layer, position);
    const RowRange rows = rows_of_token(layer.tokens_per_state, num_kept(rank, position));
    for (std::int64_t row = rows.first; row < rows.last; ++row)
      sums.back() += token_digest(layer, row_content(layer.tokens_per_state, content, row), row);
  }
  return sums[last] - sums[first];
}

Worker::Worker(std::int32_t num_rows, const ContextRank& context, MemoryModel& model)
    : model_(model),
      context_(context),
      num_groups_(model.num_groups()),
      row_taken_(static_cast<std::size_t>(num_rows)) {}

// Stores the prompt as runs of tokens. know() expands it when the request first runs, so requests
// that wait or are aborted cost no contents.
void Worker::add_request(RequestId id, const RequestSpec& spec) {
  if (index_of(id) >= requests_.size()) requests_.resize(index_of(id) + 1);
  LS_CHECK(requests_[id] == nullptr, "request id {} is taken by {}", index_of(id),
           requests_[id]->name);
  auto request = std::make_unique<WorkerRequest>();
  request->name = spec.name;
  request->prompt = spec.prompt;
  request->num_known = request->num_prompt = spec.prompt.size();
  request->prefix = PrefixContent(context_);
  request->items = spec.keys.mm;
  requests_[id] = std::move(request);
}

bool Worker::is_known(RequestId id) const {
  return index_of(id) < requests_.size() && requests_[id] != nullptr;
}

WorkerRequest& Worker::at(RequestId id) {
  LS_CHECK(is_known(id), "request id {}", index_of(id));
  return *requests_[id];
}

// The step's drafts are removed first, the rejected ones with them; `tokens` contains the accepted
// ones again.
void Worker::append_sampled(RequestId id, std::span<const std::int32_t> tokens) {
  WorkerRequest& request = at(id);
  LS_CHECK(request.writer != kNobody, "{} was never scheduled", request.name);
  request.prefix.truncate(request.num_known);
  for (const std::int32_t token : tokens) request.prefix.append(token);
  request.num_known += static_cast<std::int64_t>(tokens.size());
  // The running state is the one after the last accepted draft: one entry further per draft.
  for (std::int64_t& entry : request.state_entry)
    if (entry >= 0) entry += static_cast<std::int64_t>(tokens.size()) - 1;
  for (ConvPlace& place : request.conv_places)
    if (place.entry >= 0) place.offset += static_cast<std::int64_t>(tokens.size()) - 1;
}

std::int32_t Worker::leave_row(RequestId id) {
  WorkerRequest& request = at(id);
  const std::int32_t row = request.row;
  if (row < 0) return row;
  row_taken_[row] = 0;
  request.row = -1;
  request.tables.clear();
  request.state_entry.clear();
  request.conv_places.clear();
  return row;
}

void Worker::forget(RequestId id) {
  WorkerRequest& request = at(id);
  LS_CHECK(request.row < 0, "{} is in row {}", request.name, request.row);
  if (request.writer != kNobody) model_.retire_writer(request.writer);
  requests_[id].reset();
}

// Tables and the state of a previous run are dropped: a resumed request receives all its blocks
// again. Its contents stay.
bool Worker::enter_row(RequestId id) {
  WorkerRequest& request = at(id);
  LS_CHECK(request.row < 0, "{} is in row {}", request.name, request.row);
  // The lowest free row: both sides derive the same row from the decisions, without an exchange.
  const auto free = std::ranges::find(row_taken_, std::uint8_t{0});
  if (free == row_taken_.end()) return false;
  *free = 1;
  request.row = static_cast<std::int32_t>(free - row_taken_.begin());
  request.tables.assign(num_groups_, {});
  request.residency.clear();
  request.state_entry.assign(num_groups_, -1);
  request.conv_places.assign(num_groups_, {});
  request.drafter = {};
  know(id);
  return true;
}

WorkerRequest& Worker::know(RequestId id) {
  WorkerRequest& request = at(id);
  if (request.writer != kNobody) return request;
  request.writer = model_.add_writer(request.name);
  for (const std::int32_t token : request.prompt.materialize()) request.prefix.append(token);
  request.prompt = {};
  return request;
}

void Worker::drop_sampled(RequestId id, std::int64_t num_tokens) {
  WorkerRequest& request = at(id);
  LS_CHECK(num_tokens <= request.num_known, "{} tokens of {} are {}", num_tokens, request.name,
           request.num_known);
  request.num_known = num_tokens;
  if (request.writer != kNobody) request.prefix.truncate(num_tokens);
}

}  // namespace lockstep
