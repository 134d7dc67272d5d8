// Time on a GPU's own clock, and the copy that bandwidths are compared with. Declared without
// CUDA's headers.
#pragma once

#include <cstdint>
#include <functional>

namespace lockstep::cuda {

// Milliseconds between two events around `work`, which launches on the stream; below zero when the
// device failed. Before the first event the `cold` bytes at `scratch` are overwritten: with more of
// them than the GPU's L2 holds, `work` finds none of its data there.
float gpu_milliseconds(void* stream, void* scratch, std::int64_t cold,
                       const std::function<void()>& work);

// What is left of the device's memory; 0 when it does not say.
std::int64_t free_memory_bytes();

// cudaMemcpyAsync from device to device: the most that a move of as many bytes can reach.
int copy_on_device(void* stream, void* target, const void* source, std::int64_t size_bytes);

}  // namespace lockstep::cuda
