// Operations in any order that their memory allows: what is asked of this device up to a finish()
// becomes a graph (step_graph.h), is spread over streams of the device behind it, and is checked to
// be ordered where it must be (stream_order.h).
//
// 1. finish() leaves what the operations would have left one after the other, in the order of the
//    calls.
// 2. A missing order is a report like those of a memory checker: kind "unordered", with both names.
// 3. upload() keeps a copy of the bytes until it runs; release() takes effect at the next finish().
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "cuda_backend/device/device.h"
#include "cuda_backend/streams/step_graph.h"

namespace lockstep::cuda {

struct StreamOptions {
  int num_streams = 2;
  bool check_order = true;
  // Changes the graph before its operations are placed; null: it stays as it is.
  std::function<void(std::span<const Operation>, StepGraph&)> edit_graph = nullptr;
};

// REQUIRES: num_streams >= 2; nothing has run on the device yet.
std::unique_ptr<Device> make_stream_device(std::unique_ptr<Device> device,
                                           const StreamOptions& options);

}  // namespace lockstep::cuda
