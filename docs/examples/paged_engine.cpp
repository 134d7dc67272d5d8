// A small engine behind the scheduler protocol (docs/protocols.md), with only
// nlohmann's JSON: first come, first served; chunked prefill; one table of blocks a request; the
// youngest is preempted when the pool is empty. No prefix cache, no drafts.
//
//     c++ -std=c++20 docs/examples/paged_engine.cpp -o paged_engine
//     lockstep check-adapter ./paged_engine
//     lockstep fuzz --decisions ./paged_engine
#include <algorithm>
#include <deque>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

using Json = nlohmann::ordered_json;
using Names = std::vector<std::string>;

struct Request {
  int tokens = 0, last = 0, computed = 0;  // known, at its end, in blocks
  std::set<int> ends = {};                 // tokens that stop it
  std::vector<int> table = {};
  bool was_seen = false;
};

// A message by its first key: what else it must and may have, but keys that begin with x_.
const std::map<std::string, std::pair<Names, Names>> kMessages = {
    {"hello", {}},
    {"open", {}},
    {"abort", {}},
    {"close", {}},
    {"add", {{"prompt", "max_tokens", "arrival"}, {"eos", "stop_token_ids", "priority", "parent"}}},
    {"schedule", {{}, {"tables"}}},
    {"update", {{"sampled"}, {}}}};
// Options that are followed, or change nothing in an engine as small as this.
const std::set<std::string> kOptions = {"max_num_seqs",
                                        "max_num_batched_tokens",
                                        "max_model_len",
                                        "block_size",
                                        "policy",
                                        "dcp",
                                        "pcp",
                                        "enable_prefix_caching",
                                        "enable_chunked_prefill",
                                        "async_scheduling",
                                        "mamba_block_size",
                                        "scheduler_reserve_full_isl",
                                        "long_prefill_token_threshold",
                                        "mamba_cache_mode",
                                        "hash_algorithm",
                                        "num_spec_tokens",
                                        "num_hash_lookahead_tokens",
                                        "prefix_cache_retention_interval"};

class Engine {
 public:
  Json handle(const Json& message) {
    if (!message.is_object() || message.empty()) throw std::invalid_argument("found no message");
    const std::string kind = message.begin().key();
    const auto& [needed, optional] = kMessages.at(kind);
    for (const std::string& key : needed) message.at(key);
    for (const auto& [key, value] : message.items())
      if (key != kind && !std::ranges::count(needed, key) && !std::ranges::count(optional, key) &&
          !key.starts_with("x_"))
        throw std::invalid_argument("found " + key + " in " + kind);
    if (kind == "hello")
      return {{"hello",
               {{"scheduler_protocol", 1},
                {"engine", {{"name", "paged"}, {"version", "1"}}},
                {"features", {"full", "mla", "no_prefix_caching"}}}}};
    if (kind == "open") return open(message["open"]);
    if (kind == "close") return is_open_ = false, Json::object();
    if (!is_open_) throw std::invalid_argument("found " + kind + " while no case is open");
    if (kind == "add") return add(message);
    if (kind == "abort") return leave(message["abort"]), Json::object();
    if (kind == "schedule") return schedule(message.contains("tables"));
    return update(message["sampled"]);
  }
  void fail() { is_open_ = false; }

 private:
  Json open(const Json& asked) {
    is_open_ = false;
    for (const auto& [option, value] : asked.at("config").items())
      if (!kOptions.contains(option)) return {{"refused", "found option " + option}};
    if (asked.contains("connector") || asked.at("groups").size() != 1)
      return {{"refused", "found a connector or several groups; expected one group"}};
    config_ = asked["config"];
    block_size_ = asked["groups"][0].at("spec").at("block_size");
    requests_.clear(), running_.clear(), waiting_.clear(), finished_.clear(), free_.clear();
    for (int block = 1; block < asked.at("num_blocks"); ++block) free_.push_back(block);
    is_open_ = true;
    return {{"opened", {{"scheduler_block_size", block_size_}, {"hash_block_size", block_size_}}}};
  }

  Json add(const Json& event) {
    int size = 0;
    if (const Json& prompt = event["prompt"]; prompt.is_object())
      size = static_cast<int>(prompt["tokens"].size());
    else
      for (const Json& run : prompt) size += run.back().get<int>();
    const int room = config_["max_model_len"].get<int>() - size;
    if (room < 1) return {{"refused", "the prompt is longer than max_model_len allows"}};
    Request request{.tokens = size, .last = size + std::min(event["max_tokens"].get<int>(), room)};
    if (event.contains("eos")) request.ends.insert(event["eos"].get<int>());
    for (const Json& token : event.value("stop_token_ids", Json::array()))
      request.ends.insert(token.get<int>());
    requests_[event["add"]] = request;
    waiting_.push_back(event["add"]);
    return Json::object();
  }

