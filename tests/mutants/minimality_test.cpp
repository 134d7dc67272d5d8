// A shrunk case is minimal: no part of it can be removed alone. This check does not use the
// shrinker, whose passes may have missed a part.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cli/mutant_bench.h"
#include "properties/judge/failure.h"
#include "properties/shrink/case_parts.h"
#include "traces/formats/engine_options.h"
#include "traces/formats/run_fields.h"

namespace lockstep {
namespace {

struct Smaller {
  std::string what;
  SavedCase saved;
};

template <class Change>
void add(std::vector<Smaller>& all, const SavedCase& saved, std::string what, Change change) {
  SavedCase other = saved;
  change(other);
  for (RequestSpec* request : requests_of(other)) drop_unused_tokens(request->prompt);
  const bool sound = (broken_rules(other) & ~broken_rules(saved)) == 0;
  const bool is_smaller =
      rank_of(other, 0) < rank_of(saved, 0);  // a block of 16 is not less than 2
  if (sound && is_smaller) all.push_back({std::move(what), std::move(other)});
}

// One request or control, group, layer, run or last token of a prompt, option or setting fewer.
std::vector<Smaller> each_smaller(const SavedCase& saved) {
  std::vector<Smaller> all;
  for (std::size_t i = 0; i < num_records(saved); ++i)
    add(all, saved, "record " + std::to_string(i), [&](SavedCase& other) {
      std::vector<bool> keep(num_records(saved), true);
      keep[i] = false;
      other = with_records(saved, keep);
    });
  for (std::size_t g = 0; g < saved.cache.groups.size(); ++g) {
    if (saved.cache.groups.size() > 1)
      add(all, saved, "group " + std::to_string(g),
          [&](SavedCase& other) { other = without_group(saved, g); });
    if (saved.cache.groups[g].layer_names.size() > 1)
      add(all, saved, "a layer of group " + std::to_string(g),
          [&](SavedCase& other) { other = without_layer(saved, g, 0); });
  }
  for (std::size_t r = 0; r < requests_of(saved).size(); ++r) {
    const std::vector<TokenRun>& runs = requests_of(saved)[r]->prompt.runs;
    for (std::size_t i = 0; i < runs.size() && runs.size() > 1; ++i)
      add(all, saved, "a run of request " + std::to_string(r), [&](SavedCase& other) {
        std::vector<TokenRun>& left = requests_of(other)[r]->prompt.runs;
        left.erase(left.begin() + static_cast<std::ptrdiff_t>(i));
      });
    if (!runs.empty() && runs.back().count > 1)
      add(all, saved, "the last token of request " + std::to_string(r),
          [&](SavedCase& other) { --requests_of(other)[r]->prompt.runs.back().count; });
  }
  for (const std::string& name : all_engine_options({}).given)
    if (name != "engine" && !name.starts_with("max_"))
      add(all, saved, "option " + name,
          [&](SavedCase& other) { run_field(name).copy(RunSpec{}, other); });
  for (const RunField& field : run_fields())
    if (field.saved_in == SavedIn::settings && !field.is_default(saved))
      add(all, saved, "setting " + std::string(field.name),
          [&](SavedCase& other) { field.copy(RunSpec{}, other); });
  return all;
}

std::vector<std::string> caught_ids() {
  std::vector<std::string> all;
  for (const Mutant& mutant : mutant_catalogue())
    if (mutant.site == MutantSite::scheduler || mutant.site == MutantSite::backend)
      all.emplace_back(mutant.id);
  return all;
}

class MinimalCasesSlow : public testing::TestWithParam<std::string> {};

TEST_P(MinimalCasesSlow, NothingCanBeTakenAwayByItself) {
  const MutantBench bench = mutant_bench();
  const MutantReport report = search_mutant(*find_mutant(GetParam()), bench, {});
  ASSERT_TRUE(report.caught && report.smallest);
  ASSERT_TRUE(report.is_minimal);
  EXPECT_LE(report.size.requests, 3);
  const auto judged = [&](SavedCase saved, bool planted) {
    if (!planted) saved.mutants.clear();
    const auto failure = judge_in_child(
        saved, [&](const SavedCase& one) { return judge(one, bench.backend); },
        std::chrono::seconds(10));
    EXPECT_TRUE(failure);
    return *failure;
  };
  std::int64_t tried = 0;
  for (const Smaller& smaller : each_smaller(*report.smallest)) {
    ++tried;
    const Failure failure = judged(smaller.saved, true);
    const bool still_fails = failure.same_as(report.failure) && failure.steps <= report.steps &&
                             judged(smaller.saved, false).kind == "agreed";
    EXPECT_FALSE(still_fails) << "it fails without " << smaller.what << " too: " << failure.what;
  }
  EXPECT_GT(tried, 0);
}

INSTANTIATE_TEST_SUITE_P(All, MinimalCasesSlow, testing::ValuesIn(caught_ids()),
                         [](const auto& id) {
                           std::string name = id.param;
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace lockstep
