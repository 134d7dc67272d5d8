// The orders expected here were printed by CPython 3.11 with PYTHONHASHSEED=0.
#include "sim/connectors/recorded_connector.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

namespace lockstep {
namespace {

std::vector<std::string> first_requests(int count) {
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.push_back(fmt::format("r{}", i));
  return names;
}

TEST(PythonSetOrder, HashesAreThoseOfTheInterpreter) {
  EXPECT_EQ(python_hash(""), 0u);
  EXPECT_EQ(python_hash("r1"), 16905778148463992206u);
  EXPECT_EQ(python_hash("request-8"), 790838276843634633u);
}

TEST(PythonSetOrder, ASmallSetIsOrderedByItsTableOfEight) {
  EXPECT_EQ(in_python_set_order(first_requests(4)),
            (std::vector<std::string>{"r2", "r3", "r1", "r0"}));
}

TEST(PythonSetOrder, ASetThatOutgrewItsTableIsOrderedByTheLargerOne) {
  EXPECT_EQ(in_python_set_order(first_requests(5)),
            (std::vector<std::string>{"r2", "r4", "r3", "r1", "r0"}));
  EXPECT_EQ(in_python_set_order(first_requests(30)),
            (std::vector<std::string>{"r17", "r3",  "r1",  "r18", "r26", "r21", "r6",  "r4",
                                      "r15", "r28", "r7",  "r24", "r27", "r0",  "r10", "r25",
                                      "r19", "r5",  "r11", "r13", "r9",  "r20", "r22", "r2",
                                      "r29", "r14", "r12", "r8",  "r23", "r16"}));
}

TEST(PythonSetOrder, ANameIsInTheSetOnce) {
  EXPECT_EQ(in_python_set_order({"r1", "r0", "r1"}), (std::vector<std::string>{"r1", "r0"}));
}

}  // namespace
}  // namespace lockstep
