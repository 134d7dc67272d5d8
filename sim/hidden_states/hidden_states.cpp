#include "sim/hidden_states/hidden_states.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "base/check.h"
#include "base/number_text.h"
#include "reference/memory/page_image.h"
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

namespace {

constexpr std::size_t kBytesShown = 16;

}  // namespace

HiddenStateExtraction::HiddenStateExtraction(const MemoryModel& model, Worker& worker)
    : model_(model), worker_(worker) {
  for (const ModelLayer& layer : model.layers())
    if (is_hidden_state(layer.layout.kind)) layers_.push_back(layer.index);
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

Checked HiddenStateExtraction::compare(const StepReadback& readback) {
  if (!readback.reports.empty()) {
    Divergence found;
    found.phase = Phase::extraction;
    found.step = program_.step;
    found.message = readback.reports.front().message;
    return found;
  }
  std::size_t at = 0;
  std::vector<std::uint8_t> expected;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    const RowExtraction& extraction = program_.extractions[i];
    const ModelLayer& layer = model_.layers()[extraction.layer];
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
        return difference(extraction, requests_[i], token, expected, found);
    }
  }
  if (at != readback.extracted.size())
    return fail(fmt::format("the backend extracted {} bytes of hidden states, {} were asked for",
                            readback.extracted.size(), at));
  return {};
}

std::vector<HiddenStates> HiddenStateExtraction::states(const StepReadback& readback) {
  std::vector<HiddenStates> all;
  auto at = readback.extracted.begin();
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    const RowExtraction& extraction = program_.extractions[i];
    const ModelLayer& layer = model_.layers()[extraction.layer];
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
  const ModelLayer& layer = model_.layers()[extraction.layer];
  const std::int64_t size = model_.block_size(layer.group);
  const auto& table = request.tables[layer.group];
  const auto wrong = std::ranges::mismatch(expected, found_row).in1 - expected.begin();
  Divergence found;
  found.phase = Phase::extraction;
  found.step = program_.step;
  found.request = request.name;
  found.layer = layer.index;
  found.layer_name = layer.name;
  found.group = layer.group;
  found.block = index_of(table[token / size]);
  found.slot = found.block * size + token % size;
  found.part = "hidden";
  found.token = token;
  found.byte = wrong;
  found.expected = hex_bytes(expected.subspan(wrong), kBytesShown);
  found.found = hex_bytes(found_row.subspan(wrong), kBytesShown);
  found.doing = fmt::format("extraction of the hidden states of {}, which has ended with {} tokens",
                            request.name, request.num_known);
  found.message = fmt::format(
      "hidden state of {}'s token {} in layer {} ({}), slot {} of block {}: the extracted row "
      "differs from byte {} on",
      request.name, token, layer.index, layer.name, found.slot, found.block, wrong);
  return found;
}

}  // namespace lockstep
