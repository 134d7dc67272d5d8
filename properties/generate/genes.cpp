#include "properties/generate/genes.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <limits>

#include "base/check.h"
#include "base/json_reader.h"
#include "base/json_writer.h"

namespace lockstep {
namespace {

// A gene keeps at most 40 words; beyond that, random ones are dropped.
constexpr std::size_t kWordsMax = 40;  // of a part
constexpr std::uint32_t kLastWord = std::numeric_limits<std::uint32_t>::max();

// Derives the seed of a part without a gene. The key is mixed first, because consecutive keys
// differ in few bits.
std::uint32_t seed_of_part(const CaseGenes& genes, PartKey key) {
  return static_cast<std::uint32_t>(splitmix64(genes.base ^ splitmix64(key)) >> 32);
}

// Returns the gene of a part, made explicit if the part had none. Copying it to other genes keeps
// the part's choices, whatever their base.
Gene gene_of(const CaseGenes& genes, PartKey key) {
  const auto found = genes.parts.find(key);
  return found != genes.parts.end() ? found->second
                                    : Gene{.seed = seed_of_part(genes, key), .words = {}};
}

// Returns the word that stands for `value` of [0, range). Both ends stay ends in every range; other
// values map to the middle of their share: value 1 of 4 is 3/8 of 2^32.
std::uint32_t word_of(std::int64_t value, std::int64_t range) {
  if (value <= 0) return 0;
  if (value >= range - 1) return kLastWord;
  return static_cast<std::uint32_t>(((2 * static_cast<std::uint64_t>(value) + 1) << 31) /
                                    static_cast<std::uint64_t>(range));
}

// Answers from the genes, with one stream per part. A part that is entered again continues where it
// stopped, so the order in which parts are entered does not matter.
class GeneChoices final : public ChoiceSource {
 public:
  GeneChoices(const CaseGenes& genes, std::vector<DrawnChoice>* drawn)
      : genes_(genes), drawn_(drawn) {
    enter(CasePart::head, 0);
  }

  void enter(CasePart part, std::int64_t index) override {
    LS_CHECK(index >= 0 && index < kPartIndexes, "part {}, index {}", static_cast<int>(part),
             index);
    key_ = key_of(part, index);
    const auto [stream, is_new] = streams_.try_emplace(key_);
    if (is_new) {
      const auto gene = genes_.parts.find(key_);
      stream->second.gene = gene != genes_.parts.end() ? &gene->second : nullptr;
      stream->second.seed =
          gene != genes_.parts.end() ? gene->second.seed : seed_of_part(genes_, key_);
    }
    stream_ = &stream->second;
  }

 private:
  struct Stream {
    const Gene* gene = nullptr;  // null: the part has no gene
    std::uint32_t seed = 0;
    std::uint16_t position = 0;  // of the next choice
  };

  // Scales the word to [0, n): word * n / 2^32, which keeps the word's share of the range.
  std::int64_t draw(std::int64_t n) override {
    const std::uint16_t position = stream_->position++;
    auto word = static_cast<std::uint32_t>(
        splitmix64((static_cast<std::uint64_t>(stream_->seed) << 16) + position) >> 32);
    if (stream_->gene != nullptr)
      if (const auto own = stream_->gene->words.find(position); own != stream_->gene->words.end())
        word = own->second;
    const auto value = static_cast<std::int64_t>(word * static_cast<std::uint64_t>(n) >> 32);
    if (drawn_ != nullptr)
      drawn_->push_back({.part = key_,
                         .position = position,
                         .range = static_cast<std::int32_t>(n),
                         .value = static_cast<std::int32_t>(value)});
    return value;
  }

  const CaseGenes& genes_;
  std::vector<DrawnChoice>* const drawn_;
  std::map<PartKey, Stream> streams_;
  PartKey key_ = 0;
  Stream* stream_ = nullptr;
};

// Kinds of changes. Small changes are chosen more often, see kChanges: they keep what the parent
// reached.
enum class Change : std::uint8_t {
  words,          // one to three choices of one part
  toggles,        // one to three features
  part,           // one part, from a fresh seed
  traffic,        // all requests and faults
  configuration,  // all parts except features and traffic
  // Keeps which features are enabled, but none of their details.
  all_but_features,
  cross_traffic,   // the traffic of the second case
  cross_requests,  // about half of its requests
  cross_part,      // one other part of it
  copy_request,    // one request over another
};
// Words make 4 of 16 changes, features and single parts 2 each, the others 1.
constexpr std::array kChanges = {
    Change::words,         Change::words,          Change::words,         Change::words,
    Change::toggles,       Change::toggles,        Change::part,          Change::part,
    Change::traffic,       Change::traffic,        Change::configuration, Change::all_but_features,
    Change::cross_traffic, Change::cross_requests, Change::cross_part,    Change::copy_request};

// Returns true for parts that a configuration can exchange: requests and faults.
bool is_traffic(PartKey key) {
  const CasePart part = part_of(key);
  return part == CasePart::traffic || part == CasePart::request || part == CasePart::faults ||
         part == CasePart::fault;
}

// Makes one change. It works on a copy of the first case's genes; both parents stay as they are.
class Changer {
 public:
  Changer(const ParentCase& first, const ParentCase& second, SeededRandom& random)
      : first_(first),
        second_(second),
        keys_(keys_of(first)),
        keys_of_second_(keys_of(second)),
        random_(random),
        genes_(*first.genes) {}

