// Whether a process speaks docs/scheduler_protocol.md: every message, what is to be refused, what
// follows a failure, cases of each feature that it claims, and that it decides a case alike every
// time.
//
// (1) Every check has a line, and one that fails says what was found and what was expected.
// (2) What a check needs of an engine that does not claim it is skipped, and said so.
// (3) Whether decisions are right is for `fuzz`; here a few cases of each feature must agree.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "properties/generate/generator.h"
#include "sim/foreign/foreign_scheduler.h"

namespace lockstep {

struct AdapterCheck {
  std::string name;     // a sentence that holds
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
