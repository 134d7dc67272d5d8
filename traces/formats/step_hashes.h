// Hashes of the steps of a run: what `replay --hashes FILE` writes and `lockstep same` compares
// (docs/formats.md, "Step hashes"). A header, a line per step, an end line.
//
// Invariants
// (1) Steps are numbered from 0 without gaps.
// (2) A file without its end line is refused: a run that ended early has one.
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

// Every hash is 32 lower-case hexadecimal digits.
struct StepHashesHeader {
  std::string engine;      // "vllm-0.33.0"
  std::string backend;     // "simt (CPU)", "none"
  bool has_pages = false;  // the run had a backend: steps have pages
  bool operator==(const StepHashesHeader&) const = default;
};

// The block tables of a scheduled request, one hash per group.
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
  std::string fingerprint;
  bool operator==(const HashedPage&) const = default;
};

struct StepHashes {
  std::int64_t step = 0;
  std::string hash;      // of the chain up to here: everything that the run hashes
  std::string decision;  // of this decision and the number of free blocks
  std::vector<HashedTable> tables;
  std::vector<HashedPage> pages;
  std::vector<std::string> ended;  // requests that the step's output ended
  bool operator==(const StepHashes&) const = default;
};

struct StepHashesEnd {
  std::int64_t steps = 0;
  std::string verdict;     // "agreed", "divergence", "interrupted"
  std::string check = {};  // phase of a divergence; empty: none
  bool operator==(const StepHashesEnd&) const = default;
};

class StepHashesReader {
 public:
  // True if the line is the beginning of such a file.
  static bool is_header(std::string_view line);
  static Result<StepHashesReader> open(const std::string& path);

  const StepHashesHeader& header() const { return header_; }
  // Reads the next step: true; false after the last one, when end() is set.
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

class StepHashesWriter {
 public:
  static Result<StepHashesWriter> create(const std::string& path, const StepHashesHeader& header);
  Result<void> write(const StepHashes& step);
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
