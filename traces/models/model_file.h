// Model files: what a model's layers keep, in a few lines of JSON (docs/planner.md); the
// catalogue of them that comes with the project; and a Hugging Face config.json read as one.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "reference/plan/model_spec.h"

namespace lockstep {

// Where optional data lies: recordings and traces too large for the project.

// $LOCKSTEP_DATA when set (and a folder), otherwise the folder `shared` next to the project's
// source, otherwise ../shared seen from the current folder; absent when there is none.
std::optional<std::filesystem::path> find_data_dir();

// Where find_data_dir() looked, for the sentence that says why something was skipped.
std::string data_dir_hint();

// The project's own samples: traces/samples in the source folder this was built from, or ./traces/
// samples of the current folder; absent when there is neither.
std::optional<std::filesystem::path> find_samples_dir();

// A model file or a config.json, told apart by the key `model_file`.
Result<ModelSpec> read_model_file(const std::string& path);
// The text of a model file; `file` names it in errors.
Result<ModelSpec> model_from_text(std::string_view text, const std::string& file);

// A name of the catalogue, or a path. An unknown name is an Error that lists the catalogue.
Result<ModelSpec> find_model(const std::string& name_or_path);

// Names of the catalogue, sorted.
std::vector<std::string> model_names();

// A model file that says the same; read_model_file gives the same model back.
std::string model_to_json(const ModelSpec& model);

}  // namespace lockstep
