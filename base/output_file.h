// The one way to write a file that the user names.
//
// Invariants
// (1) A regular file is replaced at once: bytes go to TARGET.partial-<pid>, are flushed to the disk
//     and take their name by rename(2). Symbolic links are followed; mode and owner stay.
// (2) A device, a FIFO and a socket are written directly and never replaced.
// (3) "-" is standard output, and so is a path to the file that standard output or standard error
//     already writes (/dev/stdout): bytes follow those that were written before.
// (4) A regular file in a folder that takes no new file, or whose owner cannot be kept, is
//     rewritten in place: that file alone may be half written when the disk fails.
// (5) Until commit() succeeds, the target of (1) has its old bytes. Destruction without it removes
//     the temporary file.
//
// Not kept: extended attributes and further hard links of a replaced file.
#pragma once

#include <string>
#include <string_view>

#include "base/result.h"

namespace lockstep {

class OutputFile {
 public:
  static Result<OutputFile> create(const std::string& path);
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&& other) noexcept;
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();  // without commit(): removes the temporary file

  Result<void> write(std::string_view bytes);
  Result<void> commit();

 private:
  OutputFile(std::string path, std::string target, std::string partial_path, int fd);
  void abandon();

  std::string path_;          // as the user gave it
  std::string target_;        // behind all links
  std::string partial_path_;  // empty: the target is written directly
  int fd_ = -1;
};

Result<void> write_output(const std::string& path, std::string_view bytes);
// Adds to the end of a file, which need not exist.
Result<void> append_output(const std::string& path, std::string_view bytes);

// Refuses, before any work, a path that write_output() cannot write: its folder does not exist, it
// is a folder, or the user may not write it.
Result<void> check_output(const std::string& path);
// The same for a folder of outputs, which may still have to be made.
Result<void> check_output_folder(const std::string& path);
Result<void> make_output_folder(const std::string& path);

// Keeps standard output for the outputs named "-"; what the program prints goes to standard error
// from here on. The second call has no effect.
void keep_standard_output_for_files();

// Flushes what the program printed. Error: standard output took less than was printed.
Result<void> finish_standard_output();

}  // namespace lockstep
