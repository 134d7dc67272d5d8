#include "sim/conform/fit.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <ranges>
#include <utility>

#include "base/parallel.h"
#include "base/stop_signal.h"

namespace lockstep {
namespace {

struct LoadedRecording {
  std::string path;
  std::shared_ptr<const Recording> recording;
};

// How far a recording agrees under a profile.
struct Carried {
  std::int64_t steps = 0;  // steps before the first difference; one more if all agree
  ConformFile file;
};

// Summed over recordings. More agreed steps are better, then more recordings that agree.
struct Score {
  std::int64_t steps = 0;
  std::int64_t agreed = 0;
  auto operator<=>(const Score&) const = default;
};

// Thrown within a search after a stop signal: what was being compared is incomplete.
struct Stopped {};

class Search {
 public:
  Search(std::vector<LoadedRecording> recordings, const FitOptions& options)
      : recordings_(std::move(recordings)), options_(options) {}

  // Climbs to the best combination, moves it close to a release, then measures the evidence. The
  // last two steps cost most: they run every other value of every policy over every recording.
  // Errors: a stop signal before every release has run.
  Result<Fit> run() {
    Fit fit;
    try {
      at_ = best_release();
      climb();
      fit.nearest = nearest_to(*at_);
      near_release(*fit.nearest);
      fit.evidence = evidence_of(*at_);
      find_other_reasons(*at_, engine_profile(fit.nearest->name), fit.evidence);
      best_ = std::move(carry_all({at_}, everything())[0]);
    } catch (const Stopped&) {
      if (at_ == nullptr) return fail("stopped before all releases were compared");
      fit.is_stopped = true;
      fit.nearest = nearest_to(*at_);
      fit.evidence.clear();
    }
    fit.profile = at_;
    fit.summary = take_summary();
    fit.tried = tried_;
    return fit;
  }

 private:
  using Indices = std::vector<std::size_t>;

  // Runs one recording under a profile. A profile that refuses the recording's configuration counts
  // as 0 steps, since the recorded engine did serve it.
  Carried carry(const EngineProfile& profile, std::size_t i) const {
    const LoadedRecording& each = recordings_[i];
    auto file = conform_recording(each.path, each.recording, profile.name);
    if (!file) {
      ConformFile refused;
      refused.file = each.path;
      refused.judged_as = profile.name;
      refused.mismatch = {.file = each.path,
                          .what = "the configuration",
                          .recorded = "\"served\"",
                          .model = fmt::format("\"refused: {}\"", file.error().message)};
      return {0, std::move(refused)};
    }
    std::int64_t steps = file->steps + 1;
    // A difference in the header or the end line has no step: 0 steps, or all of them.
    if (file->mismatch) steps = file->mismatch->step >= 0 ? file->mismatch->step : file->steps;
    return {steps, std::move(*file)};
  }

  // Runs every candidate over every one of these recordings, in parallel: [candidates, recordings].
  std::vector<std::vector<Carried>> carry_all(const std::vector<const EngineProfile*>& candidates,
                                              const Indices& which) {
    std::vector<std::vector<Carried>> carried(candidates.size(),
                                              std::vector<Carried>(which.size()));
    for_each_in_parallel(
        std::ssize(candidates) * std::ssize(which), options_.jobs,
        [&](std::int64_t index) {
          const auto at = static_cast<std::size_t>(index);
          const std::size_t c = at / which.size(), r = at % which.size();
          carried[c][r] = carry(*candidates[c], which[r]);
        },
        [] { return !stop_requested(); });
    if (stop_requested()) throw Stopped();
    tried_ += std::ssize(candidates);
    return carried;
  }

  static Score score_of(const std::vector<Carried>& carried) {
    Score score;
    for (const Carried& each : carried) {
      score.steps += each.steps;
      score.agreed += each.file.mismatch ? 0 : 1;
    }
    return score;
  }

  Indices everything() const {
    Indices all(recordings_.size());
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
    return all;
  }

  bool may_be(const Release* release) const {
    return std::ranges::find(options_.left_out, release) == options_.left_out.end();
  }

  void tell(const std::string& what) const {
    if (options_.at) options_.at(what);
  }

  // Returns the release with which the climb starts. Newest first, so a tie keeps the newer one.
  const EngineProfile* best_release() {
    tell("the releases");
    std::vector<const EngineProfile*> candidates;
    for (const EngineProfile& profile : std::views::reverse(engine_profiles()))
      if (may_be(profile.release)) candidates.push_back(&profile);
    auto carried = carry_all(candidates, everything());
    std::size_t best = 0;
    for (std::size_t i = 1; i < candidates.size(); ++i)
      if (score_of(carried[i]) > score_of(carried[best])) best = i;
    best_ = std::move(carried[best]);
    return candidates[best];
  }

  Indices failing() const {
    Indices which;
    for (std::size_t i = 0; i < best_.size(); ++i)
      if (best_[i].file.mismatch) which.push_back(i);
    return which;
  }

