// A disk that fails and shows files while they are written, and files on it that are seen whole or
// not at all.
#include "sim/hidden_states/hidden_states.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <map>

namespace lockstep {
namespace {

std::vector<std::uint8_t> bytes_of(int value, std::size_t size) {
  return std::vector<std::uint8_t>(size, static_cast<std::uint8_t>(value));
}

TEST(Disk, AWriteUnderWayShowsThePartThatIsThere) {
  Disk disk({.seed = 1, .delay_ns_min = 100, .delay_ns_max = 100});
  disk.write(0, "a", bytes_of(7, 50));
  EXPECT_EQ(disk.read(0, "a")->size(), 0u);
  EXPECT_EQ(disk.read(50, "a"), bytes_of(7, 25));
  EXPECT_FALSE(disk.complete(99));
  EXPECT_TRUE(disk.complete(100)->is_done);
  EXPECT_EQ(disk.read(100, "a"), bytes_of(7, 50));
}

TEST(Disk, AFailedWriteLeavesAPartOrNothingAndAFailedRenameChangesNothing) {
  Disk disk({.seed = 3, .delay_ns_min = 1, .delay_ns_max = 1, .fail_percent = 100});
  for (int i = 0; i < 40; ++i) {
    disk.write(i, "a", bytes_of(7, 50));
    EXPECT_FALSE(disk.complete(i + 1)->is_done);
    EXPECT_LT(disk.read(i + 1, "a")->size(), 50u);
  }
  EXPECT_EQ(disk.counts().writes_failed, 40);
  EXPECT_GT(disk.counts().writes_torn, 10);
  EXPECT_LT(disk.counts().writes_torn, 30);
  disk.rename(41, "a", "b");
  EXPECT_FALSE(disk.complete(42)->is_done);
  EXPECT_EQ(disk.paths(), std::vector<std::string>{"a"});
}

// Puts of a few names over and over, looked at between all events.
struct Seen {
  std::int64_t done = 0;
  std::int64_t given_up = 0;
  std::int64_t retries = 0;
  std::int64_t torn = 0;
  std::int64_t renames_failed = 0;
  std::int64_t looks_under_way = 0;  // at a name whose next version was being written
};

void run(const DiskOptions& options, const std::vector<std::uint8_t>& script, Seen& seen) {
  Disk disk(options);
  WholeFiles files(disk, 3);
  std::map<std::string, std::vector<std::vector<std::uint8_t>>> put;
  std::map<std::string, std::vector<std::uint8_t>> under_way;
  std::map<std::string, std::vector<std::uint8_t>> last_done;
  const auto look = [&](std::int64_t now_ns) {
    for (const auto& [name, versions] : put) {
      const auto there = disk.read(now_ns, name);
      const bool is_whole = !there || std::ranges::find(versions, *there) != versions.end();
      RC_ASSERT(is_whole);
      if (under_way.contains(name)) {
        ++seen.looks_under_way;
      } else if (last_done.contains(name)) {
        RC_ASSERT(there.has_value());
      }
    }
  };
  std::int64_t now_ns = 0;
  const auto drain = [&](std::int64_t until_ns) {
    while (disk.next_due_ns().value_or(until_ns + 1) <= until_ns) {
      const std::int64_t due_ns = std::max(now_ns, *disk.next_due_ns());
      look(now_ns + (due_ns - now_ns) / 2);
      now_ns = due_ns;
      for (const WholeFiles::Outcome& outcome : files.take_outcomes(now_ns)) {
        (outcome.is_done ? seen.done : seen.given_up) += 1;
        const auto version = under_way.extract(outcome.name).mapped();
        if (outcome.is_done) {
          RC_ASSERT(disk.read(now_ns, outcome.name) == version);
          last_done[outcome.name] = version;
        }
      }
      look(now_ns);
    }
    now_ns = std::max(now_ns, until_ns);
  };
  for (std::size_t i = 0; i < script.size(); ++i) {
    drain(now_ns + script[i] * 20'000);
    const std::string name(1, static_cast<char>('a' + script[i] % 3));
    if (under_way.contains(name)) continue;
    const auto version = bytes_of(static_cast<int>(i), 2 + i % 40);
    put[name].push_back(version);
    under_way[name] = version;
    files.put(now_ns, name, version);
  }
  drain(now_ns + 1'000'000'000);
  RC_ASSERT(under_way.empty());
  seen.retries += files.num_retries();
  seen.torn += disk.counts().writes_torn;
  seen.renames_failed += disk.counts().renames_failed;
}

TEST(WholeFiles, AnObserverSeesWholeFilesOnlyWhateverFails) {
  Seen seen;
  EXPECT_TRUE(rc::check("every look finds nothing, or all of one version", [&] {
    const DiskOptions options{.seed = *rc::gen::arbitrary<std::uint64_t>(), .fail_percent = 35};
    run(options, *rc::gen::arbitrary<std::vector<std::uint8_t>>(), seen);
  }));
  EXPECT_GT(seen.done, 100);
  EXPECT_GT(seen.given_up, 10);
  EXPECT_GT(seen.retries, 100);
  EXPECT_GT(seen.torn, 50);
  EXPECT_GT(seen.renames_failed, 20);
  EXPECT_GT(seen.looks_under_way, 500);
}

// The same look finds what a writer does that does not write aside.
TEST(WholeFiles, WrittenInPlaceAFileIsSeenInPart) {
  Disk disk({.seed = 1});
  disk.write(0, "a", bytes_of(1, 1'000));
  const auto seen = disk.read(*disk.next_due_ns() / 2, "a");
  ASSERT_TRUE(seen.has_value());
  EXPECT_GT(seen->size(), 0u);
  EXPECT_LT(seen->size(), 1'000u);
}

}  // namespace
}  // namespace lockstep
