#include "properties/adapter/adapter_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "base/child_process.h"
#include "properties/generate/claimed_features.h"
#include "properties/judge/judge.h"
#include "properties/judge/known_findings.h"
#include "traces/formats/engine_options.h"

namespace lockstep {
namespace {

// Three agreeing cases suffice to show that a feature is wired up. 40 seeds bound the search for
// them where the engine refuses most cases.
constexpr int kCasesPerFeature = 3;
constexpr std::uint64_t kSeedsPerFeature = 40;

// Feature words for requests, replies and configurations that the generator never produces.
constexpr std::array<std::string_view, 9> kOtherWords = {
    "no_prefix_caching",         "min_tokens",     "repetition_detection",
    "skip_reading_prefix_cache", "reset_running",  "pause_state",
    "sliding_window_mla",        "bounded_replay", "one_pool_per_kind"};
// Prefixes of words that restrict the generated cases; a class name or mode follows the colon.
constexpr std::array<std::string_view, 2> kLimits = {"lacks:", "mamba_cache_mode:"};

// Accepts only `{}`: the reply has no keys to read, and the caller refuses keys left unread.
void read_nothing(JsonObject&) {}

// Collects the checks in order and reports each one as soon as it is known.
class Checks {
 public:
  explicit Checks(const AdapterCheckOptions& options) : options_(options) {}

  void add(std::string name, std::string what) { note({std::move(name), std::move(what), {}}); }
  void skip(std::string name, std::string why) { note({std::move(name), {}, std::move(why)}); }
  std::vector<AdapterCheck> take() { return std::move(checks_); }

 private:
  void note(AdapterCheck check) {
    if (options_.done) options_.done(check);
    checks_.push_back(std::move(check));
  }
  const AdapterCheckOptions& options_;
  std::vector<AdapterCheck> checks_;
};

// Sends the messages of the protocol itself, in a case with one group. The helpers return an error
// text, empty if the exchange went well, so that a check is a chain of them.
class Dialogue {
 public:
  Dialogue(ForeignEngine& engine, RecordingHeader header, Checks& checks)
      : engine_(engine), header_(std::move(header)), checks_(checks) {}

  void run() {
    opens();
    serves();
    refuses();
    goes_on_after_failures();
    takes_events();
    closes();
  }

