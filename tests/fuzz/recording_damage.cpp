#include "tests/fuzz/recording_damage.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/check.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Lines = std::vector<Json>;

constexpr std::size_t kLinesMax = 60;

// A header, steps and an end line; a long one is cut, and its end line reports it.
Lines lines_of(const fs::path& path) {
  Lines lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    lines.push_back(Json::parse(line));
    if (lines.size() == kLinesMax && !lines.back().contains("end")) {
      const auto steps = lines.size() - 1;
      lines.push_back({{"end", true}, {"steps", steps}, {"unfinished", Json::array()}});
      break;
    }
  }
  return lines;
}

bool is_recording(const fs::path& path) {
  std::ifstream file(path);
  std::string start(64, '\0');
  file.read(start.data(), static_cast<std::streamsize>(start.size()));
  return start.starts_with("{\"schedule_recording\":1,");
}

// Recordings of the project in the order of their names: of both engines, with and without a KV
// connector, as served, and of what was once found.
const std::vector<Lines>& sound_recordings() {
  static const std::vector<Lines> recordings = [] {
    std::vector<fs::path> paths;
    for (const char* folder :
         {"traces/samples/recordings", "traces/samples/served", "tests/regressions"})
      for (const auto& entry :
           fs::recursive_directory_iterator(fs::path(LOCKSTEP_SOURCE_DIR) / folder))
        if (entry.is_regular_file() && entry.path().parent_path().filename() != "damaged" &&
            is_recording(entry.path()))
          paths.push_back(entry.path());
    LS_CHECK(paths.size() > 50, "{} recordings to damage", paths.size());
    std::ranges::sort(paths);
    std::vector<Lines> found;
    for (const fs::path& path : paths) found.push_back(lines_of(path));
    return found;
  }();
  return recordings;
}

std::size_t pick(ChoiceSource& choices, std::size_t size) {
  return static_cast<std::size_t>(choices.below(static_cast<std::int64_t>(size)));
}

// Words with a meaning for a reader or a judge, by what they could represent.
const std::vector<std::vector<std::string>> kWords = {
    {"full", "mla", "sliding_window", "chunked_local", "mamba", "hidden_state", "cross_attention",
     "encoder_only"},
    {"none", "align", "all"},
    {"none", "ngram", "draft_model", "eagle"},
    {"fcfs", "priority"},
    {"recompute", "fail"},
    {"content", "sha256_cbor", "xxhash_cbor"},
    {"0.22.1", "0.33.0"},
    {"bf16", "fp16", "fp32", "fp8", "int8"},
    {"stop", "length", "abort", "error"},
    {"WAITING", "WAITING_FOR_REMOTE_KVS", "PREEMPTED"},
};

class Damage {
 public:
  explicit Damage(ChoiceSource& choices) : choices_(choices) {}

  std::string text() {
    const std::vector<Lines>& sound = sound_recordings();
    lines_ = sound[pick(choices_, sound.size())];
    cut();
    for (const Json& line : lines_) collect_names(line);
    for (std::int64_t times = choices_.below(5); times > 0; --times) damage_once();
    if (!choices_.chance(10)) count_anew();
    std::string text;
    for (const Json& line : lines_) text += line.dump() + "\n";
    return text;
  }

 private:
  // Short ones are cheaper, and what is damaged early has more behind it.
  void cut() {
    const std::size_t steps = lines_.size() - 2;
    const auto kept =
        std::min<std::size_t>(steps, 1 + pick(choices_, choices_.chance(30) ? 60 : 16));
    lines_.erase(lines_.begin() + 1 + static_cast<std::ptrdiff_t>(kept), lines_.end() - 1);
  }

  void collect_names(const Json& node) {
    if (node.is_string()) return;
    if (node.is_object())
      for (const auto& [key, value] : node.items()) {
        if ((key == "add" || key == "id") && value.is_string()) names_.push_back(value);
        collect_names(value);
      }
    if (node.is_array())
      for (const Json& element : node) collect_names(element);
  }

