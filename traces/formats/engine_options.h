// The options of an engine as JSON objects (recordings, trace hints, saved cases), and engine
// files.
//
// Not checked here: whether a release supports the options together (resolve_block_sizes() and the
// profile do that), and limits of sizes (reference/plan/limits.h).
#pragma once

#include <string>

#include "base/json_reader.h"
#include "base/json_writer.h"
#include "base/result.h"
#include "reference/profiles/engine_profile.h"
#include "traces/formats/recording.h"

namespace lockstep {

// Whether the object may have InputOptions. Recordings have them; elsewhere such an option is
// refused, since no engine here would follow it.
enum class InputsIn : std::uint8_t { nowhere, recording };

// Reads an object whose keys are options of EngineConfig, any subset in any order, and of
// InputOptions. An unknown option is refused, unless its name starts with x_.
EngineOptions read_engine_options(JsonValue value, InputsIn inputs_in = InputsIn::nowhere);
// Writes only the options in `given`, in their order.
void write_engine_options(JsonWriter& out, const EngineOptions& options);
// Returns `config` with every option marked as given: saved cases state all of them, so that a
// later change of a default does not change the case.
EngineOptions all_engine_options(const EngineConfig& config);

// Returns the header of a recording of this configuration. Both block sizes stay 0: the engine
// derives them. Options that have their default are omitted, except for those that every recording
// states. REQUIRES: config.engine is the name of a profile.
RecordingHeader header_of_engine(const EngineConfig& config,
                                 const std::vector<KVCacheGroupSpec>& groups,
                                 std::int64_t num_blocks);
// Adds a KV connector to the header's engine. Hash lookahead is switched off then, as the engine
// core does with a connector.
void connect_engine(RecordingHeader& header, KVLoadFailurePolicy policy,
                    const KVConnectorTraits& traits);

// {"name":..,"version":..}, with "policies" where the engine differs from its release.
RecordedEngine read_recorded_engine(JsonValue value);
void write_recorded_engine(JsonWriter& out, const RecordedEngine& engine);

// Engine files: a release and the policies in which a fork or a branch differs from it. `--engine`
// takes one wherever it takes a profile.
//
//   {"engine_file": 1, "base": "vllm-0.28.0", "policies": {"freed_blocks": "append"}}

// Reads an object of policies and their words as the suffix of an engine's description:
// ",freed_blocks=append". Errors name `lockstep engines`, which lists both.
std::string read_policies(JsonValue value);
// Writes the policies in which a profile differs from its release; {} where it does not.
void write_policies(JsonWriter& out, const EngineProfile& profile);

// Reads an engine file of at most 1 MiB. The profile is registered by parse_engine() and is never
// destroyed, so the pointer stays valid.
Result<const EngineProfile*> read_engine_file(const std::string& path);
std::string engine_file_text(const EngineProfile& profile);  // ends with a newline

// Returns the canonical description of the engine that a user names: a profile with or without
// policies, or the path of an engine file (it ends in ".json"). Errors begin with `where`.
Result<std::string> engine_named(std::string_view where, const std::string& text);

}  // namespace lockstep
