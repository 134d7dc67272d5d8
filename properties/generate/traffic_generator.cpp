// Arrivals, prompts, outputs, aborts, resets and faults. Lengths are chosen near block boundaries,
// and prompts share prefixes: both matter more to a cache than realistic text.
#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "properties/generate/generator.h"
#include "properties/generate/generator_parts.h"
#include "reference/plan/capacity.h"

namespace lockstep {
namespace {

constexpr std::int32_t kFill = 7;  // the token of outputs that return in later prompts

// Returns the longest prompt that an engine takes. One output token must fit; SGLang reserves five
// (srt/managers/tp_worker.py, max_req_input_len).
std::int64_t longest_prompt(const Draw& draw, const EngineConfig& engine) {
  return engine.max_model_len - (draw.options.one_pool_per_kind ? 5 : 1);
}

// Appends requests one by one. t_ns_ is the latest arrival and never decreases.
class Traffic {
 public:
  Traffic(Draw& draw, SavedCase& saved) : draw_(draw), saved_(saved) {}

  // Appends request `index`, and before it possibly a reset of the prefix cache.
  void add(std::int64_t index) {
    std::vector<TraceRecord>& records = saved_.trace.records;
    const bool burst = draw_.has(Feature::bursts) && choices().chance(60);
    // Two samples of one request share its arrival time. Otherwise arrivals differ by at least 1
    // ns, as in an engine's clock.
    const bool same = draw_.has(Feature::same_instant) && choices().chance(40);
    if (!same) t_ns_ += burst ? 1 : 1 + choices().below(6) * kStepNs / 2;
    if (draw_.has(Feature::resets) && choices().chance(15))
      records.emplace_back(
          TraceControl{.kind = TraceControl::Kind::reset_prefix_cache, .t_ns = t_ns_});
    TraceRequest request;
    request.spec.name = fmt::format("r{}", index);
    // A follow-up needs a complete answer, so an aborted request has no next turn.
    const TraceRequest* before = nullptr;
    if (draw_.has(Feature::sessions) && index > 0 && choices().chance(50))
      before = std::get_if<TraceRequest>(&records.back());
    if (before != nullptr && before->abort) before = nullptr;
    if (before != nullptr) request.spec.prompt = continued_prompt(*before, index);
    // The front end refuses a prompt of exactly max_model_len, because it leaves no token for the
    // output. A longer one is also refused by the scheduler; a few of those are generated.
    const std::int64_t size = request.spec.prompt.size();
    if (before != nullptr && (size == longest() + 1 || (size > longest() && !choices().chance(10))))
      before = nullptr;
    if (before == nullptr) request.spec.prompt = new_prompt(index);
    request.spec.arrival_ns = t_ns_;
    if (before != nullptr) {
      request.after = {before->spec.name};
      request.delay_ns = choices().below(4) * kStepNs;
      request.spec.arrival_ns = 0;
    }
    draw_output(request);
    // An abort has an absolute time, and the arrival of a follow-up is not known yet.
    if (before == nullptr) draw_end(request);
    if (draw_.has(Feature::priorities))
      request.spec.priority = static_cast<std::int32_t>(choices().below(3));
    if (draw_.has(Feature::salts) && choices().chance(40))
      request.spec.cache_salt = choices().one_of({"a", "b"});
    records.emplace_back(std::move(request));
  }

 private:
  ChoiceSource& choices() { return draw_.choices; }
  // Returns a length in [1, limit] that often is a multiple of the block size or differs from one
  // by 1, where off-by-one defects show.
  std::uint32_t shared_part(std::int64_t limit) {
    const std::int64_t block = saved_.engine.block_size;
    std::int64_t length = choices().between(1, limit);
    if (choices().chance(60)) length = length / block * block + choices().one_of({0, 0, 1, -1});
    return static_cast<std::uint32_t>(std::clamp<std::int64_t>(length, 1, limit));
  }

  // Makes a prompt of a shared prefix, an own part, or both. Two seeds of shared text make repeats
  // likely among few requests; 100 + index makes the own part unique.
  Prompt new_prompt(std::int64_t index) {
    Prompt prompt;
    const std::int64_t limit = std::max<std::int64_t>(1, longest());
    std::uint32_t length = 0;
    if (draw_.has(Feature::shared_prefixes) && choices().chance(75)) {
      length = shared_part(limit);
      const auto seed = static_cast<std::uint64_t>(choices().between(1, 2));
      prompt.append({TokenRun::Kind::seeded, seed, 0, length});
    }
    const std::int64_t room = limit - length;
    // A quarter of the shared prompts end with the shared part: a request whose whole prompt is
    // cached.
    if (length > 0 && (room == 0 || choices().chance(25))) return prompt;
    const auto own =
        static_cast<std::uint32_t>(1 + choices().below(std::max<std::int64_t>(room, 1)));
    // Symbolic runs are hashed in O(1) and never equal seeded ones, even with the same token ids.
    const TokenRun::Kind kind =
        choices().one_of({TokenRun::Kind::seeded, TokenRun::Kind::symbolic});
    prompt.append({kind, 100 + static_cast<std::uint64_t>(index), 0, own});
    return prompt;
  }

