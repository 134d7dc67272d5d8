#include "tests/tidy/rooms.h"

#include <sstream>

namespace lockstep::tidy {

std::string Rooms::room_of(std::string_view path) const {
  for (std::string folder(path); !folder.empty();) {
    const std::size_t slash = folder.rfind('/');
    if (const auto part = shared.find(folder); part != shared.end()) return part->second;
    if (arrows.contains(folder)) return folder;
    folder.resize(slash == folder.npos ? 0 : slash);
  }
  return {};
}

std::set<std::string> Rooms::reach(const std::string& room) const {
  std::set<std::string> seen = {room};
  std::vector<std::string> open = {room};
  while (!open.empty()) {
    const auto at = arrows.find(open.back());
    open.pop_back();
    if (at == arrows.end()) continue;
    for (const std::string& next : at->second)
      if (seen.insert(next).second) open.push_back(next);
  }
  return seen;
}

Rooms read_rooms(std::string_view text) {
  Rooms rooms;
  std::istringstream lines{std::string(text)};
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string first, second;
    words >> first;
    if (first.ends_with(':')) {
      first.pop_back();
      std::set<std::string>& arrows = rooms.arrows[first];
      while (words >> second) arrows.insert(second);
    } else if (words >> second && second == "=") {
      words >> rooms.shared[first];
    }
  }
  return rooms;
}

Findings check_arrows(const Rooms& rooms, const SourceFile& file) {
  Findings findings;
  const std::string room = rooms.room_of(file.path);
  if (!is_code(file.path) || room.empty()) return findings;
  std::istringstream lines(file.text);
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    constexpr std::string_view kInclude = "#include \"";
    if (!line.starts_with(kInclude)) continue;
    const std::string included = line.substr(kInclude.size(), line.rfind('"') - kInclude.size());
    const std::string target = rooms.room_of(included);
    if (target.empty())
      findings.push_back({file.path, number, "includes " + included + ", which is of no room"});
    else if (target != room && !rooms.arrows.at(room).contains(target))
      findings.push_back({file.path, number, room + " may not include " + included});
  }
  return findings;
}

std::vector<std::string> circles(const Rooms& rooms) {
  std::vector<std::string> found;
  for (const auto& [room, arrows] : rooms.arrows)
    for (const std::string& next : arrows)
      if (rooms.reach(next).contains(room)) found.push_back(room + " and " + next);
  return found;
}

}  // namespace lockstep::tidy
