// Cases of two engines with a network between them, and of connector set-up: generated from
// choices, judged with or without a planted defect.
//
// Invariants
// (1) A case of `pair` agrees when the pair's ledger finds every rule kept, no engine diverges from
//     its backend, if it has one, and no request waits forever.
// (2) A case of `holds` plants nothing: vllm-0.22.1 itself may deadlock once blocks come from
//     elsewhere (docs/findings.md, 7 and 8). Without the defect the decode engine computes all
//     tokens.
// (3) A case of `connectors` agrees when the engine starts, and passes several groups only to
//     connectors that support them.
#pragma once

#include <string>
#include <string_view>

#include "properties/generate/choices.h"
#include "properties/generate/generator.h"
#include "properties/judge/judge.h"
#include "sim/connectors/multi_connector.h"
#include "sim/pair/engine_pair.h"
#include "traces/formats/request_trace.h"

namespace lockstep {

struct TransferCase {
  TransferSubject subject = TransferSubject::pair;
  bool has_pages = false;  // engines with backends
  PairOptions pair;
  Trace trace;
  MultiConnectorConfig connectors;
};

struct TransferOutcome {
  std::string check;  // empty: it agrees
  std::string what;
  bool failed() const { return !check.empty(); }
};

TransferCase generate_transfer(ChoiceSource& choices, const TransferBias& bias);
// `defect`: a mutant's id; empty: none. `backend`: of both engines, for cases with pages.
TransferOutcome judge_transfer(const TransferCase& transfer, std::string_view defect,
                               const BackendFactory& backend);
// The shortest head of its trace that fails the same check.
TransferCase shortest_failing(const TransferCase& transfer, std::string_view defect,
                              std::string_view check, const BackendFactory& backend);
std::string describe(const TransferCase& transfer);

}  // namespace lockstep
