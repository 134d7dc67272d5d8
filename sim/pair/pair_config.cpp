#include "sim/pair/pair_config.h"

#include <fmt/core.h>

#include "base/check.h"
#include "sim/pair/transfer_receiver.h"

namespace lockstep {
namespace {

bool is_kind_known(CacheKind kind) { return attends_to_all(kind) || is_sliding_window(kind); }

// Whether a block of one lies in a host block as a block of the other does.
bool lay_out_alike(const BackendConfig& a, const BackendConfig& b) {
  return a.layout == b.layout && a.attention_backend == b.attention_backend &&
         a.layout_rule == b.layout_rule && a.numbers == b.numbers &&
         a.parallel.tp_size == b.parallel.tp_size;
}

Result<void> check_pages(const PairOptions& options) {
  LS_CHECK(std::ssize(options.prefill_ranks) == num_ranks(options.prefill.backend) &&
               std::ssize(options.decode_ranks) == num_ranks(options.decode.backend),
           "{} and {} backends for {} and {} ranks", options.prefill_ranks.size(),
           options.decode_ranks.size(), num_ranks(options.prefill.backend),
           num_ranks(options.decode.backend));
  if (!lay_out_alike(options.prefill.backend, options.decode.backend))
    return fail(
        "disaggregated prefill: both engines must use one block layout; what is sent are "
        "the bytes of a block, layer after layer");
  for (const LockstepConfig* config : {&options.prefill, &options.decode})
    if (config->backend.num_host_blocks < options.staging_blocks)
      return fail(fmt::format(
          "prefill and decode apart: a host tier of {} blocks for a staging buffer of {}",
          config->backend.num_host_blocks, options.staging_blocks));
  return {};
}

}  // namespace

Result<void> check_pair(const PairOptions& options) {
  const auto& groups = options.prefill.backend.plan.groups;
  for (const KVCacheGroupSpec& group : groups)
    if (!is_kind_known(group.spec.kind))
      return fail(
          fmt::format("prefill and decode apart: blocks of {} are not transferred; full "
                      "attention, MLA and sliding windows are",
                      name_of(group.spec.kind)));
  if (groups != options.decode.backend.plan.groups)
    return fail("prefill and decode apart: both engines must have the same groups and block sizes");
  if (options.offer_percent < 100 && !can_compute_lost_blocks(groups))
    return fail(
        "prefill and decode apart: parts of prompts can be offered to one group that keeps "
        "all blocks; leave the offers whole");
  for (const LockstepConfig* config : {&options.prefill, &options.decode}) {
    if (config->engine.num_spec_tokens > 0)
      return fail("prefill and decode apart: draft tokens are not modelled");
    if (num_ranks(config->backend) != config->backend.parallel.tp_size ||
        config->backend.context.num_ranks > 1 || config->data_parallel.dp_size > 1)
      return fail(
          "prefill and decode apart: of several ranks, blocks of tensor parallel ones alone are "
          "transferred");
  }
  if (options.staging_blocks < 1)
    return fail("prefill and decode apart: a staging buffer holds a block at least");
  return options.has_pages() ? check_pages(options) : Result<void>();
}

}  // namespace lockstep
