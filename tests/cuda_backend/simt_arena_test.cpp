// Device memory: names, red zones, reuse, limits, and that untouched memory costs nothing.
#include "cuda_backend/simt/arena.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstring>
#include <fstream>
#include <limits>

#include "tests/cuda_backend/simt_test_device.h"

namespace lockstep {
namespace {

using simt::Arena;

constexpr std::size_t kMiB = std::size_t{1} << 20;

std::uintptr_t address_of(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }

std::size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::size_t pages = 0;
  file >> pages >> pages;
  return pages * 4096;
}

TEST(SimtArena, AllocationsAreAlignedNamedAndApart) {
  Arena arena = std::move(*Arena::reserve(64 * kMiB, kMiB, false));
  std::uintptr_t end_of_last = 0;
  for (const std::size_t size : {1ul, 255ul, 256ul, 65024ul, 65025ul, 3 * kMiB, 0ul}) {
    const std::byte* p = *arena.allocate(size, fmt::format("of {}", size));
    EXPECT_EQ(address_of(p) % Arena::kAlignment, 0u);
    EXPECT_GE(address_of(p), end_of_last + 2 * Arena::kRedZoneBytes);
    const simt::Allocation* found = arena.find(address_of(p));
    ASSERT_NE(found, nullptr);
    EXPECT_EQ(found->name, fmt::format("of {}", size));
    EXPECT_TRUE(found->holds(address_of(p), size));
    EXPECT_FALSE(found->holds(address_of(p), size + 1));
    EXPECT_FALSE(found->holds(address_of(p) - 1, 1));
    EXPECT_FALSE(found->holds(address_of(p) + 1, std::numeric_limits<std::size_t>::max()));
    end_of_last = address_of(p) + size;
  }
}

TEST(SimtArena, FreedAddressesAreReusedOnlyAfterAllFreshOnes) {
  Arena arena = std::move(*Arena::reserve(kMiB, kMiB, true));  // 16 chunks
  std::vector<std::byte*> all;
  for (int i = 0; i < 16; ++i) all.push_back(*arena.allocate(1000, fmt::format("a{}", i)));
  const auto refused = arena.allocate(1000, "one too many");
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("'one too many' wants 1000 bytes; 16000 of 1048576"),
            std::string::npos)
      << refused.error().message;

  std::memset(all[5], 1, 1000);
  EXPECT_TRUE(arena.release(all[5]));
  EXPECT_TRUE(arena.release(all[3]));
  EXPECT_FALSE(arena.release(all[3])) << "freed twice";
  EXPECT_FALSE(arena.release(all[4] + 1)) << "not the start of an allocation";
  EXPECT_EQ(arena.find(address_of(all[5]))->live, false);
  EXPECT_EQ(*arena.allocate(10, "again"), all[5]) << "the longest freed first";
  EXPECT_EQ(all[5][999], std::byte{0}) << "freed memory is returned to the system";
  EXPECT_EQ(arena.find(address_of(all[5]))->name, "again");
  EXPECT_FALSE(arena.allocate(70000, "two chunks in a row")) << "they are not neighbours";
}

TEST(SimtArena, AHundredGigabytesWithAFewPagesInUseCostAFewPages) {
  auto arena = Arena::reserve(std::size_t{128} << 30, std::size_t{1} << 30, true);
  ASSERT_TRUE(arena) << arena.error().message;
  const std::size_t pool_bytes = arena->size_bytes() / 4 * 3;
  const std::size_t before = resident_bytes();
  std::byte* pool = *arena->allocate(pool_bytes, "pool");
  for (std::size_t i = 0; i < 100; ++i) pool[pool_bytes / 100 * i] = std::byte{1};
  EXPECT_LT(resident_bytes() - before, 32 * kMiB);
}

TEST(SimtArena, FindsTheTouchedPagesOfAHugeRange) {
  const auto range = simt::VirtualRange::reserve(std::size_t{8} << 30);
  ASSERT_TRUE(range);
  for (const std::size_t page : {3u, 4u, 5u, 4096u, 1000000u})
    range.base()[page * 4096 + 7] = std::byte{1};
  std::vector<std::pair<std::size_t, std::size_t>> found;
  range.for_each_resident(3 * 4096 + 100, 1000000ul * 4096,
                          [&](std::size_t offset, std::size_t size) {
                            found.push_back({offset, size});
                          });
  const std::vector<std::pair<std::size_t, std::size_t>> expected = {
      {3 * 4096 + 100, 3 * 4096 - 100}, {4096ul * 4096, 4096}, {1000000ul * 4096, 4096}};
  EXPECT_EQ(found, expected);
}

TEST(SimtArena, ASmallerArenaIsReservedWhenAddressSpaceIsLimitedAndTooSmallIsAnError) {
  EXPECT_FALSE(Arena::reserve(std::numeric_limits<std::size_t>::max(), std::size_t{1} << 60, true));
  rlimit unlimited{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &unlimited), 0);
  std::ifstream file("/proc/self/statm");
  std::size_t pages = 0;
  file >> pages;
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the sanitizer needs the address space";
#endif
  rlimit limited = unlimited;
  limited.rlim_cur = pages * 4096 + 1024 * kMiB;
  ASSERT_EQ(setrlimit(RLIMIT_AS, &limited), 0);
  const auto smaller = Arena::reserve(std::size_t{64} << 30, 64 * kMiB, true);
  const auto refused = Arena::reserve(std::size_t{64} << 30, std::size_t{32} << 30, true);
  ASSERT_EQ(setrlimit(RLIMIT_AS, &unlimited), 0);
  ASSERT_TRUE(smaller) << smaller.error().message;
  EXPECT_EQ(smaller->size_bytes(), 256 * kMiB) << "three ranges of it fit into 1 GiB";
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("no 34359738368 bytes"), std::string::npos)
      << refused.error().message;
}

TEST(SimtArena, HostCopiesStayWithinOneLiveAllocation) {
  TestDevice device(simt::Mode::check);
  simt::Executor& executor = device.executor();
  auto* a = device.uploaded<std::uint8_t>(std::vector<std::uint8_t>(100, 1), "a");
  device.undefined<std::uint8_t>(100, "b");
  std::vector<std::uint8_t> host(200, 9);
  EXPECT_EQ(executor.memcpy_h2d(a + 50, host.data(), 51), simt::invalid_value);
  EXPECT_EQ(executor.memcpy_d2h(host.data(), a + 50, 51), simt::invalid_value);
  EXPECT_EQ(executor.memcpy_h2d(host.data() + 100, host.data(), 10), simt::invalid_value);
  EXPECT_EQ(executor.memset(a + 100, 0, 1), simt::invalid_value);
  EXPECT_EQ(device.read(a, 100), std::vector<std::uint8_t>(100, 1));
  EXPECT_EQ(executor.free(a + 1), simt::invalid_value);
  EXPECT_EQ(executor.free(a), simt::success);
  EXPECT_EQ(executor.free(a), simt::invalid_value);
  EXPECT_EQ(executor.memcpy_d2h(host.data(), a, 1), simt::invalid_value);
  EXPECT_EQ(executor.live_bytes(), 100u);
}

}  // namespace
}  // namespace lockstep
