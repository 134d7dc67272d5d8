#include "tests/traces/sample_generator.h"

#include <fmt/format.h>

#include "base/check.h"
#include "reference/types/token_rows.h"
#include "traces/formats/engine_options.h"

namespace lockstep {
namespace {

constexpr std::int64_t kMs = 1'000'000;  // ns
constexpr std::uint64_t kGlobalSeed = 1;
constexpr std::uint64_t kFamilySeeds[] = {2, 3};
constexpr std::int32_t kFamilyBlocks[] = {12, 5};
constexpr std::uint64_t kFirstOwnSeed = 1000;  // of the request's own tokens: this plus its ordinal
constexpr std::int32_t kEosToken = 50000;      // seeded tokens are all below it

class SampleMaker {
 public:
  explicit SampleMaker(const SampleParameters& parameters) : parameters_(parameters) {}

  Trace make() {
    Trace trace;
    trace.header.source = {
        .kind = "generated", .name = "shared_prefixes", .seed = parameters_.seed};
    trace.header.engine = hints();
    while (ordinal_ < parameters_.num_requests) {
      if (burst_left_ == 0) {
        t_ns_ += (20 + below(400)) * kMs;
        burst_left_ = one_in(3) ? 4 + below(12) : 1 + below(3);
      }
      --burst_left_;
      if (ordinal_ == parameters_.num_requests / 2 && !was_reset_) {
        trace.records.emplace_back(TraceControl{.t_ns = t_ns_});
        was_reset_ = true;
      }
      requests_.push_back(next_request());
      trace.records.emplace_back(requests_.back());
      ++ordinal_;
    }
    return trace;
  }

 private:
  std::int32_t below(std::int32_t bound) {
    const std::uint64_t bits = splitmix64(parameters_.seed * 0x9E3779B97F4A7C15ull + draws_++);
    return static_cast<std::int32_t>((bits >> 33) % static_cast<std::uint64_t>(bound));
  }
  bool one_in(std::int32_t n) { return below(n) == 0; }

  EngineHints hints() const {
    EngineHints hints;
    EngineConfig& config = hints.options.config;
    config.max_num_seqs = 24;
    config.max_num_batched_tokens = 256;
    config.max_model_len = 1024;
    config.block_size = parameters_.block_size;
    hints.options.given = {"max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size",
                           "async_scheduling"};
    hints.num_blocks = parameters_.num_blocks;
    return hints;
  }

  static void append(Prompt& prompt, std::uint64_t seed, std::int32_t count) {
    prompt.append({.kind = TokenRun::Kind::seeded,
                   .seed = seed,
                   .first = 0,
                   .count = static_cast<std::uint32_t>(count)});
  }

  void append_own(Prompt& prompt, std::int32_t count) {
    append(prompt, kFirstOwnSeed + static_cast<std::uint64_t>(ordinal_), count);
  }

  Prompt shared_prompt() {
    Prompt prompt;
    append(prompt, kGlobalSeed, parameters_.block_size);
    if (const std::int32_t family = below(5); family < 4) {
      const std::size_t which = family < 2 ? 0 : 1;
      append(prompt, kFamilySeeds[which], kFamilyBlocks[which] * parameters_.block_size);
    }
    // Whole blocks now and then, so that a repeat of the prompt is cached to its last token.
    const std::int32_t block_size = parameters_.block_size;
    append_own(prompt, one_in(3) ? block_size * (1 + below(4)) : 1 + below(7 * block_size));
    return prompt;
  }

  // Any request before this one.
  const TraceRequest& earlier_request() { return requests_[below(ordinal_)]; }

  // The conversation of an earlier request, gone on by a turn.
  void follow_up(TraceRequest& request) {
    const TraceRequest& before = earlier_request();
    request.after = {before.spec.name};
    request.delay_ns = (1 + below(200)) * kMs;
    request.spec.prompt = before.spec.prompt;
    request.spec.cache_salt = before.spec.cache_salt;
    append_own(request.spec.prompt, 1 + below(3 * parameters_.block_size));
  }

  void choose_prompt(TraceRequest& request) {
    const std::int32_t kind = ordinal_ == 0 ? 0 : below(20);
    if (kind == 19) {
      append_own(request.spec.prompt, 1 + below(3));
    } else if (kind >= 17) {
      request.spec.prompt = earlier_request().spec.prompt;
    } else if (kind >= 15) {
      follow_up(request);
    } else {
      request.spec.prompt = shared_prompt();
    }
  }

  void choose_output(TraceRequest& request) {
    request.output.length = one_in(8) ? 1 : 4 + below(90);
    request.spec.max_tokens = request.output.length;
    if (one_in(4)) {  // stops by itself, before max_tokens
      request.spec.eos_token = kEosToken;
      request.spec.max_tokens += 1 + below(60);
    } else if (one_in(12)) {
      for (std::int32_t i = 0; i < request.output.length; ++i) {
        request.output.tokens.push_back(below(kEosToken));
      }
    }
  }

  void choose_abort(TraceRequest& request) {
    if (!one_in(16)) return;
    AbortPlan& abort = request.abort.emplace();
    if (one_in(2) || !request.after.empty()) {
      abort.after_tokens = 1 + below(request.output.length);
    } else {
      abort.t_ns = request.spec.arrival_ns + below(600) * kMs;
    }
  }

  TraceRequest next_request() {
    TraceRequest request;
    request.spec.name = fmt::format("r{}", ordinal_);
    if (one_in(10)) request.spec.cache_salt = one_in(2) ? "tenant-a" : "tenant-b";
    choose_prompt(request);
    if (request.after.empty()) request.spec.arrival_ns = t_ns_;
    if (one_in(6)) request.spec.priority = below(5) - 2;
    choose_output(request);
    choose_abort(request);
    return request;
  }

  SampleParameters parameters_;
  std::uint64_t draws_ = 0;
  std::int32_t ordinal_ = 0;
  std::int32_t burst_left_ = 0;
  std::int64_t t_ns_ = 0;
  bool was_reset_ = false;
  std::vector<TraceRequest> requests_;
};

}  // namespace

Trace make_sample_trace(const SampleParameters& parameters) {
  LS_CHECK(parameters.num_requests >= 1, "{} requests", parameters.num_requests);
  LS_CHECK(parameters.block_size >= 4, "blocks of {} tokens", parameters.block_size);
  return SampleMaker(parameters).make();
}

}  // namespace lockstep