 private:
  // Sends `message` and reads the reply with `read`. Empty: the reply is what `read` accepts.
  std::string answered(const std::string& message,
                       const std::function<void(JsonObject& reply)>& read = read_nothing) {
    engine_.ask(message, read);
    return failure();
  }
  // Describes the engine's failure in the current case; empty: none.
  std::string failure() const {
    const EngineFailure* failed = engine_.failure();
    return failed == nullptr ? "" : fmt::format("{}: {}", failed->kind, failed->what);
  }
  // Sends `message`, which the engine must reject. Empty: the reply was `failed`, as the protocol
  // requires. The case has then ended and only `close` or `open` may follow. Exceptions of the
  // adapter ("harness") also count: the check asks for a refusal and does not care which side
  // raises it.
  std::string failed(std::string message) {
    engine_.ask(message + "\n", [](JsonObject& reply) { reply.entries(); });
    const EngineFailure* failure = engine_.failure();
    if (failure == nullptr) return fmt::format("{} was answered; expected `failed`", message);
    if (failure->kind != "exception" && failure->kind != "harness")
      return fmt::format("{}: {}; expected `failed`", message, failure->what);
    return {};
  }
  // Opens the case in an engine that may have failed before. `refused` is a failure here: every
  // engine supports the plain header.
  std::string opened() {
    if (const auto begun = engine_.begin_case(); !begun) return begun.error().message;
    std::string refused;
    step_ = 0;
    std::string why = answered(open_message(header_),
                               [&](JsonObject& reply) { refused = read_opened(reply, header_); });
    return refused.empty() ? why : "refused: " + refused;
  }
  // Adds a request of `tokens` generated tokens. With `refused`, the caller expects a possible
  // refusal and receives its reason; without it, a refusal is a failure.
  std::string added(const std::string& name, std::uint32_t tokens, std::int32_t max_tokens,
                    std::string* refused = nullptr) {
    RequestSpec request;
    request.name = name;
    request.prompt.append({TokenRun::Kind::seeded, 1, 0, tokens});
    request.max_tokens = max_tokens;
    std::string said;
    std::string why =
        answered(add_message(request), [&](JsonObject& reply) { said = read_refusal(reply); });
    if (refused != nullptr) *refused = said;
    return why.empty() && refused == nullptr && !said.empty() ? "refused: " + said : why;
  }
  // Requests the decision of the current step into decision_. The step number advances in
  // updated(), so a decision without an output has to advance it itself.
  std::string scheduled(bool tables = false) {
    decision_ = {};
    return answered(schedule_message(step_, tables),
                    [&](JsonObject& reply) { read_decision(reply, header_, decision_); });
  }
  // Sends the output of the current step, `sampled` by request, and reads the outcome. Advances the
  // step number even if the reply is wrong, because the engine has then failed anyway.
  std::string updated(const std::map<std::string, std::vector<std::int32_t>>& sampled) {
    RecordedStep step;
    step.step = step_++;
    for (const auto& [name, tokens] : sampled) step.sampled.push_back({name, tokens});
    outcome_ = {};
    return answered(update_message(step),
                    [&](JsonObject& reply) { outcome_ = read_outcome(reply, header_, decision_); });
  }
  // Returns the first non-empty text. All arguments are evaluated before the call: after a failure
  // the later exchanges only repeat that the engine has failed.
  static std::string first_of(std::initializer_list<std::string> whats) {
    for (const std::string& what : whats)
      if (!what.empty()) return what;
    return {};
  }
  static std::string unless(bool holds, std::string what) { return holds ? "" : std::move(what); }
  // Returns num_tokens of a request in the last outcome, or -1 if the reply has no row for it.
  std::int64_t tokens_of(std::string_view name) const {
    for (const auto& [other, tokens] : outcome_.num_tokens)
      if (other == name) return tokens;
    return -1;
  }

  // `open` must close an open case, because a harness that lost track of the state has no other way
  // to recover.
  void opens() {
    checks_.add("`open` begins a case", opened());
    checks_.add("`open` closes whatever was open", opened());
    checks_.add("`close` is answered with {}", answered(close_message()));
    checks_.add("a case is opened again after `close`", opened());
  }

  // Runs one request of 20 prompt tokens and 2 output tokens to its end. Prompt and pool are chosen
  // so that the whole prompt fits the first step: 64 tokens per step, 2 of 8 usable blocks. Each
  // check continues from the previous one, so the first failure repeats in all later ones.
  void serves() {
    checks_.add("`add` is answered with {}", added("a", kPrompt, 2));
    std::string what = scheduled(true);
    if (what.empty() && (decision_.scheduled.empty() || decision_.scheduled[0].id != "a"))
      what = "nothing of request a is scheduled in step 0; it is alone, and the pool is free";
    else if (what.empty() && decision_.running != std::vector<std::string>{"a"})
      what = "`running` does not have request a, which was scheduled";
    checks_.add("`schedule` decides a step and shows the queues and the pool", what);
    if (what.empty() &&
        (!decision_.tables || decision_.tables->size() != 1 || decision_.tables->front().id != "a"))
      what = "no `tables`, or not those of the requests that run";
    checks_.add("`schedule` with \"tables\" shows the block tables of running requests", what);
    if (what.empty()) what = updated({{"a", {7}}});
    if (what.empty())
      what = unless(
          tokens_of("a") == kPrompt + 1,
          fmt::format("num_tokens of request a is {}; expected {}", tokens_of("a"), kPrompt + 1));
    checks_.add("`update` reports how many tokens a request of the step has", what);
    if (what.empty()) what = first_of({scheduled(), updated({{"a", {8}}})});
    if (what.empty())
      what = unless(decision_.stopped.size() == 1 && decision_.stopped[0].id == "a" &&
                        decision_.stopped[0].reason == "length",
                    "`stopped` does not say [a, length] after max_tokens tokens");
    if (what.empty())
      what = unless(tokens_of("a") == kPrompt + 2,
                    "num_tokens lacks a request that the output has stopped");
    checks_.add("a request ends with max_tokens tokens, and `update` reports it", what);
    if (what.empty()) what = scheduled();
    if (what.empty())
      what = unless(decision_.finished == std::vector<std::string>{"a"},
                    "`finished` of the next step does not have request a");
    if (what.empty())
      // The null block is not free, so an empty pool of N blocks has N - 1 free ones.
      what = unless(decision_.free_blocks == header_.num_blocks - 1,
                    fmt::format("{} blocks are free with no request left; expected {}",
                                decision_.free_blocks, header_.num_blocks - 1));
    checks_.add("the next step reports its end, and its blocks are free", what);
    // The last decision was empty: it has no output, and the step number advances here.
    ++step_;
  }

