// The configuration of two engines and their network, and what is refused.
#pragma once

#include <cstdint>
#include <vector>

#include "sim/pair/network.h"
#include "sim/pair/transfer_protocol.h"
#include "sim/session/session.h"

namespace lockstep {

struct PairOptions {
  // Both: engine vllm-0.22.1, the same groups; pools may differ. With backends num_host_blocks is
  // the size of each one's staging buffer.
  LockstepConfig prefill;
  LockstepConfig decode;
  // A backend for each tensor parallel rank of both, or of neither, made with their configurations;
  // they outlive the run. With them pages are sent and compared, without them content ids.
  std::vector<Backend*> prefill_ranks;
  std::vector<Backend*> decode_ranks;
  std::int64_t staging_blocks = 64;  // that a step stores or loads at most
  NetworkOptions network;
  TransferTimes times;
  KVLoadFailurePolicy load_failure_policy = KVLoadFailurePolicy::recompute;
  std::int32_t attempts_max = 3;
  // Of a prompt's tokens, in whole blocks, that the prefill engine offers: caches may keep parts.
  std::int32_t offer_percent = 100;
  StepTimeModel step_time;
  std::int64_t steps_max = 0;  // of both engines together; 0: no limit
  bool is_apart = true;        // false: the decode engine does everything, nothing is transferred
  TransferDefect defect = TransferDefect::none;

  bool has_pages() const { return !decode_ranks.empty(); }
};

// Refused: blocks that are not transferred, engines that cannot read one another's blocks, ranks of
// other kinds than tensor parallel ones.
Result<void> check_pair(const PairOptions& options);

}  // namespace lockstep
