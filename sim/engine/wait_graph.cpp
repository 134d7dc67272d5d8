#include "sim/engine/wait_graph.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/graph/adjacency_list.hpp>
#include <boost/graph/strong_components.hpp>

namespace lockstep {
namespace {

using Graph = boost::adjacency_list<boost::vecS, boost::vecS, boost::directedS>;

Graph wait_graph(const Standstill& standstill) {
  const std::vector<WaitingRequest>& queue = standstill.queue;
  Graph graph(queue.size());
  std::vector<std::size_t> holders;
  std::int64_t released = standstill.free_blocks + standstill.blocks_held_by_finished;
  for (std::size_t i = 0; i < queue.size(); ++i)
    if (queue[i].blocks_held > 0) holders.push_back(i);
  std::optional<std::size_t> obstacle;  // the last request so far that does not fit
  for (std::size_t i = 0; i < queue.size(); ++i) {
    const WaitingRequest& request = queue[i];
    if (obstacle) boost::add_edge(i, *obstacle, graph);  // and so on to the first of them
    if (request.is_loading) {
      if (!obstacle) released += request.blocks_held;
      continue;
    }
    if (request.blocks_missing <= released) continue;
    obstacle = i;
    if (request.blocks_held + request.blocks_missing > standstill.total_blocks) continue;
    for (const std::size_t holder : holders)
      if (holder != i) boost::add_edge(i, holder, graph);
  }
  return graph;
}

std::string blocks_text(std::int64_t count) {
  return fmt::format("{} block{}", count, count == 1 ? "" : "s");
}

std::string holding_text(const WaitingRequest& request) {
  return fmt::format("{}, held since step {}", blocks_text(request.blocks_held),
                     request.held_since);
}

// The first of the circle wants blocks; the others have them, and stand behind it.
std::string cycle_text(const Standstill& standstill, const std::vector<WaitingRequest>& cycle) {
  const WaitingRequest& first = cycle.front();
  std::vector<std::string> holders;
  for (std::size_t i = 1; i < cycle.size(); ++i)
    if (cycle[i].blocks_held > 0)
      holders.push_back(fmt::format("{} ({})", cycle[i].name, holding_text(cycle[i])));
  return fmt::format(
      "{}{} waits for {} more, and {} of {} are free; {} {} behind it in the queue: none of them "
      "can go on",
      first.name, first.blocks_held > 0 ? fmt::format(" ({})", holding_text(first)) : std::string(),
      blocks_text(first.blocks_missing), standstill.free_blocks, standstill.total_blocks,
      fmt::join(holders, ", "), holders.size() == 1 ? "waits" : "wait");
}

}  // namespace

std::optional<WaitCycle> find_wait_cycle(const Standstill& standstill) {
  const Graph graph = wait_graph(standstill);
  std::vector<int> component(boost::num_vertices(graph));
  boost::strong_components(graph, boost::make_iterator_property_map(
                                      component.begin(), boost::get(boost::vertex_index, graph)));
  for (std::size_t i = 0; i < component.size(); ++i) {
    if (std::ranges::count(component, component[i]) < 2) continue;
    WaitCycle cycle;
    std::vector<WaitingRequest> members;
    for (std::size_t j = i; j < component.size(); ++j) {
      if (component[j] != component[i]) continue;
      members.push_back(standstill.queue[j]);
      cycle.requests.push_back(standstill.queue[j].name);
    }
    cycle.head_holds_blocks = members.front().blocks_held > 0;
    cycle.text = cycle_text(standstill, members);
    return cycle;
  }
  return std::nullopt;
}

}  // namespace lockstep
