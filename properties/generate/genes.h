// A generated case as the choices that made it, so that a guided search can change a part of the
// case and keep the others (Padhye et al., Semantic Fuzzing with Zest, 2019).
//
// Invariants
// (1) Same genes and options, same case.
// (2) Every value of the genes gives a case that the generator accepts: a change draws the part
//     again within the generator's own limits.
// (3) A word stands for a share of its range: where another part changes the range, a length stays
//     as near to its end as it was.
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

// A part of the case and its index, as one number.
using PartKey = std::uint16_t;
inline constexpr std::int64_t kPartIndexes = 64;
constexpr PartKey key_of(CasePart part, std::int64_t index = 0) {
  return static_cast<PartKey>(static_cast<std::int64_t>(part) * kPartIndexes + index);
}
constexpr CasePart part_of(PartKey key) { return static_cast<CasePart>(key / kPartIndexes); }

// The choices of one part: words from a seed, some of them replaced, by position.
struct Gene {
  std::uint32_t seed = 0;
  std::map<std::uint16_t, std::uint32_t> words;
  bool operator==(const Gene&) const = default;
};

struct CaseGenes {
  std::uint64_t base = 0;  // seeds the parts that have no gene
  std::map<PartKey, Gene> parts;
  bool operator==(const CaseGenes&) const = default;
};

// A choice that was made: value `value` of [0, range).
struct DrawnChoice {
  PartKey part = 0;
  std::uint16_t position = 0;
  std::int32_t range = 1;
  std::int32_t value = 0;
};

// The case of the genes; `drawn` receives the choices among several values, if not null.
SavedCase generate_case(const CaseGenes& genes, const GeneratorOptions& options,
                        std::vector<DrawnChoice>* drawn = nullptr);

// A case of the corpus, as far as a change needs it.
struct ParentCase {
  const CaseGenes* genes = nullptr;
  const std::vector<DrawnChoice>* drawn = nullptr;
};

// A change of the first case, or a cross of both.
CaseGenes changed_genes(const ParentCase& first, const ParentCase& second, SeededRandom& random);

// One line: {"base":1,"parts":{"192":[7,0,99]}}. A part has its seed and then pairs of a position
// and a word.
std::string genes_to_text(const CaseGenes& genes);
// `name` and `line` are for messages.
Result<CaseGenes> genes_from_text(const std::string& name, std::string_view text,
                                  std::int64_t line);

}  // namespace lockstep
