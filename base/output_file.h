// Writes a file that the user names. All commands write this way.
//
// Invariants
// (1) A regular file is replaced atomically: the bytes go to TARGET.partial-<pid>, are flushed to
//     the disk and take their name by rename(2). A long TARGET is a number. Symbolic links are
//     followed; mode and owner are kept.
// (2) A device, a FIFO and a socket are written directly and never replaced.
// (3) "-" is standard output, and so is a path to the file that standard output or standard error
//     already writes (/dev/stdout). The bytes follow those that were written before.
// (4) A regular file is rewritten in place if its folder accepts no new file or its owner cannot be
//     kept. Only such a file may be half written when the disk is full.
// (5) Until commit() succeeds, the target of (1) keeps its old bytes. Destruction without commit()
//     removes the temporary file.
//
// Not kept: extended attributes, and further hard links of a replaced file.
#pragma once

#include <string>
#include <string_view>

#include "base/result.h"

namespace lockstep {

// One output from its first byte to commit(). Moving transfers it; a moved-from file is closed.
class OutputFile {
 public:
  // Opens the output. Errors: as check_output(), and what the system refuses.
  static Result<OutputFile> create(const std::string& path);
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&& other) noexcept;
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();  // removes the temporary file, unless commit() succeeded

  // Appends `bytes`; an error leaves the file to be destroyed. REQUIRES: before commit(), once.
  Result<void> write(std::string_view bytes);
  Result<void> commit();

 private:
  OutputFile(std::string path, std::string target, std::string partial_path, int fd);
  void abandon();

  std::string path_;          // as the user gave it
  std::string target_;        // path after all links
  std::string partial_path_;  // empty: the target is written directly
  int fd_ = -1;
};

// Creates, writes and commits a file in one call.
Result<void> write_output(const std::string& path, std::string_view bytes);
// Appends to a file, which is created if it does not exist. Not atomic: other programs append to
// the same file, for example the steps of a CI job to its summary.
Result<void> append_output(const std::string& path, std::string_view bytes);

// Refuses a path that write_output() cannot write: a folder, a file in a folder that does not
// exist, or one without write permission. Called before any work, so that an hour's run does not
// end in an error. The file may still become unwritable later.
Result<void> check_output(const std::string& path);
// The same for a folder of outputs, which need not exist yet: the nearest existing parent decides.
Result<void> check_output_folder(const std::string& path);
// Creates the folder and its parents; an existing folder is not an error.
Result<void> make_output_folder(const std::string& path);

// Reserves standard output for outputs named "-": from this call on, everything else that the
// program prints goes to standard error. A second call has no effect.
void keep_standard_output_for_files();

// Flushes everything that the program has printed. Error: standard output did not accept all of it,
// for example because the disk is full.
Result<void> finish_standard_output();

}  // namespace lockstep
