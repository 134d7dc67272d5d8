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
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda_backend/device/device.h"

namespace lockstep::cuda {

// The batch sizes that vLLM captures up to `largest`, ascending: 1, 2, 4, multiples of 8 below 256,
// multiples of 16 from there on, and `max_tokens` (of a step) itself (vllm/config/vllm.py,
// _set_cudagraph_sizes).
std::vector<std::int32_t> cudagraph_capture_sizes(std::int32_t largest, std::int32_t max_tokens);

// REQUIRES: `sizes` ascend and are not empty; nothing has run on the device yet.
std::unique_ptr<Device> make_graph_device(std::unique_ptr<Device> device,
                                          std::vector<std::int32_t> sizes);

}  // namespace lockstep::cuda
