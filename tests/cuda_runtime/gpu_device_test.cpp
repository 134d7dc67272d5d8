// The device of a GPU by itself, on a runtime that keeps CUDA's promises and no others: each test
// runs with many seeds, most of which would show a wait that is missing.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "cuda_backend/streams/stream_device.h"
#include "tests/cuda_runtime/simulated_cuda.h"
#include "tests/cuda_runtime/simulated_gpu_device.h"

namespace lockstep::cuda {
namespace {

constexpr std::uint64_t kSeeds = 20;
constexpr std::int64_t kDeviceStagingBytes = std::int64_t{256} << 10;  // of GpuDevice, at first

std::unique_ptr<Device> make_device() {
  auto device = make_simulated_gpu_device();
  EXPECT_TRUE(device) << device.error().message;
  return device ? std::move(*device) : nullptr;
}

// The body is given a device, and every object of CUDA has gone when the device has.
void with_every_seed(const std::function<void(std::unique_ptr<Device>)>& body,
                     SimulatedCudaOptions options = {}) {
  for (options.seed = 1; options.seed <= kSeeds; ++options.seed) {
    SCOPED_TRACE(options.seed);
    SimulatedCuda cuda(options);
    body(make_device());
    EXPECT_EQ(cuda.live(), LiveObjects());
    EXPECT_STREQ(cudaGetErrorString(cuda.run_all()), "no error");
  }
}

std::vector<std::uint8_t> numbered(std::int64_t size_bytes, int first = 1) {
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(size_bytes));
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<std::uint8_t>(first + i % 251);
  return bytes;
}

// A kernel: the device calls it whenever the runtime does.
void run(Device& device, std::function<void()> kernel) {
  device.run(Operation{}, [kernel = std::move(kernel)](const LaunchPlace& place) -> int {
    return SimulatedCuda::current().launch(static_cast<cudaStream_t>(place.stream),
                                           [kernel](simt::Executor*) { kernel(); });
  });
}

TEST(SimulatedGpuDevice, WhatGoesUpComesDown) {
  with_every_seed([](std::unique_ptr<Device> device) {
    const auto bytes = numbered(1000);
    std::vector<std::uint8_t> found(1000);
    std::byte* memory = device->allocate(1000, "memory");
    device->upload(memory, bytes.data(), 1000);
    device->download(found.data(), memory, 1000);
    EXPECT_TRUE(device->finish());
    EXPECT_EQ(found, bytes);
    device->release(memory);
    EXPECT_EQ(device->description(), "Simulated GPU, sm_90");
  });
}

// CUDA does not say that a copy from pageable memory has read it when the call returns.
TEST(SimulatedGpuDevice, AnUploadDoesNotReadTheHostsMemoryAfterItReturns) {
  with_every_seed([](std::unique_ptr<Device> device) {
    std::byte* memory = device->allocate(64, "memory");
    std::vector<std::uint8_t> found(64), bytes = numbered(64);
    device->upload(memory, bytes.data(), 64);
    std::ranges::fill(bytes, std::uint8_t{0});
    device->download(found.data(), memory, 64);
    EXPECT_TRUE(device->finish());
    EXPECT_EQ(found, numbered(64));
    device->release(memory);
  });
}

// initcheck sees a read of memory that nothing wrote only if the device does not write it either.
TEST(SimulatedGpuDevice, FreshMemoryIsUndefined) {
  with_every_seed([](std::unique_ptr<Device> device) {
    std::byte* memory = device->allocate(64, "memory");
    std::vector<std::uint8_t> found(64);
    device->download(found.data(), memory, 64);
    EXPECT_TRUE(device->finish());
    EXPECT_EQ(std::ranges::count(found, 0), 0);  // the runtime's fresh bytes are never zero
    device->release(memory);
  });
}

// cudaFree "may perform implicit synchronization", and cudaFreeHost says nothing.
TEST(SimulatedGpuDevice, ReleasedMemoryStaysValidForStartedWork) {
  with_every_seed([](std::unique_ptr<Device> device) {
    device->open_streams(2);
    std::byte* memory = device->allocate(64, "memory");
    std::byte* host = device->allocate_host(64, "host memory");
    device->upload(memory, numbered(64).data(), 64);
    ASSERT_TRUE(device->finish());
    std::vector<std::uint8_t> found(64), seen(64);
    device->use_stream(1);
    run(*device, [=] { std::copy_n(memory, 64, host); });
    device->download(found.data(), memory, 64);
    device->release(memory);
    run(*device, [=, &seen] { std::copy_n(reinterpret_cast<std::uint8_t*>(host), 64, &seen[0]); });
    device->release_host(host);
    EXPECT_TRUE(device->finish());
    EXPECT_EQ(found, numbered(64));
    EXPECT_EQ(seen, numbered(64));
  });
}

// What a step had started when something in it failed still runs.
TEST(SimulatedGpuDevice, ADestroyedDeviceWaitsForStartedWork) {
  with_every_seed([](std::unique_ptr<Device> device) {
    std::byte* memory = device->allocate(1 << 20, "memory");
    std::vector<std::uint8_t> found(1 << 20);
    device->download(found.data(), memory, 1 << 20);
    device.reset();
    EXPECT_EQ(SimulatedCuda::current().run_all(), cudaSuccess);
    EXPECT_EQ(cudaFree(memory), cudaSuccess);
  });
}

TEST(SimulatedGpuDevice, DownloadsOfAnySizeArriveWhole) {
  for (const std::int64_t size : {kDeviceStagingBytes - 1, kDeviceStagingBytes,
                                  kDeviceStagingBytes + 1, 100 * kDeviceStagingBytes + 77}) {
    SimulatedCuda cuda({.seed = static_cast<std::uint64_t>(size)});
    auto device = make_device();
    std::byte* memory = device->allocate(size, "memory");
    std::vector<std::uint8_t> found(static_cast<std::size_t>(size));
    const auto bytes = numbered(size);
    device->upload(memory, bytes.data(), size);
    device->download(found.data(), memory, size);
    EXPECT_TRUE(device->finish());
    EXPECT_TRUE(found == bytes) << size;
    device->release(memory);
  }
}

TEST(SimulatedGpuDevice, ManyPiecesThatFillTheStagingBufferExactlyArriveWhereTheyBelong) {
  constexpr std::int64_t kPieces = 1 << 10;
  SimulatedCuda cuda;
  auto device = make_device();
  std::byte* memory = device->allocate(kDeviceStagingBytes, "memory");
  device->upload(memory, numbered(kDeviceStagingBytes).data(), kDeviceStagingBytes);
  ASSERT_TRUE(device->finish());
  const std::int64_t waits = cuda.num_calls("cudaStreamSynchronize");
  // Last piece first, in both places.
  std::vector<std::uint8_t> found(static_cast<std::size_t>(kDeviceStagingBytes));
  const std::int64_t size = kDeviceStagingBytes / kPieces;
  for (std::int64_t piece = kPieces; piece-- > 0;)
    device->download(found.data() + piece * size, memory + piece * size, size);
  EXPECT_EQ(cuda.num_calls("cudaStreamSynchronize"), waits) << "it waits before it is full";
  ASSERT_TRUE(device->finish());
  EXPECT_TRUE(found == numbered(kDeviceStagingBytes));
  device->release(memory);
}

TEST(SimulatedGpuDevice, StreamsAreOrderedByEventsAcrossSteps) {
  with_every_seed([](std::unique_ptr<Device> device) {
    device->open_streams(2);
    std::string said;
    for (int step = 0; step < 3; ++step) {
      device->use_stream(1);
      run(*device, [&said] { said += 'a'; });
      const int event = device->record_event();
      run(*device, [&said] { said += '.'; });
      device->use_stream(0);
      device->wait_event(event);
      run(*device, [&said] { said += 'b'; });
      ASSERT_TRUE(device->finish());
      std::erase(said, '.');
    }
    EXPECT_EQ(said, "ababab");
    EXPECT_EQ(SimulatedCuda::current().live().events, 1);
  });
}

// Without the wait at its end a step's downloads are what lay in the staging buffer before.
TEST(SimulatedGpuDevice, AMissingWaitIsSeen) {
  int wrong = 0;
  with_every_seed(
      [&](std::unique_ptr<Device> device) {
        std::byte* memory = device->allocate(64, "memory");
        std::vector<std::uint8_t> found(64);
        device->upload(memory, numbered(64).data(), 64);
        device->download(found.data(), memory, 64);
        EXPECT_TRUE(device->finish());
        wrong += found != numbered(64);
        SimulatedCuda::current().run_all();  // for the memory that goes now
        device->release(memory);
      },
      {.drops_synchronisations = true});
  EXPECT_GT(wrong, static_cast<int>(kSeeds) / 2);
}

// A graph of two launches, and what launching it says.
CapturedGraph graph_that_says(std::string& said) {
  CapturedGraph graph;
  for (const char name : {'a', 'b'})
    graph.launches.push_back([&said, name](const LaunchPlace& place) -> int {
      return SimulatedCuda::current().launch(static_cast<cudaStream_t>(place.stream),
                                             [&said, name](simt::Executor*) { said += name; });
    });
  return graph;
}

TEST(SimulatedGpuDevice, AGraphIsCapturedOnceAndLaunchedEachTime) {
  with_every_seed([](std::unique_ptr<Device> device) {
    std::string said;
    {
      CapturedGraph graph = graph_that_says(said);
      for (int launch = 0; launch < 3; ++launch)
        EXPECT_EQ(device->launch_graph(graph, device->place()), 0);
      ASSERT_TRUE(device->finish());
      EXPECT_EQ(said, "ababab");
      EXPECT_EQ(SimulatedCuda::current().num_calls("cudaStreamBeginCapture"), 1);
      EXPECT_EQ(SimulatedCuda::current().num_calls("cudaGraphLaunch"), 3);
    }
    EXPECT_EQ(SimulatedCuda::current().live().instances, 0);
  });
}

// Memory that moves in the middle of a step drops graphs that the step has just launched.
TEST(SimulatedGpuDevice, ADroppedGraphHasFinishedItsLaunches) {
  with_every_seed([](std::unique_ptr<Device> device) {
    std::string said;
    auto graph = std::make_unique<CapturedGraph>(graph_that_says(said));
    EXPECT_EQ(device->launch_graph(*graph, device->place()), 0);
    graph.reset();
    EXPECT_TRUE(device->finish());
    EXPECT_EQ(said, "ab");
  });
}

TEST(SimulatedGpuDevice, ALaunchThatFailsWhileItIsCapturedIsTheDevicesFailure) {
  SimulatedCuda cuda;
  auto device = make_device();
  std::string said;
  CapturedGraph graph = graph_that_says(said);
  graph.launches.push_back([](const LaunchPlace&) -> int { return cudaErrorInvalidValue; });
  device->run(Operation{},
              [&](const LaunchPlace& place) { return device->launch_graph(graph, place); });
  const auto done = device->finish();
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().message, "captured launch: invalid argument");
  EXPECT_EQ(graph.instance, nullptr);
  EXPECT_EQ(cuda.run_all(), cudaSuccess);
  EXPECT_EQ(said, "") << "a part of the graph ran";
  device.reset();
  EXPECT_EQ(cuda.live(), LiveObjects());
}