  // Returns every change of one policy from a profile.
  static std::vector<PolicyFlip> flips_of(const EngineProfile& profile) {
    std::vector<PolicyFlip> flips;
    for (const Policy& policy : policies())
      for (const PolicyValue& value : policy.values)
        if (value.value != policy.get(profile)) flips.push_back({&policy, value.value});
    return flips;
  }

  // Moves to the best candidate that carries these recordings further, and all of them together
  // further than the current profile. False: none. Two stages, because candidates are many and most
  // help nothing.
  bool further(const std::vector<const EngineProfile*>& candidates, const Indices& which) {
    if (which.empty() || candidates.empty()) return false;
    Score kept;
    for (const std::size_t i : which) {
      kept.steps += best_[i].steps;
      kept.agreed += best_[i].file.mismatch ? 0 : 1;
    }
    const auto carried = carry_all(candidates, which);
    std::vector<std::pair<Score, const EngineProfile*>> promising;
    for (std::size_t c = 0; c < candidates.size(); ++c)
      if (const Score score = score_of(carried[c]); score > kept)
        promising.emplace_back(score, candidates[c]);
    std::ranges::stable_sort(promising, std::greater{},
                             [](const auto& each) { return each.first; });
    // A policy that helps some recordings may break others, so the most promising few run on all.
    constexpr std::size_t kAsked = 6;
    if (promising.size() > kAsked) promising.resize(kAsked);
    const EngineProfile* before = at_;
    for (const auto& [score, candidate] : promising) {
      auto whole = carry_all({candidate}, everything());
      if (score_of(whole[0]) <= score_of(best_)) continue;
      best_ = std::move(whole[0]);
      at_ = candidate;
    }
    return at_ != before;
  }

  // Changes one policy, or a pair if no single one helps, until all recordings agree or nothing
  // improves. Ends because the score rises with every change.
  void climb() {
    for (;;) {
      const Indices which = failing();
      if (which.empty()) return;
      tell(fmt::format("{} of {} recordings differ", which.size(), recordings_.size()));
      const std::vector<PolicyFlip> flips = flips_of(*at_);
      std::vector<const EngineProfile*> one, two;
      for (const PolicyFlip& flip : flips)
        one.push_back(&with_policy(*at_, *flip.policy, flip.value));
      if (further(one, which)) continue;
      for (std::size_t i = 0; i < flips.size(); ++i)
        for (std::size_t j = i + 1; j < flips.size(); ++j)
          if (flips[i].policy != flips[j].policy)
            two.push_back(&with_policy(*one[i], *flips[j].policy, flips[j].value));
      if (!further(two, shortest(which))) return;
    }
  }

  // Returns a few short recordings. Pairs are many: 60 changes make about 1,770 of them.
  Indices shortest(Indices which) const {
    constexpr std::size_t kFew = 6;
    std::ranges::stable_sort(which, std::less{},
                             [&](std::size_t i) { return recordings_[i].recording->steps.size(); });
    if (which.size() > kFew) which.resize(kFew);
    return which;
  }

  // Returns the release from which the fewest policies differ; the newer one if several do.
  const Release* nearest_to(const EngineProfile& found) const {
    const EngineProfile* nearest = nullptr;
    for (const EngineProfile& profile : std::views::reverse(engine_profiles()))
      if (may_be(profile.release) &&
          (nearest == nullptr ||
           differences(profile, found).size() < differences(*nearest, found).size()))
        nearest = &profile;
    return nearest->release;
  }

  // Moves to the found policies under the name of that release, each taken back to the release's
  // value wherever all recordings still go as far: a policy that the recordings do not determine
  // should not be reported as different. Pairs are tried for policies that only work together.
  void near_release(const Release& release) {
    const EngineProfile& home = engine_profile(release.name);
    const EngineProfile& found = *at_;
    at_ = &home;
    for (const Policy* policy : differences(home, found))
      at_ = &with_policy(*at_, *policy, policy->get(found));
    const auto back = [&](const EngineProfile& from, const Policy* policy) {
      return &with_policy(from, *policy, policy->get(home));
    };
    for (bool goes_on = true; goes_on;) {
      const auto different = differences(home, *at_);
      std::vector<const EngineProfile*> nearer;
      for (const Policy* policy : different) nearer.push_back(back(*at_, policy));
      for (std::size_t i = 0; i < different.size(); ++i)
        for (std::size_t j = i + 1; j < different.size(); ++j)
          nearer.push_back(back(*nearer[i], different[j]));
      goes_on = false;
      for (const EngineProfile* candidate : nearer) {
        auto carried = carry_all({candidate}, everything());
        if (score_of(carried[0]) < score_of(best_)) continue;
        best_ = std::move(carried[0]);
        at_ = candidate;
        goes_on = true;
        break;
      }
    }
  }

