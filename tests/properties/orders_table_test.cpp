// docs/reference/orders.md: every kind of cache in every layout of the overlaid memory, what was
// compared and which defects were caught. LOCKSTEP_WRITE_TABLES=1 writes it.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "cuda_backend/backends.h"
#include "properties/judge/judge.h"
#include "tests/properties/cache_kinds.h"

namespace lockstep {
namespace {

constexpr std::array kOfRows = {"layout-order-lost", "order-layer-stride", "order-head-stride",
                                "wrong-stride",      "write-past-page",    "drop-slot"};
constexpr std::array kOfStates = {"zero-stride", "zero-lost", "state-copy-lost",
                                  "state-stride-unpadded", "state-offset-wrong-itemsize"};

std::vector<std::string> defects_for(const tests::CacheKindCase& kind) {
  std::vector<std::string> defects;
  const auto has = [&](bool states) {
    return std::ranges::any_of(kind.groups, [&](const KVCacheGroupSpec& group) {
      return (group.spec.kind == CacheKind::mamba) == states;
    });
  };
  if (has(false)) defects.insert(defects.end(), kOfRows.begin(), kOfRows.end());
  if (has(true)) defects.insert(defects.end(), kOfStates.begin(), kOfStates.end());
  return defects;
}

struct OrderCell {
  bool is_refused = false;
  std::int64_t bytes = 0;
  std::size_t caught = 0;
  std::vector<std::string> without_effect;
};

OrderCell look_at(const tests::CacheKindCase& kind, CacheLayout order) {
  SavedCase saved = tests::case_in(kind, order);
  saved.check = CheckMode::fast;
  const Outcome sound = judge(saved, make_simt_backend);
  OrderCell cell;
  cell.is_refused = sound.kind == OutcomeKind::refused;
  cell.bytes = sound.bytes_checked;
  if (cell.is_refused) return cell;
  EXPECT_EQ(name_of(sound.kind), "agreed") << kind.name << ": " << sound.what;
  for (const std::string& defect : defects_for(kind)) {
    saved.mutants = {defect};
    const Outcome planted = judge(saved, make_simt_backend);
    if (planted.failed())
      ++cell.caught;
    else
      cell.without_effect.push_back(defect);
  }
  return cell;
}

std::string tables() {
  std::string cells = "| kind of cache |";
  for (const CacheLayout order : kOverlaidLayouts) cells += fmt::format(" {} |", name_of(order));
  cells += "\n|---|" + std::string("---|---|---|---|---|---|\n");
  std::map<std::string, std::vector<std::string>> without_effect;  // by defect: kinds and orders
  for (const tests::CacheKindCase& kind : tests::cache_kinds()) {
    cells += fmt::format("| {} |", kind.name);
    std::map<std::string, std::string> orders_of;  // by defect
    for (const CacheLayout order : kOverlaidLayouts) {
      const OrderCell cell = look_at(kind, order);
      EXPECT_EQ(cell.is_refused, !kind.orders.contains(order)) << kind.name;
      if (cell.is_refused) {
        cells += " - |";
        continue;
      }
      cells += fmt::format(" {}, {}/{} |", cell.bytes / 1024, cell.caught,
                           cell.caught + cell.without_effect.size());
      for (const std::string& defect : cell.without_effect)
        orders_of[defect] += fmt::format(" {}", name_of(order));
    }
    for (const auto& [defect, orders] : orders_of)
      without_effect[defect].push_back(fmt::format("{}:{}", kind.name, orders));
    cells += "\n";
  }
  cells +=
      "\nDefects that have nothing to change on a kind of cache (one head, no padding, nothing to "
      "zero, no\n"
      "request longer than a block):\n\n";
  for (const auto& [defect, kinds] : without_effect) {
    cells += fmt::format("- `{}`\n", defect);
    for (const std::string& kind : kinds) cells += fmt::format("  - {}\n", kind);
  }
  return cells;
}

TEST(OrdersTable, OfTheDocsIsWhatReplaysShow) {
  const std::string path = LOCKSTEP_SOURCE_DIR "/docs/reference/orders.md";
  constexpr std::string_view kBegin = "<!-- generated -->\n", kEnd = "<!-- end -->\n";
  std::stringstream read;
  read << std::ifstream(path).rdbuf();
  const std::string page = read.str();
  const std::size_t begin = page.find(kBegin), end = page.find(kEnd);
  ASSERT_NE(begin, std::string::npos);
  ASSERT_NE(end, std::string::npos);
  const std::string now = page.substr(0, begin + kBegin.size()) + tables() + page.substr(end);
  if (std::getenv("LOCKSTEP_WRITE_TABLES") != nullptr) std::ofstream(path) << now;
  EXPECT_EQ(now, page) << "write it again: LOCKSTEP_WRITE_TABLES=1 and this test";
}

}  // namespace
}  // namespace lockstep
