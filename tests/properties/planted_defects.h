// Defects planted in the scheduler, and properties that must see them.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <initializer_list>
#include <string>

#include "base/child_process.h"
#include "reference/defects/scheduler_defect.h"

namespace lockstep {

// Whether each is seen, or runs into a check of the scheduler's own. `holds`: the property, run in
// a child because of the latter.
inline void expect_seen(std::initializer_list<SchedulerDefect> defects,
                        const std::function<bool(SchedulerDefect)>& holds) {
  for (const SchedulerDefect defect : defects) {
    const auto answer = run_in_child([&] { return std::string(holds(defect) ? "" : "seen"); },
                                     std::chrono::seconds(60));
    ASSERT_TRUE(answer) << answer.error().message;
    EXPECT_TRUE(answer->end == ChildAnswer::End::crashed || answer->text == "seen")
        << name_of(defect);
  }
}

// The engines that a property is tested with, as names of tests.
inline const auto name_of_engine = [](const testing::TestParamInfo<std::string>& engine) {
  return std::string(engine.param == "vllm-0.22.1" ? "v0_22_1" : "v0_33_0");
};

}  // namespace lockstep
