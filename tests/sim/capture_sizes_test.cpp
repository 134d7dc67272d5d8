// Which captured graph takes a step: the model's rule against vLLM's list written out, and against
// the list that the backend looks its sizes up in.
#include "sim/step/backend_config.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cuda_backend/streams/stream_device.h"

namespace lockstep {
namespace {

TEST(CaptureSizes, AreVllmsWrittenOut) {
  const std::vector<std::int32_t> up_to_40{1, 2, 4, 8, 16, 24, 32, 40};
  EXPECT_EQ(cuda::cudagraph_capture_sizes(40, 8192), up_to_40);
  const std::vector<std::int32_t> around_256 = cuda::cudagraph_capture_sizes(300, 8192);
  EXPECT_EQ(std::vector(around_256.end() - 4, around_256.end()),
            (std::vector<std::int32_t>{248, 256, 272, 288}));
  // The largest step is captured too, unless it is above what was asked for.
  EXPECT_EQ(cuda::cudagraph_capture_sizes(512, 13), (std::vector<std::int32_t>{1, 2, 4, 8, 13}));
  EXPECT_EQ(cuda::cudagraph_capture_sizes(12, 13), (std::vector<std::int32_t>{1, 2, 4, 8}));
  EXPECT_EQ(cuda::cudagraph_capture_sizes(3, 3), (std::vector<std::int32_t>{1, 2, 3}));
}

TEST(CaptureSizes, OfModelAndBackendAgreeForEveryBatch) {
  for (const std::int32_t largest : {1, 2, 3, 5, 8, 13, 64, 250, 256, 263, 512, 600})
    for (const std::int32_t max_tokens : {1, 3, 8, 13, 100, 256, 300, 8192}) {
      const auto sizes = cuda::cudagraph_capture_sizes(largest, max_tokens);
      for (std::int32_t tokens = 1; tokens <= std::min(max_tokens, 700); ++tokens) {
        const auto fits = std::ranges::lower_bound(sizes, tokens);
        EXPECT_EQ(captured_batch(tokens, largest, max_tokens), fits == sizes.end() ? 0 : *fits)
            << tokens << " tokens of " << max_tokens << ", sizes up to " << largest;
      }
    }
}

TEST(CaptureSizes, TakeNoTokenAndNoGraphForNothing) {
  EXPECT_EQ(captured_batch(0, 64, 256), 0);
  EXPECT_EQ(captured_batch(7, 0, 256), 0);
}

}  // namespace
}  // namespace lockstep
