// The part of the loop that knows the requests: who comes, who leaves, whose id is free again.
#include <fmt/core.h>

#include <utility>

#include "base/check.h"
#include "sim/conform/recorded_terms.h"
#include "sim/engine/lockstep_loop.h"

namespace lockstep {

Result<void> LockstepLoop::apply_events() {
  resets_.clear();
  for (WorkloadEvent& event : events_) {
    switch (event.kind) {
      case WorkloadEvent::Kind::add:
        if (auto added = add_request(event); !added) return added;
        break;
      case WorkloadEvent::Kind::abort: {
        const auto id = ids_.find(event.name);
        if (id == ids_.end()) {
          abort_again(event.name);
          break;
        }
        decisions_.abort_request(id->second);
        ++summary_.aborted_requests;
        leave(id->second, "abort");
        break;
      }
      case WorkloadEvent::Kind::reset_prefix_cache:
        resets_.push_back(decisions_.reset_prefix_cache() ? 1 : 0);
        chain_.add(resets_.back());
        break;
    }
  }
  return {};
}

// It has left; as long as the engine has not reported that, it hears of the abort all the same.
void LockstepLoop::abort_again(std::string_view name) {
  for (std::size_t i = 0; i < requests_.size(); ++i)
    if (requests_[i].live && requests_[i].name == name)
      decisions_.abort_request(RequestId{static_cast<std::uint32_t>(i)});
}

Result<void> LockstepLoop::add_request(WorkloadEvent& event) {
  ++summary_.requests;
  std::string name = event.request.name;
  const std::int64_t prompt = event.request.prompt.size();
  RequestSpec spec;  // the worker's copy
  if (device_ != nullptr) spec = event.request;
  const auto id = decisions_.add_request(std::move(event.request));
  if (!id) {
    if (++summary_.refused_requests == 1)
      summary_.not_checked.push_back(
          fmt::format("refused requests, the first: {}", id.error().message));
    workload_.request_refused(name, event.ticket, id.error());
    return {};
  }
  if (index_of(*id) >= requests_.size()) requests_.resize(index_of(*id) + 1);
  LS_CHECK(!requests_[index_of(*id)].live, "id {} of {} is {}'s", index_of(*id), name,
           requests_[index_of(*id)].name);
  if (!ids_.emplace(name, *id).second)
    return fail(fmt::format("two live requests are called {}", name));
  chain_.add(name);
  recorder_.added(*id, name, prompt, summary_.steps);
  requests_[index_of(*id)] = {.name = std::move(name),
                              .ticket = event.ticket,
                              .num_prompt_tokens = prompt,
                              .num_output_tokens = 0,
                              .live = true};
  if (device_ != nullptr) device_->add_request(*id, spec);
  progress_.arrived();
  return {};
}

void LockstepLoop::hash_stopped(std::span<const StoppedRequest> stopped) {
  chain_.add(stopped.size());
  for (const StoppedRequest& request : stopped) {
    chain_.add(static_cast<std::uint64_t>(index_of(request.id)) << 8 |
               static_cast<std::uint64_t>(request.reason));
    ++summary_.finished_requests;
    leave(request.id, reason_of(request.reason));
  }
}

// It leaves the engine in this step; its id lives on until a decision reports it finished.
void LockstepLoop::leave(RequestId id, std::string_view reason) {
  const LiveRequest& request = requests_[index_of(id)];
  summary_.output_tokens += decisions_.num_tokens(id) - request.num_prompt_tokens;
  ids_.erase(request.name);
  left_.push_back(id);
  recorder_.ended(id, reason);
  progress_.left();
}

// The step has told the worker that these have left: their ids may be given to others.
void LockstepLoop::forget_finished(const SchedulerOutput& decision) {
  for (const RequestId id : decision.finished) {
    LiveRequest& request = requests_[index_of(id)];
    LS_CHECK(request.live, "id {} finishes and is not live", index_of(id));
    request = {};
  }
}

}  // namespace lockstep
