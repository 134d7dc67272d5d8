// Options are rows of the table in run_fields.cpp, so that files, the command line and saved cases
// agree on names and ranges. Only the options of request inputs have their own small table here.
#include "traces/formats/engine_options.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/json_fields.h"
#include "base/line_reader.h"
#include "reference/plan/limits.h"
#include "reference/profiles/policies.h"
#include "reference/profiles/releases.h"
#include "traces/formats/run_fields.h"

namespace lockstep {
namespace {

// An option of EngineConfig by its name in files; null: no such option, or a setting of the run
// only.
const RunField* find_option(std::string_view name) {
  const RunField* field = find_run_field(name);
  return field != nullptr && field->saved_in == SavedIn::engine ? field : nullptr;
}

// An option of request inputs: its name in files, and how it is read and written.
struct InputOption {
  std::string_view name;
  void (*read)(JsonValue, InputOptions&);
  void (*write)(JsonWriter&, const InputOptions&);
};

// Rows for optional numbers and flags. A row is written only if the file gave it, hence value_or()
// never supplies a value that the file did not have.
template <auto member>
constexpr InputOption number_option(std::string_view name) {
  return {name,
          [](JsonValue value, InputOptions& inputs) {
            inputs.*member = value.integer<std::int32_t>(0, kTokensMax);
          },
          [](JsonWriter& out, const InputOptions& inputs) {
            out.integer((inputs.*member).value_or(0));
          }};
}

template <auto member>
constexpr InputOption flag_option(std::string_view name) {
  return {name, [](JsonValue value, InputOptions& inputs) { inputs.*member = value.boolean(); },
          [](JsonWriter& out, const InputOptions& inputs) {
            out.boolean((inputs.*member).value_or(false));
          }};
}

// `runner` is recorded only for pooling models; vLLM's default "generate" has no key.
void read_runner(JsonValue value, InputOptions& inputs) {
  inputs.runner = value.string();
  if (inputs.runner != "pooling") value.refuse("\"pooling\", or no such option");
}

constexpr InputOption kInputOptions[] = {
    number_option<&InputOptions::max_loras>("max_loras"),
    number_option<&InputOptions::mm_max_item_embeds>("mm_max_item_embeds"),
    flag_option<&InputOptions::disable_chunked_mm_input>("disable_chunked_mm_input"),
    flag_option<&InputOptions::is_encoder_decoder>("is_encoder_decoder"),
    {"runner", read_runner,
     [](JsonWriter& out, const InputOptions& inputs) { out.string(inputs.runner); }},
};

const InputOption* find_input_option(std::string_view name) {
  const auto* const found = std::ranges::find(kInputOptions, name, &InputOption::name);
  return found == std::end(kInputOptions) ? nullptr : found;
}

}  // namespace

// Duplicate keys are refused by the JSON reader; `given` therefore has each name once.
EngineOptions read_engine_options(JsonValue value, InputsIn inputs_in) {
  EngineOptions options;
  RunSpec run;
  for (auto& [key, entry] : value.object().entries()) {
    if (const RunField* option = find_option(key)) {
      option->read(*option, entry, run);
      options.given.emplace_back(key);
    } else if (const InputOption* input = find_input_option(key);
               input != nullptr && inputs_in == InputsIn::recording) {
      input->read(entry, options.inputs);
      options.given.emplace_back(key);
    } else if (!key.starts_with("x_")) {
      entry.refuse_because("found an unknown option; expected a known option");
    }
  }
  options.config = run.engine;
  return options;
}

void write_engine_options(JsonWriter& out, const EngineOptions& options) {
  // Rows write members of a RunSpec, so the engine's options are wrapped into one.
  RunSpec run;
  run.engine = options.config;
  out.begin_object();
  for (const std::string& name : options.given) {
    const InputOption* const input = find_input_option(name);
    if (input != nullptr)
      input->write(out.key(name), options.inputs);
    else
      run_field(name).write(out.key(name), run);
  }
  out.end_object();
}

EngineOptions all_engine_options(const EngineConfig& config) {
  EngineOptions options{.config = config, .given = {}};
  for (const RunField& field : run_fields())
    if (field.saved_in == SavedIn::engine) options.given.emplace_back(field.name);
  return options;
}

template <class Io>
void fields(Io& io, FieldsOf<Io, RecordedEngine>& engine) {
  io.required("name", engine.name);
  io.required("version", engine.version);
  io.optional("policies", engine.policies,
              form::Code{read_policies, [&](JsonWriter& out, const std::string&) {
                           write_policies(out, engine_profile(engine.profile()));
                         }});
}

RecordedEngine read_recorded_engine(JsonValue value) {
  return row_of_fields<RecordedEngine>(value);
}

void write_recorded_engine(JsonWriter& out, const RecordedEngine& engine) {
  write_fields(out, engine);
}

// Only versions of vLLM are mapped to the nearest release: for other engines a nearest version
// would claim rules that no comparison supports.
std::string RecordedEngine::profile() const {
  const std::string own = text();
  if (name != "vllm" || find_engine_profile(own) != nullptr) return own;
  return std::string(nearest_release(version).name) + policies;
}

// The name of a profile is RELEASE,POLICY=WORD,...; the release's name is NAME-VERSION.
RecordingHeader header_of_engine(const EngineConfig& config,
                                 const std::vector<KVCacheGroupSpec>& groups,
                                 std::int64_t num_blocks) {
  const EngineProfile& profile = engine_profile(config.engine);
  const std::string_view release = profile.release->name;
  const std::size_t dash = release.find('-');
  RecordingHeader header{
      .engine = {std::string(release.substr(0, dash)), std::string(release.substr(dash + 1)),
                 profile.name.substr(release.size())},
      .family = "lockstep"};
  header.options.config = config;
  // Resolved here, because a reader of the recording must not depend on this profile's rule.
  header.options.config.num_hash_lookahead_tokens = hash_lookahead_of(config, profile);
  header.options.given = {"max_num_seqs",
                          "max_num_batched_tokens",
                          "max_model_len",
                          "block_size",
                          "enable_prefix_caching",
                          "enable_chunked_prefill",
                          "scheduler_reserve_full_isl"};
  // Optional options are stated only where they differ from their default.
  const auto give = [&](bool differs, const char* name) {
    if (differs) header.options.given.emplace_back(name);
  };
  const EngineConfig defaults;
  give(config.async_scheduling, "async_scheduling");
  give(config.long_prefill_token_threshold != 0, "long_prefill_token_threshold");
  give(config.policy != defaults.policy, "policy");
  give(config.mamba_cache_mode != defaults.mamba_cache_mode, "mamba_cache_mode");
  give(config.mamba_block_size != 0, "mamba_block_size");
  give(config.num_spec_tokens != 0, "num_spec_tokens");
  give(config.spec_method != SpecMethod::none, "spec_method");
  give(header.options.config.num_hash_lookahead_tokens != 0, "num_hash_lookahead_tokens");
  give(config.prefix_cache_retention_interval != kDenseRetention,
       "prefix_cache_retention_interval");
  give(config.num_prefill_lookahead_tokens != defaults.num_prefill_lookahead_tokens,
       "num_prefill_lookahead_tokens");
  give(config.prefix_match_unit != 0, "prefix_match_unit");
  give(config.dcp != 1, "dcp");
  give(config.pcp != 1, "pcp");
  give(config.hash_algorithm != HashAlgorithm::content, "hash_algorithm");
  header.has_cache_events =
      config.enable_prefix_caching && config.hash_algorithm != HashAlgorithm::content;
  header.groups = groups;
  header.num_blocks = num_blocks;
  return header;
}

void connect_engine(RecordingHeader& header, KVLoadFailurePolicy policy,
                    const KVConnectorTraits& traits) {
  const EngineProfile* profile = find_engine_profile(header.engine.profile());
  const bool drops = profile != nullptr && profile->drops_output_of_victims;
  header.connector =
      RecordedConnectorConfig{.fail_on_load_error = policy == KVLoadFailurePolicy::fail,
                              .supports_hybrid_groups = header.groups.size() > 1,
                              .requires_kv_delivery = drops && traits.requires_kv_delivery};
  // With a connector vLLM keeps hashes without lookahead (0.33.0, config/vllm.py,
  // num_hash_lookahead_tokens()).
  EngineConfig& config = header.options.config;
  if (config.num_hash_lookahead_tokens > 0) config.num_hash_lookahead_tokens = 0;
}

constexpr std::size_t kEngineFileMax = 1 << 20;

// Stops at the first unknown policy or word: the reader keeps only the first error anyway.
std::string read_policies(JsonValue value) {
  std::string description;
  JsonObject object = value.object();
  for (JsonEntry& entry : object.entries()) {
    const Policy* policy = find_policy(entry.key);
    if (policy == nullptr) {
      entry.value.refuse("a policy that `lockstep engines` lists");
      break;
    }
    const std::string_view word = entry.value.nonempty_string();
    if (std::ranges::find(policy->values, word, &PolicyValue::word) == policy->values.end()) {
      entry.value.refuse("a value that `lockstep engines` lists for this policy");
      break;
    }
    description += fmt::format(",{}={}", policy->name, word);
  }
  return description;
}

void write_policies(JsonWriter& out, const EngineProfile& profile) {
  out.begin_object();
  for (const Policy* policy : differences(profile, engine_profile(profile.release->name)))
    out.string(policy->name, policy->word(policy->get(profile)));
  out.end_object();
}

Result<const EngineProfile*> read_engine_file(const std::string& path) {
  LS_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, kEngineFileMax));
  JsonReader reader(path);
  if (!reader.parse(text)) return reader.failure();
  JsonObject object = reader.root().object();
  object.required("engine_file").integer(1, 1);
  // `base` may itself have policies after a comma; parse_engine() reads them together with the
  // object's.
  std::string description(object.required("base").nonempty_string());
  if (auto policies = object.optional("policies")) description += read_policies(policies);
  object.finish();
  if (!reader.ok()) return reader.failure();
  auto profile = parse_engine(description);
  if (!profile) return fail("{}: base: {}", path, profile.error().message);
  return profile;
}

std::string engine_file_text(const EngineProfile& profile) {
  return object_line([&](JsonWriter& out) {
    out.integer("engine_file", 1).string("base", profile.release->name).key("policies");
    write_policies(out, profile);
  });
}

Result<std::string> engine_named(std::string_view where, const std::string& text) {
  const auto profile = text.ends_with(".json") ? read_engine_file(text) : parse_engine(text);
  if (!profile) return fail("{}: {}", where, profile.error().message);
  return (*profile)->name;
}

}  // namespace lockstep
