// Turns two different numbers into a Divergence: the exact byte, what is stored there, the request
// that owns it and the write that put it there. Reads the backend again where that adds
// information, and changes neither side.
//
// Invariants
// (1) Every Divergence has phase, step, message and `doing`. The other fields are set where they
//     apply.
// (2) Positions of bytes are those of the first wrong byte or table entry; wrong_bytes counts all
//     of its page.
// (3) A value that is right on a second read is still a divergence. Its message states that the
//     fingerprint or digest was wrong, or that the memory changed in between.
//
// Not decided here: whether two values differ (sim/check/comparer.h).
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

// Diagnoses the divergences of one rank. Expensive calls are acceptable: a run ends with its first
// divergence.
class Diagnosis {
 public:
  Diagnosis(const BackendConfig& config, MemoryModel& model, Worker& worker, Backend& backend)
      : config_(config), model_(model), worker_(worker), backend_(backend) {}

  // Sets the step that later divergences describe. `program` must outlive them.
  // REQUIRES: called before any other method.
  void begin_step(const StepProgram& program, std::span<const RequestId> requests);

  // Diagnoses a page whose fingerprint differs: reads the page, and compares it with the model's
  // image.
  Result<Divergence> page(Phase phase, ModelPage page);
  // Diagnoses the first wrong entry of a row's block table. `found`: the row as read back, of any
  // length; a missing or surplus entry is reported as "no entry". `row`: index in
  // StepProgram::rows.
  Divergence table(std::size_t row, std::int32_t group, std::span<const std::int32_t> found);
  // Diagnoses entry `token` of a group's slot mapping: a scheduled token, padding or an encoder
  // row.
  Divergence slot(std::int32_t group, std::size_t token, Slot expected, Slot found);
  // Diagnoses a wrong digest. Bisects its positions with further probes down to the first one that
  // reads wrong: about log2(n) probes for n positions.
  Result<Divergence> digest(const AttentionProbe& probe, RequestId request, std::uint64_t expected,
                            std::uint64_t found);
  // Diagnoses element `element` of a query's output, counted over [num_query_heads, head_size].
  Divergence output(const AttentionQuery& query, RequestId request, std::size_t element,
                    double expected, double found, double tolerance);
  // Diagnose a number of a state after an update, and a number of the outputs for the update's last
  // token. `element`: index within the state tensor, or within its outputs.
  Divergence state(const StateUpdate& update, const ModelLayer& layer, std::size_t state,
                   std::int64_t element, double expected, double found, double tolerance) const;
  Divergence state_output(const StateUpdate& update, const ModelLayer& layer, std::size_t state,
                          std::int32_t token, std::int64_t element, double expected, double found,
                          double tolerance) const;
  // Passes on a report of the backend's memory checker, with the expected owner of the byte that it
  // names. A byte outside the cache has no owner.
  Divergence report(const MemoryReport& report);
  // Diagnoses a host block whose fingerprint differs. Names the layer only if the byte is within
  // what a block of the group stores; later bytes belong to an earlier, larger block.
  Result<Divergence> host_block(HostBlockId host);

 private:
  // Starts a Divergence with the fields that all of them share.
  Divergence about(Phase phase) const;
  Divergence about_state(Phase phase, const StateUpdate& update, const ModelLayer& layer,
                         std::size_t state) const;
  // The setters fill groups of fields. set_doing() needs found.request, set_slot() needs
  // found.group.
  void set_doing(Divergence& found) const;
  void set_owner(Divergence& found, ModelPage page, std::int64_t byte) const;
  void set_layer(Divergence& found, std::int32_t layer) const;
  // Sets `writer`: the last write by the model's journal and, if the backend records writers, by
  // the backend.
  void set_journal(Divergence& found, ModelPage page, std::int64_t byte) const;
  // Sets token, block and slot of a position, which counts sinks in front of the request's tokens.
  // REQUIRES: the rank keeps the position.
  void set_slot(Divergence& found, const WorkerRequest& request, std::int64_t position) const;
  // Returns the contents of a probe's positions: rows of an encoder, or tokens after the sinks.
  PrefixContent& contents_of(const ModelLayer& layer, WorkerRequest& request) const {
    return model_.is_encoder_group(layer.group) ? request.encoder : request.prefix;
  }
  // Executes one probe on the backend; true if its digest differs from the model's.
  Result<bool> reads_wrong(const AttentionProbe& probe, WorkerRequest& request);

  const BackendConfig& config_;
  MemoryModel& model_;
  Worker& worker_;
  Backend& backend_;
  const StepProgram* program_ = nullptr;
  std::vector<RequestId> requests_;  // of program_->rows, in their order
};

// Splits a page into runs of bytes with one purpose: rows, states, padding. Together the runs cover
// every byte exactly once, in ascending order.
std::vector<PageSpan> page_spans(const MemoryModel& model, ModelPage page);

// Finds content that explains bytes found in place of the expected ones: searches all contents that
// the model expects anywhere in the cache, poison patterns and states. Returns a phrase for a
// message, or an empty text if nothing matches.
//
// Read-only, but expensive: it tries every live row and state. For divergences, not for steps.
//
// `found` are the bytes at `first_byte` of the page: a whole row if `owner` is a row, else any
// bytes. Only whole words of 8 bytes that differ from `expected` are searched.
std::string whose_content(const MemoryModel& model, const ByteOwner& owner, std::int64_t first_byte,
                          std::span<const std::uint8_t> found,
                          std::span<const std::uint8_t> expected);

// Returns the name of a part for messages: "K", "V", "latent row", "hidden state", "state 1".
std::string part_name(const ModelLayer& layer, std::int64_t part);

}  // namespace lockstep
