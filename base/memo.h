// Stores values that are made once per key and never removed, so that callers may keep references.
//
// Invariants
// (1) A value never moves or changes once it is stored; references to it stay valid.
// (2) All calls may run in parallel; a key's value is stored once.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <utility>

namespace lockstep {

// REQUIRES of Value: movable. Keys are compared by content, so a temporary string may be passed.
template <class Value>
class Memo {
 public:
  // Returns the value of a key; null if none is stored yet.
  const Value* find(std::string_view key) const {
    const std::shared_lock lock(mutex_);
    const auto found = values_.find(key);
    return found == values_.end() ? nullptr : found->second.get();
  }
  // Stores a value and returns a reference to it. If the key already has one, for example from
  // another thread that was faster, that value stays and `value` is dropped.
  const Value& keep(std::string_view key, Value value) {
    const std::unique_lock lock(mutex_);
    auto& kept = values_[std::string(key)];
    if (kept == nullptr) kept = std::make_unique<const Value>(std::move(value));
    return *kept;
  }

 private:
  mutable std::shared_mutex mutex_;
  std::map<std::string, std::unique_ptr<const Value>, std::less<>> values_;
};

}  // namespace lockstep
