// From two different numbers to a Divergence that states the exact byte, what is stored there and
// which write put it there. Reads the backend again where that adds information; changes nothing.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "reference/memory/memory_model.h"
#include "sim/protocol/backend.h"
#include "sim/step/worker.h"
#include "sim/verdict/divergence.h"

namespace lockstep {

class Diagnosis {
 public:
  Diagnosis(const BackendConfig& config, MemoryModel& model, Worker& worker, Backend& backend)
      : config_(config), model_(model), worker_(worker), backend_(backend) {}

  // What every divergence of the step says about it. REQUIRES: before the others.
  void begin_step(const StepProgram& program, std::span<const RequestId> requests);

  // A page whose fingerprint is not the expected one.
  Result<Divergence> page(Phase phase, ModelPage page);
  // Entry `entry` of a row's block table; reports an absent one as absent.
  Divergence table(std::size_t row, std::int32_t group, std::span<const std::int32_t> found);
  Divergence slot(std::int32_t group, std::size_t token, Slot expected, Slot found);
  // Probes again and again until the first position is found whose rows read wrong.
  Result<Divergence> digest(const AttentionProbe& probe, RequestId request, std::uint64_t expected,
                            std::uint64_t found);
  Divergence output(const AttentionQuery& query, RequestId request, std::size_t element,
                    double expected, double found, double tolerance);
  // A number of a state, after an update, and what an update gave out for its last token.
  Divergence state(const StateUpdate& update, const ModelLayer& layer, std::size_t state,
                   std::int64_t element, double expected, double found, double tolerance) const;
  Divergence state_output(const StateUpdate& update, const ModelLayer& layer, std::size_t state,
                          std::int64_t element, double expected, double found,
                          double tolerance) const;
  Divergence report(const MemoryReport& report);
  // A host block whose fingerprint is not the expected one.
  Result<Divergence> host_block(HostBlockId host);

 private:
  Divergence about(Phase phase) const;
  Divergence about_state(Phase phase, const StateUpdate& update, const ModelLayer& layer,
                         std::size_t state) const;
  void set_doing(Divergence& found) const;
  void set_owner(Divergence& found, ModelPage page, std::int64_t byte) const;
  void set_layer(Divergence& found, std::int32_t layer) const;
  void set_journal(Divergence& found, ModelPage page, std::int64_t byte) const;
  void set_slot(Divergence& found, const WorkerRequest& request, std::int64_t position) const;
  // The contents of a probe's positions: rows of an encoder, or tokens after the sinks.
  PrefixContent& contents_of(const ModelLayer& layer, WorkerRequest& request) const {
    return model_.is_encoder_group(layer.group) ? request.encoder : request.prefix;
  }
  Result<bool> reads_wrong(const AttentionProbe& probe, WorkerRequest& request);

  const BackendConfig& config_;
  MemoryModel& model_;
  Worker& worker_;
  Backend& backend_;
  const StepProgram* program_ = nullptr;
  std::vector<RequestId> requests_;
};

// Every byte of the page in runs: rows, states, what is unused.
std::vector<PageSpan> page_spans(const MemoryModel& model, ModelPage page);

// Finds the owner of bytes: searches all contents that the model expects in the cache for one that
// explains what was found in place of the expected bytes.
//
// Read-only, but expensive: it tries every live row and state. For divergences, not for steps.

// `found` are the bytes at `first_byte` of the page, a row as far as the model knows (`owner`), or
// any bytes. Empty: they belong to nothing.
std::string whose_content(const MemoryModel& model, const ByteOwner& owner, std::int64_t first_byte,
                          std::span<const std::uint8_t> found);

// "K", "V", "row", "state 1".
std::string part_name(const ModelLayer& layer, std::int64_t part);

}  // namespace lockstep
