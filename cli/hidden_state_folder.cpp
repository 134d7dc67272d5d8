#include "cli/hidden_state_folder.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "base/atomic_file.h"

namespace lockstep {
namespace {

// In a group of its own, or beside attention of equal rows.
bool keeps_hidden_states(const KVCacheGroupSpec& group) {
  for (std::size_t layer = 0; layer < group.layer_names.size(); ++layer)
    if (group.layer_spec(layer).kind == CacheKind::hidden_state) return true;
  return false;
}

}  // namespace

Result<void> HiddenStateFolder::check(const LockstepConfig& config, bool has_backend) const {
  if (std::ranges::none_of(config.device.plan.groups, keeps_hidden_states))
    return fail(
        "--hidden-states: the model keeps none; give a --model with a layer of kind hidden_state "
        "(docs/model_files.md)");
  if (!has_backend)
    return fail("--hidden-states are read out of a cache, and --backend none has none");
  if (num_ranks(config.device) > 1 || config.data_parallel.dp_size > 1)
    return fail(
        "--hidden-states with several ranks: each would hold a part; give them to a run of one");
  if (!std::filesystem::is_directory(path_))
    return fail(fmt::format("--hidden-states {}: there is no such folder", path_));
  const auto probe = AtomicFile::create(std::filesystem::path(path_) / "probe");
  if (!probe) return fail(fmt::format("--hidden-states: {}", probe.error().message));
  return {};
}

Result<void> HiddenStateFolder::write(std::span<const HiddenStates> requests) {
  for (const HiddenStates& states : requests) {
    const std::vector<std::uint8_t> bytes = hidden_state_file(states);
    const auto path = std::filesystem::path(path_) / names_.next(states.request);
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (auto written = write_file_atomically(path, text); !written) return written;
    ++num_files_;
    num_bytes_ += std::ssize(bytes);
  }
  return {};
}

}  // namespace lockstep