  // Makes one change in 80 % of the calls and up to three in the others. 30 % of the calls draw a
  // number of additional changes from 0, 1 and 2.
  CaseGenes run() {
    const auto times = 1 + (random_.chance(30) ? random_.below(3) : 0);
    for (std::int64_t i = 0; i < times; ++i)
      change(kChanges[static_cast<std::size_t>(random_.below(std::ssize(kChanges)))]);
    drop_words();
    return std::move(genes_);
  }

 private:
  void change(Change what) {
    switch (what) {
      case Change::words:
        return change_words();
      case Change::toggles:
        return toggle_features();
      case Change::part:
        return renew(keys_[random_below(keys_.size())]);
      case Change::traffic:
        return renew_if([](PartKey key) { return is_traffic(key); });
      case Change::configuration:
        return renew_if(
            [](PartKey key) { return !is_traffic(key) && part_of(key) != CasePart::features; });
      case Change::all_but_features:
        return renew_if([](PartKey key) { return part_of(key) != CasePart::features; });
      // Parts of the second case's traffic that have no gene must also be taken: gene_of() makes
      // them explicit. The first case's own traffic is dropped before.
      case Change::cross_traffic:
        for (std::int64_t key = 0; key < kNumCaseParts * kPartIndexes; ++key)
          if (is_traffic(static_cast<PartKey>(key))) genes_.parts.erase(static_cast<PartKey>(key));
        for (const PartKey key : keys_of_second_)
          if (is_traffic(key)) take(key);
        return;
      case Change::cross_requests:
        for (const PartKey key : keys_of_second_)
          if (part_of(key) == CasePart::request && random_.chance(50)) take(key);
        return;
      case Change::cross_part:
        return take(keys_of_second_[random_below(keys_of_second_.size())]);
      case Change::copy_request:
        return copy_request();
    }
  }

  std::size_t random_below(std::size_t n) {
    return static_cast<std::size_t>(random_.below(static_cast<std::int64_t>(n)));
  }

  // Returns the parts in which the case made choices, ascending and without duplicates.
  static std::vector<PartKey> keys_of(const ParentCase& parent) {
    std::vector<PartKey> keys;
    for (const DrawnChoice& choice : *parent.drawn) keys.push_back(choice.part);
    std::ranges::sort(keys);
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    return keys;
  }

  // Returns the first case's choices of a part, in order.
  std::vector<const DrawnChoice*> choices_of(PartKey key) const {
    std::vector<const DrawnChoice*> choices;
    for (const DrawnChoice& choice : *first_.drawn)
      if (choice.part == key) choices.push_back(&choice);
    return choices;
  }

  // Returns the gene of a part for writing. A new one keeps the choices of the part, since it gets
  // the seed that the part already had.
  Gene& own(PartKey key) {
    const auto [gene, is_new] = genes_.parts.try_emplace(key);
    if (is_new) gene->second.seed = seed_of_part(genes_, key);
    return gene->second;
  }

  void renew(PartKey key) {
    genes_.parts[key] = {.seed = static_cast<std::uint32_t>(random_.next() >> 32), .words = {}};
  }

  // Gives fresh seeds to the parts that satisfy the predicate, and also to parts that the case
  // never entered: a new configuration may enter them.
  template <class Predicate>
  void renew_if(Predicate is_renewed) {
    CaseGenes renewed{.base = random_.next(), .parts = {}};
    for (const PartKey key : keys_)
      if (!is_renewed(key)) renewed.parts[key] = gene_of(genes_, key);
    genes_ = std::move(renewed);
  }

  void take(PartKey key) { genes_.parts[key] = gene_of(*second_.genes, key); }

  // Changes choices of one part only: consequences in other parts follow through their ranges.
  void change_words() {
    const PartKey key = keys_[random_below(keys_.size())];
    const std::vector<const DrawnChoice*> of_part = choices_of(key);
    for (std::int64_t i = random_.between(1, 3); i > 0; --i)
      change_word(*of_part[random_below(of_part.size())]);
  }

