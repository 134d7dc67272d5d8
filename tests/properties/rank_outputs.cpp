#include "tests/properties/rank_outputs.h"

#include <fmt/core.h>

#include <memory>
#include <utility>

#include "properties/judge/forwarding_backend.h"
#include "reference/plan/rank_plan.h"
#include "sim/session/session.h"

namespace lockstep {
namespace {

constexpr std::int64_t kEveryQuery = std::int64_t{1} << 40;

// A layer of a rank, as its outputs name it.
struct AskedLayer {
  std::string name;
  std::int32_t first_query_head = 0;
  std::int32_t num_query_heads = 0;
  std::int64_t head_size = 0;
};

std::vector<AskedLayer> asked_layers(const RankPlan& plan) {
  std::vector<AskedLayer> layers;
  for (const KVCacheGroupSpec& group : plan.plan.groups)
    for (std::size_t i = 0; i < group.layer_names.size(); ++i) {
      const LayerShare& share = plan.layers[layers.size()];
      const auto heads = static_cast<std::int32_t>(group.layer_spec(i).num_kv_heads);
      layers.push_back({.name = group.layer_names[i],
                        .first_query_head = share.first_query_head,
                        .num_query_heads = heads * share.queries_per_kv,
                        .head_size = group.layer_spec(i).head_size});
    }
  return layers;
}

// Passes everything on and keeps what attention answered.
class KeepingBackend final : public ForwardingBackend {
 public:
  KeepingBackend(std::unique_ptr<Backend> inner, std::vector<AskedLayer> layers,
                 OutputsByQuery& outputs)
      : ForwardingBackend(std::move(inner)), layers_(std::move(layers)), outputs_(outputs) {}

  Result<void> execute(const StepProgram& program, StepReadback& readback) override {
    auto done = inner_->execute(program, readback);
    if (done && !program.queries.empty()) keep(program, readback);
    return done;
  }

 private:
  void keep(const StepProgram& program, const StepReadback& readback) {
    auto at = readback.outputs.begin();
    for (const AttentionQuery& query : program.queries) {
      const AskedLayer& layer = layers_[static_cast<std::size_t>(query.layer)];
      for (std::int32_t head = 0; head < layer.num_query_heads; ++head, at += layer.head_size)
        outputs_[{program.step, query.row, layer.name, layer.first_query_head + head, query.first,
                  query.last}]
            .assign(at, at + layer.head_size);
    }
  }

  const std::vector<AskedLayer> layers_;
  OutputsByQuery& outputs_;
};

SavedCase on_one_device(SavedCase saved) {
  saved.tensor_parallel_size = 1;
  saved.pipeline_parallel_size = 1;
  return saved;
}

}  // namespace

Result<OutputsByQuery> outputs_of(const SavedCase& saved, const BackendFactory& backend) {
  LockstepConfig config = config_of(saved);
  config.budget.query_rows = kEveryQuery;
  if (auto sound = check_setup(config); !sound) return tl::unexpected(sound.error());
  if (!config.connector.parts.empty())
    return fail("a KV connector: what ranks read of it is not asked here");
  OutputsByQuery outputs;
  const auto keeping = [&](const BackendConfig& own) -> Result<std::unique_ptr<Backend>> {
    const auto plan = rank_plan(own.plan, own.parallel, own.queries_per_kv);
    if (!plan) return tl::unexpected(plan.error());
    auto inner = backend(own);
    if (!inner) return inner;
    return std::make_unique<KeepingBackend>(std::move(*inner), asked_layers(*plan), outputs);
  };
  const auto session = open_undisturbed(saved, config, keeping, {});
  if (!session) return tl::unexpected(session.error());
  const auto report = (*session)->run();
  if (!report) return tl::unexpected(report.error());
  if (report->summary.divergence) return fail(to_text(*report->summary.divergence));
  return outputs;
}

Result<std::optional<std::string>> check_rank_outputs(const SavedCase& saved,
                                                      const BackendFactory& backend) {
  const auto together = outputs_of(saved, backend);
  if (!together) return tl::unexpected(together.error());
  const auto alone = outputs_of(on_one_device(saved), backend);
  if (!alone) return tl::unexpected(alone.error());
  if (together->size() != alone->size())
    return std::optional(
        fmt::format("{} outputs of one device, {} of the ranks", alone->size(), together->size()));
  for (const auto& [key, output] : *alone) {
    const auto same = together->find(key);
    if (same != together->end() && same->second == output) continue;
    return std::optional(
        fmt::format("step {}, row {}, layer {}, query head {} over tokens [{}, {}): {}", key.step,
                    key.row, key.layer, key.query_head, key.first, key.last,
                    same == together->end() ? "no rank answers" : "the ranks answer otherwise"));
  }
  return std::optional<std::string>();
}

}  // namespace lockstep
