#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "properties/shrink/case_parts.h"
#include "properties/shrink/shrink_passes.h"

namespace lockstep {
namespace {

void shrink_prompt(ShrinkTrial& trial, std::size_t request) {
  const auto runs = [&](SavedCase& saved) -> std::vector<TokenRun>& {
    return requests_of(saved)[request]->prompt.runs;
  };
  const auto num_runs = [&] { return requests_of(trial.best())[request]->prompt.runs.size(); };
  const auto drop_unused = [&](SavedCase& saved) {
    drop_unused_tokens(requests_of(saved)[request]->prompt);
  };
  for (std::size_t i = num_runs(); i-- > 0;)
    trial.attempt_with([&](SavedCase& saved) {
      runs(saved).erase(runs(saved).begin() + static_cast<std::ptrdiff_t>(i));
      drop_unused(saved);
    });
  // What was written out token by token, by the first source that there is.
  for (std::size_t i = num_runs(); i-- > 0;)
    trial.attempt_with([&](SavedCase& saved) {
      TokenRun& run = runs(saved)[i];
      if (run.kind == TokenRun::Kind::literal) run = {.seed = 1, .count = run.count};
      drop_unused(saved);
    });
  // Where the tokens are needed, but not their source: they come from the run before.
  for (std::size_t i = num_runs(); i-- > 1;)
    trial.attempt_with([&](SavedCase& saved) {
      if (runs(saved)[i - 1].kind == TokenRun::Kind::literal) return;
      runs(saved)[i - 1].count += runs(saved)[i].count;
      runs(saved).erase(runs(saved).begin() + static_cast<std::ptrdiff_t>(i));
      drop_unused(saved);
    });
  for (std::size_t i = num_runs(); i-- > 0;)
    trial.lower_with(
        1, [&](SavedCase& saved) { return std::int64_t{runs(saved)[i].count}; },
        [&](SavedCase& saved, std::int64_t count) {
          runs(saved)[i].count = static_cast<std::uint32_t>(count);
          drop_unused(saved);
        });
}

// The output ends after `length` tokens because nothing more is asked for.
void set_output(TraceRequest& request, std::int64_t length) {
  request.output.length = static_cast<std::int32_t>(length);
  if (!request.output.tokens.empty())
    request.output.tokens.resize(static_cast<std::size_t>(length));
  request.spec.max_tokens = request.output.length;
  request.spec.eos_token.reset();
  request.spec.stop_token_ids.clear();
}

void shrink_output(ShrinkTrial& trial, std::size_t request) {
  const auto at = [&](SavedCase& saved) -> TraceRequest& {
    return *trace_requests_of(saved)[request];
  };
  trial.attempt_with([&](SavedCase& saved) { set_output(at(saved), at(saved).output.length); });
  trial.lower_with(
      1, [&](SavedCase& saved) { return std::int64_t{at(saved).output.length}; },
      [&](SavedCase& saved, std::int64_t length) { set_output(at(saved), length); });
  trial.attempt_with([&](SavedCase& saved) { at(saved).output.tokens.clear(); });
  trial.attempt_with([&](SavedCase& saved) { at(saved).output.fill.reset(); });
  trial.attempt_with([&](SavedCase& saved) { at(saved).abort.reset(); });
  SavedCase now = trial.best();
  for (std::size_t i = at(now).after.size(); i-- > 0;)
    trial.attempt_with([&](SavedCase& saved) {
      auto& after = at(saved).after;
      if (after.size() > 1) after.erase(after.begin() + static_cast<std::ptrdiff_t>(i));
    });
}

void shrink_trimmings(ShrinkTrial& trial, std::size_t request) {
  const auto at = [&](SavedCase& saved) -> RequestSpec& { return *requests_of(saved)[request]; };
  trial.attempt_with([&](SavedCase& saved) { at(saved).priority = 0; });
  trial.attempt_with([&](SavedCase& saved) { at(saved).cache_salt.clear(); });
  trial.attempt_with([&](SavedCase& saved) { at(saved).eos_token.reset(); });
  trial.attempt_with([&](SavedCase& saved) { at(saved).stop_token_ids.clear(); });
  if (trial.best().recording)
    trial.lower(1, [&](SavedCase& saved) { return &at(saved).max_tokens; });
}

// Sources of tokens become 1, 2, 3, ... in the order in which they are first seen.
void tidy_prompts(SavedCase& saved) {
  std::map<std::pair<TokenRun::Kind, std::uint64_t>, std::uint64_t> seeds;
  for (RequestSpec* request : requests_of(saved))
    for (TokenRun& run : request->prompt.runs) {
      if (run.kind == TokenRun::Kind::literal) continue;
      run.seed = seeds.emplace(std::pair(run.kind, run.seed), seeds.size() + 1).first->second;
      run.kind = TokenRun::Kind::seeded;
    }
}

// Requests become r0, r1, ... in the order in which they stand.
void tidy_names(SavedCase& saved) {
  std::map<std::string, std::string> names;
  for (TraceRequest* request : trace_requests_of(saved)) {
    std::string& name = request->spec.name;
    name = names.emplace(name, fmt::format("r{}", names.size())).first->second;
    for (std::string& after : request->after) after = names[after];
  }
}

}  // namespace

void shrink_requests(ShrinkTrial& trial) {
  for (std::size_t i = requests_of(trial.best()).size(); i-- > 0;) {
    shrink_prompt(trial, i);
    if (!trial.best().recording) shrink_output(trial, i);
    shrink_trimmings(trial, i);
  }
  for (std::size_t i = requests_of(trial.best()).size(); i-- > 0;)
    for (std::size_t run = requests_of(trial.best())[i]->prompt.runs.size(); run-- > 0;)
      trial.attempt_with(
          [&](SavedCase& saved) { requests_of(saved)[i]->prompt.runs[run].first = 0; });
  trial.attempt_with(tidy_prompts);
  if (!trial.best().recording) trial.attempt_with(tidy_names);
}

}  // namespace lockstep
