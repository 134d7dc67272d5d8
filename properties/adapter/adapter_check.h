// Checks that a process speaks docs/protocols.md: every message, every refusal, what
// follows a failure, cases of each claimed feature, and that it decides a case the same way every
// time.
//
// Invariants
// (1) Every check has a line. A failing one states what was found and what was expected.
// (2) A check of a feature that the engine does not claim is skipped, and reported as skipped.
// (3) `fuzz` judges whether decisions are right; here a few cases of each feature must agree.
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
  std::string name;     // a proposition
  std::string what;     // why it does not; empty: it holds
  std::string skipped;  // why it was not asked; empty: it was
};

struct AdapterCheckOptions {
  std::shared_ptr<ForeignEngines> engines;
  std::string engine;  // the profile that is nearest
  FeatureSet never;    // what a generated case may not have
  std::function<void(const AdapterCheck& check)> done;
};

// Errors: an engine that does not start again.
Result<std::vector<AdapterCheck>> check_adapter(const AdapterCheckOptions& options);

}  // namespace lockstep
