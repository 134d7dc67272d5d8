// Model files: the caches of a model's layers, in a few lines of JSON (docs/planner.md); the
// catalogue of them that comes with the project; and a Hugging Face config.json read as one.
//
// Not checked here: whether a release serves the model; the planner refuses what it cannot plan.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "reference/plan/model_spec.h"

namespace lockstep {

// Finds the folder of recordings and traces that are too large for the project: $LOCKSTEP_DATA when
// set (nothing else then), otherwise `shared` next to the project's source, otherwise ../shared of
// the current folder; absent: no such folder.
std::optional<std::filesystem::path> find_data_dir();

// Returns where find_data_dir() looked, for the message about a skipped test.
std::string data_dir_hint();

// Finds the project's own samples: traces/samples of the data root (base/data_root.h) or of the
// current folder; absent: neither exists.
std::optional<std::filesystem::path> find_samples_dir();

// Reads a model file or a config.json; the key `model_file` distinguishes them. At most 4 MiB.
Result<ModelSpec> read_model_file(const std::string& path);
// Reads the text of a model file; `file` names it in errors. A model without any cache is an error.
Result<ModelSpec> model_from_text(std::string_view text, const std::string& file);

// Reads a model of the catalogue by its name, or a file by its path. A name of the catalogue takes
// precedence over a file. An unknown name is an error that lists the catalogue.
Result<ModelSpec> find_model(const std::string& name_or_path);

// Names of the catalogue, sorted; empty: no catalogue is installed.
std::vector<std::string> model_names();

// Returns a model file from which model_from_text() gives the same model, without its assumptions.
std::string model_to_json(const ModelSpec& model);

}  // namespace lockstep
