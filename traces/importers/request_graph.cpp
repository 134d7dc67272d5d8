// Checks and orders linked requests, and infers links from recorded times.
#include "traces/importers/request_graph.h"

#include <fmt/format.h>
#include <boost/graph/adjacency_list.hpp>
#include <boost/graph/strong_components.hpp>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <queue>
#include <unordered_set>
#include <utility>

#include "base/check.h"
#include "traces/formats/prompt_json.h"
#include "traces/importers/foreign_traces.h"

namespace lockstep {
namespace {

using WaitsFor = boost::adjacency_list<boost::vecS, boost::vecS, boost::directedS>;

// An edge leads from a request to each one that it waits for.
WaitsFor graph_of(const std::vector<LinkedRequest>& requests) {
  WaitsFor graph(requests.size());
  for (std::size_t i = 0; i < requests.size(); ++i)
    for (const std::size_t other : requests[i].waits_for) boost::add_edge(i, other, graph);
  return graph;
}

const std::string& name_of(const LinkedRequest& request) { return request.request.spec.name; }

// Describes one cycle within a strong component, starting at its request `first`: "request b waits
// for c, which waits for b: none of them can start". Every member of a component has a successor in
// it, so the walk ends at a member that it has seen.
std::string circle_text(const std::vector<LinkedRequest>& requests,
                        const std::vector<int>& component, std::size_t first) {
  std::vector<std::size_t> way;
  std::unordered_set<std::size_t> seen;
  std::size_t at = first;
  while (seen.insert(at).second) {
    way.push_back(at);
    const auto& next = requests[at].waits_for;
    at = *std::ranges::find_if(next, [&](std::size_t i) { return component[i] == component[at]; });
  }
  way.erase(way.begin(), std::ranges::find(way, at));
  std::string text = fmt::format("request {} waits for", name_of(requests[way.front()]));
  for (std::size_t i = 1; i < way.size(); ++i)
    text += fmt::format(" {}, which waits for", name_of(requests[way[i]]));
  return text + fmt::format(" {}: none of them can start",
                            way.size() == 1 ? "itself" : name_of(requests[way.front()]));
}

// A cycle exists exactly where a strong component has several members, or a request waits for
// itself. Tarjan's algorithm is linear, which a search per request would not be.
Result<void> check_no_circle(const std::string& path, const std::vector<LinkedRequest>& requests) {
  const WaitsFor graph = graph_of(requests);
  std::vector<int> component(requests.size());
  boost::strong_components(graph, boost::make_iterator_property_map(
                                      component.begin(), boost::get(boost::vertex_index, graph)));
  std::vector<int> members(requests.size());
  for (const int c : component) ++members[static_cast<std::size_t>(c)];
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const bool waits_for_itself =
        std::ranges::find(requests[i].waits_for, i) != requests[i].waits_for.end();
    if (members[static_cast<std::size_t>(component[i])] == 1 && !waits_for_itself) continue;
    return fail("{}:{}: {}", path, requests[i].line, circle_text(requests, component, i));
  }
  return {};
}

// Checks conditions on single requests, and times of those that keep them.
Result<void> check_each(const std::string& path, const std::vector<LinkedRequest>& requests,
                        const ImportOptions& options) {
  std::unordered_set<std::string_view> names;
  for (const LinkedRequest& request : requests) {
    const auto refuse = [&](std::string_view why) {
      return fail("{}:{}: request {} {}", path, request.line, name_of(request), why);
    };
    if (!names.insert(name_of(request)).second) return refuse("has the name of an earlier request");
    if (request.has_no_output && options.zero_output == ZeroOutput::refuse)
      return refuse("has no output; expected at least one token");
    if (!request.keeps_time) continue;
    for (const std::size_t other : request.waits_for)
      if (requests[other].t_ns > request.t_ns)
        return refuse(fmt::format("is before {}, which it follows", name_of(requests[other])));
  }
  return {};
}

// Indices in order of arrival, and for each request, by its index, the time before which it cannot
// arrive.
struct Ordered {
  std::vector<std::size_t> places;
  std::vector<std::int64_t> time_ns;  // by index: the earliest arrival
};

// Topological order with the smallest (time, index) first. A follower's time is at least that of
// the requests that it waits for, so that times never decrease. REQUIRES: no cycles.
Ordered order_of(const std::vector<LinkedRequest>& requests) {
  std::vector<std::vector<std::size_t>> followers(requests.size());
  std::vector<std::size_t> open(requests.size());
  Ordered ordered;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    open[i] = requests[i].waits_for.size();
    for (const std::size_t other : requests[i].waits_for) followers[other].push_back(i);
    ordered.time_ns.push_back(requests[i].t_ns);
  }
  using Place = std::pair<std::int64_t, std::size_t>;
  std::priority_queue<Place, std::vector<Place>, std::greater<>> ready;
  for (std::size_t i = 0; i < requests.size(); ++i)
    if (open[i] == 0) ready.emplace(ordered.time_ns[i], i);
  while (!ready.empty()) {
    const auto [time_ns, i] = ready.top();
    ready.pop();
    ordered.places.push_back(i);
    for (const std::size_t follower : followers[i]) {
      std::int64_t& later = ordered.time_ns[follower];
      if (!requests[follower].keeps_time) later = std::max(later, time_ns);
      if (--open[follower] == 0) ready.emplace(later, follower);
    }
  }
  return ordered;
}

