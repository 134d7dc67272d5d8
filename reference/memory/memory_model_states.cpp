// The states of the memory model: rules (2) and (15) of sim/protocol/backend.h.
#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "reference/memory/memory_model.h"
#include "reference/memory/page_image.h"

namespace lockstep {

std::span<const std::uint8_t> bytes_of_state(const std::vector<std::uint64_t>& words,
                                             const ModelLayer& layer, std::size_t state) {
  const StateLayout& at = layer.layout.states[state];
  const auto* first =
      reinterpret_cast<const std::uint8_t*>(words.data() + layer.state_first_word[state]);
  return {first, static_cast<std::size_t>(at.num_elements * at.itemsize_bytes)};
}

std::span<std::uint8_t> bytes_of_state(std::vector<std::uint64_t>& words, const ModelLayer& layer,
                                       std::size_t state) {
  const auto bytes = bytes_of_state(std::as_const(words), layer, state);
  return {const_cast<std::uint8_t*>(bytes.data()), bytes.size()};
}

Result<void> MemoryModel::add_states(const KVCacheSpec& spec, ModelLayer& layer,
                                     Group& group) const {
  for (std::size_t s = 0; s < layer.layout.states.size(); ++s) {
    const StateLayout& state = layer.layout.states[s];
    layer.state_first_word.push_back(group.state_words);
    group.state_words += num_words(state.num_elements * state.itemsize_bytes);
    if (numbers_ == Numbers::words) continue;
    auto of = state_numbers(spec, s, layer.share);
    if (!of) return fail(fmt::format("numbers: {}: {}", layer.name, of.error().message));
    layer.state_numbers.push_back(*of);
  }
  return {};
}

std::optional<std::string> MemoryModel::copy_state(std::int32_t group, BlockId source,
                                                   BlockId target, BlockId conv_source,
                                                   std::int64_t conv_offset) {
  LS_CHECK(is_state_group(group), "group {}", group);
  const BlockContent& from = block(source);
  if (from.group != group || from.state.writer == kNobody)
    return fmt::format("a state is copied from block {}, which holds none", index_of(source));
  if (numbers_ == Numbers::words) {
    set_state(group, target, from.state);
    return std::nullopt;
  }
  const BlockContent& inputs_from = block(conv_source);
  if (inputs_from.group != group || inputs_from.state.words == nullptr)
    return fmt::format("the inputs of convolutions are copied from block {}, which holds none",
                       index_of(conv_source));
  StateContent copied = from.state;
  std::vector<std::uint64_t> words = *from.state.words;
  const std::vector<std::uint64_t>& inputs = *inputs_from.state.words;
  const std::vector<std::uint64_t> before = state_words(group, target);
  for (const ModelLayer& layer : layers_of(group))
    for (std::size_t s = 0; s < layer.state_numbers.size(); ++s) {
      const StateNumbers& of = layer.state_numbers[s];
      if (of.rule != StateRule::convolution) continue;
      const auto moved = bytes_of_state(inputs, layer, s).subspan(conv_offset * of.row_bytes());
      const auto rows = bytes_of_state(words, layer, s);
      std::ranges::copy(bytes_of_state(before, layer, s), rows.begin());
      std::ranges::copy(moved, rows.begin());
    }
  copied.words = std::make_shared<const std::vector<std::uint64_t>>(std::move(words));
  set_state(group, target, std::move(copied));
  return std::nullopt;
}

std::vector<std::uint64_t> MemoryModel::state_words(std::int32_t group, BlockId id) const {
  const BlockContent& content = block(id);
  if (content.group == group && content.state.words != nullptr) return *content.state.words;
  std::vector<std::uint64_t> words(static_cast<std::size_t>(groups_[group].state_words));
  std::int32_t drawn = -1;  // layers may share a page
  std::vector<std::uint8_t> image;
  for (const ModelLayer& layer : layers_of(group)) {
    if (layer.layout.tensor_index != drawn)
      image = page_image({layer.layout.tensor_index, index_of(id)});
    drawn = layer.layout.tensor_index;
    for (std::size_t s = 0; s < layer.layout.states.size(); ++s) {
      const auto bytes = bytes_of_state(words, layer, s);
      std::memcpy(bytes.data(), image.data() + layer.layout.states[s].offset_bytes, bytes.size());
    }
  }
  return words;
}

void MemoryModel::settle_state(std::int32_t group, BlockId id, StateWords words) {
  BlockContent& content = blocks_[id];
  LS_CHECK(content.group == group && content.state.writer != kNobody,
           "block {} has no state of group {} to settle", index_of(id), group);
  content.state.words = std::move(words);
}

// The words of a group's states, each token by token.
void MemoryModel::advance_words(std::int32_t group, std::span<const ContentId> contents,
                                std::vector<std::uint64_t>& words) const {
  for (const ModelLayer& layer : layers_of(group)) {
    for (std::size_t s = 0; s < layer.layout.states.size(); ++s) {
      const StateLayout& state = layer.layout.states[s];
      std::uint64_t* at = words.data() + layer.state_first_word[s];
      const std::int64_t count = num_words(state.num_elements * state.itemsize_bytes);
      const std::uint64_t coord =
          coordinate(layer.share.layer, kPartState + static_cast<int>(s), layer.share.first_head);
      for (const ContentId content : contents)
        for (std::int64_t i = 0; i < count; ++i)
          at[i] = next_state_word(at[i], content ^ coord, static_cast<std::uint64_t>(i));
    }
  }
}

std::optional<std::string> MemoryModel::advance_state(std::int32_t group, BlockId source,
                                                      BlockId target, std::int64_t first_position,
                                                      ContentId before,
                                                      std::span<const ContentId> contents,
                                                      WriterId writer) {
  const Group& of = groups_[group];
  LS_CHECK(of.states && !contents.empty(), "group {}, {} tokens", group, contents.size());
  if (target == kNullBlock) return "a state is written to the null block";
  if (const std::int32_t owner = blocks_[target].group; owner != -1 && owner != group)
    return fmt::format("a state is written to block {}, which belongs to group {}",
                       index_of(target), owner);
  std::vector<std::uint64_t> words(static_cast<std::size_t>(of.state_words));
  if (source != kNullBlock) {
    const BlockContent& from = block(source);
    if (from.group != group || from.state.writer == kNobody)
      return fmt::format("a state after {} tokens is read from block {}, which holds none",
                         first_position, index_of(source));
    if (from.state.num_tokens != first_position || from.state.content != before)
      return fmt::format(
          "a state after {} tokens is read from block {}, which holds {}'s after {} tokens",
          first_position, index_of(source), writer_name(from.state.writer), from.state.num_tokens);
    if (numbers_ == Numbers::words) words = *from.state.words;
  } else if (first_position != 0) {
    return fmt::format("a state after {} tokens is read from the null block", first_position);
  }
  StateContent now{.content = contents.back(),
                   .num_tokens = first_position + static_cast<std::int64_t>(contents.size()),
                   .writer = writer,
                   .step = step_,
                   .words = nullptr};
  if (numbers_ == Numbers::words) {
    advance_words(group, contents, words);
    now.words = std::make_shared<const std::vector<std::uint64_t>>(std::move(words));
  }
  set_state(group, target, std::move(now));
  return std::nullopt;
}

void MemoryModel::set_state(std::int32_t group, BlockId id, StateContent state) {
  BlockContent& block = blocks_[id];
  LS_CHECK(block.group == -1 || block.group == group, "block {} of group {} written for group {}",
           index_of(id), block.group, group);
  use(state.writer);
  release(block.state.writer);
  block.group = group;
  block.state = std::move(state);
  for (const ModelLayer& layer : layers_of(group)) {
    const std::int32_t tensor = layer.layout.tensor_index;
    tensors_[tensor].known[index_of(id)] = 0;
    touch(tensor, index_of(id));
  }
}

}  // namespace lockstep
