// The catalogue's defects of HiSparse: what is decided of its pages, and where their rows lie.
#include "properties/mutants/mutant_parts.h"

namespace lockstep {
namespace {
using enum Feature;
}  // namespace

std::vector<Mutant> page_decision_mutants() {
  const GeneratorOptions pages = decisions({hisparse, shared_prefixes, tight_pool, long_prompts});
  GeneratorOptions beside_peers = pages;
  beside_peers.always.add(connector_peers);
  constexpr auto kRead = "invariant.read_page";
  return {
      {.id = "page-host-held-twice",
       .mechanism = "a copy of a page holds its host block twice, and frees it once",
       .exposed_by = "HiSparse, and a page that fills up",
       .caught_by = {"invariant.page_leak", "liveness"},
       .bias = pages},
      {.id = "page-copy-unheld",
       .mechanism = "a copy of a page does not hold its device blocks: they are reallocated while "
                    "it is in flight",
       .exposed_by = "HiSparse, and a request that ends while its pages are copied",
       .caught_by = {"invariant.page_under_way"},
       .bias = pages},
      {.id = "page-last-untold",
       .mechanism =
           "workers do not receive the position of a request's last page, and write nowhere",
       .exposed_by = "HiSparse",
       .caught_by = {"invariant.written_page"},
       .bias = pages},
      {.id = "page-loss-untold",
       .mechanism = "workers receive new pages, and not those that were lost since: they "
                    "read a block that now belongs to another request",
       .exposed_by = "HiSparse, and a full pool",
       .caught_by = {kRead},
       .bias = pages},
      {.id = "page-loss-forgotten",
       .mechanism = "a page whose block was reallocated still counts as resident",
       .exposed_by = "HiSparse, and a full pool",
       .caught_by = {kRead},
       .bias = pages},
      {.id = "page-copy-stale",
       .mechanism = "a reallocated block still counts as the copy of a published page, "
                    "and a hit takes it over",
       .exposed_by = "HiSparse, and a hit on a page whose block was reallocated",
       .caught_by = {kRead},
       .bias = pages},
      {.id = "page-restore-dropped",
       .source = "vllm 0.33.0, v1/hisparse/coordinator.py (findings, 46)",
       .mechanism = "the last page of a load stays on the host, and is read from an empty block",
       .exposed_by = "HiSparse with peers, and a load that ends inside a page",
       .caught_by = {kRead},
       .bias = beside_peers},
      {.id = "page-mirror-short",
       .mechanism = "rows on the last page of a step are not written to the host, and the page "
                    "passes for clean",
       .exposed_by = "HiSparse, and a step that writes two pages of a request",
       .caught_by = {"invariant.clean_page"},
       .bias = pages},
      {.id = "page-without-hot-region",
       .mechanism = "pages are freed before the request has a hot region to read them through",
       .exposed_by = "HiSparse, and a full pool",
       .caught_by = {"invariant.hot_region"},
       .bias = pages},
      {.id = "page-all-resident",
       .mechanism = "a step that reads from the host is reported as reading nothing there",
       .exposed_by = "HiSparse, and a hit or a full pool",
       .caught_by = {"invariant.all_resident"},
       .bias = pages},
  };
}

// Their rows, as a backend moves them and looks them up.
std::vector<Mutant> page_row_mutants() {
  const FeatureSet apart{two_block_pool, context_parallel};
  const GeneratorOptions pages =
      on_executor({hisparse, shared_prefixes, tight_pool, long_prompts}, apart);
  GeneratorOptions beside_peers = pages;
  beside_peers.always.add(connector_peers);
  return {
      {.id = "rows-mirror-short",
       .mechanism = "the last token of a step is not written to the host",
       .exposed_by = "HiSparse",
       .caught_by = {kHost},
       .bias = pages},
      {.id = "rows-residency-kept",
       .mechanism = "a page that has left the device is still read there",
       .exposed_by = "HiSparse, and a page whose block was reallocated",
       .caught_by = {kDigest, kOutput},
       .bias = pages},
      {.id = "rows-restore-dropped",
       .mechanism = "the last page of a load does not come back to the device",
       .exposed_by = "HiSparse with peers, and a load that ends inside a page",
       .caught_by = {kWritten},
       .bias = beside_peers},
      {.id = "rows-host-unread",
       .mechanism = "the null block is read instead of the host page",
       .exposed_by = "HiSparse, and a hit or a full pool",
       .caught_by = {kDigest, kOutput},
       .bias = pages},
      {.id = "hot-region-kept",
       .source = "vllm 0.33.0, v1/hisparse/runtime.py: invalidate_blocks",
       .mechanism = "the next request in a batch row inherits the previous request's hot region",
       .exposed_by = "HiSparse, and two requests that read from the host in one row",
       .caught_by = {kWritten, kDigest},
       .bias = pages},
      {.id = "hot-evicts-used",
       .mechanism = "a row that is read takes a slot that the same read uses",
       .exposed_by = "HiSparse, and a hot region that is full",
       .caught_by = {kWritten, kDigest, kMemory},
       .bias = pages},
      {.id = "hot-row-by-slot",
       .mechanism = "a hot region is filled with the host rows of its slots' numbers",
       .exposed_by = "HiSparse, and a hit or a full pool",
       .caught_by = {kWritten, kDigest},
       .bias = pages},
  };
}

}  // namespace lockstep