  // Moves the choice to an end of its range (2 of 8), one step up or down (4 of 8), or anywhere (2
  // of 8). Most defects are at boundaries or one step from them.
  void change_word(const DrawnChoice& choice) {
    std::int64_t value = random_.below(choice.range);
    switch (random_.below(8)) {
      case 0:
        value = 0;
        break;
      case 1:
        value = choice.range - 1;
        break;
      case 2:
      case 3:
        value = std::min<std::int64_t>(choice.value + 1, choice.range - 1);
        break;
      case 4:
      case 5:
        value = std::max<std::int64_t>(choice.value - 1, 0);
        break;
      default:
        break;
    }
    own(choice.part).words[choice.position] = word_of(value, choice.range);
  }

  // Switches features on or off. A feature is a chance of 100, whose last value is true and whose
  // first is false.
  void toggle_features() {
    const std::vector<const DrawnChoice*> features = choices_of(key_of(CasePart::features));
    for (std::int64_t i = random_.between(1, 3); i > 0; --i) {
      const DrawnChoice& choice = *features[random_below(features.size())];
      own(choice.part).words[choice.position] = random_.chance(50) ? kLastWord : 0;
    }
  }

  void copy_request() {
    // Requests that are equal except for their position share prefixes and compete for blocks.
    std::vector<PartKey> requests;
    for (const PartKey key : keys_)
      if (part_of(key) == CasePart::request) requests.push_back(key);
    if (requests.empty()) return;
    const PartKey from = requests[random_below(requests.size())];
    genes_.parts[requests[random_below(requests.size())]] = gene_of(genes_, from);
  }

  // Drops random words above the limit. Changes of changes accumulate words, and a corpus has to
  // stay small.
  void drop_words() {
    for (auto& [key, gene] : genes_.parts)
      while (gene.words.size() > kWordsMax)
        gene.words.erase(std::next(gene.words.begin(), random_.below(std::ssize(gene.words))));
  }

  const ParentCase& first_;
  const ParentCase& second_;
  const std::vector<PartKey> keys_, keys_of_second_;
  SeededRandom& random_;
  CaseGenes genes_;
};

}  // namespace

SavedCase generate_case(const CaseGenes& genes, const GeneratorOptions& options,
                        std::vector<DrawnChoice>* drawn) {
  GeneChoices choices(genes, drawn);
  return generate_case(choices, options);
}

CaseGenes changed_genes(const ParentCase& first, const ParentCase& second, SeededRandom& random) {
  LS_CHECK(!first.drawn->empty() && !second.drawn->empty(), "a case without choices");
  return Changer(first, second, random).run();
}

std::string genes_to_text(const CaseGenes& genes) {
  return object_line([&](JsonWriter& out) {
    out.key("base").uint64(genes.base).key("parts").begin_object();
    for (const auto& [key, gene] : genes.parts) {
      out.key(fmt::format("{}", key)).begin_array().integer(gene.seed);
      for (const auto& [position, word] : gene.words) out.integer(position).integer(word);
      out.end_array();
    }
    out.end_object();
  });
}

// Reads the object of genes_to_text(). A part key outside all parts is refused; the loop bounds the
// number so that long digits do not overflow.
static CaseGenes read_genes(JsonValue value) {
  JsonObject object = value.object();
  CaseGenes genes;
  genes.base = object.required("base").uint64();
  JsonObject parts = object.required("parts").object();
  for (auto& [name, entry] : parts.entries()) {
    std::int64_t key = 0;
    for (const char c : name)
      key = c >= '0' && c <= '9' && key < kNumCaseParts * kPartIndexes
                ? 10 * key + (c - '0')
                : kNumCaseParts * kPartIndexes;
    if (name.empty() || key >= kNumCaseParts * kPartIndexes)
      entry.refuse_because(fmt::format("no part of a case has the number {}", name));
    Gene gene;
    std::int64_t index = 0;
    std::uint16_t position = 0;
    for (JsonValue number : entry.array()) {
      if (index == 0)
        gene.seed = number.integer<std::uint32_t>();
      else if (index % 2 == 1)
        position = number.integer<std::uint16_t>();
      else
        gene.words[position] = number.integer<std::uint32_t>();
      ++index;
    }
    if (index % 2 == 0) entry.refuse("a seed, and pairs of a position and a word");
    genes.parts[static_cast<PartKey>(key)] = std::move(gene);
  }
  object.finish();
  return genes;
}

Result<CaseGenes> genes_from_text(const std::string& name, std::string_view text,
                                  std::int64_t line) {
  JsonReader json(name);
  CaseGenes genes;
  if (json.parse(text, line)) genes = read_genes(json.root());
  if (!json.ok()) return json.failure();
  return genes;
}

}  // namespace lockstep