  void damage_once() {
    switch (choices_.below(10)) {
      case 0:
        return damage_order();
      case 1:
        return exchange_key();
      case 2:
        return turn_option();
      default:
        return damage_node(lines_[pick_line()]);
    }
  }

  std::size_t pick_line() {
    if (choices_.chance(15)) return 0;
    return pick(choices_, lines_.size());
  }

  // Lines are swapped, repeated, or removed; a line of another recording is inserted.
  void damage_order() {
    const std::size_t from = pick(choices_, lines_.size());
    const std::size_t to = pick(choices_, lines_.size());
    switch (choices_.below(5)) {
      case 0:
        std::swap(lines_[from], lines_[to]);
        return;
      case 1:
        lines_.insert(lines_.begin() + static_cast<std::ptrdiff_t>(to), Json(lines_[from]));
        return;
      case 2:
        if (lines_.size() > 2) lines_.erase(lines_.begin() + static_cast<std::ptrdiff_t>(from));
        return;
      case 3:
        std::reverse(lines_.begin() + static_cast<std::ptrdiff_t>(std::min(from, to)),
                     lines_.begin() + static_cast<std::ptrdiff_t>(std::max(from, to)));
        return;
      default: {
        const Lines& other = sound_recordings()[pick(choices_, sound_recordings().size())];
        lines_.insert(lines_.begin() + static_cast<std::ptrdiff_t>(to),
                      other[pick(choices_, other.size())]);
        return;
      }
    }
  }

  // A step gets the value that another one has under the same key, of this recording or another.
  void exchange_key() {
    const std::vector<Lines>& sound = sound_recordings();
    const Json from = choices_.chance(30) ? [&] {
      const Lines& other = sound[pick(choices_, sound.size())];
      return other[pick(choices_, other.size())];
    }()
                                          : lines_[pick(choices_, lines_.size())];
    Json& to = lines_[pick(choices_, lines_.size())];
    if (!from.is_object() || !to.is_object() || from.empty()) return;
    const auto item =
        std::next(from.begin(), static_cast<std::ptrdiff_t>(pick(choices_, from.size())));
    to[item.key()] = item.value();
  }

  // The engine had been started otherwise.
  void turn_option() {
    Json& header = lines_.front();
    if (!header.is_object() || !header.contains("config") || !header["config"].is_object()) return;
    static const std::vector<std::pair<std::string, std::vector<Json>>> kOptions = {
        {"async_scheduling", {true, false}},
        {"enable_prefix_caching", {true, false}},
        {"enable_chunked_prefill", {true, false}},
        {"scheduler_reserve_full_isl", {true, false}},
        {"max_num_seqs", {1, 2, 3, 1000}},
        {"max_num_batched_tokens", {1, 2, 7, 64, 100000}},
        {"max_model_len", {1, 2, 16, 33, 1000000}},
        {"block_size", {1, 2, 16, 48}},
        {"mamba_block_size", {0, 1, 16, 48}},
        {"num_spec_tokens", {0, 1, 2, 5}},
        {"num_hash_lookahead_tokens", {0, 1, 2}},
        {"prefix_cache_retention_interval", {-1, 0, 16, 64}},
        {"long_prefill_token_threshold", {0, 1, 7}},
        {"spec_method", {"none", "ngram", "draft_model", "eagle"}},
        {"mamba_cache_mode", {"none", "align", "all"}},
        {"hash_algorithm", {"content", "sha256_cbor", "xxhash_cbor"}},
        {"policy", {"fcfs", "priority"}},
        {"dcp", {1, 2, 4}},
        {"pcp", {1, 2}},
    };
    const auto& [name, values] = kOptions[pick(choices_, kOptions.size())];
    header["config"][name] = values[pick(choices_, values.size())];
  }

