#include "sim/foreign/foreign_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace lockstep {
Result<std::unique_ptr<ForeignEngine>> ForeignEngine::start(ForeignEngineOptions options) {
  std::unique_ptr<ForeignEngine> engine(new ForeignEngine(std::move(options)));
  LS_RETURN_IF_ERROR(engine->launch());
  return engine;
}

Result<void> ForeignEngine::launch() {
  failure_.reset();
  num_replies_ = 0;
  LS_ASSIGN_OR_RETURN(process_, LineProcess::start(options_.command));
  const bool said = converse(
      options_.hello, [this](JsonObject& reply) { hello_ = options_.read_hello(reply); }, {},
      options_.start_limit);
  if (said) return {};
  const EngineFailure failure = std::exchange(failure_, std::nullopt).value();
  if (failure.what.find(fmt::format("({})", kEngineNotReady)) != std::string::npos)
    return fail(fmt::format("{}: {}", options_.option, last_line(failure.trace)));
  std::string message = fmt::format("{} `{}`: {}", options_.option, options_.command, failure.what);
  if (!failure.trace.empty()) message += "\n" + failure.trace;
  return fail(std::move(message));
}

Result<void> ForeignEngine::begin_case() {
  if (process_ == nullptr) return launch();
  failure_.reset();
  return {};
}

void ForeignEngine::fail_as(std::string kind, std::string what, std::string trace) {
  if (failure_) return;
  if (kind != "exception" && kind != "harness") process_.reset();
  failure_ = {.kind = std::move(kind), .what = std::move(what), .trace = std::move(trace)};
}

// False: the engine has ended, or keeps silent.
bool ForeignEngine::answered(LineProcess::End end, std::chrono::milliseconds limit) {
  if (end == LineProcess::End::answered) return true;
  if (end == LineProcess::End::timed_out) {
    fail_as("hang",
            fmt::format("{} did not answer in {} s", options_.subject, limit.count() / 1000),
            process_->last_words());
    return false;
  }
  const std::string how = process_->how_it_ended();
  const std::string words = process_->last_words();
  fail_as("crash",
          fmt::format("{}'s process has ended ({}){}{}", options_.subject, how,
                      words.empty() ? "" : ": ", last_line(words)),
          words);
  return false;
}

bool ForeignEngine::ask(std::string_view message,
                        const std::function<void(JsonObject& reply)>& read,
                        const Connector& connector) {
  return !failure_ && converse(message, read, connector, options_.time_limit);
}

bool ForeignEngine::converse(std::string_view message,
                             const std::function<void(JsonObject& reply)>& read,
                             const Connector& connector, std::chrono::milliseconds limit) {
  LS_CHECK(process_ != nullptr, "no engine to send {} to", message);
  if (!answered(process_->send(message, limit), limit)) return false;
  for (;;) {
    std::string_view line;
    if (!answered(process_->receive(line, limit), limit)) return false;
    JsonReader json("reply");
    if (json.parse(line, ++num_replies_)) {
      JsonObject object = json.root().object();
      if (auto failed = object.optional("failed")) {
        JsonObject said = failed.object();
        std::string what(said.required("what").string());
        const JsonValue trace = said.optional("trace");
        std::string words = trace ? std::string(JsonValue(trace).string()) : std::string();
        JsonValue side = said.optional("harness");
        const bool is_harness = side && side.boolean();
        said.finish();
        if (json.ok()) {
          fail_as(is_harness ? "harness" : "exception", std::move(what), std::move(words));
          return false;
        }
      } else if (connector && (object.has("ask") || object.has("tell"))) {
        const std::string answer = connector(object);
        object.finish();
        if (json.ok() && failure_) return false;
        if (json.ok()) {
          if (!answer.empty() && !answered(process_->send(answer, limit), limit)) return false;
          continue;
        }
      } else {
        read(object);
        object.finish();
        if (json.ok()) return !failure_;
      }
    }
    message.remove_suffix(message.ends_with('\n') ? 1 : 0);
    fail_as("reply", fmt::format("{} (to {})", json.error().message, printable_excerpt(message)));
    return false;
  }
}

Result<std::shared_ptr<ForeignEngines>> ForeignEngines::open(ForeignEngineOptions options) {
  std::shared_ptr<ForeignEngines> engines(new ForeignEngines(std::move(options)));
  LS_ASSIGN_OR_RETURN(auto first, ForeignEngine::start(engines->options_));
  engines->hello_ = first->hello();
  engines->idle_.push_back(std::move(first));
  return engines;
}

Result<ForeignEngines::Lease> ForeignEngines::take() {
  std::unique_ptr<ForeignEngine> engine;
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      engine = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (engine == nullptr) {
    LS_ASSIGN_OR_RETURN(engine, ForeignEngine::start(options_));
  }
  LS_RETURN_IF_ERROR(engine->begin_case());
  return Lease(engine.release(), [home = shared_from_this()](ForeignEngine* given_back) {
    const std::lock_guard lock(home->mutex_);
    home->idle_.emplace_back(given_back);
  });
}

void ForeignEngines::restart() {
  const std::lock_guard lock(mutex_);
  idle_.clear();
}

}  // namespace lockstep
