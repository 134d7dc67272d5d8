// A generated case, represented by the choices that made it. A guided search can thus change one
// part of the case and keep the others (Padhye et al., Semantic Fuzzing with Zest, 2019).
//
// Invariants
// (1) The same genes and options give the same case.
// (2) Every value of the genes gives a case that the generator accepts, because a change only
//     redirects the generator's own choices.
// (3) A word stands for a share of its range. If another part changes the range, a length stays as
//     close to its end as it was: the last of 10 tokens becomes the last of 100.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "base/seeded_random.h"
#include "properties/generate/choices.h"
#include "properties/generate/generator.h"

namespace lockstep {

// A part of the case and its index, as one number: part * kPartIndexes + index.
using PartKey = std::uint16_t;
// Indexes per part: requests, faults, attempts.
inline constexpr std::int64_t kPartIndexes = 64;
constexpr PartKey key_of(CasePart part, std::int64_t index = 0) {
  return static_cast<PartKey>(static_cast<std::int64_t>(part) * kPartIndexes + index);
}
constexpr CasePart part_of(PartKey key) { return static_cast<CasePart>(key / kPartIndexes); }

// The choices of one part. Position p uses words[p] if present, else a word derived from the seed.
struct Gene {
  std::uint32_t seed = 0;
  std::map<std::uint16_t, std::uint32_t> words;
  bool operator==(const Gene&) const = default;
};

// The genes of a case: a base seed, and the parts that differ from what it gives.
struct CaseGenes {
  std::uint64_t base = 0;  // seeds the parts that have no gene
  std::map<PartKey, Gene> parts;
  bool operator==(const CaseGenes&) const = default;
};

// A choice as it was made: `value` of [0, range). Choices with a range of 1 are not recorded.
struct DrawnChoice {
  PartKey part = 0;
  std::uint16_t position = 0;
  std::int32_t range = 1;
  std::int32_t value = 0;
};

// Generates the case of the genes. `drawn`, if not null, receives all its choices in order.
SavedCase generate_case(const CaseGenes& genes, const GeneratorOptions& options,
                        std::vector<DrawnChoice>* drawn = nullptr);

// A case of the corpus, as much of it as a change needs. The pointers must outlive the change.
struct ParentCase {
  const CaseGenes* genes = nullptr;
  const std::vector<DrawnChoice>* drawn = nullptr;
};

// Returns a change of the first case, or a cross of both. Only the first case's choices are changed
// in place. REQUIRES: both cases have choices.
CaseGenes changed_genes(const ParentCase& first, const ParentCase& second, SeededRandom& random);

// Formats genes as one line: {"base":1,"parts":{"192":[7,0,99]}}. Each part has its seed and then
// pairs of a position and a word. Part 192 is `groups` (3 * 64), index 0.
std::string genes_to_text(const CaseGenes& genes);
// Reads one line. `name` and `line` appear in error messages. Errors: a part that no case has, a
// number out of range, a position without a word.
Result<CaseGenes> genes_from_text(const std::string& name, std::string_view text,
                                  std::int64_t line);

}  // namespace lockstep
