#include "sim/hidden_states/hidden_state_extraction.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/hex_text.h"
#include "reference/memory/page_image.h"

namespace lockstep {
namespace {

constexpr std::size_t kBytesShown = 16;

}  // namespace

HiddenStateExtraction::HiddenStateExtraction(const MemoryModel& model, Worker& worker)
    : model_(model), worker_(worker) {
  for (const ModelLayer& layer : model.layers())
    if (layer.layout.kind == CacheKind::hidden_state) layers_.push_back(layer.index);
}

void HiddenStateExtraction::begin(std::int64_t step) {
  program_.step = step;
  program_.extractions.clear();
  requests_.clear();
}

void HiddenStateExtraction::add(RequestId id) {
  if (layers_.empty()) return;
  const WorkerRequest& request = worker_.at(id);
  if (request.row < 0) {
    ++requests_without_a_row_;
    return;
  }
  const auto num_tokens = static_cast<std::int32_t>(request.num_known) - 1;
  for (const std::int32_t layer : layers_) {
    program_.extractions.push_back({.row = request.row, .layer = layer, .num_tokens = num_tokens});
    requests_.push_back(id);
  }
}

Result<std::optional<Divergence>> HiddenStateExtraction::compare(const StepReadback& readback) {
  std::size_t at = 0;
  std::vector<std::uint8_t> expected;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    const RowExtraction& extraction = program_.extractions[i];
    const ModelLayer& layer = model_.layers()[static_cast<std::size_t>(extraction.layer)];
    const PrefixContent& prefix = worker_.at(requests_[i]).prefix;
    const auto row_bytes = static_cast<std::size_t>(layer.row_size_bytes);
    expected.resize(row_bytes * static_cast<std::size_t>(layer.layout.num_kv_heads));
    for (std::int64_t token = 0; token < extraction.num_tokens; ++token, ++rows_compared_) {
      for (std::size_t head = 0; head < expected.size() / row_bytes; ++head)
        draw_row(prefix.content(token), layer.coords[head], layer.words,
                 std::span(expected).subspan(head * row_bytes, row_bytes));
      if (at + expected.size() > readback.extracted.size())
        return fail(fmt::format("the backend extracted {} bytes of hidden states, too few",
                                readback.extracted.size()));
      const auto found = std::span(readback.extracted).subspan(at, expected.size());
      at += expected.size();
      if (!std::ranges::equal(expected, found))
        return std::optional(difference(extraction, requests_[i], token, expected, found));
    }
  }
  if (at != readback.extracted.size())
    return fail(fmt::format("the backend extracted {} bytes of hidden states, {} were asked for",
                            readback.extracted.size(), at));
  return std::optional<Divergence>();
}

std::vector<HiddenStates> HiddenStateExtraction::states(const StepReadback& readback) {
  std::vector<HiddenStates> all;
  auto at = readback.extracted.begin();
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    const RowExtraction& extraction = program_.extractions[i];
    const ModelLayer& layer = model_.layers()[static_cast<std::size_t>(extraction.layer)];
    if (extraction.layer == layers_.front()) {
      const WorkerRequest& request = worker_.at(requests_[i]);
      HiddenStates& states = all.emplace_back();
      states.request = request.name;
      for (std::int64_t token = 0; token < extraction.num_tokens; ++token)
        states.contents.push_back(request.prefix.content(token));
    }
    const std::int64_t num_heads = layer.layout.num_kv_heads;
    const auto end = at + extraction.num_tokens * num_heads * layer.row_size_bytes;
    all.back().layers.push_back({.layer = layer.name,
                                 .dtype = layer.dtype,
                                 .num_heads = num_heads,
                                 .row_size_bytes = layer.row_size_bytes,
                                 .bytes = {at, end}});
    at = end;
  }
  return all;
}

Divergence HiddenStateExtraction::difference(const RowExtraction& extraction, RequestId id,
                                             std::int64_t token,
                                             std::span<const std::uint8_t> expected,
                                             std::span<const std::uint8_t> found_row) const {
  const WorkerRequest& request = worker_.at(id);
  const ModelLayer& layer = model_.layers()[static_cast<std::size_t>(extraction.layer)];
  const std::int64_t size = model_.block_size(layer.group);
  const auto& table = request.tables[static_cast<std::size_t>(layer.group)];
  const auto wrong = std::ranges::mismatch(expected, found_row).in1 - expected.begin();
  Divergence found;
  found.phase = Phase::extraction;
  found.step = program_.step;
  found.request = request.name;
  found.layer = layer.index;
  found.layer_name = layer.name;
  found.group = layer.group;
  found.block = index_of(table[static_cast<std::size_t>(token / size)]);
  found.slot = found.block * size + token % size;
  found.part = "hidden";
  found.token = token;
  found.byte = wrong;
  found.expected = hex_bytes(expected.subspan(static_cast<std::size_t>(wrong)), kBytesShown);
  found.found = hex_bytes(found_row.subspan(static_cast<std::size_t>(wrong)), kBytesShown);
  found.doing = fmt::format("extraction of the hidden states of {}, which has ended with {} tokens",
                            request.name, request.num_known);
  found.message = fmt::format(
      "hidden state of {}'s token {} in layer {} ({}), slot {} of block {}: the extracted row "
      "differs from byte {} on",
      request.name, token, layer.index, layer.name, found.slot, found.block, wrong);
  return found;
}

}  // namespace lockstep
