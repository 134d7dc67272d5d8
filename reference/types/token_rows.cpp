#include "reference/types/token_rows.h"

#include "base/check.h"

namespace lockstep {

std::int64_t Prompt::size() const {
  std::int64_t total = 0;
  for (const TokenRun& run : runs) total += run.count;
  return total;
}

// Merges runs that continue each other, so that a prompt built block by block from a trace has few
// runs. `tokens` of literal runs are the caller's to append.
void Prompt::append(const TokenRun& run) {
  if (run.count == 0) return;
  if (!runs.empty()) {
    TokenRun& last = runs.back();
    if (last.kind == run.kind && last.seed == run.seed && last.first + last.count == run.first) {
      last.count += run.count;
      return;
    }
  }
  runs.push_back(run);
}

// Literal runs copy from `tokens`; all others generate each id from the seed and the position.
std::vector<std::int32_t> Prompt::materialize() const {
  std::vector<std::int32_t> out;
  out.reserve(size());
  for (const TokenRun& run : runs) {
    if (run.kind == TokenRun::Kind::literal) {
      LS_CHECK(run.first + run.count <= tokens.size(), "literal run past the prompt's tokens");
      out.insert(out.end(), tokens.begin() + run.first, tokens.begin() + run.first + run.count);
    } else {
      for (std::uint32_t i = 0; i < run.count; ++i) out.push_back(token_of(run, run.first + i));
    }
  }
  return out;
}

}  // namespace lockstep
