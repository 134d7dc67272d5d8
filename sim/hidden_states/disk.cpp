#include "sim/hidden_states/disk.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/check.h"

namespace lockstep {

std::int64_t Disk::end_ns(std::int64_t now_ns) {
  LS_CHECK(now_ns >= now_ns_, "asked at {} ns, after {} ns", now_ns, now_ns_);
  now_ns_ = now_ns;
  return now_ns + random_.between(options_.delay_ns_min, options_.delay_ns_max);
}

DiskTicket Disk::write(std::int64_t now_ns, const std::string& path,
                       std::vector<std::uint8_t> bytes) {
  File& file = files_[path];
  LS_CHECK(file.end_ns <= now_ns, "{} is still being written", path);
  ++counts_.writes;
  const bool is_done = !random_.chance(options_.fail_percent);
  std::size_t num_bytes = bytes.size();
  if (!is_done) {
    ++counts_.writes_failed;
    const bool is_torn = num_bytes > 1 && random_.chance(options_.torn_percent);
    counts_.writes_torn += is_torn ? 1 : 0;
    num_bytes = is_torn ? static_cast<std::size_t>(random_.between(1, std::ssize(bytes) - 1)) : 0;
  }
  file = {.bytes = std::move(bytes), .begin_ns = now_ns, .end_ns = end_ns(now_ns)};
  const DiskTicket ticket{num_tickets_++};
  under_way_.emplace(file.end_ns, UnderWay{ticket, is_done, path, {}, num_bytes});
  return ticket;
}

DiskTicket Disk::rename(std::int64_t now_ns, const std::string& from, const std::string& to) {
  ++counts_.renames;
  const bool is_done = !random_.chance(options_.fail_percent);
  counts_.renames_failed += is_done ? 0 : 1;
  const DiskTicket ticket{num_tickets_++};
  under_way_.emplace(end_ns(now_ns), UnderWay{ticket, is_done, from, to, 0});
  return ticket;
}

void Disk::remove(const std::string& path) {
  LS_CHECK(std::ranges::none_of(under_way_,
                                [&](const auto& entry) { return entry.second.path == path; }),
           "{} is removed while something is done with it", path);
  LS_CHECK(files_.erase(path) == 1, "{} is removed and is not there", path);
}

std::optional<DiskCompletion> Disk::complete(std::int64_t now_ns) {
  LS_CHECK(now_ns >= now_ns_, "asked at {} ns, after {} ns", now_ns, now_ns_);
  now_ns_ = now_ns;
  if (under_way_.empty() || under_way_.begin()->first > now_ns) return std::nullopt;
  const UnderWay over = std::move(under_way_.begin()->second);
  under_way_.erase(under_way_.begin());
  if (over.renamed_to.empty()) {
    files_.at(over.path).bytes.resize(over.num_bytes);
  } else if (over.is_done) {
    auto file = files_.extract(over.path);
    LS_CHECK(!file.empty(), "{} is renamed and is not there", over.path);
    files_[over.renamed_to] = std::move(file.mapped());
  }
  return DiskCompletion{over.ticket, over.is_done};
}

std::optional<std::int64_t> Disk::next_due_ns() const {
  if (under_way_.empty()) return std::nullopt;
  return under_way_.begin()->first;
}

std::optional<std::vector<std::uint8_t>> Disk::read(std::int64_t now_ns,
                                                    const std::string& path) const {
  const auto found = files_.find(path);
  if (found == files_.end()) return std::nullopt;
  const File& file = found->second;
  if (now_ns >= file.end_ns) return file.bytes;
  const std::int64_t there =
      std::ssize(file.bytes) * (now_ns - file.begin_ns) / (file.end_ns - file.begin_ns);
  return std::vector<std::uint8_t>(file.bytes.begin(), file.bytes.begin() + there);
}

std::vector<std::string> Disk::paths() const {
  std::vector<std::string> paths;
  for (const auto& [path, file] : files_) paths.push_back(path);
  return paths;
}

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
