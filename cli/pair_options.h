// What `lockstep pair` can be told: a replay's options for both engines, and those of the network
// between them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cli/replay_options.h"
#include "sim/pair/network.h"
#include "sim/pair/transfer_protocol.h"

namespace CLI {
class App;
}

namespace lockstep {

struct PairCommandOptions {
  ReplayOptions replay;  // the decode engine's; the prefill engine's too but for its pool
  std::optional<std::int64_t> prefill_blocks;
  std::int64_t steps_max = 0;
  std::int64_t staging_blocks = 64;
  std::int32_t attempts_max = 3;
  std::int32_t offer_percent = 100;
  NetworkOptions network;
  TransferTimes times;
};

void declare_pair_options(CLI::App& command, PairCommandOptions& options);

}  // namespace lockstep
