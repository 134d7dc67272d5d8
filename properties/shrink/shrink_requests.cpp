// The passes over requests, arrivals, records and steps.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "properties/shrink/case_parts.h"
#include "properties/shrink/shrinker.h"

namespace lockstep {
namespace {

// Shrinks a prompt: drops runs, replaces literal ones, joins runs, and shortens them.
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
  // Replaces tokens that were written out one by one by a generated source.
  for (std::size_t i = num_runs(); i-- > 0;)
    trial.attempt_with([&](SavedCase& saved) {
      TokenRun& run = runs(saved)[i];
      if (run.kind == TokenRun::Kind::literal) run = {.seed = 1, .count = run.count};
      drop_unused(saved);
    });
  // Joins a run with the previous one: the tokens may be needed, but not their source.
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

// Shrinks an output: first without stop tokens, then shorter, then without literal tokens, abort,
// and all but one of the requests that it waits for.
void shrink_output(ShrinkTrial& trial, std::size_t request) {
  const auto at = [&](SavedCase& saved) -> TraceRequest& {
    return *trace_requests_of(saved)[request];
  };
  trial.attempt_with([&](SavedCase& saved) { at(saved).end_at_length(at(saved).output.length); });
  trial.lower_with(
      1, [&](SavedCase& saved) { return std::int64_t{at(saved).output.length}; },
      [&](SavedCase& saved, std::int64_t length) {
        at(saved).end_at_length(static_cast<std::int32_t>(length));
      });
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

// Removes properties that few failures need. In a recording max_tokens can be lowered only here.
void shrink_trimmings(ShrinkTrial& trial, std::size_t request) {
  const auto at = [&](SavedCase& saved) -> RequestSpec& { return *requests_of(saved)[request]; };
  trial.attempt_with([&](SavedCase& saved) { at(saved).priority = 0; });
  trial.attempt_with([&](SavedCase& saved) { at(saved).cache_salt.clear(); });
  trial.attempt_with([&](SavedCase& saved) { at(saved).eos_token.reset(); });
  trial.attempt_with([&](SavedCase& saved) { at(saved).stop_token_ids.clear(); });
  if (trial.best().recording)
    trial.lower(1, [&](SavedCase& saved) { return &at(saved).max_tokens; });
}

// Renumbers the sources of tokens 1, 2, 3, ... in order of appearance. Symbolic runs become seeded
// ones.
void tidy_prompts(SavedCase& saved) {
  std::map<std::pair<TokenRun::Kind, std::uint64_t>, std::uint64_t> seeds;
  for (RequestSpec* request : requests_of(saved))
    for (TokenRun& run : request->prompt.runs) {
      if (run.kind == TokenRun::Kind::literal || run.kind == TokenRun::Kind::repeated) continue;
      run.seed = seeds.emplace(std::pair(run.kind, run.seed), seeds.size() + 1).first->second;
      run.kind = TokenRun::Kind::seeded;
    }
}

// Renames requests r0, r1, ... in trace order, also where others wait for them.
void tidy_names(SavedCase& saved) {
  std::map<std::string, std::string> names;
  for (TraceRequest* request : trace_requests_of(saved)) {
    std::string& name = request->spec.name;
    name = names.emplace(name, fmt::format("r{}", names.size())).first->second;
    for (std::string& after : request->after) after = names[after];
  }
}

}  // namespace

// The last request first: later requests depend on earlier ones, and rarely the reverse.
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

namespace {

// Moves record `index` and all later ones `by` ns earlier, but none before the record in front of
// it. Aborts move with their requests.
void move_up(SavedCase& saved, std::size_t index, std::int64_t by) {
  std::int64_t at_least = 0;
  for (std::size_t i = 0; i < saved.trace.records.size(); ++i) {
    TraceRecord& record = saved.trace.records[i];
    if (std::int64_t* t_ns = time_of(record)) {
      if (i >= index) *t_ns = std::max(at_least, *t_ns - by);
      at_least = *t_ns;
    }
    auto* request = std::get_if<TraceRequest>(&record);
    if (request == nullptr || !request->abort || !request->abort->t_ns || i < index) continue;
    *request->abort->t_ns = std::max(at_least, *request->abort->t_ns - by);
  }
}

// Returns the time between record `index` and the previous record that has a time.
std::int64_t gap_before(SavedCase& saved, std::size_t index) {
  std::int64_t before = 0;
  for (std::size_t i = 0; i < index; ++i)
    if (const std::int64_t* t_ns = time_of(saved.trace.records[i])) before = *t_ns;
  const std::int64_t* t_ns = time_of(saved.trace.records[index]);
  return t_ns == nullptr ? 0 : *t_ns - before;
}

// Lets a request arrive with the previous record instead of waiting for others.
void stop_waiting(SavedCase& saved, std::size_t index) {
  std::int64_t before = 0;
  for (std::size_t i = 0; i < index; ++i)
    if (const std::int64_t* t_ns = time_of(saved.trace.records[i])) before = *t_ns;
  auto* request = std::get_if<TraceRequest>(&saved.trace.records[index]);
  if (request == nullptr || request->after.empty()) return;
  request->after.clear();
  request->delay_ns = 0;
  request->spec.arrival_ns = before;
}

}  // namespace

// First everything at once, then record by record from the last.
void shrink_arrivals(ShrinkTrial& trial) {
  if (trial.best().recording) return;
  trial.attempt_with([](SavedCase& saved) { move_up(saved, 0, std::int64_t{1} << 62); });
  for (std::size_t i = trial.best().trace.records.size(); i-- > 0;) {
    trial.attempt_with([i](SavedCase& saved) { stop_waiting(saved, i); });
    trial.lower_with(
        0, [i](SavedCase& saved) { return gap_before(saved, i); },
        [i](SavedCase& saved, std::int64_t gap) { move_up(saved, i, gap_before(saved, i) - gap); });
    const SavedCase now = trial.best();
    const auto* request = std::get_if<TraceRequest>(&now.trace.records[i]);
    if (request == nullptr) continue;
    const auto at = [i](SavedCase& saved) -> TraceRequest& {
      return std::get<TraceRequest>(saved.trace.records[i]);
    };
    if (!request->after.empty())
      trial.lower(0, [&](SavedCase& saved) { return &at(saved).delay_ns; });
    if (request->abort && request->abort->t_ns)
      trial.lower(request->spec.arrival_ns,
                  [&](SavedCase& saved) { return &*at(saved).abort->t_ns; });
    if (request->abort && request->abort->after_tokens)
      trial.lower(1, [&](SavedCase& saved) { return &*at(saved).abort->after_tokens; });
  }
}

namespace {

// Removes chunks: all items, then halves, quarters, and so on down to single items. attempt(first,
// last) tries to remove [first, last) of the size() items; size() shrinks with each success.
template <class Size, class Attempt>
void remove_chunks(const Size& size, const Attempt& attempt) {
  for (std::size_t chunk = size(); chunk > 0; chunk /= 2)
    for (std::size_t end = size(); end > 0;) {
      const std::size_t first = end > chunk ? end - chunk : 0;
      attempt(first, end);
      end = std::min(first, size());
    }
}

// Moves the events and finished requests of dropped steps to the step after them, in order: events
// during a step precede those before the next. Without a step after them there is nothing to keep.
void keep_events(std::vector<RecordedStep>& steps, std::size_t first, std::size_t last) {
  if (last == steps.size()) return;
  std::vector<RecordedEvent> events;
  std::vector<std::string> finished;
  for (std::size_t i = first; i <= last; ++i) {
    events.insert(events.end(), steps[i].before.begin(), steps[i].before.end());
    if (i < last)
      std::ranges::copy_if(steps[i].during, std::back_inserter(events), [](const auto& event) {
        return event.kind != RecordedEvent::Kind::output;
      });
    finished.insert(finished.end(), steps[i].finished.begin(), steps[i].finished.end());
  }
  steps[last].before = std::move(events);
  steps[last].finished = std::move(finished);
}

// Renumbers the steps that outputs name. The output of a dropped step counts as that of the
// previous step.
void renumber_outputs(std::vector<RecordedStep>& steps, std::size_t first, std::size_t last) {
  const auto renumber = [&](std::int64_t& step) {
    if (step >= static_cast<std::int64_t>(last))
      step -= static_cast<std::int64_t>(last - first);
    else if (step >= static_cast<std::int64_t>(first))
      step = static_cast<std::int64_t>(first) - 1;
  };
  for (RecordedStep& step : steps) {
    for (RecordedEvent& event : step.during)
      if (event.kind == RecordedEvent::Kind::output) renumber(event.output_of_step);
    for (RecordedStaleOutput& stale : step.stale_outputs) renumber(stale.of_step);
    if (!step.output_of_step) continue;
    renumber(*step.output_of_step);
    if (*step.output_of_step < 0) step.output_of_step.reset();
  }
}

// Returns true if the steps can be dropped. A followed decision depends on the earlier ones, so
// only steps that schedule nothing, and the last ones, can go.
bool may_drop(const SavedCase& saved, std::size_t first, std::size_t last) {
  const auto& steps = saved.recording->steps;
  return saved.decide == Decides::model || last == steps.size() ||
         std::all_of(steps.begin() + static_cast<std::ptrdiff_t>(first),
                     steps.begin() + static_cast<std::ptrdiff_t>(last),
                     [](const RecordedStep& step) { return step.scheduled.empty(); });
}

// Writes the end line again: unfinished requests are unknown after a cut.
void drop_steps(ShrinkTrial& trial, std::size_t first, std::size_t last) {
  if (!may_drop(trial.best(), first, last)) return;
  trial.attempt_with([&](SavedCase& saved) {
    auto& steps = saved.recording->steps;
    if (saved.decide == Decides::recording) {
      keep_events(steps, first, last);
      renumber_outputs(steps, first, last);
    }
    steps.erase(steps.begin() + static_cast<std::ptrdiff_t>(first),
                steps.begin() + static_cast<std::ptrdiff_t>(last));
    std::int64_t number = 0;
    for (RecordedStep& step : steps) step.step = number++;
    saved.recording->end = {
        .steps = number, .unfinished = {}, .is_cut_off = saved.recording->end.is_cut_off};
  });
}

// Drops recorded decisions: a replay reads events, samples and drafts from a recording and makes
// the decisions again.
void drop_decisions(ShrinkTrial& trial) {
  trial.attempt_with([](SavedCase& saved) {
    for (RecordedStep& step : saved.recording->steps) {
      RecordedStep inputs;
      inputs.step = step.step;
      inputs.before = std::move(step.before);
      inputs.during = std::move(step.during);
      inputs.sampled = std::move(step.sampled);
      inputs.drafts = std::move(step.drafts);
      inputs.output_of_step = step.output_of_step;
      step = std::move(inputs);
    }
    saved.recording->end.unfinished.clear();
  });
}

// Removes the items of a list one by one, from the last.
template <class Things>
void remove_each(ShrinkTrial& trial, Things RunSpec::*things) {
  for (std::size_t i = (trial.best().*things).size(); i-- > 0;)
    trial.attempt_with([&](SavedCase& saved) {
      (saved.*things).erase((saved.*things).begin() + static_cast<std::ptrdiff_t>(i));
    });
}

// Lowers the numbers of a fault: earlier, shorter, smaller. A value that the fault refuses is not
// evaluated.
void shrink_fault(ShrinkTrial& trial, std::size_t i) {
  trial.lower(0, [i](SavedCase& saved) { return &saved.faults[i].step; });
  for (std::size_t a = 0; a < trial.best().faults[i].arguments.size(); ++a) {
    const std::int64_t least = trial.best().faults[i].arguments[a].first == "steps" ? 1 : 0;
    trial.lower(least, [i, a](SavedCase& saved) { return &saved.faults[i].arguments[a].second; });
  }
}

}  // namespace

// Letting the model decide comes first: if the failure does not depend on the recorded decisions,
// everything else can shrink.
void shrink_records(ShrinkTrial& trial) {
  if (trial.best().decide == Decides::recording)
    trial.attempt_with([](SavedCase& saved) { saved.decide = Decides::model; });
  const bool follows = trial.best().decide == Decides::recording;
  if (trial.best().recording && !follows)
    if (const auto timed = on_a_clock(trial.best())) trial.attempt(*timed);
  if (trial.best().recording && !follows) drop_decisions(trial);
  if (trial.best().recording)
    remove_chunks([&] { return trial.best().recording->steps.size(); },
                  [&](std::size_t first, std::size_t last) { drop_steps(trial, first, last); });
  remove_chunks([&] { return num_records(trial.best()); },
                [&](std::size_t first, std::size_t last) {
                  std::vector<bool> keep(num_records(trial.best()), true);
                  std::fill(keep.begin() + static_cast<std::ptrdiff_t>(first),
                            keep.begin() + static_cast<std::ptrdiff_t>(last), false);
                  trial.attempt(with_records(trial.best(), keep));
                });
  remove_each(trial, &SavedCase::faults);
  remove_each(trial, &SavedCase::mutants);
  for (std::size_t i = 0; i < trial.best().faults.size(); ++i) shrink_fault(trial, i);
}

}  // namespace lockstep
