// The requests that are live in an engine: who has come, who has left, whose id is free again.
//
// (1) A request is live from its arrival until a decision reports it finished: its id is nobody
//     else's until then, although it may have left long before.
// (2) Names are those of requests that have not left: no two are the same.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/ids.h"

namespace lockstep {

struct LiveRequest {
  std::string name;
  std::uint64_t ticket = 0;
  std::int64_t num_prompt_tokens = 0;
  std::int64_t num_output_tokens = 0;  // sampled, whether the engine has seen them or not
  bool live = false;
  std::int64_t unsampled_in = -1;  // the last step that sampled for it and brought no token
};

class LiveRequests {
 public:
  // False: another of that name has not left.
  bool add(RequestId id, LiveRequest request) {
    if (index_of(id) >= requests_.size()) requests_.resize(index_of(id) + 1);
    LS_CHECK(!at(id).live, "id {} of {} is {}'s", index_of(id), request.name, at(id).name);
    if (!ids_.emplace(request.name, id).second) return false;
    at(id) = std::move(request);
    return true;
  }

  LiveRequest& at(RequestId id) { return requests_[index_of(id)]; }
  const LiveRequest& at(RequestId id) const { return requests_[index_of(id)]; }
  // Null: nobody of that name is there.
  const RequestId* find(const std::string& name) const {
    const auto id = ids_.find(name);
    return id == ids_.end() ? nullptr : &id->second;
  }
  // Of that name, also those that have left.
  std::vector<RequestId> all_called(std::string_view name) const {
    std::vector<RequestId> ids;
    for (std::size_t i = 0; i < requests_.size(); ++i)
      if (requests_[i].live && requests_[i].name == name)
        ids.push_back(RequestId{static_cast<std::uint32_t>(i)});
    return ids;
  }
  std::int64_t num_live() const { return std::ranges::count(requests_, true, &LiveRequest::live); }

  void leave(RequestId id) {
    ids_.erase(at(id).name);
    left_.push_back(id);
  }
  // Since the last call, in order. They stay live.
  std::vector<RequestId> take_left() { return std::exchange(left_, {}); }
  // A decision has told the worker that these have finished.
  void forget(std::span<const RequestId> finished) {
    for (const RequestId id : finished) {
      LS_CHECK(at(id).live, "id {} finishes and is not live", index_of(id));
      at(id) = {};
    }
  }

 private:
  std::vector<LiveRequest> requests_;  // by RequestId
  std::unordered_map<std::string, RequestId> ids_;
  std::vector<RequestId> left_;
};

}  // namespace lockstep
