// What attention reads does not depend on where it lies: the digests of a case are the same under
// another layout, another backend's rules and other padding. The memory model
// is not asked; two devices are compared with each other.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda_backend/simt_backend.h"
#include "properties/case_parts.h"
#include "properties/generator.h"
#include "properties/judge.h"

namespace lockstep {
namespace {

constexpr std::uint64_t kSeeds = 25;

struct ReadDigest {
  std::int64_t step = 0;
  AttentionProbe probe;
  std::uint64_t digest = 0;
  bool operator==(const ReadDigest& other) const {
    return step == other.step && probe.row == other.probe.row && probe.layer == other.probe.layer &&
           probe.first == other.probe.first && probe.last == other.probe.last &&
           digest == other.digest;
  }
};

// Another backend, and what its steps read.
class DigestKeeper final : public Backend {
 public:
  DigestKeeper(std::unique_ptr<Backend> inner, std::vector<ReadDigest>& digests)
      : inner_(std::move(inner)), digests_(digests) {}
  std::string_view name() const override { return inner_->name(); }
  std::string device() const override { return inner_->device(); }
  Result<void> execute(const StepProgram& program, StepReadback& readback) override {
    Result<void> done = inner_->execute(program, readback);
    if (!done || program.rows.empty()) return done;  // a probe of the diagnosis has no rows
    for (std::size_t i = 0; i < program.probes.size(); ++i)
      digests_.push_back({program.step, program.probes[i], readback.digests[i]});
    return done;
  }
  Result<void> fingerprint_pages(std::span<const PageId> pages,
                                 std::span<Fingerprint> fingerprints) override {
    return inner_->fingerprint_pages(pages, fingerprints);
  }
  Result<std::vector<std::uint8_t>> read_page(PageId page) override {
    return inner_->read_page(page);
  }
  std::optional<Writer> who_wrote(PageId page, std::int64_t byte) override {
    return inner_->who_wrote(page, byte);
  }
  bool answers_queries() const override { return inner_->answers_queries(); }
  std::vector<std::string> not_checked() const override { return inner_->not_checked(); }

 private:
  std::unique_ptr<Backend> inner_;
  std::vector<ReadDigest>& digests_;
};

struct Reading {
  Outcome outcome;
  std::vector<ReadDigest> digests;
};

Reading read_by(const SavedCase& saved) {
  Reading reading;
  reading.outcome =
      judge(saved, [&](const BackendConfig& config) -> Result<std::unique_ptr<Backend>> {
        auto inner = make_simt_backend(config);
        if (!inner) return tl::unexpected(inner.error());
        return std::unique_ptr<Backend>(
            std::make_unique<DigestKeeper>(std::move(*inner), reading.digests));
      });
  return reading;
}

// Whether two runs read the same for as long as both went on.
bool read_the_same(const Reading& one, const Reading& other) {
  const std::size_t count = std::min(one.digests.size(), other.digests.size());
  return std::equal(one.digests.begin(), one.digests.begin() + static_cast<std::ptrdiff_t>(count),
                    other.digests.begin());
}

struct LayoutChange {
  std::string name;
  std::function<void(SavedCase&)> change;
  std::string mutant;  // of the backend, that breaks it
};

std::vector<LayoutChange> changes() {
  return {{"other_layout",
           [](SavedCase& saved) {
             saved.layout = saved.layout == CacheLayout::NHD ? CacheLayout::HND : CacheLayout::NHD;
           },
           "layout-two-heads"},
          {"other_attention_backend",
           [](SavedCase& saved) {
             saved.attention_backend = saved.attention_backend == AttentionBackend::triton_attn
                                           ? AttentionBackend::flash_attn
                                           : AttentionBackend::triton_attn;
           },
           "wrong-stride"},
          {"no_needless_padding", [](SavedCase& saved) { plan_again(saved); }, "wrong-stride"}};
}

SavedCase with_kernels(std::uint64_t seed, const std::string& mutant) {
  GeneratorOptions options;
  options.engine = "vllm-0.33.0";
  options.check = "fast";
  options.never.add(Feature::priority_policy);
  SavedCase saved = generate_case(seed, options);
  if (!mutant.empty()) saved.mutants = {mutant};
  return saved;
}

class LayoutRelation : public testing::TestWithParam<LayoutChange> {};

TEST_P(LayoutRelation, attention_reads_the_same) {
  std::int64_t compared = 0;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    const SavedCase saved = with_kernels(seed, "");
    SavedCase other = saved;
    GetParam().change(other);
    if (other == saved) continue;
    const Reading one = read_by(saved);
    const Reading two = read_by(other);
    if (one.digests.empty() || two.outcome.kind == OutcomeKind::refused) continue;
    ASSERT_EQ(one.digests.size(), two.digests.size()) << "seed " << seed << two.outcome.what;
    ASSERT_TRUE(read_the_same(one, two)) << "seed " << seed;
    compared += std::ssize(one.digests);
  }
  EXPECT_GT(compared, 0);
}

TEST_P(LayoutRelation, breaks_under_a_defect_of_the_backend) {
  bool broken = false;
  for (std::uint64_t seed = 1; seed <= 4 * kSeeds && !broken; ++seed) {
    const SavedCase saved = with_kernels(seed, GetParam().mutant);
    SavedCase other = saved;
    GetParam().change(other);
    if (other != saved) broken = !read_the_same(read_by(saved), read_by(other));
  }
  EXPECT_TRUE(broken) << GetParam().mutant;
}

INSTANTIATE_TEST_SUITE_P(Each, LayoutRelation, testing::ValuesIn(changes()),
                         [](const auto& change) { return change.param.name; });

}  // namespace
}  // namespace lockstep