// A trace in memory, read record by record.
class OrderedRequests final : public TraceReader {
 public:
  OrderedRequests(TraceHeader header, std::vector<TraceRequest> requests,
                  std::vector<std::string> assumed)
      : header_(std::move(header)), requests_(std::move(requests)), assumed_(std::move(assumed)) {}
  std::vector<std::string> assumed() const override { return assumed_; }
  const TraceHeader& header() const override { return header_; }
  Result<bool> next(TraceRecord& record) override {
    if (next_ == requests_.size()) return false;
    record = std::move(requests_[next_++]);
    return true;
  }

 private:
  TraceHeader header_;
  std::vector<TraceRequest> requests_;
  std::vector<std::string> assumed_;
  std::size_t next_ = 0;
};

// Makes the prompt of a request at position `ordinal` of the trace, which private tokens depend on.
// Without ids, tail `ceil` means a private prompt; with `floor` it may also be shorter than a
// block, which prompt_of_hash_ids() handles. REQUIRES: the number of ids has been checked.
Prompt prompt_of(const LinkedRequest& linked, const TraceHeader& header, std::uint64_t ordinal) {
  if (linked.prompt_tokens == 0) return linked.request.spec.prompt;
  if (linked.hash_ids.empty() && (!header.ids || header.ids->tail == IdTail::ceil))
    return private_prompt(linked.prompt_tokens, ordinal);
  auto prompt = prompt_of_hash_ids(linked.hash_ids, linked.prompt_tokens, *header.ids, ordinal);
  LS_CHECK(prompt.has_value(), "{} ids for {} tokens", linked.hash_ids.size(),
           linked.prompt_tokens);
  return *std::move(prompt);
}

// Returns the requests that a request waits for when omitted ones are replaced by their own
// predecessors, in ascending order without repetition. Delays of omitted requests are dropped.
std::vector<std::size_t> kept_only(const std::vector<LinkedRequest>& requests,
                                   std::vector<std::size_t> waits_for,
                                   const std::vector<bool>& left_out) {
  std::vector<std::size_t> kept;
  std::unordered_set<std::size_t> seen;
  while (!waits_for.empty()) {
    const std::size_t at = waits_for.back();
    waits_for.pop_back();
    if (!seen.insert(at).second) continue;
    if (left_out[at])
      waits_for.insert(waits_for.end(), requests[at].waits_for.begin(),
                       requests[at].waits_for.end());
    else
      kept.push_back(at);
  }
  std::ranges::sort(kept);
  return kept;
}

}  // namespace

void LinkedRequest::set_output(std::int32_t length) {
  has_no_output = length == 0;
  request.output.length = std::max(length, 1);
  request.spec.max_tokens = request.output.length;
}

