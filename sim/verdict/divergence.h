// A divergence: the first place where the backend and the model do not agree, complete: when, what,
// where to the byte, expected and found, the owner of the content there, its last writer, and what
// the step was doing.
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

// What the step was at when the two sides were found to differ, in the order of a step.
enum class Phase : std::uint8_t {
  decide,        // the decision cannot be executed: a token without a block, two owners, ...
  transfer,      // what a connector loads or stores is not the request's own
  reuse,         // a block about to be allocated again
  memory_check,  // a report of the backend's own checker
  block_table,
  slot_mapping,
  page_written,  // a page that the step wrote
  host_block,    // of the host tier: what the step stored, others in rotation
  attention_digest,
  attention_output,
  state_output,    // what a convolution or recurrence of real numbers gave out
  extraction,      // hidden states of a finished request, read out of the cache
  hidden_file,     // the same in a file, as a trainer sees it
  page_untouched,  // a page that nothing should have written, in rotation
  page_final,      // the same, after the last step
  collective,      // data parallel ranks that call what does not meet
  ranks_together,  // a row of the whole model that the ranks do not hold as often as its like
};

// A run of bytes of a page and what belongs there, for drawing.
struct PageSpan {
  std::int64_t first_byte = 0;
  std::int64_t size_bytes = 0;
  std::string what;  // "slot 5: K of head 0 (request r17 token 305)", "padding", "free"
};

struct Divergence {
  Phase phase = Phase::decide;
  std::int64_t step = -1;
  std::int32_t rank = -1;     // where there are several
  std::int32_t tp_rank = -1;  // and its place among them, where they differ in it
  std::int32_t pp_rank = -1;
  std::int32_t cp_rank = -1;
  std::int32_t dp_rank = -1;
  std::string request;  // whose content is expected there
  std::int32_t layer = -1;
  std::string layer_name;
  std::int32_t group = -1;
  std::int32_t tensor = -1;
  std::int32_t block = -1;
  std::int32_t host_block = -1;  // of the host tier
  std::int64_t slot = -1;
  std::int32_t head = -1;
  std::string part;              // "K", "V", "latent", "hidden", "state 0", "padding", "unused"
  std::int64_t token = -1;       // position in the request
  std::int64_t byte = -1;        // the first wrong byte of the page, or of the table row's entry
  std::int64_t wrong_bytes = 0;  // in the page
  std::string expected;          // hexadecimal for bytes, numbers for tables and slots
  std::string found;
  std::string owner;    // owner of the content there; may be empty
  std::string writer;   // last writer, from the model's journal and the backend
  std::string doing;    // what the step was doing
  std::string message;  // all of it in one line
  // Of memory_check: MemoryReport::sanitizer_words.
  std::function<std::string()> sanitizer_words;

  // For divergences of pages: the page as it should be and as it is.
  std::vector<std::uint8_t> expected_page;
  std::vector<std::uint8_t> found_page;
  std::vector<PageSpan> spans;

  bool operator==(const Divergence& other) const { return message == other.message; }
};

// Several lines for a terminal; no colours, a newline at the end.
std::string to_text(const Divergence& divergence);
// One JSON object with every field; the pages in hexadecimal.
std::string to_json(const Divergence& divergence);
// The same as a value, for files that hold more. Its texts may not be UTF-8: dump it with
// error_handler_t::replace.
nlohmann::ordered_json json_of(const Divergence& divergence);

// What a check comes to: fine, a divergence, or an error.
//
// LS_RETURN_UNLESS_FINE hands both on. An Error is a user's, or a backend's that failed.
class [[nodiscard]] Checked {
 public:
  Checked() = default;  // fine
  Checked(Divergence found) : what_(std::move(found)) {}
  Checked(tl::unexpected<Error> error) : what_(std::move(error.value())) {}
  // A divergence, or the error that kept it from being found.
  Checked(Result<Divergence> found) {
    if (found)
      what_ = std::move(*found);
    else
      what_ = std::move(found.error());
  }

  explicit operator bool() const { return std::holds_alternative<Fine>(what_); }
  bool has_diverged() const { return std::holds_alternative<Divergence>(what_); }
  bool has_error() const { return std::holds_alternative<Error>(what_); }
  // REQUIRES: it is one.
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
