// Slots of groups that ranks share, against a dealer who hands out tokens one by one; and the block
// tables of a batch.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/cuda_backend/kernel_device.h"

namespace lockstep::cuda {
namespace {

struct Group {
  int block_size, blocks_per_kv_block, width;  // tokens of a kernel block; manager blocks of a row
  ContextShare share;
};
struct Request {
  int row, num_computed_tokens, num_tokens;
};
struct SlotShape {
  std::string name;
  std::vector<Group> groups;
  std::vector<Request> requests;
  int num_padded_tokens;
};

std::vector<SlotShape> shapes() {
  const std::vector<Request> some = {{2, 0, 13}, {0, 60, 1}, {-1, 0, 2}, {1, 5, 0}, {3, 9, 22}};
  return {
      {"no sharing", {{16, 1, 8, {}}, {4, 1, 30, {}}}, some, 48},
      {"two ranks rank 0", {{16, 1, 8, {2, 0, 1}}}, some, 48},
      {"two ranks rank 1", {{16, 1, 8, {2, 1, 1}}}, some, 40},
      {"four ranks in runs of 4", {{16, 1, 8, {4, 2, 4}}}, some, 38},
      {"eight ranks in runs of a block", {{16, 1, 8, {8, 1, 16}}}, some, 38},
      {"a shared group and one kept whole", {{16, 1, 8, {2, 1, 8}}, {4, 1, 30, {}}}, some, 48},
      {"manager blocks of 560", {{16, 35, 2, {2, 1, 4}}}, some, 64},
      {"one request of one token", {{1, 1, 4, {}}}, {{1, 3, 1}}, 1},
      {"no requests", {{16, 1, 8, {}}}, {}, 8},
  };
}

class RequestSlots : public ::testing::TestWithParam<SlotShape> {
 protected:
  static constexpr int kRows = 4;

  // Rows hold what their request needs; behind that, ids of blocks that were freed.
  RequestSlots() {
    for (const Group& group : shape.groups) {
      std::vector<std::int32_t> row_lengths(kRows, 0), entries;
      for (const Request& r : shape.requests)
        if (r.row >= 0) {
          const int tokens = group.block_size * group.blocks_per_kv_block * group.share.size;
          row_lengths[r.row] = (r.num_computed_tokens + r.num_tokens + tokens - 1) / tokens;
        }
      for (int i = 0; i < kRows * group.width; ++i) {
        const auto id = static_cast<std::int32_t>(1 + number(11, i) % 1000);
        for (int k = 0; k < group.blocks_per_kv_block; ++k)
          entries.push_back(id * group.blocks_per_kv_block + k);
      }
      lengths.push_back(row_lengths);
      tables.push_back(entries);
    }
  }

  // Deals the tokens of a request to the ranks, one after the other.
  Slot dealt(std::size_t g, int row, int position) const {
    const Group& group = shape.groups[g];
    std::vector<int> kept(group.share.size, 0);
    int rank = 0, left = group.share.interleave, block = 0, in_block = 0;
    for (int p = 0;; ++p) {
      if (in_block == group.block_size * group.share.size) {  // the block is full for all ranks
        std::fill(kept.begin(), kept.end(), 0);
        ++block;
        in_block = 0;
      }
      if (p == position) {
        if (rank != group.share.rank) return PAD_SLOT_ID;
        const int width = group.width * group.blocks_per_kv_block;
        return Slot{tables[g][row * width + block]} * group.block_size + kept[rank];
      }
      ++kept[rank];
      ++in_block;
      if (--left == 0) {
        rank = (rank + 1) % group.share.size;
        left = group.share.interleave;
      }
    }
  }

  std::vector<Slot> expected() const {
    std::vector<Slot> slots;
    for (std::size_t g = 0; g < shape.groups.size(); ++g) {
      const std::size_t end = slots.size() + shape.num_padded_tokens;
      for (const Request& r : shape.requests)
        for (int i = 0; i < r.num_tokens; ++i)
          slots.push_back(r.row < 0 ? PAD_SLOT_ID : dealt(g, r.row, r.num_computed_tokens + i));
      slots.resize(end, PAD_SLOT_ID);
    }
    return slots;
  }

