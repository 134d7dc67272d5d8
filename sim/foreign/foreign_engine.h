// An external engine in a process that speaks docs/protocols.md: starts it, queries it,
// and describes its failures.
//
// Invariants
// (1) A message has one reply, or the engine has failed: ended, timed out, raised, or sent a reply
//     that violates the protocol.
// (2) An engine that has raised continues with the next case. Any other failure kills the process,
//     and the next case starts a new one.
//
// Not here: the meaning of a decision (reported_decisions.h).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/child_process.h"
#include "base/result.h"
#include "reference/schedule/decision_source.h"
#include "traces/formats/recording.h"
#include "traces/formats/scheduler_protocol.h"

namespace lockstep {

struct ForeignEngineOptions {
  std::string command;                  // a line for /bin/sh
  std::string option = "--decisions";   // that names it
  std::string subject = "the engine";   // in messages
  std::string hello = hello_message();  // in the protocol that it speaks, and the answer
  std::function<EngineHello(JsonObject& reply)> read_hello = lockstep::read_hello;
  std::chrono::milliseconds time_limit = std::chrono::seconds(30);  // of a reply
  // A reply of a process that has just started: engines import a lot.
  std::chrono::milliseconds start_limit = std::chrono::seconds(120);
};

class ForeignEngine {
 public:
  // Errors: it does not start, or does not say hello as the protocol wants it.
  static Result<std::unique_ptr<ForeignEngine>> start(ForeignEngineOptions options);

  const EngineHello& hello() const { return hello_; }

  // Begins a case, in a new process where the old one has failed. Errors: as start().
  Result<void> begin_case();
  // What the engine's connector asks or tells meanwhile; returns the line to answer with, or
  // nothing. Absent: the protocol does not allow it.
  using Connector = std::function<std::string(JsonObject& line)>;
  // Sends a message and reads its reply with `read`. False: the engine has failed, now or before.
  bool ask(std::string_view message, const std::function<void(JsonObject& reply)>& read,
           const Connector& connector = {});
  // failure in this case; null: none
  const EngineFailure* failure() const { return failure_ ? &*failure_ : nullptr; }
  // The engine's reply makes no sense in the current case.
  void fail_reply(std::string what) { fail_as("reply", std::move(what)); }

 private:
  explicit ForeignEngine(ForeignEngineOptions options) : options_(std::move(options)) {}
  Result<void> launch();
  bool converse(std::string_view message, const std::function<void(JsonObject& reply)>& read,
                const Connector& connector, std::chrono::milliseconds limit);
  bool answered(LineProcess::End end, std::chrono::milliseconds limit);
  void fail_as(std::string kind, std::string what, std::string trace = {});

  const ForeignEngineOptions options_;
  std::unique_ptr<LineProcess> process_;  // null: it was killed
  EngineHello hello_;
  std::optional<EngineFailure> failure_;
  std::int64_t num_replies_ = 0;
};

// Engines of one kind, as many as are asked for at once; each is used by one case at a time.
class ForeignEngines : public std::enable_shared_from_this<ForeignEngines> {
 public:
  // Starts the first of them. Errors: as ForeignEngine::start().
  static Result<std::shared_ptr<ForeignEngines>> open(ForeignEngineOptions options);

  // Returned to the pool when destroyed.
  using Lease = std::unique_ptr<ForeignEngine, std::function<void(ForeignEngine*)>>;
  Result<Lease> take();
  const EngineHello& hello() const { return hello_; }
  const ForeignEngineOptions& options() const { return options_; }
  // Ends all processes; the next case starts new ones. For callers whose forked children used an
  // engine and left it in an unknown state. REQUIRES: no lease is held.
  void restart();

 private:
  explicit ForeignEngines(ForeignEngineOptions options) : options_(std::move(options)) {}

  const ForeignEngineOptions options_;
  EngineHello hello_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<ForeignEngine>> idle_;
};

// The decisions of another engine, asked for step by step (docs/protocols.md).
//
// (1) Where the engine cannot be asked for something (EngineHello::features), the case is refused.

// What an engine has to be able to do for a configuration and its groups, and cannot; empty: it can
// do it all.
std::string missing_feature(const EngineHello& hello, const RecordingHeader& header);

// Each engine of a session by one of these. `tables_every`: steps from one showing of all block
// tables to the next. Errors of the factory: what the engine lacks or refuses, an engine that does
// not start.
DecisionsFactory decisions_of(std::shared_ptr<ForeignEngines> engines,
                              std::int64_t tables_every = 1);

}  // namespace lockstep
