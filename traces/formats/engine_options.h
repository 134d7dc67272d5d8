// The options of an engine as JSON objects: recordings, trace hints, saved cases.
#pragma once

#include <string>

#include "base/json_reader.h"
#include "base/json_writer.h"
#include "base/result.h"
#include "reference/profiles/engine_profile.h"
#include "traces/formats/recording.h"

namespace lockstep {

// Where options that bound inputs may stand: an engine here has none of them.
enum class InputsIn : std::uint8_t { nowhere, recording };

// An object whose keys are options of EngineConfig, any of them, and of InputOptions.
EngineOptions read_engine_options(JsonValue value, InputsIn inputs_in = InputsIn::nowhere);
// The options given, in their order.
void write_engine_options(JsonWriter& out, const EngineOptions& options);
// Every option of `config`.
EngineOptions all_engine_options(const EngineConfig& config);
// Overwrites in `config` what `options` gives.
void apply_engine_options(const EngineOptions& options, EngineConfig& config);

// The header of a recording of this configuration, less the block sizes, which the engine derives.
// REQUIRES: a profile's name, "NAME-VERSION", in config.engine.
RecordingHeader header_of_engine(const EngineConfig& config,
                                 const std::vector<KVCacheGroupSpec>& groups,
                                 std::int64_t num_blocks);
// Adds a KV connector to that header's engine.
void connect_engine(RecordingHeader& header, KVLoadFailurePolicy policy,
                    const KVConnectorTraits& traits);

// {"name":..,"version":..}
RecordedEngine read_recorded_engine(JsonValue value);
void write_recorded_engine(JsonWriter& out, const RecordedEngine& engine);

// Engine files: a release and the policies in which a fork or a branch differs from it. `--engine`
// takes one wherever it takes a profile.
//
//   {"engine_file": 1, "base": "vllm-0.28.0", "policies": {"freed_blocks": "append"}}

// An object of policies and their words as the end of a description: ",freed_blocks=append".
std::string read_policies(JsonValue value);
// What a profile has otherwise than its release.
void write_policies(JsonWriter& out, const EngineProfile& profile);

// REQUIRES: the profile lives on (parse_engine).
Result<const EngineProfile*> read_engine_file(const std::string& path);
std::string engine_file_text(const EngineProfile& profile);  // ends with a newline

// The canonical description of what a user names: a profile, or the path of an engine file (it ends
// in ".json"). Errors begin with `where`.
Result<std::string> engine_named(std::string_view where, const std::string& text);

}  // namespace lockstep