TraceHeader header_of(std::string kind, std::string_view path,
                      std::optional<HashIdConvention> ids) {
  return {.source = {.kind = std::move(kind), .name = file_name_of(path), .seed = {}},
          .ids = ids,
          .engine = {}};
}

Result<std::unique_ptr<TraceReader>> in_order(const std::string& path, TraceHeader header,
                                              std::vector<LinkedRequest> requests,
                                              const ImportOptions& options, ReadNotes notes) {
  const std::string files = name_of_files(path, options);
  LS_RETURN_IF_ERROR(check_each(files, requests, options));
  LS_RETURN_IF_ERROR(check_no_circle(files, requests));
  for (LinkedRequest& linked : requests) {
    if (options.arrivals == Arrivals::closed) linked.t_ns = 0;
    if (linked.has_no_output) ++notes.zero_outputs;
  }
  std::vector<bool> left_out;
  for (const LinkedRequest& linked : requests)
    left_out.push_back(linked.has_no_output && options.zero_output == ZeroOutput::skip);
  for (LinkedRequest& linked : requests)
    linked.waits_for = kept_only(requests, linked.waits_for, left_out);
  const Ordered ordered = order_of(requests);
  std::vector<TraceRequest> records;
  for (const std::size_t place : ordered.places) {
    if (left_out[place]) continue;
    LinkedRequest& linked = requests[place];
    TraceRequest request = linked.request;
    request.spec.prompt = prompt_of(linked, header, records.size());
    if (linked.keeps_time || linked.waits_for.empty()) {
      request.spec.arrival_ns = linked.t_ns;
      request.delay_ns = 0;
    } else {
      for (const std::size_t other : linked.waits_for)
        request.after.push_back(name_of(requests[other]));
    }
    records.push_back(std::move(request));
  }
  return std::make_unique<OrderedRequests>(std::move(header), std::move(records),
                                           notes.phrases(options));
}

// Sessions are grouped in order of start; a std::map keeps the result independent of hashing.
std::vector<LinkedRequest> link_sessions(std::vector<AgentRequest> requests) {
  std::vector<std::size_t> by_start(requests.size());
  std::iota(by_start.begin(), by_start.end(), std::size_t{0});
  const auto start = [&](std::size_t i) { return requests[i].linked.t_ns; };
  std::ranges::stable_sort(by_start, {}, start);
  std::map<std::string_view, std::vector<std::size_t>> sessions;
  for (const std::size_t i : by_start) sessions[requests[i].session].push_back(i);
  // Adds a link once: a child of one request may both start from and join the same parent.
  const auto wait = [&](std::size_t who, std::size_t for_whom) {
    auto& waits_for = requests[who].linked.waits_for;
    if (std::ranges::find(waits_for, for_whom) == waits_for.end()) waits_for.push_back(for_whom);
  };
  for (const auto& [name, turns] : sessions) {
    for (std::size_t i = 1; i < turns.size(); ++i) wait(turns[i], turns[i - 1]);
    const auto parent = sessions.find(requests[turns.front()].parent);
    if (parent == sessions.end() || parent->first == name) continue;
    const std::vector<std::size_t>& theirs = parent->second;
    const auto behind = std::ranges::upper_bound(theirs, start(turns.front()), {}, start);
    if (behind != theirs.begin()) wait(turns.front(), *std::prev(behind));
    const auto joins = std::ranges::lower_bound(theirs, requests[turns.back()].end_ns, {}, start);
    // A request of the parent that started with the child may be the one that the child waits for:
    // a child of no duration would close a cycle.
    if (joins != theirs.end() && joins >= behind) wait(*joins, turns.back());
  }
  std::vector<LinkedRequest> linked;
  for (AgentRequest& request : requests) {
    std::int64_t over_ns = 0;
    for (const std::size_t other : request.linked.waits_for)
      over_ns = std::max(over_ns, requests[other].end_ns);
    if (!request.linked.waits_for.empty())
      request.linked.request.delay_ns = std::max<std::int64_t>(request.linked.t_ns - over_ns, 0);
  }
  for (AgentRequest& request : requests) linked.push_back(std::move(request.linked));
  return linked;
}

}  // namespace lockstep
