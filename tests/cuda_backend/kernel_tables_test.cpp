// Block tables and slot mappings on the device: rows after appends, edits and clears, and the slots
// of positions.
#include <gtest/gtest.h>

#include "tests/cuda_backend/kernel_device.h"

namespace lockstep::cuda {
namespace {

struct Tables {
  explicit Tables(CheckMode mode = CheckMode::check, int second_stride = 35) : device(mode) {
    add(8, 1, 4, 1);                // width, split, kernel block size, stride of kernel blocks
    add(6, 35, 16, second_stride);  // 560-token blocks
    groups_on_device = device.put(groups, "groups");
  }
  void add(int width, int split, int kernel_block_size, int stride) {
    GroupTable table;
    table.width = width;
    table.blocks_per_kv_block = split;
    table.kernel_block_stride = stride;
    table.kernel_block_size = table.slot_block_size = kernel_block_size;
    table.lengths = device.put(std::vector<std::int32_t>(kRows, 0), "lengths");
    table.entries = device.room<std::int32_t>(kRows * width, "entries");
    table.kernel_entries = split == 1
                               ? table.entries
                               : device.room<std::int32_t>(kRows * width * split, "kernel entries");
    groups.push_back(table);
  }
  void append(const std::vector<TableAppend>& appends, const std::vector<std::int32_t>& ids) {
    const auto count = static_cast<std::int32_t>(appends.size());
    device->launch(device.kernels().append_entries,
                   TableAppendParams{groups_on_device, device.put(appends, "appends"),
                                     device.put(ids, "ids"), count});
  }
  std::vector<std::int32_t> row(int group, int row) {
    const GroupTable& table = groups[group];
    const std::int32_t length = device.get(table.lengths + row, 1).front();
    return device.get(table.entries + row * table.width, length);
  }
  std::vector<Slot> slots(const std::vector<std::int32_t>& positions,
                          const std::vector<std::int32_t>& rows, int num_padded) {
    Slot* slots = device.room<Slot>(2 * num_padded, "slots");
    device->launch(device.kernels().slot_mapping,
                   SlotMappingParams{groups_on_device, device.put(positions, "positions"),
                                     device.put(rows, "rows"), slots, num_padded, 2,
                                     static_cast<std::int32_t>(positions.size()), nullptr,
                                     num_padded, PAD_SLOT_ID, context.num_ranks, context.rank,
                                     context.interleave, nullptr, 0});
    return device.get(slots, 2 * num_padded);
  }