  // Makes the prompt of the next turn: the previous prompt, its output, and one to four new tokens.
  // REQUIRES: the output of `before` consists of kFill tokens.
  Prompt continued_prompt(const TraceRequest& before, std::int64_t index) {
    Prompt prompt = before.spec.prompt;
    const auto first = static_cast<std::uint32_t>(prompt.tokens.size());
    const auto count = static_cast<std::uint32_t>(before.output.length);
    prompt.tokens.insert(prompt.tokens.end(), count, kFill);
    prompt.runs.push_back({TokenRun::Kind::literal, 0, first, count});
    prompt.append({TokenRun::Kind::seeded, 100 + static_cast<std::uint64_t>(index), 0,
                   static_cast<std::uint32_t>(1 + choices().below(4))});
    return prompt;
  }

  // Generates the output length of 1 to 12 tokens. With a stop token, max_tokens exceeds it, so the
  // request stops early by its token and not by its length.
  void draw_output(TraceRequest& request) {
    request.output.length = static_cast<std::int32_t>(1 + choices().below(12));
    request.spec.max_tokens = request.output.length;
    if (draw_.has(Feature::sessions)) {
      request.output.fill = kFill;
    } else if (draw_.has(Feature::stop_tokens) && choices().chance(50)) {
      request.spec.max_tokens += static_cast<std::int32_t>(choices().between(1, 8));
      request.spec.eos_token = 2;
    }
  }

  // Generates an abort: after a number of output tokens, or at a time within six steps of arrival.
  void draw_end(TraceRequest& request) {
    if (!draw_.has(Feature::aborts) || !choices().chance(35)) return;
    if (choices().chance(40))
      request.abort = AbortPlan{
          .t_ns = {},
          .after_tokens = static_cast<std::int32_t>(choices().between(1, request.output.length))};
    else
      request.abort =
          AbortPlan{.t_ns = t_ns_ + choices().below(12) * kStepNs / 2, .after_tokens = {}};
  }

  std::int64_t longest() const { return longest_prompt(draw_, saved_.engine); }

