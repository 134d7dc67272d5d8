// States of real numbers, as plain loops (sim/protocol/backend.h, rule 15). The inputs of a
// convolution are only moved, so their bytes in a page are exact. A recurrence runs in doubles from
// its stored start, together with the distance that fp32 may be off.
//
// Invariants
// (1) Recurrence is one request's state of one layer over the tokens of one step: it starts from
//     stored numbers, and its error grows from zero token by token.
// (2) The distance is a worst case of the form in which the kernel advances a state, with u =
//     2^-24: in pieces of up to 32 tokens, which end where a state is stored, or token by token.
//     Mamba2: a decay is off by 6 + 18 |A dt| units per token (in pieces: 51), sums over columns by
//     columns / 32 + 30 (columns + 62), all relative to sums of absolute values.
//     Delta rule: an error is the length of a row's error vector. It shrinks with every decay, and
//     a token adds 6 + |g| + 2 (columns / 32 + 8) + 4 (columns / 64 + 6) units of |h| + |v|; in
//     pieces, 2 columns + 100 + 40 sum |g| units of the piece's sum: |h| before it and its changes,
//     decayed. An output is off by |q| times the error, and by its own sum over columns.
//     A convolution of width w: (w + 1) u sum |w x|, its activation's slope 1.1 and own error 24 u.
//     Any number stored or returned in a format other than fp32 is rounded again.
// Not here: the position of a state (memory_plan.h), its block (memory_model.h).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "reference/memory/content.h"
#include "reference/plan/rank_plan.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

// convolution: the last inputs are kept. selective: Mamba2's recurrence. gated_delta: the gated
// delta rule of linear attention. Layers of even number use selective, odd ones gated_delta.
enum class StateRule : std::uint8_t { convolution, selective, gated_delta };

// One state tensor of a layer: its rule and its dimensions.
struct StateNumbers {
  StateRule rule = StateRule::convolution;
  DType dtype = DType::fp32;
  std::int64_t layer = 0;  // of the whole plan
  std::int64_t part = 0;   // coordinate part of its first input
  std::int64_t place = 0;  // number of this part among those that tensor parallelism makes
  // Convolutions: [num_inputs, num_channels]. `width` inputs give one output, so width - 1 are
  // kept, and one more per draft.
  std::int64_t width = 0;
  std::int64_t num_inputs = 0;
  std::int64_t num_channels = 0;
  // Recurrences: [heads, rows, columns].
  std::int64_t heads = 1;
  std::int64_t rows = 1;
  std::int64_t columns = 0;

  std::int64_t row_bytes() const { return num_channels * itemsize_bytes(dtype); }  // of inputs
  // Numbers that the kernel returns per token.
  std::int64_t num_outputs() const {
    return rule == StateRule::convolution ? num_channels : heads * rows;
  }
};

// State tensor `state` of the layer. A tensor of two dimensions whose first one fits a width of 2
// to 4 is a convolution, all others are recurrences. Errors: elements that are not numbers, rows
// too long for the kernels of a recurrence.
Result<StateNumbers> state_numbers(const KVCacheSpec& spec, std::size_t state,
                                   const LayerShare& share);

// Numbers, and the maximum distance of a kernel's output from each.
struct Bounded {
  std::vector<double> values, bounds;
};

// The inputs of a convolution at the start of a step: rows [offset, offset + width - 1) of a
// state's bytes; zeros for a request's first step. `offset` skips inputs of rejected drafts.
struct KeptInputs {
  std::span<const std::uint8_t> state;  // empty: zeros
  std::int64_t offset = 0;
};
// Writes the sequence (kept inputs, then inputs of the tokens), from index `keep_from` on, to rows
// 0, 1, ... of `state`. Rows after them stay. REQUIRES: it fits.
void keep_inputs(const StateNumbers& of, const KeptInputs& kept,
                 std::span<const ContentId> contents, std::int64_t keep_from,
                 std::span<std::uint8_t> state);
// The output of the convolution for the last of the tokens.
Bounded convolve_last(const StateNumbers& of, const KeptInputs& kept,
                      std::span<const ContentId> contents);

// A recurrent state in doubles, with a bound on a kernel's distance from it.
class Recurrence {
 public:
  // `state`: the stored start; empty: zeros. `in_pieces`: the kernel processes pieces of tokens,
  // otherwise one token at a time, which changes the bound and not the values.
  Recurrence(const StateNumbers& of, std::span<const std::uint8_t> state, bool in_pieces);

  // Advances by the token with this content.
  void advance(ContentId content);
  // Ends a piece: the kernel stores the state after the last token.
  void end_piece() { tokens_in_piece_ = 0; }
  // Outputs [heads, rows] for the last token.
  const Bounded& outputs() const { return outputs_; }
  // An element of the state as it is stored, and its bound.
  double value(std::int64_t element) const { return values_[element]; }
  double bound(std::int64_t element) const;

 private:
  // The error of one row under the delta rule.
  struct Row {
    double error = 0;   // a length, in absolute numbers
    double decays = 0;  // in the piece: sum of |g|
    double summed = 0;  // in the piece: |h| before it and its changes, decayed
  };
  void advance_selective(ContentId content);
  void advance_delta(ContentId content);
  // The error that a token adds to a row, and that of its output alone.
  struct Added {
    double state, output;
  };
  Added error_of_token(Row& row, double g, double change, double before, double after, double v);
  double units_of_sums() const;  // Mamba2

  const StateNumbers of_;
  const bool in_pieces_;
  std::int64_t tokens_in_piece_ = 0;
  std::vector<double> values_, sizes_;  // [heads, rows, columns]; sizes are of absolute values
  std::vector<double> decay_terms_;     // [heads]: Mamba2
  std::vector<Row> rows_;               // [heads, rows]
  Bounded outputs_;
};

// The element of a format as a number. REQUIRES: fp32, bf16 or fp16.
double number_at(const std::uint8_t* element, DType dtype);

}  // namespace lockstep