  // Sends what must be refused: a prompt of 80 tokens where max_model_len is 48, and an unknown
  // option.
  void refuses() {
    std::string refused;
    std::string what = first_of({opened(), added("long", 4 * kPrompt, 2, &refused)});
    if (what.empty())
      what = unless(!refused.empty(),
                    fmt::format("a prompt of {} tokens was taken; max_model_len is {}", 4 * kPrompt,
                                header_.options.config.max_model_len));
    checks_.add("`add` refuses a prompt longer than max_model_len", what);
    checks_.add("a refused request does not exist, and the case continues",
                first_of({added("a", kPrompt, 1), scheduled(),
                          unless(decision_.scheduled.size() == 1, "not one request is scheduled"),
                          updated({{"a", {7}}})}));
    // The unknown option is spliced into the text, because open_message() writes only known keys.
    // `refused` and an exception are both acceptable; silently ignoring it is not.
    std::string with_option = open_message(header_);
    const std::string config = "\"config\":{";
    with_option.insert(with_option.find(config) + config.size(), "\"no_such_option\":1,");
    bool was_refused = false;
    engine_.ask(with_option, [&](JsonObject& reply) {
      was_refused = reply.has("refused");
      reply.entries();
    });
    const EngineFailure* failed = engine_.failure();
    checks_.add("an unknown option is refused",
                was_refused || (failed != nullptr && failed->kind == "exception")
                    ? ""
                    : first_of({failure(), "the case was opened; expected `refused`"}));
  }

  // Sends malformed messages, and checks that `failed` ends only the case and not the process.
  void goes_on_after_failures() {
    constexpr std::pair<std::string_view, std::string_view> kWrong[] = {
        {"an unknown message is `failed`", R"({"sleep":true})"},
        {"a line that is not JSON is `failed`", "schedule 0"},
        {"a line that is not an object is `failed`", "[1]"},
        {"an unknown key is `failed`",
         R"({"add":"b","prompt":[[1,4]],"max_tokens":1,"arrival":0.0,"colour":1})"},
        {"a missing key is `failed`", R"({"add":"b","prompt":[[1,4]]})"}};
    for (const auto& [name, message] : kWrong)
      checks_.add(std::string(name), first_of({opened(), failed(std::string(message))}));
    // Keys with the prefix x_ are extensions. Both sides skip them.
    checks_.add(
        "keys that begin with x_ pass",
        first_of({opened(), answered(R"({"add":"b","prompt":[[1,4]],"max_tokens":1,"arrival":0.0,)"
                                     "\"x_colour\":1}\n",
                                     [](JsonObject& reply) { read_refusal(reply); })}));
    std::string what = first_of({opened(), failed(R"({"sleep":true})")});
    // begin_case() clears the recorded failure on this side only; the engine itself still has the
    // failed case.
    if (what.empty() && engine_.begin_case()) what = failed(R"({"schedule":0})");
    checks_.add("after `failed` only `close` and `open` may follow", what);
    engine_.begin_case();
    checks_.add("`close` follows `failed`", answered(close_message()));
    what = failed(R"({"schedule":0})");
    checks_.add("with no case open there is nothing to schedule", what);
    checks_.add("the next case starts afresh",
                first_of({opened(), added("a", kPrompt, 1), scheduled(), updated({{"a", {7}}})}));
  }

