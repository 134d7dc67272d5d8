// Operations in any order that their memory allows: what is asked of this device up to a finish()
// becomes a graph (step_graph.h), is spread over streams of the device behind it, and is checked to
// be ordered where it must be (stream_order.h).
//
// 1. finish() leaves what the operations would have left one after the other, in the order of the
//    calls.
// 2. A missing order is a report like those of a memory checker: kind "unordered", with both names.
// 3. upload() keeps a copy of the bytes until it runs; release() takes effect at the next finish().
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "cuda_backend/device/device.h"
#include "cuda_backend/streams/step_graph.h"

namespace lockstep::cuda {

struct StreamOptions {
  int num_streams = 2;
  // Changes the graph before its operations are placed; null: it stays as it is.
  std::function<void(std::span<const Operation>, StepGraph&)> edit_graph = nullptr;
};

// REQUIRES: num_streams >= 2; nothing has run on the device yet.
std::unique_ptr<Device> make_stream_device(std::unique_ptr<Device> device,
                                           const StreamOptions& options);

// Captured graphs, as engines use them: the launches of a part of a step are recorded once for each
// padded batch size, with the pointers and parameters that they had then, and launched again for
// every later batch that is padded to the same size.
//
// 1. The first batch of a size runs as issued, and is recorded on the way. A later one launches
//    what was recorded, whatever its own parameters are: what differs must lie in device memory.
// 2. A replayed graph is one operation on one stream, which touches what its launches would touch
//    in this step.
// 3. A graph lives until memory is released or forget_captured() is called: its pointers may be
//    stale from then on.
// 4. While it runs eagerly no batch has a graph.
// Not checked here: rule 1's premise. A parameter that was frozen by mistake shows in the results.

// The batch sizes that vLLM captures up to `largest`, ascending: 1, 2, 4, multiples of 8 below 256,
// multiples of 16 from there on, and `max_tokens` (of a step) itself (vllm/config/vllm.py,
// _set_cudagraph_sizes).
std::vector<std::int32_t> cudagraph_capture_sizes(std::int32_t largest, std::int32_t max_tokens);

// REQUIRES: `sizes` ascend and are not empty; nothing has run on the device yet.
std::unique_ptr<Device> make_graph_device(std::unique_ptr<Device> device,
                                          std::vector<std::int32_t> sizes);

// Streams for a device that has one: each is a queue, and finish() empties them in an order drawn
// from a seed, as far from the order of the calls as streams and events allow. It keeps no order
// that was not asked for.
//
// 1. Same seed and same calls: same order.
// 2. Between two streams there is no order but that of events; within one, that of the calls.
// 3. Streams have ranks that are drawn anew now and then: the highest that can go on does, so an
//    operation of a low one is late until something waits for it.
std::unique_ptr<Device> make_stream_queues(std::unique_ptr<Device> device, std::uint64_t seed);

}  // namespace lockstep::cuda
