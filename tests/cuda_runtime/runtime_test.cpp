// The simulated runtime itself: what CUDA promises holds for every seed, and what it does not
// promise goes wrong for some.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>
#include <string>

#include "tests/cuda_runtime/simulated_cuda.h"

namespace lockstep::cuda {
namespace {

constexpr std::uint64_t kSeedsOfARuntime = 40;

cudaStream_t make_stream() {
  cudaStream_t stream = nullptr;
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  return stream;
}
cudaEvent_t make_event() {
  cudaEvent_t event = nullptr;
  EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  return event;
}
void* make_memory(std::size_t size_bytes) {
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, size_bytes), cudaSuccess);
  return memory;
}
char* make_pinned(std::size_t size_bytes) {
  void* memory = nullptr;
  EXPECT_EQ(cudaMallocHost(&memory, size_bytes), cudaSuccess);
  return static_cast<char*>(memory);
}
// A kernel that says its name.
void say(cudaStream_t stream, std::string& said, char name) {
  const auto kernel = [&said, name](simt::Executor*) { said += name; };
  EXPECT_EQ(SimulatedCuda::current().launch(stream, kernel), cudaSuccess);
}

// What a body comes to with each of some seeds.
std::set<std::string> outcomes(const std::function<std::string()>& body,
                               SimulatedCudaOptions options = {}) {
  std::set<std::string> found;
  for (options.seed = 0; options.seed < kSeedsOfARuntime; ++options.seed) {
    SimulatedCuda cuda(options);
    found.insert(body());
  }
  return found;
}

TEST(SimulatedCuda, AStreamKeepsItsOrderAndTwoDoNot) {
  const auto found = outcomes([] {
    std::string said;
    const cudaStream_t one = make_stream(), other = make_stream();
    for (const char name : {'a', 'b'}) say(one, said, name);
    say(other, said, 'c');
    EXPECT_EQ(SimulatedCuda::current().run_all(), cudaSuccess);
    return said;
  });
  EXPECT_EQ(found, (std::set<std::string>{"abc", "acb", "cab"}));
}

std::string said_with_an_event() {
  std::string said;
  const cudaStream_t one = make_stream(), other = make_stream();
  const cudaEvent_t event = make_event();
  say(one, said, 'a');
  EXPECT_EQ(cudaEventRecord(event, one), cudaSuccess);
  say(one, said, 'b');
  EXPECT_EQ(cudaStreamWaitEvent(other, event, 0), cudaSuccess);
  say(other, said, 'c');
  EXPECT_EQ(cudaEventRecord(event, one), cudaSuccess);  // too late for what waits
  EXPECT_EQ(cudaStreamSynchronize(other), cudaSuccess);
  EXPECT_NE(said.find('c'), std::string::npos);
  EXPECT_EQ(SimulatedCuda::current().run_all(), cudaSuccess);
  return said;
}
TEST(SimulatedCuda, AnEventDelaysOnlyTheStreamsThatWaitForIt) {
  EXPECT_EQ(outcomes(said_with_an_event), (std::set<std::string>{"abc", "acb"}));
}
TEST(SimulatedCuda, ARuntimeThatDropsWaitsLosesThatOrder) {
  EXPECT_TRUE(outcomes(said_with_an_event, {.drops_waits = true}).contains("cab"));
}

TEST(SimulatedCuda, PinnedMemoryIsReadWhenACopyRunsAndPageableMemoryThenOrBefore) {
  const auto found = outcomes([] {
    const cudaStream_t stream = make_stream();
    char pageable = 'a', *pinned = make_pinned(2);
    pinned[0] = 'a';
    auto* device = static_cast<char*>(make_memory(2));
    EXPECT_EQ(cudaMemcpyAsync(device, pinned, 1, cudaMemcpyDefault, stream), cudaSuccess);
    EXPECT_EQ(cudaMemcpyAsync(device + 1, &pageable, 1, cudaMemcpyDefault, stream), cudaSuccess);
    pageable = pinned[0] = 'b';
    EXPECT_EQ(cudaMemcpyAsync(pinned, device, 2, cudaMemcpyDefault, stream), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    return std::string(pinned, 2);
  });
  EXPECT_EQ(found, (std::set<std::string>{"aa", "ab", "ba", "bb"}));
}

TEST(SimulatedCuda, ACopyWithinTheHostIsDoneWhenTheCallReturns) {
  const auto found = outcomes([] {
    const cudaStream_t stream = make_stream();
    char* pinned = make_pinned(3);
    std::string pageable = "xyz";
    std::string said;
    say(stream, said, 'k');
    EXPECT_EQ(cudaMemcpyAsync(pinned, pageable.data(), 3, cudaMemcpyDefault, stream), cudaSuccess);
    return said + std::string(pinned, 3);
  });
  EXPECT_EQ(found, (std::set<std::string>{"kxyz"}));
}

TEST(SimulatedCuda, FreshMemoryIsNotZeroAndFreeWaitsOnlySometimes) {
  const auto found = outcomes([] {
    const cudaStream_t stream = make_stream();
    void* device = make_memory(4);
    char* pinned = make_pinned(4);
    EXPECT_EQ(cudaMemcpyAsync(pinned, device, 4, cudaMemcpyDefault, stream), cudaSuccess);
    EXPECT_EQ(cudaFree(device), cudaSuccess);
    const cudaError_t error = cudaStreamSynchronize(stream);
    EXPECT_TRUE(error != cudaSuccess || pinned[0] != 0);
    return std::string(cudaGetErrorString(error));
  });
  EXPECT_EQ(found, (std::set<std::string>{"no error", "an illegal memory access was encountered"}));
}

TEST(SimulatedCuda, AnErrorOfWorkThatRanIsReturnedByEveryLaterCall) {
  SimulatedCuda cuda;
  const cudaStream_t stream = make_stream();
  char* pinned = make_pinned(4);
  void* device = make_memory(4);
  EXPECT_EQ(cudaMemcpyAsync(device, pinned, 4, cudaMemcpyDefault, stream), cudaSuccess);
  EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorIllegalAddress);
  cudaStream_t another = nullptr;
  EXPECT_EQ(cudaStreamCreateWithFlags(&another, cudaStreamNonBlocking), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaFree(device), cudaErrorIllegalAddress);
  EXPECT_EQ(cuda.live().device_memory, 0);
}