  // Aborts a running request and checks that its blocks are free in the next step.
  void takes_events() {
    std::string what = first_of({opened(), added("a", kPrompt, 4), scheduled(),
                                 updated({{"a", {7}}}), answered(abort_message("a")), scheduled()});
    // An engine that had already scheduled the request when the abort arrived may give it one more
    // row, which needs an output (SGLang does).
    if (what.empty() && !decision_.scheduled.empty())
      what = first_of({updated({{"a", {7}}}), scheduled()});
    if (what.empty())
      what =
          unless(decision_.running.empty() && decision_.finished == std::vector<std::string>{"a"} &&
                     decision_.free_blocks == header_.num_blocks - 1,
                 "it runs on, is not in `finished`, or keeps blocks");
    checks_.add("`abort` ends a request", what);
    checks_.add("an abort may name a finished request", answered(abort_message("a")));
    resets();
    pauses();
    asks_for_features_of_requests();
  }

  // Resets the prefix cache without and, if claimed, with running requests. With `running`, the
  // engine preempts them first: they wait again and hold no block, so the reset succeeds.
  void resets() {
    const std::string name =
        "`reset_prefix_cache` reports whether the cache was emptied, and the state";
    if (!engine_.hello().can("reset_prefix_cache")) return checks_.skip(name, "not claimed");
    bool done = false;
    const auto reset = [&](bool running) {
      decision_ = {};
      return answered(reset_message(running),
                      [&](JsonObject& reply) { done = read_reset(reply, header_, decision_); });
    };
    checks_.add(name, first_of({opened(), reset(false)}));
    const std::string with_running = "a reset with `running` preempts all running requests";
    if (!engine_.hello().can("reset_running")) return checks_.skip(with_running, "not claimed");
    std::string what = first_of(
        {opened(), added("a", kPrompt, 4), scheduled(), updated({{"a", {7}}}), reset(true)});
    if (what.empty())
      what = unless(done && decision_.running.empty() &&
                        decision_.waiting == std::vector<std::string>{"a"} &&
                        decision_.free_blocks == header_.num_blocks - 1,
                    "it was not done, request a does not wait, or blocks are not free");
    checks_.add(with_running, what);
  }

  // Pauses with `paused_new`: waiting requests stay in the queue, running ones continue.
  void pauses() {
    const std::string name = "a paused engine admits no request until it is resumed";
    if (!engine_.hello().can("pause_state")) return checks_.skip(name, "not claimed");
    std::string what = first_of({opened(), added("a", kPrompt, 2),
                                 answered(pause_message(PauseState::paused_new)), scheduled()});
    if (what.empty()) what = unless(decision_.scheduled.empty(), "a request was admitted");
    // No update follows an empty decision.
    ++step_;
    if (what.empty()) what = first_of({answered(pause_message(PauseState::unpaused)), scheduled()});
    if (what.empty())
      what = unless(decision_.scheduled.size() == 1, "it was not admitted after the pause");
    checks_.add(name, what);
    checks_.add("an unknown pause_state is `failed`",
                first_of({opened(), failed(R"({"pause_state":"ASLEEP"})")}));
  }