  static constexpr int kRows = 3;
  ContextRank context;
  KernelDevice device;
  std::vector<GroupTable> groups;
  GroupTable* groups_on_device = nullptr;
};

using Ids = std::vector<std::int32_t>;

TEST(KernelTables, AppendsExtendReplaceAndShortenRows) {
  for (CheckMode mode : {CheckMode::fast, CheckMode::check}) {
    Tables tables(mode);
    tables.append({{0, 0, 0, 0, 3}, {2, 0, 0, 3, 1}, {0, 1, 0, 4, 2}}, {5, 9, 2, 7, 3, 1});
    EXPECT_EQ(tables.row(0, 0), (Ids{5, 9, 2}));
    EXPECT_EQ(tables.row(0, 1), Ids{});
    EXPECT_EQ(tables.row(0, 2), Ids{7});
    EXPECT_EQ(tables.row(1, 0), (Ids{3, 1}));
    tables.append({{0, 0, 3, 0, 2}, {2, 0, 0, 2, 2}}, {4, 6, 8, 1});
    EXPECT_EQ(tables.row(0, 0), (Ids{5, 9, 2, 4, 6}));
    EXPECT_EQ(tables.row(0, 2), (Ids{8, 1}));
    tables.append({{0, 0, 0, 0, 1}}, {3});
    EXPECT_EQ(tables.row(0, 0), Ids{3});
    tables.device.expect_no_reports();
  }
}

// Those of blocks 3 and 1.
void expect_kernel_blocks(int stride) {
  Tables tables(CheckMode::check, stride);
  tables.append({{1, 1, 0, 0, 2}}, {3, 1});
  const GroupTable& table = tables.groups[1];
  const Ids kernel_ids = tables.device.get(table.kernel_entries + table.width * 35, 70);
  for (int i = 0; i < 35; ++i) {
    EXPECT_EQ(kernel_ids[i], 3 * stride + i);
    EXPECT_EQ(kernel_ids[35 + i], 1 * stride + i);
  }
}

TEST(KernelTables, KernelBlockIdsFollowTheManagerBlocks) { expect_kernel_blocks(35); }
TEST(KernelTables, KernelBlocksOfAPackedBlockLeaveOutThePagesInBetween) {
  expect_kernel_blocks(72);
}

// Two requests, of which one has a block more than the other.
TEST(KernelTables, DraftsContinueFromTheirPassAndHaveNoSlotAfterTheTable) {
  for (CheckMode mode : {CheckMode::fast, CheckMode::check}) {
    Tables tables(mode);
    tables.append({{0, 0, 0, 0, 2}, {2, 0, 0, 2, 3}, {0, 1, 0, 5, 1}, {2, 1, 0, 6, 1}},
                  {5, 9, 7, 3, 4, 2, 1});
    auto* positions = tables.device.put(std::vector<std::int32_t>{6, 7, 8}, "positions");
    Slot* slots = tables.device.room<Slot>(6, "slots");
    const auto pass = [&](std::int32_t advance) {
      tables.device->launch(
          tables.device.kernels().draft_slots,
          DraftSlotsParams{tables.groups_on_device,
                           tables.device.put(std::vector<std::int32_t>{0, 0, 2}, "rows"), positions,
                           slots, 3, 2, 3, advance, 9, PAD_SLOT_ID});
      return tables.device.get(slots, 6);
    };
    EXPECT_EQ(pass(0), (std::vector<Slot>{38, 39, 16, 1126, 1127, 568}));
    EXPECT_EQ(pass(1), (std::vector<Slot>{39, PAD_SLOT_ID, 17, 1127, 1128, 569}));
    EXPECT_EQ(tables.device.get(positions, 3), (Ids{7, 8, 9}));
    // A position behind the last one is the last one.
    EXPECT_EQ(pass(1), (std::vector<Slot>{PAD_SLOT_ID, PAD_SLOT_ID, 17, 1128, 1129, 569}));
    EXPECT_EQ(tables.device.get(positions, 3), (Ids{8, 9, 9}));
    tables.device.expect_no_reports();
  }
}

TEST(KernelTables, EditsChangeOneEntryAndItsKernelBlocks) {
  Tables tables;
  tables.append({{0, 0, 0, 0, 3}, {0, 1, 0, 3, 2}}, {5, 9, 2, 4, 6});
  tables.device->launch(
      tables.device.kernels().edit_entries,
      TableEditParams{
          tables.groups_on_device,
          tables.device.put(std::vector<TableEntry>{{0, 0, 1, 0}, {0, 1, 0, 0}}, "edits"), 2});
  EXPECT_EQ(tables.row(0, 0), (Ids{5, 0, 2}));
  EXPECT_EQ(tables.row(1, 0), (Ids{0, 6}));
  EXPECT_EQ(tables.device.get(tables.groups[1].kernel_entries, 70)[34], 34);
  EXPECT_EQ(tables.device.get(tables.groups[1].kernel_entries, 70)[35], 6 * 35);
  tables.device.expect_no_reports();
}

TEST(KernelTables, ClearedRowsAreEmptyInEveryGroup) {
  Tables tables;
  tables.append({{0, 0, 0, 0, 2}, {1, 0, 0, 0, 2}, {0, 1, 0, 0, 1}}, {5, 9});
  tables.device->launch(
      tables.device.kernels().clear_rows,
      TableClearParams{tables.groups_on_device, tables.device.put(Ids{0, 2}, "rows"), 2, 2});
  EXPECT_EQ(tables.row(0, 0), Ids{});
  EXPECT_EQ(tables.row(0, 1), (Ids{5, 9}));
  EXPECT_EQ(tables.row(1, 0), Ids{});
  tables.device.expect_no_reports();
}

TEST(KernelTables, SlotsAreBlockTimesBlockSizePlusOffsetInEveryGroupAndPadsAreMinusOne) {
  for (CheckMode mode : {CheckMode::fast, CheckMode::check}) {
    Tables tables(mode);
    tables.append({{0, 0, 0, 0, 3}, {0, 1, 0, 3, 1}, {2, 0, 0, 1, 1}, {2, 1, 0, 4, 1}},
                  {5, 9, 2, 4, 1});
    const std::vector<Slot> slots = tables.slots({0, 3, 4, 11, 2}, {0, 0, 0, 0, 2}, 7);
    const std::vector<Slot> expected = {
        5 * 4 + 0,   5 * 4 + 3,   9 * 4 + 0,   2 * 4 + 3,    9 * 4 + 2,   -1, -1,
        4 * 560 + 0, 4 * 560 + 3, 4 * 560 + 4, 4 * 560 + 11, 1 * 560 + 2, -1, -1};
    EXPECT_EQ(slots, expected);
    tables.device.expect_no_reports();
  }
}

TEST(KernelTables, AnUnwrittenEntryIsReportedWhenASlotNeedsIt) {
  if (runs_on_gpu()) GTEST_SKIP() << kNoChecker;
  Tables tables;
  tables.append({{0, 0, 0, 0, 1}, {0, 1, 0, 0, 1}}, {5});
  tables.slots({4}, {0}, 1);  // group 0 has no second block
  const auto reports = tables.device.reports();
  ASSERT_FALSE(reports.empty());
  EXPECT_EQ(reports.front().kind, "uninitialised read");
  EXPECT_EQ(reports.front().allocation, "entries");
}

}  // namespace
}  // namespace lockstep::cuda
