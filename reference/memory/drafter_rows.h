// The meaning of a draft model's row: rule (24) of sim/protocol/backend.h. Its content is made of
// the last token that went into it and of how it was made: a mark in the lowest bits, so that a row
// that is read describes its own origin.
//
// Invariants
// (1) Exactly the right rows have the mark `settled` or `of_drafts`: the latter is made of
//     unverified drafts, and right if they are accepted.
#pragma once

#include <cstdint>
#include <string_view>

#include "reference/memory/content.h"

namespace lockstep {

enum class DraftMark : std::uint8_t {
  settled,       // of tokens that stand
  of_drafts,     // of tokens that stand and of drafts behind them, by the target's hidden states
  proposed,      // by a pass for one draft, out of the drafter's own hidden states
  rejected,      // of a draft that was rejected, by the pass over the step's tokens
  wrong_token,   // of another token than the one behind it
  wrong_window,  // run again with another token's inputs
};
inline constexpr std::uint64_t kDraftMarks = 15;

constexpr ContentId drafter_row(ContentId last_token, DraftMark mark) {
  return (mix(last_token ^ 0x6472616674657200ull) & ~kDraftMarks) |
         static_cast<std::uint64_t>(mark);
}
constexpr DraftMark mark_of(ContentId row) { return static_cast<DraftMark>(row & kDraftMarks); }
// Whether a row holds what a drafter that knew all tokens would have written.
constexpr bool is_right(ContentId row, ContentId settled) {
  return mark_of(row) <= DraftMark::of_drafts && (row | kDraftMarks) == (settled | kDraftMarks);
}

constexpr std::string_view words_of(DraftMark mark) {
  switch (mark) {
    case DraftMark::settled:
      return "a row made of other tokens";
    case DraftMark::of_drafts:
      return "a row made of drafts that were not accepted";
    case DraftMark::proposed:
      return "a row written while proposing";
    case DraftMark::rejected:
      return "a row of a rejected draft";
    case DraftMark::wrong_token:
      return "a row made of another token than the next one";
    case DraftMark::wrong_window:
      return "a row run again with another token's inputs";
  }
  return "a row";
}

}  // namespace lockstep
