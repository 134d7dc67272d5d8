// A divergence: the first point at which backend and model disagree. It is complete: when, what,
// which byte, expected and found, the owner of that content, its last writer, and what the step was
// doing.
//
// Numbers that do not apply are -1, texts that do not apply are empty.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/result.h"

namespace lockstep {

// The check that found the difference, in the order of a step.
enum class Phase : std::uint8_t {
  decide,        // the decision cannot be executed: a token without a block, two owners, ...
  transfer,      // what a connector loads or stores is not the request's own
  reuse,         // a page of a block about to be reallocated
  memory_check,  // a report of the backend's own checker
  block_table,
  slot_mapping,
  page_written,  // a page that the step wrote
  host_block,    // of the host tier: what the step stored, others in rotation
  attention_digest,
  attention_output,
  state_output,    // output of a convolution or recurrence of real numbers
  extraction,      // hidden states of a finished request, read out of the cache
  hidden_file,     // the same in a file, as a trainer reads it
  page_untouched,  // a page that nothing should have written, in rotation
  page_final,      // the same, after the last step
  collective,      // data parallel ranks whose calls do not match
  ranks_together,  // a row of the whole model on fewer ranks than other rows
};

// A range of bytes of a page and its intended content, for drawing.
struct PageSpan {
  std::int64_t first_byte = 0;
  std::int64_t size_bytes = 0;
  std::string what;  // "slot 5: K of head 0 (request r17 token 305)", "padding", "free"
};

// Ids and numbers are those of the reference model, so a report can be read without the backend.
struct Divergence {
  Phase phase = Phase::decide;
  std::int64_t step = -1;
  std::int32_t rank = -1;     // index among several ranks
  std::int32_t tp_rank = -1;  // each only if the ranks differ in it
  std::int32_t pp_rank = -1;
  std::int32_t cp_rank = -1;
  std::int32_t dp_rank = -1;
  std::string request{};  // the request that owns the expected content
  std::int32_t layer = -1;
  std::string layer_name{};
  std::int32_t group = -1;
  std::int32_t tensor = -1;
  std::int32_t block = -1;
  std::int32_t host_block = -1;  // of the host tier
  std::int64_t slot = -1;
  std::int32_t head = -1;
  std::string part{};            // "K", "V", "latent", "hidden", "state 0", "padding", "unused"
  std::int64_t token = -1;       // position in the request
  std::int64_t byte = -1;        // first wrong byte of the page or of the table row
  std::int64_t wrong_bytes = 0;  // in the page
  std::string expected{};        // hexadecimal for bytes, numbers for tables and slots
  std::string found{};
  std::string owner{};    // owner of the content there; may be empty
  std::string writer{};   // last writer, from the model's journal and the backend
  std::string doing{};    // what the step was doing
  std::string message{};  // all of it in one line
  // For memory_check: MemoryReport::sanitizer_words.
  std::function<std::string()> sanitizer_words{};

  // For divergences of pages: the expected and the actual page, of equal size, and the parts of the
  // expected one.
  std::vector<std::uint8_t> expected_page{};
  std::vector<std::uint8_t> found_page{};
  std::vector<PageSpan> spans{};

  // Compares messages only: they state what differs and where.
  bool operator==(const Divergence& other) const { return message == other.message; }
};

// Returns several lines for a terminal, without colours, with a newline at the end.
std::string to_text(const Divergence& divergence);
// Returns json_of() as text. REQUIRES: all texts are UTF-8.
std::string to_json(const Divergence& divergence);
// Returns one JSON object with every field, the pages in hexadecimal. Its texts may not be UTF-8:
// dump it with error_handler_t::replace.
nlohmann::ordered_json json_of(const Divergence& divergence);

// Result of a check: fine, a divergence, or an error. A divergence is a finding about the code
// under test. An error is a user's mistake, or a backend that failed. LS_RETURN_UNLESS_FINE returns
// both.
class [[nodiscard]] Checked {
 public:
  Checked() = default;  // fine
  Checked(Divergence found) : what_(std::move(found)) {}
  Checked(tl::unexpected<Error> error) : what_(std::move(error.value())) {}
  // A divergence, or the error that prevented its construction.
  Checked(Result<Divergence> found) {
    if (found)
      what_ = std::move(*found);
    else
      what_ = std::move(found.error());
  }

  // True if the check found nothing.
  explicit operator bool() const { return std::holds_alternative<Fine>(what_); }
  bool has_diverged() const { return std::holds_alternative<Divergence>(what_); }
  bool has_error() const { return std::holds_alternative<Error>(what_); }
  // REQUIRES: it holds one.
  Divergence& divergence() { return std::get<Divergence>(what_); }
  const Divergence& divergence() const { return std::get<Divergence>(what_); }
  const Error& error() const { return std::get<Error>(what_); }

 private:
  struct Fine {};
  std::variant<Fine, Divergence, Error> what_;
};

}  // namespace lockstep

// LS_RETURN_UNLESS_FINE(check(x)): returns the divergence or the error of a Checked, or continues.
#define LS_RETURN_UNLESS_FINE(...)                                 \
  do {                                                             \
    if (auto ls_checked = (__VA_ARGS__); !ls_checked) [[unlikely]] \
      return ls_checked;                                           \
  } while (false)
