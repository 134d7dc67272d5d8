// The collectives of ranks, and whether they match. Every rank of a group enters a collective with
// the same kind and shape, in the same order. A rank that calls a different one, or none, leaves
// the others with wrong data or a deadlock.
//
// Invariants
// (1) Calls are plain values; sim/ranks/dp_step.h decides why a rank makes them.
// (2) The first mismatching call is reported, with both ranks. Calls after it are not judged.
//
// Not checked: what the collectives carry.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

enum class CollectiveKind : std::uint8_t { all_reduce, all_gather, reduce_scatter };
std::string_view name_of(CollectiveKind kind);

struct Collective {
  CollectiveKind kind = CollectiveKind::all_reduce;
  std::string what;                 // "tokens of the step", for a person
  std::vector<std::int64_t> shape;  // of one rank's part; all_gather: what each rank brings
  std::int64_t own = 0;             // all_gather: what this rank brings; 0: not said
  std::int64_t cut_over = 1;        // reduce_scatter: ranks that shape[0] is divided among
  bool is_own = false;  // of the rank's own group (its tensor parallel ranks): only there it meets
  bool operator==(const Collective&) const = default;
};

// Why a step's calls do not meet.
struct UnmetCollective {
  bool hangs = false;  // a rank calls nothing where another waits; otherwise they mismatch
  std::int32_t rank = 0;
  std::int32_t other = 0;  // the rank that it does not meet; itself: no rank would take the call
  std::int64_t call = 0;   // counted from 0
  std::string what;        // one line
};

// calls[r]: those of rank r in one step, in order.
std::optional<UnmetCollective> first_unmet(std::span<const std::vector<Collective>> calls);

}  // namespace lockstep
