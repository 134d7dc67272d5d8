// An external engine in a process that speaks docs/protocols.md: starts it, exchanges messages with
// it, and describes its failures.
//
// Invariants
// (1) A message has one reply, or the engine has failed: ended, timed out, raised, or sent a reply
//     that violates the protocol.
// (2) An engine that has raised continues with the next case. Any other failure kills the process,
//     and the next case starts a new one.
// (3) After the first failure of a case, no further message of that case is sent.
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
  std::string command;                  // a command line for /bin/sh
  std::string option = "--decisions";   // the command-line option that names it, for errors
  std::string subject = "the engine";   // its name in messages
  std::string hello = hello_message();  // first message, in the engine's protocol
  std::function<EngineHello(JsonObject& reply)> read_hello = lockstep::read_hello;
  std::chrono::milliseconds time_limit = std::chrono::seconds(30);  // of every later reply
  // Time limit of the first reply of a process: importing an engine takes long.
  std::chrono::milliseconds start_limit = std::chrono::seconds(120);
};

class ForeignEngine {
 public:
  // Starts the process and reads its hello. Errors: the command does not start, or its first reply
  // is not a hello of the protocol.
  static Result<std::unique_ptr<ForeignEngine>> start(ForeignEngineOptions options);

  const EngineHello& hello() const { return hello_; }

  // Begins a case and forgets the previous case's failure. Starts a new process if the old one was
  // killed. Errors: as start().
  Result<void> begin_case();
  // Handles a line of the engine's KV connector that arrives before the reply. Returns the line to
  // answer with, or an empty text. A null function: the protocol does not allow such lines.
  using Connector = std::function<std::string(JsonObject& line)>;
  // Sends a message and reads its reply with `read`. False: the engine has failed, with this
  // message or before it in the case.
  bool ask(std::string_view message, const std::function<void(JsonObject& reply)>& read,
           const Connector& connector = {});
  // The first failure in this case; null: none.
  const EngineFailure* failure() const { return failure_ ? &*failure_ : nullptr; }
  // Records that a well-formed reply makes no sense in the current case, and kills the process.
  void fail_reply(std::string what) { fail_as("reply", std::move(what)); }

 private:
  explicit ForeignEngine(ForeignEngineOptions options) : options_(std::move(options)) {}
  Result<void> launch();
  // Sends a message and reads lines until the reply. The limit applies to each line, so an engine
  // that keeps querying its connector does not time out.
  bool converse(std::string_view message, const std::function<void(JsonObject& reply)>& read,
                const Connector& connector, std::chrono::milliseconds limit);
  // Turns the end of a read or write into a failure: timeout or end of the process. True: no
  // failure.
  bool answered(LineProcess::End end, std::chrono::milliseconds limit);
  // Records the first failure of a case; later ones are its consequences. "exception" and "harness"
  // keep the process.
  void fail_as(std::string kind, std::string what, std::string trace = {});

  const ForeignEngineOptions options_;
  std::unique_ptr<LineProcess> process_;  // null: it was killed
  EngineHello hello_;
  std::optional<EngineFailure> failure_;
  std::int64_t num_replies_ = 0;  // lines of this process, for error messages
};

// A pool of engines of one kind: as many processes as cases run at once. Each is used by one case
// at a time. Safe for several threads.
class ForeignEngines : public std::enable_shared_from_this<ForeignEngines> {
 public:
  // Starts the first engine, which shows that the command works. Errors: as ForeignEngine::start().
  static Result<std::shared_ptr<ForeignEngines>> open(ForeignEngineOptions options);

  // An engine that returns to the pool when the lease is destroyed. The lease keeps the pool alive.
  using Lease = std::unique_ptr<ForeignEngine, std::function<void(ForeignEngine*)>>;
  // Returns an idle engine or starts one, with a new case begun.
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

// The decisions of another engine, requested step by step (docs/protocols.md).
//
// (1) A case that needs a feature which the engine lacks (EngineHello::features) is refused.

// Returns the first feature that a configuration and its groups need and the engine lacks; empty:
// it has all of them. Features of single requests are checked when they arrive.
std::string missing_feature(const EngineHello& hello, const RecordingHeader& header);

// Makes the factory of decision sources: one engine per data parallel rank. `tables_every`: all
// block tables are reported every that many steps, since they are the largest part of a reply; at
// least 1. Errors of the factory: what the engine lacks or refuses, an engine that does not start.
DecisionsFactory decisions_of(std::shared_ptr<ForeignEngines> engines,
                              std::int64_t tables_every = 1);

}  // namespace lockstep
