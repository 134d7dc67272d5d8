#include "traces/formats/engine_options.h"

#include <algorithm>
#include <array>
#include <limits>
#include <type_traits>

namespace lockstep {
namespace {

// The words of an enum, in order of its values.
template <class E>
constexpr int kWords = 0;
template <>
constexpr std::array kWords<SchedulingPolicy> = std::to_array<JsonWord<SchedulingPolicy>>(
    {{"fcfs", SchedulingPolicy::fcfs}, {"priority", SchedulingPolicy::priority}});
template <>
constexpr std::array kWords<MambaCacheMode> =
    std::to_array<JsonWord<MambaCacheMode>>({{"none", MambaCacheMode::none},
                                             {"align", MambaCacheMode::align},
                                             {"all", MambaCacheMode::all}});
template <>
constexpr std::array kWords<SpecMethod> =
    std::to_array<JsonWord<SpecMethod>>({{"none", SpecMethod::none},
                                         {"ngram", SpecMethod::ngram},
                                         {"draft_model", SpecMethod::draft_model},
                                         {"eagle", SpecMethod::eagle}});
template <>
constexpr std::array kWords<HashAlgorithm> =
    std::to_array<JsonWord<HashAlgorithm>>({{"content", HashAlgorithm::content},
                                            {"sha256_cbor", HashAlgorithm::sha256_cbor},
                                            {"xxhash_cbor", HashAlgorithm::xxhash_cbor}});

struct Option {
  std::string_view name;
  void (*read)(JsonValue, EngineConfig&);
  void (*write)(JsonWriter&, const EngineConfig&);
  void (*copy)(const EngineConfig& from, EngineConfig& to);
};

// An option that is the member `field`; an integer is at least `min`.
template <auto field, std::int32_t min = 0>
constexpr Option option(std::string_view name) {
  using T = std::remove_cvref_t<decltype(std::declval<EngineConfig>().*field)>;
  return {
      name,
      [](JsonValue value, EngineConfig& config) {
        if constexpr (std::is_same_v<T, bool>) {
          config.*field = value.boolean();
        } else if constexpr (std::is_same_v<T, std::string>) {
          config.*field = value.nonempty_string();
        } else if constexpr (std::is_enum_v<T>) {
          config.*field = value.word<T>(kWords<T>);
        } else {
          config.*field = value.integer<T>(min);
        }
      },
      [](JsonWriter& out, const EngineConfig& config) {
        if constexpr (std::is_same_v<T, bool>) {
          out.boolean(config.*field);
        } else if constexpr (std::is_same_v<T, std::string>) {
          out.string(config.*field);
        } else if constexpr (std::is_enum_v<T>) {
          out.string(kWords<T>[static_cast<std::size_t>(config.*field)].first);
        } else {
          out.integer(config.*field);
        }
      },
      [](const EngineConfig& from, EngineConfig& to) { to.*field = from.*field; },
  };
}

constexpr std::array kOptions = std::to_array<Option>({
    option<&EngineConfig::engine>("engine"),
    option<&EngineConfig::max_num_seqs, 1>("max_num_seqs"),
    option<&EngineConfig::max_num_batched_tokens, 1>("max_num_batched_tokens"),
    option<&EngineConfig::max_model_len, 1>("max_model_len"),
    option<&EngineConfig::block_size, 1>("block_size"),
    option<&EngineConfig::mamba_block_size>("mamba_block_size"),
    option<&EngineConfig::enable_prefix_caching>("enable_prefix_caching"),
    option<&EngineConfig::enable_chunked_prefill>("enable_chunked_prefill"),
    option<&EngineConfig::async_scheduling>("async_scheduling"),
    option<&EngineConfig::scheduler_reserve_full_isl>("scheduler_reserve_full_isl"),
    option<&EngineConfig::long_prefill_token_threshold>("long_prefill_token_threshold"),
    option<&EngineConfig::policy>("policy"),
    option<&EngineConfig::mamba_cache_mode>("mamba_cache_mode"),
    option<&EngineConfig::num_spec_tokens>("num_spec_tokens"),
    option<&EngineConfig::spec_method>("spec_method"),
    option<&EngineConfig::dcp, 1>("dcp"),
    option<&EngineConfig::pcp, 1>("pcp"),
    option<&EngineConfig::hash_algorithm>("hash_algorithm"),
    option<&EngineConfig::num_hash_lookahead_tokens, kEngineHashLookahead>(
        "num_hash_lookahead_tokens"),
    option<&EngineConfig::prefix_cache_retention_interval, kDenseRetention>(
        "prefix_cache_retention_interval"),
});

const Option* find_option(std::string_view name) {
  const auto found = std::find_if(kOptions.begin(), kOptions.end(),
                                  [name](const Option& option) { return option.name == name; });
  return found == kOptions.end() ? nullptr : found;
}

const Option& known_option(std::string_view name) {
  const Option* option = find_option(name);
  LS_CHECK(option != nullptr, "no engine option is called {}", name);
  return *option;
}

}  // namespace

EngineOptions read_engine_options(JsonValue value) {
  EngineOptions options;
  for (auto& [key, entry] : value.object().entries()) {
    if (const Option* option = find_option(key)) {
      option->read(entry, options.config);
      options.given.emplace_back(key);
    } else if (!key.starts_with("x_")) {
      entry.refuse_because("found an option that no engine here has; expected a known option");
    }
  }
  return options;
}

void write_engine_options(JsonWriter& out, const EngineOptions& options) {
  out.begin_object();
  for (const std::string& name : options.given) {
    known_option(name).write(out.key(name), options.config);
  }
  out.end_object();
}

EngineOptions all_engine_options(const EngineConfig& config) {
  EngineOptions options{.config = config, .given = {}};
  for (const Option& option : kOptions) options.given.emplace_back(option.name);
  return options;
}

void apply_engine_options(const EngineOptions& options, EngineConfig& config) {
  for (const std::string& name : options.given) known_option(name).copy(options.config, config);
}

RecordedEngine read_recorded_engine(JsonValue value) {
  JsonObject object = value.object();
  RecordedEngine engine;
  engine.name = object.required("name").nonempty_string();
  engine.version = object.required("version").nonempty_string();
  object.finish();
  return engine;
}

void write_recorded_engine(JsonWriter& out, const RecordedEngine& engine) {
  out.begin_object().string("name", engine.name).string("version", engine.version).end_object();
}

}  // namespace lockstep
