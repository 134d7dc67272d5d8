// The part of Diagnosis that tells of the host tier.
#include <fmt/core.h>

#include <algorithm>

#include "base/check.h"
#include "base/hex_text.h"
#include "sim/check/diagnosis.h"

namespace lockstep {
namespace {

// The group whose blocks fill a host block to its end.
std::int32_t largest_group(const MemoryModel& model) {
  std::int32_t largest = 0;
  for (std::int32_t g = 0; g < model.num_groups(); ++g)
    if (model.host_bytes_of(g) > model.host_bytes_of(largest)) largest = g;
  return largest;
}

// "group 0's tokens 16 to 31 of r3", as far as the model knows.
std::string stored_there(const MemoryModel& model, const HostContent& host) {
  if (host.group < 0) return "nothing was stored there";
  std::string what = fmt::format("group {}'s block", host.group);
  if (host.state.writer != kNobody)
    return fmt::format("{}, {}'s state after {} tokens", what, model.writer_name(host.state.writer),
                       host.state.num_tokens);
  const auto first = std::ranges::find_if(
      host.slots, [](const SlotContent& slot) { return slot.writer != kNobody; });
  if (first == host.slots.end()) return what + ", without a row";
  return fmt::format("{}, {}'s tokens from {} on", what, model.writer_name(first->writer),
                     first->position);
}

}  // namespace

Result<Divergence> Diagnosis::host_block(HostBlockId host) {
  Divergence found = about(Phase::host_block);
  const HostContent& content = model_.host_block(host);
  auto bytes = backend_.read_host_block(largest_group(model_), host);
  if (!bytes) return tl::unexpected(bytes.error());
  found.host_block = index_of(host);
  found.group = content.group;
  found.owner = stored_there(model_, content);
  found.expected_page = *content.bytes;
  found.found_page = std::move(*bytes);
  LS_CHECK(found.found_page.size() == found.expected_page.size(), "{} bytes read, {} in a block",
           found.found_page.size(), found.expected_page.size());
  found.spans.push_back(
      {.first_byte = 0, .size_bytes = std::ssize(found.expected_page), .what = found.owner});
  for (std::size_t i = 0; i < found.found_page.size(); ++i) {
    if (found.found_page[i] == found.expected_page[i]) continue;
    if (found.byte < 0) found.byte = static_cast<std::int64_t>(i);
    ++found.wrong_bytes;
  }
  if (found.byte < 0) {
    found.message = fmt::format(
        "host block {}: its bytes are right when they are read, its fingerprint is not: the "
        "device's fingerprint is wrong, or something changed the block in between",
        index_of(host));
    return found;
  }
  const auto at = static_cast<std::size_t>(found.byte);
  found.expected = hex_bytes(std::span(found.expected_page).subspan(at));
  found.found = hex_bytes(std::span(found.found_page).subspan(at));
  const bool behind = content.group < 0 || found.byte >= model_.host_bytes_of(content.group);
  if (!behind) set_layer(found, model_.host_layer_at(content.group, found.byte));
  found.message = fmt::format(
      "host block {} ({}) differs in {} of {} bytes, first at byte {}, {}", index_of(host),
      found.owner, found.wrong_bytes, found.found_page.size(), found.byte,
      behind ? "behind what was stored"
             : fmt::format("of layer {} ({})", found.layer, found.layer_name));
  return found;
}

}  // namespace lockstep
