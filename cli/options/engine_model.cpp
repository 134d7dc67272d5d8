#include "cli/options/engine_model.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/child_process.h"
#include "base/output_file.h"
#include "cli/options/decisions_option.h"
#include "cli/output/again.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

// Imports take most of the time.
constexpr std::chrono::minutes kTimeLimit{10};

}  // namespace

void declare_from(CLI::App& command, std::string& from) {
  declare_engine_python(command);
  command
      .add_option("--from", from,
                  "engine that builds the layers of a config.json: vllm or vllm:DIR (none: "
                  "Lockstep's own reader)")
      ->type_name("ENGINE");
}

Result<std::string> engine_model(const std::string& config, const std::string& from) {
  namespace fs = std::filesystem;
  if (from != "vllm" && !from.starts_with("vllm:"))
    return fail("--from {}: expected vllm or vllm:DIR", from);
  // An engine reads a model's whole folder, not only its config.json.
  const fs::path folder =
      fs::is_directory(config) ? fs::path(config) : fs::absolute(config).parent_path();
  if (!fs::is_regular_file(folder / "config.json"))
    return fail("{}: expected a config.json or its folder", config);
  LS_ASSIGN_OR_RETURN(const std::string adapter, adapter_command("--from", from));
  LS_ASSIGN_OR_RETURN(const auto engine,
                      LineProcess::start(fmt::format("{} --layers {}", adapter,
                                                     shell_word(fs::absolute(folder).string()))));
  std::string_view line;
  // One line of JSON: the model file, or {"refused": reason}.
  const auto end = engine->receive(line, kTimeLimit);
  if (end == LineProcess::End::timed_out)
    return fail("{}: {} did not build the model in {} minutes", config, from, kTimeLimit.count());
  if (end == LineProcess::End::ended) {
    const std::string how = engine->how_it_ended();
    const std::string words = engine->last_words();
    // A missing package is the user's to install, so only the adapter's instruction is shown.
    if (how == kEngineNotReady) return fail("--from: {}", last_line(words));
    return fail("{}: {} does not start ({}): {}", config, from, how, last_line(words));
  }
  const auto reply = nlohmann::json::parse(line, nullptr, false);
  if (!reply.is_object()) return fail("{}: the reply of {} is not a JSON object", config, from);
  if (reply.contains("refused")) return fail("{}: {}", config, reply["refused"].get<std::string>());
  std::string text = std::string(line) + "\n";
  // Parsed here only for its error: the caller stores the text.
  if (auto model = model_from_text(text, config); !model) return tl::unexpected(model.error());
  return text;
}

Result<void> take_engine_model(std::string& config, const std::string& from) {
  if (from.empty()) return {};
  LS_ASSIGN_OR_RETURN(const std::string text, engine_model(config, from));
  // The name is a hash of the text: a repeated command finds the same file.
  const auto name = fmt::format("lockstep-model-{:016x}.json", std::hash<std::string>{}(text));
  const std::string path = (std::filesystem::temp_directory_path() / name).string();
  LS_RETURN_IF_ERROR(write_output(path, text));
  fmt::print("model file of {}: {}\n", from, path);
  config = path;
  return {};
}

}  // namespace lockstep
