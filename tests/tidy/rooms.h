// The rooms of the house: folders, and which of them each may include. CMake writes them down out
// of its targets (cmake/lockstep_target.cmake, rooms.txt), so an arrow that a test allows is one
// that the linker has.
//
// 1. A file is of the room with the longest path that is a folder of the file; a folder that is
//    compiled into another room's library has that one's arrows.
// 2. A room includes itself and the rooms of its line; a room behind one of those is not enough.
// 3. Arrows have no cycle.
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tests/tidy/rules.h"

namespace lockstep::tidy {

struct Rooms {
  std::map<std::string, std::set<std::string>> arrows;  // by room
  std::map<std::string, std::string> shared;            // by folder: the room that it is part of

  // The room of a file or a folder; empty: of none.
  std::string room_of(std::string_view path) const;
  // All that can be reached from a room, itself included.
  std::set<std::string> reach(const std::string& room) const;
};

// Out of lines `ROOM: ROOMS...` and `FOLDER = ROOM`.
Rooms read_rooms(std::string_view text);

// Includes for which there is no arrow. Files of no room may include anything.
Findings check_arrows(const Rooms& rooms, const SourceFile& file);
// Rooms that can be reached from themselves, one line each.
std::vector<std::string> circles(const Rooms& rooms);

}  // namespace lockstep::tidy