  Draw& draw_;
  SavedCase& saved_;
  std::int64_t t_ns_ = 0;
};

}  // namespace

void draw_traffic(Draw& draw, SavedCase& saved) {
  saved.trace.header.source = {.kind = "generated", .name = "lockstep fuzz", .seed = {}};
  Traffic traffic(draw, saved);
  draw.choices.enter(CasePart::traffic);
  const std::int64_t count = draw.choices.between(1, draw.options.requests_max);
  for (std::int64_t i = 0; i < count; ++i) {
    draw.choices.enter(CasePart::request, i);
    traffic.add(i);
  }
}

void draw_stop_lists(Draw& draw, SavedCase& saved) {
  if (!draw.has(Feature::stop_tokens)) return;
  std::int64_t index = 0;
  for (TraceRecord& record : saved.trace.records) {
    auto* request = std::get_if<TraceRequest>(&record);
    if (request == nullptr) continue;
    draw.choices.enter(CasePart::request, index++);
    if (!draw.choices.chance(50)) continue;
    RequestSpec& spec = request->spec;
    // Tokens that no replay samples (trace_workload.cpp), then the one that ended the request.
    spec.stop_token_ids =
        draw.choices.one_of<std::vector<std::int32_t>>({{50'000}, {50'001, 50'000}, {}});
    if (spec.eos_token && (spec.stop_token_ids.empty() || draw.choices.chance(50)))
      spec.stop_token_ids.push_back(*std::exchange(spec.eos_token, std::nullopt));
  }
}

void raise_priorities(Draw& draw, SavedCase& saved) {
  EngineConfig& engine = saved.engine;
  if (engine.policy != SchedulingPolicy::priority) return;
  auto priority = static_cast<std::int32_t>(saved.trace.records.size());
  bool is_first = true;
  for (TraceRecord& record : saved.trace.records) {
    auto* request = std::get_if<TraceRequest>(&record);
    if (request == nullptr) continue;
    // Lower values are more important, so each later request outranks all earlier ones.
    request->spec.priority = --priority;
    const std::int64_t room = longest_prompt(draw, engine) - request->spec.prompt.size();
    if (std::exchange(is_first, false) && room > 0)
      request->spec.prompt.append(
          {TokenRun::Kind::seeded, 99, 0, static_cast<std::uint32_t>(room)});
  }
  if (draw.options.never.has(Feature::long_prefill_threshold)) return;
  std::int64_t block = 1;
  for (const KVCacheGroupSpec& group : saved.cache.groups)
    block = std::max(block, group.spec.block_size);
  engine.long_prefill_token_threshold = static_cast<std::int32_t>(
      std::min<std::int64_t>(draw.choices.between(2, 3) * block, engine.max_model_len));
}

// vLLM 0.33.0 preempts max() over (priority, arrival_time) of the running requests
// (v1/core/sched/scheduler.py, schedule()). Among equal requests that is the first of the queue.
void make_equals(Draw& draw, SavedCase& saved) {
  EngineConfig& engine = saved.engine;
  const GeneratorOptions& wanted = draw.options;
  if (wanted.never.has(Feature::same_instant) ||
      wanted.never.has(Feature::long_prefill_threshold) ||
      wanted.always.has(Feature::prefix_caching))
    return;
  // States and uncached windows are excluded: the case is about two requests that compute all
  // tokens again.
  const bool is_plain = std::ranges::all_of(saved.cache.groups, [](const KVCacheGroupSpec& group) {
    return is_prefix_cacheable(group.spec) && !is_state_kind(group.spec.kind);
  });
  if (engine.policy != SchedulingPolicy::priority || !engine.enable_chunked_prefill ||
      engine.max_num_seqs < 2 || !is_plain || !saved.connector.parts.empty())
    return;
  engine.enable_prefix_caching = false;
  engine.prefix_cache_retention_interval = kDenseRetention;
  engine.hash_algorithm = HashAlgorithm::content;
  engine.scheduler_reserve_full_isl = false;
  engine.long_prefill_token_threshold = static_cast<std::int32_t>(draw.choices.between(1, 3));
  int num_long = 0;
  for (TraceRecord& record : saved.trace.records) {
    // Times must not decrease; with all arrivals at 0, resets move to 0 as well.
    if (auto* control = std::get_if<TraceControl>(&record)) control->t_ns = 0;
    auto* request = std::get_if<TraceRequest>(&record);
    if (request == nullptr || !request->after.empty()) continue;
    request->spec.arrival_ns = 0;
    request->spec.priority = 0;
    const std::int64_t room = engine.max_model_len - 1 - request->spec.prompt.size();
    if (num_long++ < 2 && room > 0)
      request->spec.prompt.append({TokenRun::Kind::seeded,
                                   98 - static_cast<std::uint64_t>(num_long), 0,
                                   static_cast<std::uint32_t>(room)});
  }
}

namespace {

using enum FaultKind;

constexpr std::int64_t kLastsMax = 6;  // steps

PlannedFault draw_fault(ChoiceSource& choices, const FaultRoom& room) {
  PlannedFault fault{
      .kind = choices.one_of({refuse_allocation, pinch_pool, pinch_pool, early_output, late_output,
                              abort_waiting, abort_first_chunk, abort_mid_prefill, abort_decode,
                              abort_preempted, abort_in_flight, abort_again}),
      .step = choices.below(room.steps)};
  if (is_abort(fault.kind)) {
    if (fault.kind != abort_again) fault.number = choices.below(4);
    return fault;
  }
  fault.steps = choices.between(1, kLastsMax);
  if (fault.kind == pinch_pool)
    fault.number = std::max<std::int64_t>(
        0, room.blocks_of_request -
               choices.one_of<std::int64_t>({0, 0, 0, 1, room.blocks_of_request / 2}));
  return fault;
}

}  // namespace

FaultPlan draw_faults(ChoiceSource& choices, const FaultRoom& room) {
  std::vector<PlannedFault> faults;
  choices.enter(CasePart::faults);
  const std::int64_t count = choices.between(1, room.faults_max);
  for (std::int64_t i = 0; i < count; ++i) {
    choices.enter(CasePart::fault, i);
    faults.push_back(draw_fault(choices, room));
  }
  return FaultPlan(std::move(faults));
}

void draw_fault_plan(Draw& draw, SavedCase& saved) {
  if (!draw.has(Feature::faults)) return;
  const FaultRoom room{.blocks_of_request =
                           planned_blocks_of_request(saved.engine, saved.cache.groups)};
  saved.faults = faults_of(draw_faults(draw.choices, room));
}

}  // namespace lockstep
