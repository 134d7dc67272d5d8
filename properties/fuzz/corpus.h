// The corpus of a guided search: the cases that reached something first.
//
// Invariants
// (1) The same cases in the same order give the same corpus and the same next cases, whatever the
//     number of threads.
// (2) Every mark that was reached has one owner, the first case that reached it; a case that agreed
//     replaces one that failed.
// (3) minimal() reaches every mark that the corpus reached. It depends on the set of the cases, not
//     on their order.
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

// A case that was judged.
struct JudgedGenes {
  CaseGenes genes;
  std::vector<DrawnChoice> drawn;
  std::vector<Mark> marks;  // ascending
  bool failed = false;
};

class Corpus {
 public:
  Corpus() : counts_(kNumMarks), owners_(kNumMarks, kNone) {}

  // Counts the marks of a case, and keeps it if it owns one. Not between two calls of next() that
  // are to see the same corpus.
  void add(JudgedGenes judged);
  // Weighs the cases for the calls of next() that follow: rare marks weigh more.
  void settle();
  // A new case, or a change of one of the corpus. REQUIRES: settle() after the last add().
  CaseGenes next(std::uint64_t seed) const;

  // The richest cases first.
  std::vector<CaseGenes> minimal() const;

 private:
  static constexpr std::int32_t kNone = -1;
  struct Entry {
    JudgedGenes judged;
    std::vector<Mark> owned;  // settle() drops those that another entry has taken
  };
  const JudgedGenes& pick(SeededRandom& random) const;

  std::vector<std::uint32_t> counts_;  // cases with the mark
  std::vector<std::int32_t> owners_;   // entries
  std::vector<Entry> entries_;
  std::vector<std::size_t> owning_;  // entries that own a mark
  std::vector<double> weights_;      // of those, cumulated
};

// Cases that together reach every mark of `cases`, each time the one that adds the most marks. The
// same for any order of the cases.
std::vector<const JudgedGenes*> minimal_cover(std::span<const JudgedGenes* const> cases);

// A file of genes, one case a line. Errors: as genes_from_text(); a file that cannot be read.
Result<std::vector<CaseGenes>> read_corpus(const std::string& path);
std::string corpus_to_text(std::span<const CaseGenes> corpus);
// The cases of both, once each, in the order of their text.
std::vector<CaseGenes> merged_corpora(std::span<const CaseGenes> first,
                                      std::span<const CaseGenes> second);

}  // namespace lockstep
