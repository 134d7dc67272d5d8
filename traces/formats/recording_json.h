// The lines of a recording as JSON values: for recordings, benchmark files and saved cases.
#pragma once

#include "base/json_reader.h"
#include "base/json_writer.h"
#include "traces/formats/recording.h"

namespace lockstep {

RecordingHeader read_recording_header(JsonValue value);
// The step that must have the number `expected_step`.
RecordedStep read_recorded_step(JsonValue value, const RecordingHeader& header,
                                std::int64_t expected_step);
// The end of a recording that has `steps` steps.
RecordingEnd read_recording_end(JsonValue value, std::int64_t steps);

// {"add":name,"prompt":..,"max_tokens":..} and what may follow; `arrival` is the caller's.
RequestSpec read_added_request(JsonObject& object, bool& priority_given);

}  // namespace lockstep