  RequestSlotsParams params(KernelDevice& device) const {
    RequestSlotsParams p{};
    std::vector<GroupTable> groups;
    std::vector<ContextShare> shares;
    for (std::size_t g = 0; g < shape.groups.size(); ++g) {
      GroupTable table;
      table.lengths = device.put(lengths[g], "lengths");
      table.kernel_entries = device.put(tables[g], "block table");
      table.width = shape.groups[g].width;
      table.blocks_per_kv_block = shape.groups[g].blocks_per_kv_block;
      table.kernel_block_size = table.slot_block_size = shape.groups[g].block_size;
      groups.push_back(table);
      shares.push_back(shape.groups[g].share);
    }
    std::vector<std::int32_t> starts = {0}, rows, positions;
    for (const Request& r : shape.requests) {
      rows.push_back(r.row);
      for (int i = 0; i < r.num_tokens; ++i) positions.push_back(r.num_computed_tokens + i);
      starts.push_back(static_cast<std::int32_t>(positions.size()));
    }
    p.groups = device.put(groups, "groups");
    p.shares = device.put(shares, "shares");
    p.query_start_loc = device.put(starts, "query_start_loc");
    p.rows = device.put(rows, "rows");
    p.positions = device.put(positions, "positions");
    p.slots_stride = shape.num_padded_tokens;
    p.num_groups = static_cast<std::int32_t>(groups.size());
    p.num_requests = static_cast<std::int32_t>(rows.size());
    p.num_padded_tokens = shape.num_padded_tokens;
    p.pad_slot = PAD_SLOT_ID;
    return p;
  }
  std::vector<Slot> found(KernelDevice& device, const LaunchPlace& place,
                          RequestSlotsParams p) const {
    const std::int64_t count = p.slots_stride * p.num_groups;
    p.slots = device.put(std::vector<Slot>(count, 12345), "slots");
    EXPECT_EQ(device.engine().request_slots(place, p), 0);
    return device.get(p.slots, count);
  }

  void expect_those_of_the_dealer(int hunts = 2) const {
    in_every_mode(
        [&](CheckMode mode, std::uint64_t seed) {
          KernelDevice device(mode, seed);
          const RequestSlotsParams p = params(device);
          for (const LaunchPlace& place : device.places())
            EXPECT_EQ(found(device, place, p), expected());
          device.expect_no_reports();
        },
        hunts);
  }

