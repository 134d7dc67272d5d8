// Devices in front of a device: one spreads operations over streams, one captures graphs, one
// delays operations.
//
// The stream device runs operations in any order that their memory allows. The calls up to a
// finish() become a graph (step_graph.h), are spread over streams of the inner device, and are
// checked for missing orders (stream_order.h).
//
// Invariants:
// 1. finish() leaves what the operations would have left one after the other, in call order.
// 2. A missing order is a report like those of a memory checker: kind "unordered", with both names.
// 3. upload() keeps a copy of the bytes until it runs. release() takes effect at the next finish().
// 4. operations_ and pending_ have one entry per call, in call order; finish() empties both.
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
  // Changes the graph before its operations are placed; null: no change.
  std::function<void(std::span<const Operation>, StepGraph&)> edit_graph = nullptr;
};

// REQUIRES: num_streams >= 2, a device that has not run anything.
std::unique_ptr<Device> make_stream_device(std::unique_ptr<Device> device,
                                           const StreamOptions& options);

// Captured graphs, as engines use them. The launches of a part of a step are recorded once per
// padded batch size, with their pointers and parameters, and are launched again for every later
// batch that is padded to the same size.
//
// Invariants:
// 1. The first batch of a size runs as issued and is recorded. A later batch launches the
//    recording, whatever its own parameters are: what differs must be in device memory.
// 2. A replayed graph is one operation on one stream. It touches what its launches would touch in
//    this step.
// 3. A graph lives until memory is released or forget_captured() is called. Its pointers may then
//    be stale.
// 4. In eager mode no batch has a graph.
// 5. A part is recorded or replayed, never both, and parts do not nest.
// Not checked here: the premise of rule 1. A parameter that was frozen by mistake shows in the
// results.

// The batch sizes that vLLM captures up to `largest`, ascending: 1, 2, 4, multiples of 8 below 256,
// multiples of 16 above, and `max_tokens` (of a step) itself (vllm/config/vllm.py,
// _set_cudagraph_sizes).
std::vector<std::int32_t> cudagraph_capture_sizes(std::int32_t largest, std::int32_t max_tokens);

// REQUIRES: `sizes` ascend and are not empty; the device has not run anything.
std::unique_ptr<Device> make_graph_device(std::unique_ptr<Device> device,
                                          std::vector<std::int32_t> sizes);

// Streams for a device that has only one. Each stream is a queue; finish() empties the queues in a
// seeded order, as far from the call order as streams and events allow. It keeps only the orders
// that were requested.
//
// Invariants:
// 1. Same seed and same calls: same order.
// 2. Events are the only order between two streams. Within a stream, call order holds.
// 3. Streams have random ranks that change now and then. The highest stream that can continue does,
//    so an operation of a low stream is late until another operation waits for it.
// 4. After finish() every queue is empty and no event is pending.
std::unique_ptr<Device> make_stream_queues(std::unique_ptr<Device> device, std::uint64_t seed);

}  // namespace lockstep::cuda
