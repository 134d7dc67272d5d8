#include "properties/fuzz/corpus.h"

#include <algorithm>
#include <queue>
#include <tuple>
#include <utility>

#include "base/line_reader.h"

namespace lockstep {

constexpr std::int32_t kNewPercent = 80;  // cases from fresh seeds, in percent
// Changes of a failing case mostly repeat its failure, which adds no coverage.
constexpr double kWeightOfFailed = 0.05;

void Corpus::add(JudgedGenes judged) {
  const auto index = static_cast<std::int32_t>(entries_.size());
  std::vector<Mark> owned;
  for (const Mark mark : judged.marks) {
    ++counts_[mark];
    std::int32_t& owner = owners_[mark];
    // An owner keeps its mark, unless it failed and the new case did not.
    if (owner != kNone &&
        (judged.failed || !entries_[static_cast<std::size_t>(owner)].judged.failed))
      continue;
    owner = index;
    owned.push_back(mark);
  }
  if (!owned.empty()) entries_.push_back({.judged = std::move(judged), .owned = std::move(owned)});
}

void Corpus::settle() {
  owning_.clear();
  weights_.clear();
  double sum = 0;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    std::erase_if(entry.owned,
                  [&](Mark mark) { return owners_[mark] != static_cast<std::int32_t>(i); });
    if (entry.owned.empty()) continue;
    double weight = 0;
    for (const Mark mark : entry.owned) weight += 1.0 / counts_[mark];
    sum += entry.judged.failed ? kWeightOfFailed * weight : weight;
    owning_.push_back(i);
    weights_.push_back(sum);
  }
}

const JudgedGenes& Corpus::pick(SeededRandom& random) const {
  // 53 random bits make a double in [0, 1) exactly, the same on every platform.
  const double share = static_cast<double>(random.next() >> 11) * 0x1p-53;
  const auto found = std::ranges::upper_bound(weights_, share * weights_.back());
  // Rounding may give a share equal to the last weight, which upper_bound() does not find.
  const auto place = std::min<std::ptrdiff_t>(found - weights_.begin(), std::ssize(weights_) - 1);
  return entries_[owning_[static_cast<std::size_t>(place)]].judged;
}

CaseGenes Corpus::next(std::uint64_t seed) const {
  SeededRandom random(seed);
  const bool is_new = random.chance(kNewPercent) || owning_.empty();
  if (is_new) return {.base = random.next(), .parts = {}};
  // The second case may equal the first; a cross then changes little.
  const JudgedGenes& first = pick(random);
  const JudgedGenes& second = pick(random);
  return changed_genes({&first.genes, &first.drawn}, {&second.genes, &second.drawn}, random);
}

std::vector<CaseGenes> Corpus::minimal() const {
  std::vector<const JudgedGenes*> cases;
  for (const Entry& entry : entries_) cases.push_back(&entry.judged);
  std::vector<CaseGenes> genes;
  for (const JudgedGenes* judged : minimal_cover(cases)) genes.push_back(judged->genes);
  return genes;
}

std::vector<const JudgedGenes*> minimal_cover(std::span<const JudgedGenes* const> cases) {
  // The marks that a case adds only decrease as others are selected. A stale count is thus an upper
  // bound, and only the leading candidate must be recounted (lazy greedy selection).
  struct Candidate {
    std::int64_t adds = 0;
    std::string text;
    const JudgedGenes* judged = nullptr;
    // The largest count is on top; among equals the smaller text, so that the order is total.
    bool operator<(const Candidate& other) const {
      return std::tie(adds, other.text) < std::tie(other.adds, text);
    }
  };
  std::priority_queue<Candidate> candidates;
  for (const JudgedGenes* judged : cases)
    candidates.push({std::ssize(judged->marks), genes_to_text(judged->genes), judged});
  std::vector<bool> reached(kNumMarks);
  std::vector<const JudgedGenes*> cover;
  while (!candidates.empty()) {
    Candidate best = candidates.top();
    candidates.pop();
    const auto adds =
        std::ranges::count_if(best.judged->marks, [&](Mark mark) { return !reached[mark]; });
    if (adds == 0) continue;
    if (adds < best.adds) {
      best.adds = adds;
      candidates.push(std::move(best));
      continue;
    }
    for (const Mark mark : best.judged->marks) reached[mark] = true;
    cover.push_back(best.judged);
  }
  return cover;
}

Result<std::vector<CaseGenes>> read_corpus(const std::string& path) {
  LS_ASSIGN_OR_RETURN(auto lines, LineReader::open(path));
  std::vector<CaseGenes> corpus;
  std::string_view line;
  while (true) {
    LS_ASSIGN_OR_RETURN(const auto got, lines.next(line));
    if (!got) return corpus;
    LS_ASSIGN_OR_RETURN(auto genes, genes_from_text(path, line, lines.number()));
    corpus.push_back(std::move(genes));
  }
}

std::string corpus_to_text(std::span<const CaseGenes> corpus) {
  std::string text;
  for (const CaseGenes& genes : corpus) text += genes_to_text(genes);
  return text;
}

std::vector<CaseGenes> merged_corpora(std::span<const CaseGenes> first,
                                      std::span<const CaseGenes> second) {
  std::vector<std::pair<std::string, const CaseGenes*>> sorted;
  for (const auto& corpus : {first, second})
    for (const CaseGenes& genes : corpus) sorted.emplace_back(genes_to_text(genes), &genes);
  std::ranges::sort(sorted);
  // Sorting by text makes equal genes adjacent.
  std::vector<CaseGenes> merged;
  for (const auto& [text, genes] : sorted)
    if (merged.empty() || !(merged.back() == *genes)) merged.push_back(*genes);
  return merged;
}

}  // namespace lockstep
