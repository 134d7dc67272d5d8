// The parts of the generator by file: cache_generator.cpp makes groups and their pool;
// whole_caches.cpp shards and replicates them; engine_generator.cpp makes the options of the
// engine, its ranks, the backend's modes and KV connectors; traffic_generator.cpp makes
// arrivals, aborts and faults. draw_host_pages() has a file of its own.
//
// A function that cannot apply its feature returns without a change: a feature is a permission and
// not a promise.
#pragma once

#include "properties/generate/generator.h"
#include "reference/profiles/compatibility.h"

namespace lockstep {

constexpr std::int64_t kStepNs = 10'000'000;  // approximate virtual time of a step

// The state of one generation: the choices, what the search requires, and the features of this
// case.
struct Draw {
  ChoiceSource& choices;
  const GeneratorOptions& options;
  FeatureSet features;

  // Returns true if the case runs Lockstep's kernels, whose blocks are multiples of 16 tokens.
  // Decisions without a backend, and a worker that brings its own attention, may have shorter
  // blocks.
  bool runs_kernels() const { return options.backend != "none" && !options.worker; }
  bool has(Feature feature) const { return features.has(feature); }
  // Returns true if the option that `feature` varies keeps the release's own default. An option
  // that the search requires or excludes never does.
  bool as_served(Feature feature) const {
    return has(Feature::served) && !options.always.has(feature) && !options.never.has(feature);
  }
};

// Generates what the groups depend on: release, block size, lengths, drafts.
void draw_engine(Draw& draw, EngineConfig& engine);
// Generates the groups, and sets the engine's options that follow from them: block size, mode of
// states.
std::vector<KVCacheGroupSpec> draw_groups(Draw& draw, EngineConfig& engine);
// Generates the options that must fit the groups: step budget, thresholds, context parallel ranks.
void fit_engine(Draw& draw, const std::vector<KVCacheGroupSpec>& groups, EngineConfig& engine);
// Generates the pool and the plan, the attention backend, its layout and its kernel blocks.
void draw_pool(Draw& draw, std::vector<KVCacheGroupSpec> groups, SavedCase& saved);
// Generates the numbers of ranks, and changes heads and states so that the ranks can share them.
void draw_ranks(Draw& draw, SavedCase& saved);
// Generates captured graphs, and real numbers where the kernels support the cache.
void draw_device_modes(Draw& draw, SavedCase& saved);
// Generates peers or a host tier, where the engine takes a KV connector.
void draw_connector(Draw& draw, SavedCase& saved);
// Adds one or two more connectors, at any position, if the case has one.
void draw_further_connectors(Draw& draw, SavedCase& saved);
// With faults, may abort a request while it loads. REQUIRES: a connector whose loads take steps.
void draw_aborted_load(Draw& draw, SavedCase& saved);
// Returns true if a group's page cannot be planned again from its heads and states alone.
bool has_pages_of_its_own(const KVCacheGroupSpec& group);
// Generates prefill checkpoints and hits inside blocks, where the engine has them and the case has
// states.
void draw_states_as_served(Draw& draw, SavedCase& saved);
// Lets hits end inside blocks, where the case has several groups, states among them, and a prefix
// cache. May not be accepted.
void set_match_unit(SavedCase& saved);
// If the case has an encoder, leaves blocks for one request of max_model_len, and lets requests
// arrive sooner: preempted ones then run the encoder again.
void tighten_encoder_pool(Draw& draw, SavedCase& saved);
// Generates a connector together with a step in flight.
void draw_async_connector(Draw& draw, SavedCase& saved);
// Replaces content hashes by the engine's own hash algorithm.
void draw_hashes(Draw& draw, SavedCase& saved);
// Generates how often an n-gram speculator proposes fewer drafts than it may.
void draw_short_drafts(Draw& draw, SavedCase& saved);
// Generates windows that are recomputed after a hit, rings and compressed rows, each where the rest
// of the case permits it.
void draw_further_caches(Draw& draw, SavedCase& saved);
// Lengthens every block so that an indexer's block spans two kernel blocks of 64 tokens. Indexers
// with a ring then have mapped block tables (reference/placement/). The case stays unchanged where
// it has no ring or no compressed rows.
void map_tables(SavedCase& saved);
// Generates one kernel block size for a worker that splits blocks, as vLLM selects it for an
// attention backend that takes few sizes.
void split_blocks(Draw& draw, SavedCase& saved);
// Generates an encoder's cross attention, sinks or a reference window: at most one of them.
void draw_encoders_and_sinks(Draw& draw, SavedCase& saved);
// Adds layers of a draft model to a group, if the engine drafts with a model.
void draw_drafter_cache(Draw& draw, SavedCase& saved);
// Replaces the cache by groups of host pages, with the workers of their pages and, by feature, with
// peers.
void draw_host_pages(Draw& draw, SavedCase& saved);
// Generates decode context parallelism with replicated caches: windows, rings and states, and other
// groups by chance. A cache of one group gets a replicated copy of that group.
void draw_whole_caches(Draw& draw, SavedCase& saved);
// Plans `saved` again with these groups, with more blocks if they need more, in its layout or else
// in NHD. `before`: the engine for which the pool was generated. False: no layout is accepted, and
// `next` is unspecified.
bool lay_out_again(const SavedCase& saved, std::vector<KVCacheGroupSpec> groups,
                   const EngineConfig& before, SavedCase& next);
// Returns true if the engine, the layouts and every rank accept the case. Expensive: it lays out
// the plan of every rank. Without a backend, only the engine is checked.
bool is_accepted(const SavedCase& saved);
// Returns true if the table of compatibility.h accepts the case with `more` traits; release_takes()
// checks only the release with `traits`.
bool takes(const SavedCase& saved, RunTraits more);
bool release_takes(const EngineConfig& engine, RunTraits traits);
// Generates the requests: arrivals, prompts, outputs, aborts and resets of the prefix cache.
void draw_traffic(Draw& draw, SavedCase& saved);
// Generates lists of stop tokens. A request that ends by eos may list that token instead, and ends
// at the same place; no replay samples the other listed tokens.
void draw_stop_lists(Draw& draw, SavedCase& saved);
// Makes each request more important than all earlier ones, and the first a long prompt in chunks of
// a few blocks. Later arrivals then preempt it in mid-prefill. Only with policy `priority`.
void raise_priorities(Draw& draw, SavedCase& saved);
// Gives all requests one priority and one arrival, in small chunks and without prefix caching, the
// first two as long as max_model_len permits. Two such requests can preempt each other forever
// (docs/findings.md, 11). Only with policy `priority`, and where the rest of the case permits it.
void make_equals(Draw& draw, SavedCase& saved);
// Generates faults, sized by the blocks of a request.
void draw_fault_plan(Draw& draw, SavedCase& saved);

}  // namespace lockstep