  // Tries request options that the generator never produces. Only acceptance is checked, not their
  // effect.
  void asks_for_features_of_requests() {
    constexpr std::pair<std::string_view, std::string_view> kKeys[] = {
        {"min_tokens", R"("min_tokens":1)"},
        {"skip_reading_prefix_cache", R"("skip_reading_prefix_cache":true)"},
        {"repetition_detection",
         R"("repetition_detection":{"max_pattern_size":2,"min_pattern_size":1,"min_count":3})"}};
    for (const auto& [word, key] : kKeys) {
      const std::string name = fmt::format("`add` takes {}", word);
      if (!engine_.hello().can(word)) {
        checks_.skip(name, "not claimed");
        continue;
      }
      std::string refused;
      std::string what = first_of(
          {opened(),
           answered(fmt::format(R"({{"add":"a","prompt":[[1,4]],"max_tokens":2,"arrival":0.0,{}}})"
                                "\n",
                                key),
                    [&](JsonObject& reply) { refused = read_refusal(reply); })});
      checks_.add(name, first_of({what, refused}));
    }
  }

  void closes() { checks_.add("the last case is closed", answered(close_message())); }

  // 20 tokens in blocks of 16: one full block and 4 tokens of a second.
  static constexpr std::uint32_t kPrompt = 20;

