// What vLLM 0.33.0 made of configurations of its model types: read from config.json alone and
// planned with the recorded options, the layers, groups, blocks and capacity are the recorded ones,
// or the reader refuses with the key. A plan that differs fails; the share of refusals is bounded.
//
// config_plans.jsonl has the configurations, each with its plans in a line of text (plan_texts);
// with $LOCKSTEP_DATA the recordings are read too and must say the same.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "reference/memory/model_placement.h"
#include "reference/plan/model_spec.h"
#include "traces/configs/config_reader.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

std::string read_all(const fs::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string dims_text(const std::vector<std::int64_t>& dims) {
  std::string text;
  for (const std::int64_t dim : dims) text += (text.empty() ? "" : "x") + std::to_string(dim);
  return text;
}

// Bytes of all states, so that three convolutions are one of their common width.
std::string states_text(const std::vector<StateTensorSpec>& states) {
  std::int64_t first = 0;
  for (std::size_t i = 0; i + 1 < states.size(); ++i) {
    std::int64_t bytes = itemsize_bytes(states[i].dtype);
    for (const std::int64_t dim : states[i].dims) bytes *= dim;
    first += bytes;
  }
  return std::to_string(first) + "+" + dims_text(states.back().dims) + " " +
         std::string(name_of(states.back().dtype));
}

DType dtype_of(const std::string& name) {
  return name == "float32"   ? DType::fp32
         : name == "float16" ? DType::fp16
         : name == "uint8"   ? DType::uint8
                             : DType::bf16;
}

// A spec in words. `size_v`: of a V row.
std::string spec_text(const std::string& type, std::int64_t block, std::int64_t heads,
                      std::int64_t size, std::int64_t size_v, const std::string& dtype,
                      std::int64_t extent, std::int64_t tokens_per_row, std::int64_t page) {
  std::string text =
      type + " " + std::to_string(block) + "x" + std::to_string(heads) + "x" + std::to_string(size);
  if (size_v != size) text += "+" + std::to_string(size_v);
  text += " " + dtype;
  if (extent != 0) text += " of " + std::to_string(extent);
  if (tokens_per_row != 1) text += " /" + std::to_string(tokens_per_row);
  return text + " " + std::to_string(page) + "B";
}

std::string text_of(const KVCacheSpec& spec) {
  if (spec.kind == CacheKind::mamba)
    return "states " + std::to_string(spec.block_size) + " " + states_text(spec.states) + " " +
           std::to_string(page_bytes(spec)) + "B" +
           (spec.mamba_cache_mode == MambaCacheMode::align
                ? " checkpoints " + std::to_string(spec.num_prefill_checkpoint_blocks) + " at " +
                      std::to_string(spec.prefill_checkpoint_alignment)
                : "");
  return spec_text(std::string(planned_name_of(spec.kind)), spec.block_size, spec.num_kv_heads,
                   spec.head_size, spec.head_size_v, std::string(name_of(spec.dtype)),
                   spec.sliding_window != 0 ? spec.sliding_window : spec.attention_chunk_size,
                   spec.tokens_per_state.tokens, page_bytes(spec));
}

std::string text_of(const Json& spec) {
  static const std::map<std::string, std::string> kTypes = {
      {"FullAttentionSpec", "full"},
      {"SlidingWindowSpec", "sliding_window"},
      {"ChunkedLocalAttentionSpec", "chunked_local"},
      {"MLAAttentionSpec", "mla"},
      {"SlidingWindowMLASpec", "sliding_window_mla"},
      {"CrossAttentionSpec", "cross"},
      {"CircularBufferSpec", "circular_buffer"}};
  const std::string type = spec.at("class");
  const auto page = spec.at("page_size_bytes").get<std::int64_t>();
  const auto block = spec.at("block_size").get<std::int64_t>();
  if (type == "MambaSpec") {
    std::vector<StateTensorSpec> states;
    for (std::size_t i = 0; i < spec.at("shapes").size(); ++i)
      states.push_back(
          {spec.at("shapes")[i].get<std::vector<std::int64_t>>(), dtype_of(spec.at("dtypes")[i])});
    std::string text = "states " + std::to_string(block) + " " + states_text(states) + " " +
                       std::to_string(page) + "B";
    if (spec.value("mamba_cache_mode", "none") == "align")
      text += " checkpoints " + std::to_string(spec.value("num_prefill_checkpoint_blocks", 0)) +
              " at " + std::to_string(spec.value("prefill_checkpoint_alignment", 0));
    return text;
  }
  const auto known = kTypes.find(type);
  return spec_text(known == kTypes.end() ? type : known->second, block,
                   spec.value("num_kv_heads", 1), spec.at("head_size"), spec.at("head_size_v"),
                   std::string(name_of(dtype_of(spec.at("dtype")))),
                   spec.value("sliding_window", spec.value("attention_chunk_size", 0)),
                   spec.value("tokens_per_state", 1), page);
}

// "3 x a, 1 x b": equal neighbours counted, or all of a bag.
std::string counted(std::vector<std::string> texts, bool in_order) {
  if (!in_order) std::ranges::sort(texts);
  std::string text;
  for (std::size_t i = 0; i < texts.size();) {
    std::size_t end = i;
    while (end < texts.size() && texts[end] == texts[i]) ++end;
    text += (text.empty() ? "" : "; ") + std::to_string(end - i) + " x " + texts[i];
    i = end;
  }
  return text;
}

std::string plan_text(const std::vector<std::string>& layers,
                      const std::vector<std::string>& groups, std::int64_t block_size,
                      std::int64_t num_blocks, const std::string& order, std::int64_t tokens) {
  return "layers " + counted(layers, true) + " | groups " + counted(groups, true) + " | " + order +
         ", blocks of " + std::to_string(block_size) + ", " + std::to_string(num_blocks) +
         " of them, " + std::to_string(tokens) + " tokens";
}

constexpr std::string_view kNothing = "keeps no cache";

std::string recorded_text(const Json& plan) {
  if (plan.value("no_cache", false)) return std::string(kNothing);
  std::vector<std::string> layers, groups;
  const Json& specs = plan.at("specs");
  const Json& of_layers = plan.at("layer_specs");
  for (const Json& spec : of_layers)
    if (!spec.is_null()) layers.push_back(text_of(specs.at(spec.get<std::size_t>())));
  for (const Json& group : plan.at("groups")) {
    const Json& spec = group.at("spec");
    std::vector<std::string> of_group;
    if (spec.is_object() && spec.contains("parts")) {
      for (const Json& layer : group.at("layers"))
        of_group.push_back(
            text_of(specs.at(of_layers[layer.get<std::size_t>()].get<std::size_t>())));
    } else {
      const std::string text = text_of(spec.is_number() ? specs.at(spec.get<std::size_t>()) : spec);
      of_group.assign(group.at("layers").size(), text);
    }
    groups.push_back("(" + counted(of_group, false) + ")");
  }
  return plan_text(layers, groups, plan.at("aligned").at("block_size"), plan.at("num_blocks"),
                   plan.at("layout").at("chosen"), plan.at("capacity").at("tokens"));
}

struct Recorded {
  std::string name, architecture, config;
  bool is_refused = false;  // by vLLM
  std::vector<Json> options;
  std::vector<std::string> plans;
};

// What Lockstep plans; refused: nullopt and the reason.
std::optional<std::string> planned_text(const Recorded& one, const Json& recorded,
                                        std::string& reason) {
  const auto model = model_from_hf_config(one.config, one.name);
  if (!model) {
    reason = model.error().message;
    return std::nullopt;
  }
  if (model->layers.empty()) return std::string(kNothing);
  PlanOptions options;
  options.memory_bytes = recorded.at("memory_bytes");
  options.max_model_len = recorded.at("max_model_len");
  options.max_num_batched_tokens = recorded.at("max_num_batched_tokens");
  options.async_scheduling = true;
  options.mamba_chunk_size = model->mamba_chunk_size;
  options.mamba_cache_mode =
      *from_name<MambaCacheMode>(std::string(recorded.at("mamba_cache_mode")));
  if (const auto format = take_checkpoint_format(*model, options); !format) {
    reason = format.error().message;
    return std::nullopt;
  }
  const auto placed = place_served_model(*model, options, "vllm-0.33.0", "");
  if (!placed) {
    reason = placed.error().message;
    return std::nullopt;
  }
  std::vector<std::string> layers, groups;
  for (const PlacementLayer& layer : placed->stages.layers) layers.push_back(text_of(*layer.spec));
  const Placement& plan = placed->stages.workers.front();
  for (const KVCacheGroupSpec& group : plan.groups) {
    std::vector<std::string> of_group;
    for (std::size_t i = 0; i < group.layer_names.size(); ++i)
      of_group.push_back(text_of(group.layer_spec(i)));
    groups.push_back("(" + counted(of_group, false) + ")");
  }
  return plan_text(layers, groups, placed->stages.alignment->block_size, plan.num_blocks,
                   std::string(name_of(plan.order)), capacity_of(plan, placed->options)->tokens);
}

const Json& plans_of(const Json& json) {
  static const Json kNone = Json::array();
  return json.contains("plans") ? json.at("plans") : kNone;
}

fs::path bundled() { return fs::path(LOCKSTEP_SOURCE_DIR) / "tests/configs/config_plans.jsonl"; }

std::vector<Recorded> bundled_configs() {
  std::vector<Recorded> list;
  std::ifstream file(bundled());
  for (std::string line; std::getline(file, line);) {
    const Json json = Json::parse(line);
    Recorded one;
    one.name = json.at("name");
    one.architecture = json.at("architecture");
    one.config = json.at("config").dump();
    one.is_refused = json.contains("refused");
    for (const Json& plan : plans_of(json)) {
      one.options.push_back(plan.at("options"));
      one.plans.push_back(plan.at("plan"));
    }
    list.push_back(std::move(one));
  }
  return list;
}

std::vector<Recorded> recorded_configs() {
  std::vector<Recorded> list;
  const auto data = find_data_dir();
  const fs::path root = data ? *data / "recordings_more/vllm-0.33.0/models" : fs::path{};
  std::vector<fs::path> folders;
  if (!root.empty() && fs::exists(root))
    for (const auto& entry : fs::directory_iterator(root))
      if (entry.is_directory()) folders.push_back(entry.path());
  std::ranges::sort(folders);
  for (const fs::path& folder : folders) {
    const Json json = Json::parse(read_all(folder / "layers.json"));
    Recorded one;
    one.name = folder.filename().string();
    one.architecture = json.at("architecture");
    one.config = read_all(folder / "config.json");
    one.is_refused = json.contains("refused");
    for (const Json& plan : plans_of(json)) {
      one.options.push_back(plan.at("options"));
      one.plans.push_back(recorded_text(plan));
    }
    list.push_back(std::move(one));
  }
  return list;
}

struct Tally {
  int right = 0, wrong = 0, refused = 0;
};

Tally check(const Recorded& one, std::ostream& table) {
  Tally tally;
  for (std::size_t i = 0; i < one.plans.size(); ++i) {
    std::string reason;
    const auto planned = planned_text(one, one.options[i], reason);
    if (!planned) {
      ++tally.refused;
      table << "REFUSED " << one.name << ": " << reason << "\n";
    } else if (*planned != one.plans[i]) {
      ++tally.wrong;
      table << "WRONG " << one.name << " "
            << one.options[i].at("mamba_cache_mode").get<std::string>() << "\n  recorded "
            << one.plans[i] << "\n  planned  " << *planned << "\n";
    } else {
      ++tally.right;
    }
  }
  return tally;
}

// Architectures in docs/reference/config_json.md, with what the reader made of their plans.
std::string table_of(const std::map<std::string, Tally>& architectures) {
  std::string table = "| architecture | plans right | wrong | refused |\n|---|---|---|---|\n";
  for (const auto& [name, tally] : architectures)
    table += "| " + name + " | " + std::to_string(tally.right) + " | " +
             std::to_string(tally.wrong) + " | " + std::to_string(tally.refused) + " |\n";
  return table;
}

TEST(ConfigPlans, OfRecordedConfigurationsAreThoseThatTheEngineMade) {
  std::stringstream differences;
  std::map<std::string, Tally> architectures;
  Tally all;
  for (const Recorded& one : bundled_configs()) {
    SCOPED_TRACE(one.name);
    if (one.is_refused) {
      EXPECT_FALSE(model_from_hf_config(one.config, one.name));
      continue;
    }
    const Tally tally = check(one, differences);
    Tally& of_architecture = architectures[one.architecture];
    for (Tally* sum : {&all, &of_architecture}) {
      sum->right += tally.right;
      sum->wrong += tally.wrong;
      sum->refused += tally.refused;
    }
  }
  std::cout << differences.str() << all.right << " right, " << all.wrong << " wrong, "
            << all.refused << " refused\n";
  EXPECT_GE(all.right + all.refused, 197);
  EXPECT_EQ(all.wrong, 0);
  EXPECT_LE(all.refused * 20, all.right + all.refused);
  // LOCKSTEP_WRITE_TABLES writes the table instead of comparing it.
  constexpr std::string_view kMark = "<!-- table: tests/configs -->\n";
  const fs::path page = fs::path(LOCKSTEP_SOURCE_DIR) / "docs/reference/config_json.md";
  const std::string text = read_all(page);
  const std::size_t at = text.find(kMark);
  ASSERT_NE(at, std::string::npos) << page;
  const std::string head = text.substr(0, at + kMark.size());
  if (std::getenv("LOCKSTEP_WRITE_TABLES") != nullptr)
    std::ofstream(page) << head << table_of(architectures);
  EXPECT_EQ(text.substr(head.size()), table_of(architectures))
      << "write it with LOCKSTEP_WRITE_TABLES=1 configs_tests";
}

TEST(ConfigPlans, InTheBundleAreThoseOfTheRecordings) {
  const auto recorded = recorded_configs();
  if (recorded.empty()) GTEST_SKIP() << data_dir_hint();
  const auto bundle = bundled_configs();
  ASSERT_EQ(recorded.size(), bundle.size());
  for (std::size_t i = 0; i < bundle.size(); ++i) {
    EXPECT_EQ(bundle[i].plans, recorded[i].plans) << bundle[i].name;
    EXPECT_EQ(Json::parse(bundle[i].config), Json::parse(recorded[i].config)) << bundle[i].name;
  }
}

}  // namespace
}  // namespace lockstep