  // Goes down to some node, and damages it.
  void damage_node(Json& root) {
    Json* node = &root;
    while (node->is_structured() && !node->empty() && (node == &root || !choices_.chance(15))) {
      const auto child = static_cast<std::ptrdiff_t>(pick(choices_, node->size()));
      // A key goes, rather than what it holds.
      if (node->is_object() && choices_.chance(6)) {
        node->erase(std::next(node->begin(), child));
        return;
      }
      node = &*std::next(node->begin(), child);
    }
    if (choices_.chance(6)) {
      *node =
          choices_.one_of<Json>({nullptr, 0, "x", Json::array(), Json::object(), true, -1, 0.5});
      return;
    }
    if (node->is_number()) damage_number(*node);
    if (node->is_string()) damage_word(*node);
    if (node->is_boolean()) *node = !node->get<bool>();
    if (node->is_array()) damage_list(*node);
    if (node->is_object() && !node->empty()) damage_names(*node);
    if (node->is_null()) *node = choices_.one_of<Json>({0, 4, Json::array()});
  }

  void damage_number(Json& number) {
    const std::int64_t value = number.is_number_integer() ? number.get<std::int64_t>() : 0;
    switch (choices_.below(8)) {
      case 0:
        number = 0;
        return;
      case 1:
        number = -1;
        return;
      case 2:
        number = choices_.one_of<std::int64_t>(
            {(std::int64_t{1} << 31) - 1, std::int64_t{1} << 31, std::int64_t{1} << 40,
             std::int64_t{1} << 62, std::int64_t{1} << 30, std::int64_t{1} << 26,
             std::numeric_limits<std::int64_t>::max(), -(std::int64_t{1} << 31)});
        return;
      case 3:
        number = value + 1;
        return;
      case 4:
        number = value - 1;
        return;
      case 5:
        number = value * choices_.between(2, 5);
        return;
      case 6:
        number = choices_.between(1, 4);
        return;
      default:
        number = choices_.below(64);
        return;
    }
  }

  void damage_word(Json& word) {
    const auto& old = word.get_ref<const std::string&>();
    for (const std::vector<std::string>& words : kWords)
      if (std::ranges::find(words, old) != words.end() && !choices_.chance(20)) {
        word = words[pick(choices_, words.size())];
        return;
      }
    word = choices_.chance(20) || names_.empty() ? choices_.one_of<std::string>({"nobody", ""})
                                                 : names_[pick(choices_, names_.size())];
  }

  void damage_list(Json& list) {
    if (list.empty()) {
      list.push_back(choices_.one_of<Json>({0, 1, names_.empty() ? "x" : names_.front()}));
      return;
    }
    const std::size_t at = pick(choices_, list.size());
    const std::size_t other = pick(choices_, list.size());
    switch (choices_.below(6)) {
      case 0:
        list = Json::array();
        return;
      case 1:
        list.erase(list.begin() + static_cast<std::ptrdiff_t>(at));
        return;
      case 2:
        list.insert(list.begin() + static_cast<std::ptrdiff_t>(at), Json(list[other]));
        return;
      case 3:
        std::swap(list[at], list[other]);
        return;
      case 4:
        list.erase(list.begin() + static_cast<std::ptrdiff_t>(at), list.end());
        return;
      default:
        std::ranges::reverse(list);
        return;
    }
  }

  // What is kept by name goes to another name, or comes under a second one.
  void damage_names(Json& object) {
    const auto item =
        std::next(object.begin(), static_cast<std::ptrdiff_t>(pick(choices_, object.size())));
    const std::string key = item.key();
    const Json value = item.value();
    if (choices_.chance(50)) object.erase(key);
    const std::string name = choices_.chance(20) || names_.empty()
                                 ? std::string("nobody")
                                 : names_[pick(choices_, names_.size())];
    object[name] = value;
  }

  // Steps are counted from 0, and the last line says how many they are: as the format has it.
  void count_anew() {
    std::int64_t step = 0;
    for (Json& line : lines_)
      if (line.is_object() && line.contains("step")) line["step"] = step++;
    Json& last = lines_.back();
    if (last.is_object() && last.contains("end")) last["steps"] = step;
  }

  ChoiceSource& choices_;
  Lines lines_;
  std::vector<std::string> names_;
};

}  // namespace

std::string damaged_recording(ChoiceSource& choices) { return Damage(choices).text(); }

}  // namespace lockstep
