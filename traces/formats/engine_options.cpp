#include "traces/formats/engine_options.h"

#include "reference/profiles/releases.h"
#include "traces/formats/engine_file.h"
#include "traces/formats/run_fields.h"

namespace lockstep {
namespace {

const RunField* find_option(std::string_view name) {
  const RunField* field = find_run_field(name);
  return field != nullptr && field->saved_in == SavedIn::engine ? field : nullptr;
}

const RunField& known_option(std::string_view name) {
  const RunField* option = find_option(name);
  LS_CHECK(option != nullptr, "no engine option is called {}", name);
  return *option;
}

// A run with this engine, for rows to look at.
RunSpec run_of(const EngineConfig& engine) {
  RunSpec run;
  run.engine = engine;
  return run;
}

}  // namespace

EngineOptions read_engine_options(JsonValue value) {
  EngineOptions options;
  RunSpec run;
  for (auto& [key, entry] : value.object().entries()) {
    if (const RunField* option = find_option(key)) {
      option->read(*option, entry, run);
      options.given.emplace_back(key);
    } else if (!key.starts_with("x_")) {
      entry.refuse_because("found an option that no engine here has; expected a known option");
    }
  }
  options.config = run.engine;
  return options;
}

void write_engine_options(JsonWriter& out, const EngineOptions& options) {
  const RunSpec run = run_of(options.config);
  out.begin_object();
  for (const std::string& name : options.given) known_option(name).write(out.key(name), run);
  out.end_object();
}

EngineOptions all_engine_options(const EngineConfig& config) {
  EngineOptions options{.config = config, .given = {}};
  for (const RunField& field : run_fields())
    if (field.saved_in == SavedIn::engine) options.given.emplace_back(field.name);
  return options;
}

void apply_engine_options(const EngineOptions& options, EngineConfig& config) {
  const RunSpec from = run_of(options.config);
  RunSpec to = run_of(config);
  for (const std::string& name : options.given) known_option(name).copy(from, to);
  config = to.engine;
}

RecordedEngine read_recorded_engine(JsonValue value) {
  JsonObject object = value.object();
  RecordedEngine engine;
  engine.name = object.required("name").nonempty_string();
  engine.version = object.required("version").nonempty_string();
  if (auto policies = object.optional("policies")) engine.policies = read_policies(policies);
  object.finish();
  return engine;
}

void write_recorded_engine(JsonWriter& out, const RecordedEngine& engine) {
  out.begin_object().string("name", engine.name).string("version", engine.version);
  if (!engine.policies.empty())
    write_policies(out.key("policies"), engine_profile(engine.profile()));
  out.end_object();
}

std::string RecordedEngine::profile() const {
  const std::string own = text();
  if (name != "vllm" || find_engine_profile(own) != nullptr) return own;
  return std::string(nearest_release(version).name) + policies;
}

}  // namespace lockstep
