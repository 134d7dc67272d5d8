#include "cuda_backend/simt/watch/launch_log.h"

#include "base/check.h"

namespace simt {

std::uint32_t LaunchLog::name_index(std::string_view name) {
  if (last_name_ < names_.size() && names_[last_name_] == name) return last_name_;
  const auto next = static_cast<std::uint32_t>(names_.size());
  const auto [it, is_new] = name_indices_.emplace(name, next);
  if (is_new) names_.emplace_back(name);
  return last_name_ = it->second;
}

std::uint32_t LaunchLog::begin(std::string_view name, bool is_host, uint3 grid) {
  LS_CHECK(!full());
  entries_.push_back({name_index(name), is_host, grid.x, grid.y});
  return static_cast<std::uint32_t>(entries_.size());
}

Stamp LaunchLog::begin_again() {
  forgotten_ += entries_.size() - 1;
  entries_.clear();
  extra_tags_.clear();
  begin_host("(one of the launches before)");
  return make_stamp(1, 0, 0, 0);
}

Party LaunchLog::party_of(Stamp stamp) const {
  const std::uint32_t launch = launch_of(stamp);
  std::uint32_t linear = tag_of(stamp);
  const auto extra = extra_tags_.find((std::uint64_t{launch} << 32) | linear);
  if (extra != extra_tags_.end()) linear = extra->second;
  return party_of(launch, linear, thread_of(stamp), epoch_of(stamp));
}

Party LaunchLog::party_of(std::uint32_t launch, std::uint32_t cta_linear, unsigned thread,
                          unsigned epoch) const {
  LS_CHECK(launch >= 1 && launch <= entries_.size(), "launch {}", launch);
  const Entry& entry = entries_[launch - 1];
  Party party{.launch = absolute(launch), .kernel = names_[entry.name], .is_host = entry.is_host};
  if (entry.is_host) return party;
  party.cta = {cta_linear % entry.grid_x, cta_linear / entry.grid_x % entry.grid_y,
               cta_linear / entry.grid_x / entry.grid_y};
  party.thread = thread;
  party.epoch = epoch;
  return party;
}

}  // namespace simt