TEST(SimulatedGpuDevice, EverySizeHasItsOwnGraphAndAForgottenOneIsCapturedAgain) {
  with_every_seed([](std::unique_ptr<Device> inner) {
    const SimulatedCuda& cuda = SimulatedCuda::current();
    auto device = make_graph_device(std::move(inner), {2, 4});
    std::string said;
    const auto twice_again = [&](std::int32_t size) {
      for (int launch = 0; launch < 2; ++launch)
        device->run_captured("part", size, [&] { run(*device, [&] { said += 'a'; }); });
    };
    for (const std::int32_t size : {2, 4, 3}) twice_again(size);  // 3 has none
    EXPECT_EQ(cuda.live().instances, 2);
    EXPECT_EQ(cuda.num_calls("cudaGraphLaunch"), 2);
    device->forget_captured();
    EXPECT_EQ(cuda.live().instances, 0);
    twice_again(2);
    EXPECT_EQ(cuda.num_calls("cudaStreamBeginCapture"), 3);
    EXPECT_EQ(cuda.num_calls("cudaGraphLaunch"), 3);
    EXPECT_TRUE(device->finish());
    EXPECT_EQ(said, "aaaaaaaa");
  });
}

// A launcher that allocates within a capture is what CUDA forbids.
TEST(SimulatedGpuDevice, ACaptureThatWasInvalidatedIsTheDevicesFailure) {
  SimulatedCuda cuda;
  auto device = make_device();
  CapturedGraph graph;
  graph.launches.push_back([](const LaunchPlace&) -> int {
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, 8), cudaErrorStreamCaptureUnsupported);
    return 0;
  });
  device->run(Operation{},
              [&](const LaunchPlace& place) { return device->launch_graph(graph, place); });
  const auto done = device->finish();
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().message,
            "cudaStreamEndCapture: operation failed due to a previous error during capture");
}

