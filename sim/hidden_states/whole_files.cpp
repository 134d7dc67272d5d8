#include "sim/hidden_states/whole_files.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/check.h"

namespace lockstep {

void WholeFiles::put(std::int64_t now_ns, const std::string& name,
                     std::vector<std::uint8_t> bytes) {
  LS_CHECK(std::ranges::none_of(under_way_,
                                [&](const auto& entry) { return entry.second.name == name; }),
           "{} is put while it is being put", name);
  write(now_ns, {.name = name, .aside = {}, .bytes = std::move(bytes)});
}

// Aside, under a name that was never used.
void WholeFiles::write(std::int64_t now_ns, Put put) {
  put.aside = writes_in_place_ ? put.name : fmt::format("{}{}{}", put.name, kAside, num_asides_++);
  put.is_written = false;
  ++put.tries;
  const DiskTicket ticket = disk_.write(now_ns, put.aside, put.bytes);
  under_way_.emplace(ticket, std::move(put));
}

std::vector<WholeFiles::Outcome> WholeFiles::take_outcomes(std::int64_t now_ns) {
  std::vector<Outcome> outcomes;
  while (const auto completion = disk_.complete(now_ns)) {
    auto node = under_way_.extract(completion->ticket);
    LS_CHECK(!node.empty(), "ticket {} is another's",
             static_cast<std::uint64_t>(completion->ticket));
    Put put = std::move(node.mapped());
    if (completion->is_done && (put.is_written || writes_in_place_)) {
      outcomes.push_back({put.name, true});
      continue;
    }
    if (completion->is_done) {
      put.is_written = true;
      const DiskTicket ticket = disk_.rename(now_ns, put.aside, put.name);
      under_way_.emplace(ticket, std::move(put));
      continue;
    }
    disk_.remove(put.aside);
    if (put.tries >= tries_max_) {
      outcomes.push_back({put.name, false});
      continue;
    }
    ++num_retries_;
    write(now_ns, std::move(put));
  }
  return outcomes;
}

}  // namespace lockstep
