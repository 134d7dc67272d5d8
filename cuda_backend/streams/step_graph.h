// The operations of a step as a graph: an edge from one to a later one where both touch the same
// bytes and at least one writes them. What the graph leaves unordered may run in any order, so it
// may be spread over several streams.
//
// 1. Vertices are the operations in the order of the calls; every edge points forward in it.
// 2. Every pair that conflicts is joined by an edge or a path; a pair that does not has no edge.
// 3. Placement: an operation waits for an event of each stream on which it depends, unless an
//    earlier wait covers that already.
// Not checked here: that the result orders what it must (stream_order.h does, by other means).
#pragma once

#include <span>
#include <vector>

#include "cuda_backend/device/operation.h"

namespace lockstep::cuda {

// For each operation those that it comes right behind, ascending.
using StepGraph = std::vector<std::vector<int>>;

StepGraph step_graph(std::span<const Operation> operations);

struct Placement {
  int stream = 0;
  std::vector<int> waits;  // for events of these operations, on other streams
  bool has_event = false;  // another operation waits for it
};

// Chains of operations that depend on each other stay on one stream; what depends on nothing that
// is the last of its stream begins where the fewest operations are.
// REQUIRES: num_streams >= 1.
std::vector<Placement> place_on_streams(const StepGraph& graph, int num_streams);

}  // namespace lockstep::cuda
