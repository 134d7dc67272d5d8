// The corpus of a guided search: the cases that reached something first. A guided run generates
// most cases from fresh seeds and the others by changing cases of the corpus.
//
// Invariants
// (1) The same cases in the same order give the same corpus and the same next cases, with any
//     number of threads.
// (2) Every mark that was reached has one owner: the first case that reached it. An agreeing case
//     takes the mark from a failing one, never the reverse.
// (3) minimal() reaches every mark that the corpus reached. It depends on the set of the cases, not
//     on their order.
// (4) An entry stays in the corpus after it has lost its last mark. It is then never picked, but
//     minimal() may still use it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "base/seeded_random.h"
#include "properties/generate/genes.h"
#include "properties/judge/marks.h"

namespace lockstep {

// A judged case, as much of it as the search uses.
struct JudgedGenes {
  CaseGenes genes;
  // The choices that made the case, for changes.
  std::vector<DrawnChoice> drawn;
  std::vector<Mark> marks;  // ascending, without duplicates
  // True if not agreed; refused counts too.
  bool failed = false;
};

// Not thread-safe: add() and settle() require exclusive access; only calls of next() may overlap.
class Corpus {
 public:
  Corpus() : counts_(kNumMarks), owners_(kNumMarks, kNone) {}

  // Counts the marks of a case and keeps the case if it becomes the owner of one. Between add() and
  // settle() next() must not run: its weights are stale.
  void add(JudgedGenes judged);
  // Recomputes the weights for next(). A case weighs the sum of 1 / count over its own marks, so
  // rare marks attract the search. A failing case weighs a twentieth: changes of it tend to fail
  // the same way.
  void settle();
  // Returns fresh genes (80 % of the calls, and always while the corpus is empty), or a change of
  // one or two cases of the corpus. REQUIRES: settle() after the last add().
  CaseGenes next(std::uint64_t seed) const;

  // Returns a minimal cover of all reached marks, the case with the most marks first.
  std::vector<CaseGenes> minimal() const;

 private:
  static constexpr std::int32_t kNone = -1;
  struct Entry {
    JudgedGenes judged;
    std::vector<Mark> owned;  // marks; stale ones are dropped by settle()
  };
  // Picks an entry with a probability proportional to its weight. REQUIRES: an entry owns a mark.
  const JudgedGenes& pick(SeededRandom& random) const;

  std::vector<std::uint32_t> counts_;  // cases that reached the mark, by mark
  std::vector<std::int32_t> owners_;   // index of the owning entry, by mark; kNone: unreached
  std::vector<Entry> entries_;
  std::vector<std::size_t> owning_;  // entries that own a mark
  std::vector<double> weights_;      // cumulative weights, parallel to owning_
};

// Selects cases that together reach every mark of `cases`, greedily: each time the one that adds
// the most marks, the smaller text first among equals. The result does not depend on the order of
// `cases`. Greedy selection is within a logarithmic factor of the smallest cover.
std::vector<const JudgedGenes*> minimal_cover(std::span<const JudgedGenes* const> cases);

// Reads a file of genes, one case per line. Errors: as genes_from_text(), and a file that cannot be
// read.
Result<std::vector<CaseGenes>> read_corpus(const std::string& path);
std::string corpus_to_text(std::span<const CaseGenes> corpus);
// Returns the cases of both corpora without duplicates, ordered by their text.
std::vector<CaseGenes> merged_corpora(std::span<const CaseGenes> first,
                                      std::span<const CaseGenes> second);

}  // namespace lockstep
