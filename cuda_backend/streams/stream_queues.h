// Streams for a device that has one: each is a queue, and finish() empties them in an order drawn
// from a seed, as far from the order of the calls as streams and events allow. An order that nobody
// asked for is one that this device will not keep.
//
// 1. Same seed and same calls: same order.
// 2. Between two streams there is no order but that of events; within one, that of the calls.
// 3. Streams have ranks that are drawn anew now and then: the highest that can go on does, so an
//    operation of a low one is late until something waits for it.
#pragma once

#include <cstdint>
#include <memory>

#include "cuda_backend/device/device.h"

namespace lockstep::cuda {

std::unique_ptr<Device> make_stream_queues(std::unique_ptr<Device> device, std::uint64_t seed);

}  // namespace lockstep::cuda
