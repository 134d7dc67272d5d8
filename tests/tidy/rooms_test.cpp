// Includes follow the arrows of their room, and arrows have no cycle.
#include "tests/tidy/rooms.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/tidy/project.h"

namespace lockstep::tidy {
namespace {

const Rooms& rooms_of_the_build() {
  static const Rooms rooms =
      read_rooms(text_of(std::filesystem::path(LOCKSTEP_BINARY_DIR) / "rooms.txt"));
  return rooms;
}

TEST(Rooms, IncludeAlongTheirArrowsOnly) {
  const Rooms& rooms = rooms_of_the_build();
  EXPECT_GE(rooms.arrows.size(), 25u);
  std::string broken;
  for (const SourceFile& file : project()) broken += text_of(check_arrows(rooms, file));
  EXPECT_EQ(broken, "");
}

TEST(Rooms, HoldAllProductCode) {
  std::string homeless;
  for (const SourceFile& file : project())
    if (is_product(file) && rooms_of_the_build().room_of(file.path).empty())
      homeless += file.path + "\n";
  EXPECT_EQ(homeless, "");
}

TEST(Rooms, StandInNoCircle) {
  for (const std::string& circle : circles(rooms_of_the_build()))
    ADD_FAILURE() << circle << " include each other";
}

TEST(Rooms, EveryArrowIsUsedBySomeInclude) {
  const Rooms& rooms = rooms_of_the_build();
  Rooms unused = rooms;
  for (const SourceFile& file : project()) {
    const std::string room = rooms.room_of(file.path);
    if (room.empty()) continue;
    for (const std::string& included : includes_of(file))
      unused.arrows[room].erase(rooms.room_of(included));
  }
  for (const auto& [room, arrows] : unused.arrows)
    for (const std::string& arrow : arrows) ADD_FAILURE() << room << " never includes " << arrow;
}

// Address arithmetic is written twice, and neither side sees the other's.
TEST(Rooms, TheBackendKnowsNothingOfTheModelsArithmetic) {
  const Rooms& rooms = rooms_of_the_build();
  const std::set<std::string> reach = rooms.reach("cuda_backend");
  for (const char* room :
       {"reference/plan", "reference/cache", "reference/schedule", "reference/memory"}) {
    EXPECT_FALSE(reach.contains(room)) << room;
    EXPECT_FALSE(rooms.reach(room).contains("cuda_backend")) << room;
  }
}

TEST(Rooms, AreReadWithTheirArrowsAndWithFoldersThatTheyShare) {
  const Rooms rooms = read_rooms("a:\na/deep: a\nb: a/deep\nc = b\n");
  EXPECT_EQ(rooms.room_of("a/file.h"), "a");
  EXPECT_EQ(rooms.room_of("a/deep/in/file.h"), "a/deep");
  EXPECT_EQ(rooms.room_of("c/file.h"), "b");
  EXPECT_EQ(rooms.room_of("elsewhere/file.h"), "");
  EXPECT_EQ(rooms.reach("b"), (std::set<std::string>{"a", "a/deep", "b"}));
}

TEST(Rooms, AnArrowBackOrPastANeighbourIsFound) {
  const Rooms rooms = read_rooms("a:\nb: a\nc: b\nd = c\n");
  const auto findings = [&](const char* path, const char* included) {
    return text_of(check_arrows(rooms, {path, fmt::format("#include \"{}\"\n", included)}));
  };
  EXPECT_EQ(findings("b/x.cpp", "a/y.h"), "");
  EXPECT_EQ(findings("b/x.cpp", "b/y.h"), "");
  EXPECT_EQ(findings("d/x.cpp", "c/y.h"), "");
  EXPECT_EQ(findings("a/x.cpp", "b/y.h"), "a/x.cpp:1: a may not include b/y.h\n");
  EXPECT_EQ(findings("d/x.cpp", "a/y.h"), "d/x.cpp:1: c may not include a/y.h\n");
  EXPECT_EQ(findings("a/x.cpp", "tests/y.h"),
            "a/x.cpp:1: includes tests/y.h, which is of no room\n");
  EXPECT_EQ(findings("tests/x.cpp", "c/y.h"), "");
}

TEST(Rooms, ACircleIsFound) {
  EXPECT_TRUE(circles(read_rooms("a:\nb: a\nc: a b\n")).empty());
  EXPECT_EQ(circles(read_rooms("a: c\nb: a\nc: b\n")).size(), 3u);
}

}  // namespace
}  // namespace lockstep::tidy