  // Changes every policy by itself and records which recordings then differ.
  std::vector<PolicyEvidence> evidence_of(const EngineProfile& profile) {
    tell("what each policy shows in");
    const std::vector<PolicyFlip> flips = flips_of(profile);
    std::vector<const EngineProfile*> candidates;
    for (const PolicyFlip& flip : flips)
      candidates.push_back(&with_policy(profile, *flip.policy, flip.value));
    const auto carried = carry_all(candidates, everything());
    std::vector<PolicyEvidence> evidence;
    for (const Policy& policy : policies()) {
      evidence.emplace_back().policy = &policy;
      evidence.back().value = policy.get(profile);
    }
    for (std::size_t i = 0; i < flips.size(); ++i) {
      const auto of_policy = static_cast<std::size_t>(flips[i].policy - policies().data());
      add_evidence(flips[i], carried[i], evidence[of_policy]);
    }
    return evidence;
  }

  // For each policy that differs from the nearest release, finds other policies that explain the
  // recordings equally well.
  void find_other_reasons(const EngineProfile& profile, const EngineProfile& home,
                          std::vector<PolicyEvidence>& evidence) {
    for (const Policy* policy : differences(home, profile)) {
      const EngineProfile& without = with_policy(profile, *policy, policy->get(home));
      const auto carried = carry_all({&without}, everything());
      Indices parting;
      // First only the recordings that need an explanation: most candidates fail there.
      for (std::size_t i = 0; i < best_.size(); ++i)
        if (carried[0][i].steps < best_[i].steps) parting.push_back(i);
      const auto of_policy = static_cast<std::size_t>(policy - policies().data());
      for (const PolicyFlip& flip : flips_of(without)) {
        if (flip.policy == policy) continue;
        const EngineProfile& other = with_policy(without, *flip.policy, flip.value);
        if (explains(other, parting) && explains(other, everything()))
          evidence[of_policy].instead.push_back(flip);
      }
    }
  }

  // True if all of these recordings go as far as under the profile that was found.
  bool explains(const EngineProfile& profile, const Indices& which) {
    constexpr std::size_t kAtOnce = 16;  // most candidates fail within the first few
    for (std::size_t begin = 0; begin < which.size(); begin += kAtOnce) {
      const std::size_t end = std::min(which.size(), begin + kAtOnce);
      const Indices some(which.begin() + static_cast<std::ptrdiff_t>(begin),
                         which.begin() + static_cast<std::ptrdiff_t>(end));
      const auto carried = carry_all({&profile}, some);
      for (std::size_t i = 0; i < some.size(); ++i)
        if (carried[0][i].steps < best_[some[i]].steps) return false;
    }
    return true;
  }

  void add_evidence(const PolicyFlip& flip, const std::vector<Carried>& carried,
                    PolicyEvidence& evidence) const {
    std::int64_t parting = 0;
    for (std::size_t i = 0; i < carried.size(); ++i) {
      if (carried[i].steps >= best_[i].steps) continue;
      ++parting;
      if (!evidence.first) evidence.first = carried[i].file.mismatch;
    }
    if (parting == 0) evidence.also.push_back(flip.value);
    evidence.parting = std::max(evidence.parting, parting);
  }

  ConformSummary take_summary() {
    ConformSummary summary;
    for (Carried& each : best_) {
      summary.steps += each.file.steps;
      summary.agreed += each.file.mismatch ? 0 : 1;
      summary.stuck += each.file.is_stuck ? 1 : 0;
      summary.files.push_back(std::move(each.file));
    }
    return summary;
  }

  std::vector<LoadedRecording> recordings_;
  const FitOptions& options_;
  const EngineProfile* at_ = nullptr;  // null: no release has run on all recordings
  std::vector<Carried> best_;          // under `at_`
  std::int64_t tried_ = 0;
};

}  // namespace

const ConformMismatch* Fit::new_behaviour() const {
  const ConformMismatch* shortest = nullptr;
  if (is_stopped) return shortest;
  // A mismatch of the end line has step -1. As an unsigned number it is later than any step.
  const auto step_of = [](const ConformMismatch& mismatch) {
    return static_cast<std::uint64_t>(mismatch.step);
  };
  for (const ConformFile& file : summary.files)
    if (file.mismatch && (shortest == nullptr || step_of(*file.mismatch) < step_of(*shortest)))
      shortest = &*file.mismatch;
  return shortest;
}

Result<Fit> fit_policies(const std::vector<std::string>& paths, const FitOptions& options) {
  std::vector<LoadedRecording> recordings;
  for (const std::string& path : paths) {
    if (stop_requested()) return fail("stopped before all recordings were read");
    LS_ASSIGN_OR_RETURN(auto recording, read_recording(path));
    if (recording.steps.empty() && recording.end.is_cut_off)
      return fail("{} is {}; it shows no policy", path, cut_off_text(recording.end));
    recordings.push_back({path, std::make_shared<const Recording>(std::move(recording))});
    const RecordedEngine& first = recordings.front().recording->header.engine;
    const RecordedEngine& engine = recordings.back().recording->header.engine;
    if (engine != first)
      return fail(
          "{}:1: engine: a recording of {}, and {} is one of {}; fit takes the recordings of one "
          "engine",
          path, engine.text(), paths.front(), first.text());
  }
  if (recordings.empty()) return fail("no recording to fit");
  return Search(std::move(recordings), options).run();
}

}  // namespace lockstep
