// Checks that an adapter process speaks the scheduler protocol of docs/protocols.md. It sends every
// message, every malformed message that must be refused, messages after a failure, and a few
// generated cases of each claimed feature. Each case must be decided the same way every time.
//
// Invariants
// (1) Every check produces one AdapterCheck, in a fixed order. A failing one states what was found
//     and what was expected.
// (2) A check of a feature that the engine does not claim is skipped and reported as skipped. It
//     never counts as held.
// (3) A failing check does not end the list. Checks that continue its case repeat its text.
//
// Not checked: whether the decisions are right in general. `fuzz` does that; here a few cases of
// each feature must agree. The connector's dialogue is covered only by the generated cases of
// `connector`.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "properties/generate/generator.h"
#include "sim/foreign/foreign_engine.h"

namespace lockstep {

struct AdapterCheck {
  std::string name;     // a proposition: "`abort` ends a request"
  std::string what;     // how it fails; empty: it holds
  std::string skipped;  // why it was not tried; empty: it was
};

struct AdapterCheckOptions {
  std::shared_ptr<ForeignEngines> engines;
  std::string engine;  // the closest modelled profile, such as vllm-0.33.0
  FeatureSet never;    // features excluded from the generated cases
  // Called after each check, so that the command can print while slow checks still run. May be
  // absent.
  std::function<void(const AdapterCheck& check)> done;
};

// Runs all checks, in the order in which docs/protocols.md introduces the messages. REQUIRES:
// `options.engines` is open and no other caller holds one of its engines, because all processes are
// restarted near the end.
// Errors: a process that does not start again. An engine that answers wrongly is not an error but a
// failing check.
Result<std::vector<AdapterCheck>> check_adapter(const AdapterCheckOptions& options);

}  // namespace lockstep
