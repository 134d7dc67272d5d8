// The catalogue's defects of a drafter's own cache: rows of its passes, and where they go.
#include "properties/mutants/mutant_parts.h"

namespace lockstep {
namespace {

using enum Feature;

// Drafts by a drafter whose layers have a cache of their own.
GeneratorOptions with_drafter(FeatureSet more = {}) {
  FeatureSet always{full_attention, drafts, drafter_cache, prefix_caching};
  always.add(more);
  return on_executor(
      always, {states, context_parallel, two_block_pool, scaled_rows, uniform_type, packed_pages,
               connector_peers, host_tier, several_groups, async_scheduling, served});
}

void over_three_passes(SavedCase& saved) {
  saved.engine.async_scheduling = false;
  saved.draft_acceptance_percent = 50;
}

// Drafts that no step can verify completely are past the last position.
void up_to_the_last_token(SavedCase& saved) {
  over_three_passes(saved);
  for (TraceRecord& record : saved.trace.records)
    if (auto* request = std::get_if<TraceRequest>(&record)) {
      request->spec.max_tokens = saved.engine.max_model_len;
      request->output.length = saved.engine.max_model_len;
    }
}

}  // namespace

std::vector<Mutant> drafter_mutants() {
  return {
      {.id = "draft-token-unshifted",
       .mechanism =
           "the drafter's first pass is given the tokens at its positions, not those behind "
           "them",
       .exposed_by = "EAGLE's or MTP's drafts",
       .caught_by = {kWritten},
       .bias = with_drafter()},
      {.id = "draft-module-first",
       .mechanism = "every module of MTP is given the first module's tokens",
       .exposed_by = "MTP of several modules",
       .caught_by = {kWritten},
       .bias = with_drafter(),
       .reshape = over_three_passes},
      {.id = "draft-row-kept",
       .mechanism = "the row written for a draft is not written again by the step that verifies it",
       .exposed_by = "drafts",
       .caught_by = {kWritten},
       .bias = with_drafter(),
       .reshape = over_three_passes},
      {.id = "draft-rejected-counted",
       .mechanism = "further passes continue after rejected drafts",
       .exposed_by = "two drafts and a rejected one",
       .caught_by = {kWritten},
       .bias = with_drafter(),
       .reshape = over_three_passes},
      {.id = "draft-not-run-again",
       .mechanism = "rows of later modules that rejected drafts went into are not run again",
       .exposed_by = "MTP of several modules, and several rejected drafts",
       .caught_by = {kWritten},
       .bias = with_drafter(),
       .reshape = over_three_passes},
      {.id = "draft-position-late",
       .mechanism = "each further pass writes a position too far",
       .exposed_by = "two drafts",
       .caught_by = {kWritten},
       .bias = with_drafter()},
      {.id = "draft-position-stuck",
       .mechanism = "further passes write over the row of the last token",
       .exposed_by = "two drafts",
       .caught_by = {kWritten},
       .bias = with_drafter()},
      {.id = "draft-unclamped",
       .mechanism = "drafts behind max_model_len keep their positions: they go to slots that no "
                    "token has, or to none",
       .exposed_by = "a request that comes to its last tokens",
       .caught_by = {kWritten},
       .bias = with_drafter(),
       .reshape = up_to_the_last_token},
      {.id = "draft-past-table",
       .mechanism = "a draft whose position has no entry goes where the row's old entry behind the "
                    "table's end leads",
       .exposed_by =
           "the first step of a prompt of whole blocks, where no slots for drafts are given",
       .caught_by = {kWritten, kMemory, "page_untouched", "reuse"},
       .bias =
           [] {
             GeneratorOptions options = with_drafter({bursts, shared_prefixes});
             options.engine = "";
             for (const Release& release : releases())
               if (release.draft_runner == DraftRunner::first) options.engine = release.name;
             return options;
           }()},
  };
}

}  // namespace lockstep