  ForeignEngine& engine_;
  RecordingHeader header_;
  Checks& checks_;
  std::int64_t step_ = 0;
  // The last decision, and the state in the same reply.
  RecordedStep decision_;
  EngineOutcome outcome_;
};

// Describes the plainest case: one layer of full attention, or of MLA where the engine has only
// that, 8 usable blocks of 16 tokens, and max_model_len 48.
RecordingHeader plain_header(const EngineHello& hello) {
  EngineConfig config{
      .max_num_seqs = 4, .max_num_batched_tokens = 64, .max_model_len = 48, .block_size = 16};
  KVCacheGroupSpec group;
  group.layer_names = {"layers.0"};
  group.spec.kind =
      !hello.can("full") && hello.can("mla") ? CacheKind::mla : CacheKind::full_attention;
  group.spec.block_size = 16;
  group.spec.head_size = 64;
  return header_of_engine(config, {group}, 9);
}

// Checks that every claimed word belongs to the protocol: a feature of the generator, a kind of
// cache, a limit, or one of kOtherWords. A misspelt word would silently disable cases.
void check_words(const EngineHello& hello, Checks& checks) {
  std::string what;
  for (const std::string& word : hello.features) {
    const bool is_known = std::ranges::any_of(
        kClaimedFeatures, [&](const ClaimedFeature& feature) { return feature.covers(word); });
    const auto kind = cache_kind_from_name(word);
    const bool is_limit = std::ranges::any_of(
        kLimits, [&](std::string_view limit) { return word.starts_with(limit); });
    if (!is_known && !kind && !is_limit &&
        std::ranges::find(kOtherWords, word) == kOtherWords.end())
      what += fmt::format("{}`{}`", what.empty() ? "" : ", ", word);
  }
  if (!what.empty()) what = "the protocol does not have " + what;
  checks.add("`hello` claims features by the protocol's words", what);
}

// What one run of a case produced: its outcome and all decisions as recording lines.
struct Decided {
  Outcome outcome;
  std::string lines;
};

// Judges a case with the engine's decisions, by the audit's rules about memory, without a backend
// and without invariants. Invariants need the model's scheduler; an engine's policy is its own.
Decided decided(const SavedCase& saved, const std::shared_ptr<ForeignEngines>& engines) {
  Decided decided;
  Recording recording;
  JudgeOptions judging{.decisions = decisions_of(engines),
                       .recording = &recording,
                       .invariants = false,
                       .rules = AuditedRules::memory};
  decided.outcome = judge(saved, judging);
  for (const RecordedStep& step : recording.steps) decided.lines += recording_step_line(step);
  return decided;
}

// Checks that generated cases with the feature `of` agree. A known finding of the engine is not a
// failure of the adapter, but does not count as agreement either. A refused case is skipped: the
// feature may be supported only in some combinations. Agreeing cases are appended to `all`, to be
// repeated.
void check_feature(const AdapterCheckOptions& options, std::string_view word, FeatureSet of,
                   Checks& checks, std::vector<std::pair<SavedCase, Decided>>& all) {
  GeneratorOptions generator{.engine = options.engine, .never = options.never, .backend = "none"};
  generator.never.remove(of);
  generator.always = of;
  int agreed = 0, known = 0;
  std::string what, refusal;
  for (std::uint64_t seed = 1; seed <= kSeedsPerFeature && agreed < kCasesPerFeature; ++seed) {
    const SavedCase saved = generate_case(seed, generator);
    if (word.starts_with("spec:") && word.substr(5) != name_of(saved.engine.spec_method)) continue;
    Decided first = decided(saved, options.engines);
    const Outcome& outcome = first.outcome;
    if (outcome.kind == OutcomeKind::refused) {
      refusal = outcome.what;
    } else if (outcome.failed() && known_finding_of_engine(saved, outcome) != nullptr) {
      ++known;
    } else if (outcome.failed()) {
      what = fmt::format("{}, {} in step {}: {}", saved.name, outcome.check, outcome.step,
                         outcome.what);
      break;
    } else {
      ++agreed;
      all.emplace_back(saved, std::move(first));
    }
  }
  // Without any case that ran, the feature claim is empty. A case with a known finding did run.
  if (what.empty() && agreed == 0 && known == 0)
    what = fmt::format("every case was refused: {}", refusal);
  checks.add(fmt::format("cases of `{}` agree", word), what);
}

// Decides all cases again and names the first one whose decisions differ from the first time.
std::string difference(const std::vector<std::pair<SavedCase, Decided>>& all,
                       const std::shared_ptr<ForeignEngines>& engines) {
  for (const auto& [saved, first] : all)
    if (const Decided again = decided(saved, engines); again.lines != first.lines)
      return fmt::format("{} was decided differently the second time", saved.name);
  return {};
}

// Checks the end of a process: it says hello, its standard input ends, and it must exit with status
// 0 without printing another line. The check starts its own process, because ForeignEngines never
// ends an input.
std::string ends_with_its_input(const ForeignEngineOptions& options) {
  auto process = LineProcess::start(options.command);
  if (!process) return process.error().message;
  LineProcess& child = **process;
  std::string_view line;
  if (child.send(hello_message(), options.time_limit) != LineProcess::End::answered ||
      child.receive(line, options.start_limit) != LineProcess::End::answered)
    return "it did not reply to `hello`";
  child.end_input();
  const auto end = child.receive(line, options.time_limit);
  if (end == LineProcess::End::answered)
    return fmt::format("after its last reply it prints: {}", printable_excerpt(line));
  if (end == LineProcess::End::timed_out)
    return fmt::format("it still runs after {} s", options.time_limit.count() / 1000);
  const std::string how = child.how_it_ended();
  return how == "exit status 0" ? "" : how;
}

}  // namespace

Result<std::vector<AdapterCheck>> check_adapter(const AdapterCheckOptions& options) {
  Checks checks(options);
  const EngineHello& hello = options.engines->hello();
  // ForeignEngines::open() has already exchanged hello, so this check holds whenever the code is
  // reached.
  checks.add("`hello` is answered with engine and features", {});
  check_words(hello, checks);
  // The lease ends with the block: the generated cases take the same process out of the pool.
  {
    LS_ASSIGN_OR_RETURN(const auto engine, options.engines->take());
    Dialogue(*engine, plain_header(hello), checks).run();
  }
  std::vector<std::pair<SavedCase, Decided>> all;
  for (const ClaimedFeature& feature : kClaimedFeatures) {
    bool is_claimed = false;
    for (const std::string& word : hello.features) {
      if (!feature.covers(word)) continue;
      is_claimed = true;
      check_feature(options, word, feature.tried_with, checks, all);
    }
    if (!is_claimed) checks.skip(fmt::format("cases of `{}` agree", feature.word), "not claimed");
  }
  checks.add("a case is decided the same way a second time", difference(all, options.engines));
  // A second process shows state that survives a case: a seed, a counter, a warm cache.
  options.engines->restart();
  checks.add("... and by another process", difference(all, options.engines));
  checks.add("the process ends with its input, and prints only replies",
             ends_with_its_input(options.engines->options()));
  return checks.take();
}

}  // namespace lockstep