TEST(SimulatedGpuDevice, AFailedAllocationNamesItsMemory) {
  SimulatedCuda cuda({.device_bytes = 100});
  auto device = make_device();
  std::byte* memory = device->allocate(100, "first");
  EXPECT_NE(memory, nullptr);
  EXPECT_EQ(device->allocate(1, "second"), nullptr);
  EXPECT_EQ(device->finish().error().message, "second: cudaMalloc of 1 bytes: out of memory");
  EXPECT_EQ(device->allocate(1, "third"), nullptr);
  EXPECT_EQ(device->finish().error().message, "second: cudaMalloc of 1 bytes: out of memory");
  device->release(memory);
  device.reset();
  EXPECT_EQ(cuda.live(), LiveObjects());
}

TEST(SimulatedGpuDevice, AFailedPinnedAllocationLeavesNothing) {
  {
    SimulatedCuda cuda({.pinned_bytes = kDeviceStagingBytes});
    auto device = make_device();
    EXPECT_EQ(device->allocate_host(1, "host tier"), nullptr);
    EXPECT_EQ(device->finish().error().message,
              "host tier: cudaHostAlloc of 1 bytes: out of memory");
  }
  SimulatedCuda cuda({.pinned_bytes = kDeviceStagingBytes - 1});
  EXPECT_EQ(make_simulated_gpu_device().error().message, "cudaMallocHost: out of memory");
  EXPECT_EQ(cuda.live(), LiveObjects());
}

