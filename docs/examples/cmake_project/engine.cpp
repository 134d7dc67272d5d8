// An engine whose scheduler is recorded: engine FILE [--bug]. First come, first served, one block
// table a request; with --bug a block is given to two requests.
#include <lockstep/recorder.h>

#include <cstdio>
#include <cstring>
#include <deque>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int kBlockSize = 16, kNumBlocks = 40, kRequests = 12, kBatch = 4;

struct Request {
  std::string id;
  int tokens, last, computed = 0;  // known now, at the end, computed
  std::vector<int> table = {};
};

class Engine {
 public:
  Engine(const std::string& path, bool has_bug)
      : has_bug_(has_bug),
        recorder_(path, {.name = "my-engine",
                         .version = "1.0",
                         .max_num_seqs = kBatch,
                         .max_num_batched_tokens = 256,
                         .max_model_len = 256,
                         .num_blocks = kNumBlocks}) {
    for (int block = 1; block < kNumBlocks; ++block) free_.push_back(block);  // 0 is the null block
  }

  void add(const std::string& id, int prompt, int max_tokens) {
    std::vector<std::int32_t> tokens;
    for (int i = 0; i < prompt; ++i) tokens.push_back(100 + i % 7);
    recorder_.add(id, tokens, max_tokens);
    waiting_.push_back({id, prompt, prompt + max_tokens});
  }

  // False: there is nothing left to do.
  bool step() {
    if (running_.empty() && waiting_.empty()) return false;
    lockstep::recorder::Step step;
    step.finished = std::exchange(finished_, {});
    const std::size_t before = running_.size();
    while (running_.size() < kBatch && !waiting_.empty() && fits(waiting_.front())) {
      running_.push_back(std::move(waiting_.front()));
      waiting_.pop_front();
    }
    for (std::size_t i = 0; i < running_.size(); ++i)
      step.scheduled.push_back(schedule(running_[i], i >= before));
    for (const Request& request : running_) step.running.push_back(request.id);
    for (const Request& request : waiting_) step.waiting.push_back(request.id);
    step.free_blocks = static_cast<int>(free_.size());
    sample(step);
    recorder_.step(step);
    return true;
  }

  const std::string& end() {
    recorder_.end();
    return recorder_.error();
  }

 private:
  // Room for the longest that the request may become: no request is preempted.
  bool fits(const Request& request) const {
    std::size_t reserved = 0;
    for (const Request& other : running_) reserved += blocks_of(other.last) - other.table.size();
    return reserved + blocks_of(request.last) <= free_.size();
  }
  static std::size_t blocks_of(int tokens) { return (tokens + kBlockSize - 1) / kBlockSize; }

  lockstep::recorder::Scheduled schedule(Request& request, bool is_new) {
    std::vector<int> added;
    while (request.table.size() < blocks_of(request.tokens)) {
      request.table.push_back(free_.front());
      added.push_back(free_.front());
      if (!has_bug_ || ++handed_out_ % 9 != 0) free_.pop_front();
    }
    lockstep::recorder::Scheduled row{.id = request.id,
                                      .tokens = request.tokens - request.computed,
                                      .computed = request.computed,
                                      .is_new = is_new,
                                      .blocks = {}};
    if (!added.empty()) row.blocks = {added};
    request.computed = request.tokens;
    return row;
  }

  void sample(lockstep::recorder::Step& step) {
    std::vector<Request> left;
    for (Request& request : running_) {
      step.sampled.push_back({request.id, {7}});
      if (++request.tokens < request.last) {
        left.push_back(std::move(request));
        continue;
      }
      step.stopped.push_back({request.id, "length"});
      finished_.push_back(request.id);
      free_.insert(free_.end(), request.table.begin(), request.table.end());
    }
    running_ = std::move(left);
  }

  const bool has_bug_;
  lockstep::recorder::Recorder recorder_;
  std::deque<int> free_;
  std::deque<Request> waiting_;
  std::vector<Request> running_;
  std::vector<std::string> finished_;
  int handed_out_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  Engine engine(argc > 1 ? argv[1] : "run.jsonl", argc > 2 && !std::strcmp(argv[2], "--bug"));
  for (int i = 0; i < kRequests; ++i) engine.add("r" + std::to_string(i), 20 + 13 * i % 50, 12);
  while (engine.step()) {
  }
  const std::string& error = engine.end();
  if (!error.empty()) std::fprintf(stderr, "%s\n", error.c_str());
  return error.empty() ? 0 : 1;
}