  SlotShape shape = GetParam();
  std::vector<std::vector<std::int32_t>> lengths, tables;
};

TEST_P(RequestSlots, AreThoseOfADealerWhoHandsOutTokensOneByOne) { expect_those_of_the_dealer(); }
INSTANTIATE_TEST_SUITE_P(Shapes, RequestSlots, ::testing::ValuesIn(shapes()),
                         [](const auto& shape) { return test_name(shape.param.name); });

using RequestSlotsSlow = RequestSlots;
TEST_P(RequestSlotsSlow, AreThoseOfADealerUnderAHundredSeedsOfPreemption) {
  expect_those_of_the_dealer(kHuntsOfSlowTests);
}
INSTANTIATE_TEST_SUITE_P(Shapes, RequestSlotsSlow, ::testing::ValuesIn(shapes()),
                         [](const auto& shape) { return test_name(shape.param.name); });

TEST_P(RequestSlots, MutantsDifferExactlyWhereTheShapeExposesThem) {
  bool in_runs = false, whole_beside_shared = false, padded = false;
  for (const Group& group : shape.groups) {
    in_runs |= group.share.interleave > 1;
    whole_beside_shared |= group.share.size == 1 && shape.groups[0].share.size > 1;
  }
  int tokens = 0;
  for (const Request& r : shape.requests) {
    tokens += r.num_tokens;
    padded |= r.row < 0;
  }
  padded |= tokens < shape.num_padded_tokens;
  const auto differs = [&](const auto& plant) {
    KernelDevice device;
    RequestSlotsParams p = params(device);
    std::vector<ContextShare> shares = device.get(p.shares, p.num_groups);
    plant(p, shares);
    p.shares = device.put(shares, "planted shares");
    return found(device, device->place(), p) != expected();
  };
  EXPECT_EQ(differs([](RequestSlotsParams&, std::vector<ContextShare>& shares) {
              for (ContextShare& share : shares) share.interleave = 1;
            }),
            in_runs)
      << "interleave ignored";
  EXPECT_EQ(differs([](RequestSlotsParams&, std::vector<ContextShare>& shares) {
              std::ranges::fill(shares, ContextShare(shares.front()));
            }),
            whole_beside_shared)
      << "replicated group shared";
  EXPECT_EQ(differs([](RequestSlotsParams& p, std::vector<ContextShare>&) { p.pad_slot = 0; }),
            padded)
      << "padding is slot 0";
}

// A row that a longer request had before still holds its blocks behind its length.
TEST(StaleTail, APositionPastTheRowsLengthGetsNoSlotAndMutantSlotStaleTailGivesItOne) {
  for (const bool stale : {false, true}) {
    KernelDevice device;
    GroupTable table;
    table.lengths = device.put(std::vector<std::int32_t>{stale ? 1000 : 1}, "lengths");
    table.kernel_entries = device.put(std::vector<std::int32_t>{7, 9}, "block table");
    table.width = 2;
    table.slot_block_size = table.kernel_block_size = 4;
    RequestSlotsParams p{};
    p.groups = device.put(std::vector<GroupTable>{table}, "groups");
    p.shares = device.put(std::vector<ContextShare>{{}}, "shares");
    p.query_start_loc = device.put(std::vector<std::int32_t>{0, 3}, "query_start_loc");
    p.rows = device.put(std::vector<std::int32_t>{0}, "rows");
    p.positions = device.put(std::vector<std::int32_t>{3, 4, 100}, "positions");
    p.slots = device.room<Slot>(3, "slots");
    p.slots_stride = p.num_padded_tokens = 3;
    p.num_groups = p.num_requests = 1;
    p.pad_slot = PAD_SLOT_ID;
    device->launch(device.engine().request_slots, p);
    if (!stale) {
      EXPECT_EQ(device.get(p.slots, 3), (std::vector<Slot>{31, PAD_SLOT_ID, PAD_SLOT_ID}));
      device.expect_no_reports();
    } else {
      EXPECT_EQ(device.get(p.slots, 2), (std::vector<Slot>{31, 36}));
      const auto reports = device.reports();  // position 100 lies past the table
      ASSERT_FALSE(reports.empty());
      EXPECT_EQ(reports.front().allocation, "block table");
    }
  }
}

// Tables of a batch of four: a row in use, a padded request, a row past its window, a fresh row.
void expect_what_requests_see(int hunts = 2) {
  const std::vector<std::int32_t> entries = {11, 12, 13, 14, 21, 22, 23, 24, 31, 32, 33, 34};
  std::vector<std::int32_t> kernel_entries;
  for (std::int32_t id : entries)
    for (int k = 0; k < 2; ++k) kernel_entries.push_back(2 * id + k);
  const std::vector<std::int32_t> whole = {62, 63, 64, 65, 0,  0,  0,  0,  0, 0, 0, 0, 0, 0, 0, 0,
                                           22, 23, 24, 25, 26, 27, 28, 29, 0, 0, 0, 0, 0, 0, 0, 0};
  std::vector<std::int32_t> windowed = whole;
  for (int i = 0; i < 5; ++i) windowed[16 + i] = 0;  // 25 tokens before a window of 6: 20 unseen
  const auto body = [&](CheckMode mode, std::uint64_t seed) {
    for (const bool stale : {false, true}) {
      KernelDevice device(mode, seed);
      GroupTable table;
      table.lengths = device.put(
          stale ? std::vector<std::int32_t>{4, 4, 4} : std::vector<std::int32_t>{4, 0, 2},
          "lengths");
      table.kernel_entries = device.put(kernel_entries, "block table");
      table.width = 4;
      table.blocks_per_kv_block = 2;
      table.kernel_block_size = 4;
      std::int32_t* out[] = {device.room<std::int32_t>(32, "batch"),
                             device.room<std::int32_t>(32, "batch")};
      const BatchTablesParams p{
          device.put(std::vector<GroupTable>{table, table}, "groups"),
          device.put(std::vector<BatchTable>{{out[0], 0}, {out[1], 6}}, "batches"),
          device.put(std::vector<std::int32_t>{2, -1, 0, 1}, "rows"),
          device.put(std::vector<std::int32_t>{3, 0, 25, 0}, "num_computed_tokens"),
          2,
          4,
          8};
      device->launch(device.engine().batch_tables, p);
      EXPECT_EQ(device.get(out[0], 32) == whole, !stale);
      EXPECT_EQ(device.get(out[1], 32) == windowed, !stale);
      device.expect_no_reports();
    }
  };
  in_every_mode(body, hunts);
}
TEST(BatchTables, HoldWhatRequestsSeeAndTheNullBlockEverywhereElse) { expect_what_requests_see(); }
TEST(BatchTablesSlow, HoldWhatRequestsSeeUnderAHundredSeedsOfPreemption) {
  expect_what_requests_see(kHuntsOfSlowTests);
}

}  // namespace
}  // namespace lockstep::cuda
