#include "properties/audit/audit_requests.h"

#include <algorithm>

namespace lockstep {

AuditRequest& AuditRequests::add(
    const RequestSpec& spec, std::size_t num_groups,
    const std::function<void(const std::function<void(std::int32_t)>&)>& in_use) {
  erase(spec.name);
  AuditRequest request;
  request.name = spec.name;
  request.index = num_requests_++;
  request.tokens = spec.prompt.materialize();
  request.num_prompt = static_cast<std::int32_t>(request.tokens.size());
  request.keyed = {spec.name, spec.cache_salt, spec.keys};
  request.root = empty_prefix(request.keyed);
  request.contents = contents_of(request.keyed, request.tokens);
  request.tables.resize(num_groups);
  request.slot = free_slots_.empty() ? num_slots_++ : free_slots_.back();
  if (!free_slots_.empty()) free_slots_.pop_back();
  set_keys(request);
  AuditRequest& added = by_name_.emplace(spec.name, std::move(request)).first->second;
  if (keys_.size() >= num_keys_max_) {
    std::set<std::int32_t> kept;
    in_use([&](std::int32_t index) { kept.insert(index); });
    for (const auto& [name, live] : by_name_) kept.insert(live.index);
    std::erase_if(keys_, [&](const auto& of) { return !kept.contains(of.first); });
    num_keys_max_ = std::max(num_keys_max_, 2 * keys_.size());
  }
  LS_CHECK(added.contents.size() == added.tokens.size(), "{} contents of {} tokens",
           added.contents.size(), added.tokens.size());
  return added;
}

void AuditRequests::erase(const std::string& name) {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) return;
  LS_CHECK(found->second.slot < num_slots_, "slot {} of {}", found->second.slot, num_slots_);
  free_slots_.push_back(found->second.slot);
  by_name_.erase(found);
}

const std::string& AuditRequests::name_at(std::int32_t index) const {
  static const std::string kForgotten = "?";
  const KeyedRequest* keys = keys_at(index);
  return keys == nullptr ? kForgotten : keys->name;
}

const KeyedRequest* AuditRequests::keys_at(std::int32_t index) const {
  const auto found = keys_.find(index);
  return found == keys_.end() ? nullptr : &found->second;
}

}  // namespace lockstep
