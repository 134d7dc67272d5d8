// Hashes of the steps of a run: the file that `replay --hashes FILE` writes and `lockstep same`
// compares, to find the first step and part in which two runs differ (docs/formats.md, "Step
// hashes"). A header, a line per step, an end line.
//
// Invariants
// (1) Steps are numbered from 0 without gaps.
// (2) A file without its end line is refused: a run that ended early has one.
// (3) Hashes have 32 lower-case hexadecimal digits.
//
// Not checked here: whether a hash belongs to its step.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/line_reader.h"
#include "base/output_file.h"
#include "base/result.h"

namespace lockstep {

// The run that was hashed.
struct StepHashesHeader {
  std::string engine;      // "vllm-0.33.0"
  std::string backend;     // "simt (CPU)", "none"
  bool has_pages = false;  // the run had a backend: steps have pages
  bool operator==(const StepHashesHeader&) const = default;
};

// The block tables of a scheduled request: one hash per group.
struct HashedTable {
  std::string request;
  std::vector<std::string> groups;
  bool operator==(const HashedTable&) const = default;
};

// A page that the step wrote.
struct HashedPage {
  std::int32_t rank = 0;
  std::int32_t tensor = 0;
  std::int32_t block = 0;  // index of the page in its tensor
  // Of all bytes of the page in the backend's memory, read after the comparison.
  std::string fingerprint;
  bool operator==(const HashedPage&) const = default;
};

// One line: a hash of everything, and hashes of its parts that locate a difference.
struct StepHashes {
  std::int64_t step = 0;
  // The chain of state hashes up to this step: equal hashes mean equal runs so far.
  std::string hash;
  // This step's decision and the number of free blocks, independent of earlier steps.
  std::string decision;
  std::vector<HashedTable> tables;
  std::vector<HashedPage> pages;
  std::vector<std::string> ended;  // requests that the step's output ended
  bool operator==(const StepHashes&) const = default;
};

// The last line. A step that diverged has no line of its own.
struct StepHashesEnd {
  std::int64_t steps = 0;
  std::string verdict;     // "agreed", "divergence", "interrupted"
  std::string check = {};  // phase of a divergence; empty: none
  bool operator==(const StepHashesEnd&) const = default;
};

// Reads such a file line by line.
//
// Invariants
// (1) steps_ steps have been returned; the next line must have that number.
// (2) has_ended_: the end line has been read and is the last one.
class StepHashesReader {
 public:
  // True if the line is the first of such a file; by its text, without parsing.
  static bool is_header(std::string_view line);
  static Result<StepHashesReader> open(const std::string& path);

  const StepHashesHeader& header() const { return header_; }
  // Reads the next step and returns true; false after the last one, when end() is set. REQUIRES: it
  // has not returned false before.
  Result<bool> next(StepHashes& step);
  // REQUIRES: next() has returned false.
  const StepHashesEnd& end() const;

 private:
  explicit StepHashesReader(LineReader lines) : lines_(std::move(lines)) {}

  LineReader lines_;
  StepHashesHeader header_;
  StepHashesEnd end_;
  std::int64_t steps_ = 0;
  bool has_ended_ = false;
};

// Writes such a file: a temporary file that close() renames, so that PATH is always complete. A
// writer destroyed without close() leaves no file.
//
// Invariants
// (1) steps_ steps have been written, in order.
// (2) buffer_ holds less than 64 KiB between calls.
class StepHashesWriter {
 public:
  static Result<StepHashesWriter> create(const std::string& path, const StepHashesHeader& header);
  // REQUIRES: step.step is the number of steps written so far.
  Result<void> write(const StepHashes& step);
  // REQUIRES: end.steps is the number of steps written.
  Result<void> close(const StepHashesEnd& end);

 private:
  StepHashesWriter(OutputFile file, bool has_pages)
      : file_(std::move(file)), has_pages_(has_pages) {}

  OutputFile file_;
  bool has_pages_ = false;
  std::string buffer_;
  std::int64_t steps_ = 0;
};

}  // namespace lockstep
