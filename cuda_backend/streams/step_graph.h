// The dependency graph of a step's operations, and its placement on streams. Two operations depend
// on each other where both touch the same bytes and at least one writes them.
//
// Invariants:
// 1. Vertices are the operations in call order. Every edge points from a later operation to an
//    earlier one.
// 2. Every conflicting pair is joined by an edge or a path. Pairs without a conflict have no edge.
// 3. Placement: an operation waits for an event of each stream on which it depends, unless an
//    earlier wait already covers it.
// 4. Waits name earlier operations of other streams, and each of them records an event.
// Not checked here: that the result orders what it must. stream_order.h checks it independently.
#pragma once

#include <span>
#include <vector>

#include "cuda_backend/device/device.h"

namespace lockstep::cuda {

// For each operation the earlier operations that it depends on, ascending.
using StepGraph = std::vector<std::vector<int>>;

StepGraph step_graph(std::span<const Operation> operations);

struct Placement {
  int stream = 0;
  std::vector<int> waits;  // for events of these operations, on other streams
  bool has_event = false;  // another operation waits for it
};

// Keeps chains of dependent operations on one stream. An operation that depends on no stream's last
// operation goes to the stream with the fewest operations.
// REQUIRES: num_streams >= 1.
std::vector<Placement> place_on_streams(const StepGraph& graph, int num_streams);

}  // namespace lockstep::cuda
