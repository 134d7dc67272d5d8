#include "sim/pair/transfer_protocol.h"

#include <algorithm>
#include <array>

namespace lockstep {
namespace {

constexpr std::array kDefects = {
    TransferDefect::send_freed_early, TransferDefect::delivery_twice,
    TransferDefect::failed_marked_ok, TransferDefect::completion_stale,
    TransferDefect::stage_read_early, TransferDefect::load_before_arrival};

}  // namespace

std::span<const TransferDefect> transfer_defects() { return kDefects; }

std::string_view name_of(TransferDefect defect) {
  switch (defect) {
    case TransferDefect::none:
      return "none";
    case TransferDefect::send_freed_early:
      return "send-freed-early";
    case TransferDefect::delivery_twice:
      return "delivery-twice";
    case TransferDefect::failed_marked_ok:
      return "recv-failed-marked-ok";
    case TransferDefect::completion_stale:
      return "completion-stale";
    case TransferDefect::stage_read_early:
      return "stage-read-early";
    case TransferDefect::load_before_arrival:
      return "load-before-arrival";
  }
  return "none";
}

std::optional<TransferDefect> transfer_defect_from_name(std::string_view name) {
  const auto found = std::ranges::find(kDefects, name, [](TransferDefect d) { return name_of(d); });
  if (found == kDefects.end()) return std::nullopt;
  return *found;
}

}  // namespace lockstep
