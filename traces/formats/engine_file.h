// Engine files: a release and the policies in which a fork or a branch differs from it. `--engine`
// takes one wherever it takes a profile.
//
//   {"engine_file": 1, "base": "vllm-0.28.0", "policies": {"freed_blocks": "append"}}
#pragma once

#include <string>

#include "base/json_reader.h"
#include "base/json_writer.h"
#include "base/result.h"
#include "reference/profiles/engine_profile.h"

namespace lockstep {

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