TEST(SimulatedCuda, ACopyThatLeavesAnAllocationIsRefused) {
  SimulatedCuda cuda;
  const cudaStream_t stream = make_stream();
  auto* device = static_cast<char*>(make_memory(8));
  char* pinned = make_pinned(16);
  EXPECT_EQ(cudaMemcpyAsync(device, pinned, 8, cudaMemcpyDefault, stream), cudaSuccess);
  EXPECT_EQ(cudaMemcpyAsync(device, pinned, 9, cudaMemcpyDefault, stream), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemsetAsync(device + 1, 0, 8, stream), cudaErrorInvalidValue);
  char pageable = 0;
  EXPECT_EQ(cudaMemsetAsync(&pageable, 0, 1, stream), cudaErrorInvalidValue);
}

TEST(SimulatedCuda, ACaptureRunsNothingAndItsGraphRunsAllOfItEachTime) {
  SimulatedCuda cuda;
  std::string said;
  const cudaStream_t stream = make_stream();
  EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  for (const char name : {'a', 'b'}) say(stream, said, name);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  cudaGraphExec_t instance = nullptr;
  EXPECT_EQ(cudaGraphInstantiate(&instance, graph, 0), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(said, "");
  for (int launch = 0; launch < 2; ++launch)
    EXPECT_EQ(cudaGraphLaunch(instance, stream), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(said, "abab");
  EXPECT_EQ(cudaGraphExecDestroy(instance), cudaSuccess);
  EXPECT_EQ(cudaGraphLaunch(instance, stream), cudaErrorInvalidValue);
}

TEST(SimulatedCuda, ACallThatMayNotBeMadeWhileCapturingEndsTheCaptureWithoutAGraph) {
  for (const bool allocates : {true, false}) {
    SimulatedCuda cuda;
    const cudaStream_t stream = make_stream();
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    void* memory = nullptr;
    EXPECT_EQ(allocates ? cudaMalloc(&memory, 8) : cudaStreamSynchronize(stream),
              cudaErrorStreamCaptureUnsupported);
    auto graph = reinterpret_cast<cudaGraph_t>(1);
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(graph, nullptr);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);  // it captures no more
  }
}

TEST(SimulatedCuda, AGraphDestroyedBeforeItsLaunchRanMayNotRun) {
  const auto found = outcomes([] {
    std::string said;
    const cudaStream_t stream = make_stream();
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    say(stream, said, 'a');
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    cudaGraphExec_t instance = nullptr;
    EXPECT_EQ(cudaGraphInstantiate(&instance, graph, 0), cudaSuccess);
    EXPECT_EQ(cudaGraphLaunch(instance, stream), cudaSuccess);
    EXPECT_EQ(cudaGraphExecDestroy(instance), cudaSuccess);
    return said + cudaGetErrorString(cudaStreamSynchronize(stream));
  });
  EXPECT_EQ(found, (std::set<std::string>{"ano error", "unspecified launch failure"}));
}

TEST(SimulatedCuda, TheSameSeedGivesTheSameOrder) {
  const auto order = [] {
    std::string said;
    std::vector<cudaStream_t> streams;
    for (int i = 0; i < 4; ++i) streams.push_back(make_stream());
    for (char name = 'a'; name <= 'z'; ++name) say(streams[name % 4], said, name);
    EXPECT_EQ(SimulatedCuda::current().run_all(), cudaSuccess);
    return said;
  };
  std::set<std::string> first = outcomes(order);
  EXPECT_EQ(first, outcomes(order));
  EXPECT_GT(first.size(), kSeedsOfARuntime / 2);
}

}  // namespace
}  // namespace lockstep::cuda