TEST(SimulatedGpuDevice, AGpuThatIsTooOldIsRefusedWithItsName) {
  SimulatedCuda cuda({.major = 7, .minor = 5});
  EXPECT_EQ(why_no_simulated_gpu(),
            "no GPU: Simulated GPU has compute capability 7.5, this build needs 8.0; set "
            "LOCKSTEP_CUDA_ARCHITECTURES");
  EXPECT_EQ(make_simulated_gpu_device().error().message, why_no_simulated_gpu());
}

TEST(SimulatedGpuDevice, AMissingGpuIsAnErrorWithItsReason) {
  {
    SimulatedCuda cuda({.device_count = 0});
    EXPECT_EQ(why_no_simulated_gpu(), "no GPU: the CUDA driver lists none");
    EXPECT_EQ(make_simulated_gpu_device().error().message, why_no_simulated_gpu());
  }
  {
    SimulatedCuda cuda({.failing_call = 0, .error = cudaErrorInsufficientDriver, .sticks = true});
    EXPECT_EQ(why_no_simulated_gpu(),
              "no GPU: CUDA driver version is insufficient for CUDA runtime version");
    EXPECT_EQ(make_simulated_gpu_device().error().message, why_no_simulated_gpu());
    EXPECT_EQ(cuda.live(), LiveObjects());
  }
  SimulatedCuda cuda;
  EXPECT_EQ(why_no_simulated_gpu(), "");
}

}  // namespace
}  // namespace lockstep::cuda
