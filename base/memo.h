// Values that are made once per key and live as long as the process.
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

// From any thread. A value never moves.
template <class Value>
class Memo {
 public:
  // Null: there is none for this key yet.
  const Value* find(std::string_view key) const {
    const std::shared_lock lock(mutex_);
    const auto found = values_.find(key);
    return found == values_.end() ? nullptr : found->second.get();
  }
  // The first value that a key was given stays.
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
