#include "sim/connectors/host_block_pool.h"

#include "base/check.h"

namespace lockstep {

HostBlockPool::HostBlockPool(std::int64_t num_blocks)
    : blocks_(static_cast<std::size_t>(num_blocks)) {
  for (std::int64_t block = num_blocks - 1; block >= 0; --block)
    free_.push_back(static_cast<HostBlockId>(block));
}

HostBlockPool::Block& HostBlockPool::at(HostBlockId host) {
  LS_CHECK(index_of(host) >= 0 && static_cast<std::size_t>(index_of(host)) < blocks_.size(),
           "host block {} of {}", index_of(host), blocks_.size());
  return blocks_[static_cast<std::size_t>(index_of(host))];
}

bool HostBlockPool::is_ready(const HostKey& key) const {
  const auto entry = entries_.find(key);
  return entry != entries_.end() &&
         blocks_[static_cast<std::size_t>(index_of(entry->second))].ready;
}

HostBlockId HostBlockPool::use(const HostKey& key) {
  const auto entry = entries_.find(key);
  LS_CHECK(entry != entries_.end() && at(entry->second).ready, "a block that is not there is used");
  Block& block = at(entry->second);
  if (block.pins == 0) {
    by_use_.erase(block.used);
    allow_eviction(entry->second);
  }
  return entry->second;
}

void HostBlockPool::allow_eviction(HostBlockId host) {
  Block& block = at(host);
  block.used = ++clock_;
  by_use_.emplace(block.used, host);
}

void HostBlockPool::pin(HostBlockId host) {
  Block& block = at(host);
  LS_CHECK(block.ready, "host block {} is pinned before it is stored", index_of(host));
  if (block.pins++ == 0) by_use_.erase(block.used);
}

void HostBlockPool::unpin(HostBlockId host) {
  Block& block = at(host);
  LS_CHECK(block.pins > 0, "host block {} is not pinned", index_of(host));
  if (--block.pins == 0) allow_eviction(host);
}

std::optional<HostBlockId> HostBlockPool::take(const HostKey& key) {
  LS_CHECK(!entries_.contains(key), "a key of group {} is stored twice", key.group);
  HostBlockId host{};
  if (!free_.empty()) {
    host = free_.back();
    free_.pop_back();
  } else {
    if (by_use_.empty()) return std::nullopt;
    host = by_use_.begin()->second;
    by_use_.erase(by_use_.begin());
    entries_.erase(*at(host).key);
    ++num_evicted_;
  }
  at(host) = {.key = key};
  entries_.emplace(key, host);
  return host;
}

void HostBlockPool::set_ready(HostBlockId host) {
  Block& block = at(host);
  LS_CHECK(block.key && !block.ready, "host block {} was not to be stored", index_of(host));
  block.ready = true;
  allow_eviction(host);
}

void HostBlockPool::drop(HostBlockId host) {
  Block& block = at(host);
  LS_CHECK(block.key && !block.ready, "host block {} was not to be stored", index_of(host));
  entries_.erase(*block.key);
  block = {};
  free_.push_back(host);
}

}  // namespace lockstep