  void leave(const std::string& name) {
    if (!requests_.contains(name)) return;
    give_back(requests_[name]);
    requests_.erase(name);
    std::erase(running_, name), std::erase(waiting_, name);
    finished_.push_back(name);
  }

  void give_back(Request& request) {
    free_.insert(free_.end(), request.table.begin(), request.table.end());
    request.table.clear();
  }

  // Blocks for `tokens`; absent: there are none, and no younger request to preempt.
  std::optional<std::vector<int>> give(const std::string& name, int tokens, Names& preempted) {
    Request& request = requests_[name];
    const std::size_t needed = (tokens + block_size_ - 1) / block_size_;
    const std::size_t missing = needed - request.table.size();
    while (free_.size() < missing) {
      if (!std::ranges::count(running_, name) || running_.back() == name) return std::nullopt;
      const std::string victim = running_.back();
      running_.pop_back();
      waiting_.insert(waiting_.begin(), victim);
      preempted.push_back(victim);
      give_back(requests_[victim]);
      requests_[victim].computed = 0;
    }
    std::vector<int> blocks(free_.begin(), free_.begin() + missing);
    free_.erase(free_.begin(), free_.begin() + missing);
    request.table.insert(request.table.end(), blocks.begin(), blocks.end());
    return blocks;
  }

  Json schedule(bool tables) {
    Json reply = {{"scheduled", Json::array()}};
    Names preempted, turns = running_;
    turns.insert(turns.end(), waiting_.begin(), waiting_.end());
    int budget = config_["max_num_batched_tokens"];
    for (const std::string& name : turns) {
      const bool is_new = !std::ranges::count(running_, name);
      if (std::ranges::count(preempted, name) || (is_new && !preempted.empty())) continue;
      if (is_new && running_.size() == config_["max_num_seqs"].get<std::size_t>()) break;
      Request& request = requests_[name];
      const int tokens = std::min(request.tokens - request.computed, budget);
      if (tokens == 0) break;
      const auto blocks = give(name, request.computed + tokens, preempted);
      if (!blocks) break;
      Json row = {{"id", name},
                  {"tokens", tokens},
                  {"computed", request.computed},
                  {"blocks", Json::array({*blocks})}};
      if (is_new) {
        row["new"] = true;
        if (request.was_seen) row["resumed"] = true;
        std::erase(waiting_, name);
        running_.push_back(name);
      }
      request.was_seen = true;
      request.computed += tokens;
      budget -= tokens;
      reply["scheduled"].push_back(row);
    }
    if (!preempted.empty()) reply["preempted"] = preempted;
    if (!finished_.empty()) reply["finished"] = std::exchange(finished_, {});
    if (tables) {
      reply["tables"] = Json::object();
      for (const std::string& name : running_)
        reply["tables"][name] = Json::array({requests_[name].table});
    }
    return with_state(reply);
  }

  Json update(const Json& sampled) {
    Json reply = {{"num_tokens", Json::object()}};
    Json stopped = Json::array();
    for (const auto& [name, tokens] : sampled.items()) {
      if (!requests_.contains(name)) continue;
      Request& request = requests_[name];
      request.tokens += static_cast<int>(tokens.size());
      reply["num_tokens"][name] = request.tokens;
      if (request.ends.contains(tokens.back().get<int>()))
        stopped.push_back({name, "stop"});
      else if (request.tokens == request.last)
        stopped.push_back({name, "length"});
    }
    for (const Json& row : stopped) leave(row[0]);
    if (!stopped.empty()) reply["stopped"] = stopped;
    return with_state(reply);
  }

  Json with_state(Json reply) const {
    reply["running"] = running_;
    reply["waiting"] = waiting_;
    reply["free_blocks"] = free_.size();
    return reply;
  }

  bool is_open_ = false;
  Json config_;
  int block_size_ = 1;
  std::deque<int> free_;
  std::map<std::string, Request> requests_;
  Names running_, waiting_, finished_;
};

int main() {
  Engine engine;
  for (std::string line; std::getline(std::cin, line);) {
    Json reply;
    try {
      reply = engine.handle(Json::parse(line));
    } catch (const std::exception& error) {
      engine.fail();
      reply = {{"failed", {{"what", error.what()}}}};
    }
    std::cout << reply.dump() << std::endl;
  }
}
