// The house rules that a machine can check, as functions from a file's text to what is wrong in it.
//
// Not checked here: formatting (clang-format), names (clang-tidy), whether a comment is true.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::tidy {

struct SourceFile {
  std::string path;  // relative to the project, with slashes
  std::string text;
};

struct Finding {
  std::string path;
  int line = 0;  // 1-based; 0: the file as a whole
  std::string what;
};
using Findings = std::vector<Finding>;

bool is_code(std::string_view path);  // C++ or CUDA, not build files, scripts or data

// Lines of at most 100 characters in code and in prose (documents may quote output and addresses),
// spaces only, nothing at their ends, a newline at the file's end.
Findings check_lines(const SourceFile& file);
// A code file holds one idea: at most 600 lines. A header has #pragma once and opens with a
// comment.
Findings check_shape(const SourceFile& file);
// No path of the machine on which something was written, no word that says it is unfinished.
Findings check_words(const SourceFile& file);
// What would make two runs differ: std distributions, random devices, clocks that tell the time.
Findings check_determinism(const SourceFile& file);
// A library neither prints nor ends the process, and the model touches no file, thread or clock.
Findings check_library_manners(const SourceFile& file);
// An include names the folder. (Which folder may include which: rooms.h.)
Findings check_includes(const SourceFile& file);
// `page_size` without a unit, kernels outside cuda_backend/kernels, and in them promises that the
// executor cannot check (__restrict__) or moves that it does not see whole (memcpy).
Findings check_terms(const SourceFile& file);
// A release of an engine is named in the table of profiles alone; others ask for its fields.
Findings check_release_names(const SourceFile& file);
// Kernels, pool, step, streams and views of the backend include no planted defect.
Findings check_seams(const SourceFile& file);
// At most 40 files that people write directly in one folder.
Findings check_folder_sizes(const std::vector<SourceFile>& files);
// A type is defined in one header: of two in one namespace the linker takes one for both.
Findings check_definitions(const std::vector<SourceFile>& files);

}  // namespace lockstep::tidy
