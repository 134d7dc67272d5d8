// The parts of the generator by file: cache_generator.cpp makes groups and their pool;
// engine_generator.cpp the options of the engine, its ranks, the backend's work and KV connectors;
// host pages by a generator of their own; traffic_generator.cpp arrivals, aborts and faults.
#pragma once

#include "properties/generate/generator.h"
#include "reference/profiles/compatibility.h"

namespace lockstep {

struct Draw {
  ChoiceSource& choices;
  const GeneratorOptions& options;
  FeatureSet features;

  // Kernels take blocks of multiples of 16 tokens; decisions without a backend, and a worker
  // without attention, may have shorter ones.
  bool runs_kernels() const { return options.backend != "none" && !options.worker; }
  bool has(Feature feature) const { return features.has(feature); }
  // What `feature` would vary is as the release serves it.
  bool as_served(Feature feature) const {
    return has(Feature::served) && !options.always.has(feature) && !options.never.has(feature);
  }
};

// Lengths and drafts, which the groups depend on.
void draw_engine(Draw& draw, EngineConfig& engine);
// Groups, and what of the engine follows from them (block sizes, cache modes).
std::vector<KVCacheGroupSpec> draw_groups(Draw& draw, EngineConfig& engine);
// Options that must fit the groups.
void fit_engine(Draw& draw, const std::vector<KVCacheGroupSpec>& groups, EngineConfig& engine);
// The pool and the plan; attention backend, layout and kernel blocks.
void draw_pool(Draw& draw, std::vector<KVCacheGroupSpec> groups, SavedCase& saved);
// How many ranks of which kind, as settings; heads and states that they can be cut into.
void draw_ranks(Draw& draw, SavedCase& saved);
// Captured graphs, and real numbers where the kernels of an engine take the cache, as settings.
void draw_device_modes(Draw& draw, SavedCase& saved);
// Peers or a host tier, as settings, where the engine takes a KV connector.
void draw_connector(Draw& draw, SavedCase& saved);
// Where there is one: more of them, before it or behind.
void draw_further_connectors(Draw& draw, SavedCase& saved);
// Checkpoints in prefills and hits inside blocks, where there are states and the engine has them.
void draw_states_as_served(Draw& draw, SavedCase& saved);
// A step in flight with peers.
void draw_async_connector(Draw& draw, SavedCase& saved);
// Hashes of the engine's own in place of those of content.
void draw_hashes(Draw& draw, SavedCase& saved);
// How often a drafter that searches the text finds no or few drafts.
void draw_short_drafts(Draw& draw, SavedCase& saved);
// Windows that are computed again, rings and compressed rows, each where nothing that the case has
// already stands against it.
void draw_further_caches(Draw& draw, SavedCase& saved);
// Indexers with a ring have kernels of 64 tokens (reference/placement/): lengthens every block by
// the factor that makes two kernel blocks of an indexer's block.
void map_tables(SavedCase& saved);
// For a worker that splits blocks: kernel blocks of one size, as vLLM selects them for a backend of
// attention that takes few sizes.
void split_blocks(Draw& draw, SavedCase& saved);
// Likewise an encoder's rows, sinks or a reference window.
void draw_encoders_and_sinks(Draw& draw, SavedCase& saved);
// Adds layers of a draft model to those of a group, if the engine drafts with one.
void draw_drafter_cache(Draw& draw, SavedCase& saved);
// Groups of host pages in place of the cache, the workers of their pages, and peers.
void draw_host_pages(Draw& draw, SavedCase& saved);
// Ranks of a context, of which each keeps some of the caches whole: windows, rings, others, or, of
// one group, a second one as it is.
void draw_whole_caches(Draw& draw, SavedCase& saved);
// The case with these groups and more blocks where they need more, in one of the remaining layouts,
// or the engine's own choice. `before`: the engine that the pool was generated for. False: it is
// refused.
bool lay_out_again(const SavedCase& saved, std::vector<KVCacheGroupSpec> groups,
                   const EngineConfig& before, SavedCase& next);
// Whether the engine, the layouts and the ranks take the case.
bool is_accepted(const SavedCase& saved);
// Whether the table of compatibility.h takes the case with `more`; a release, these traits alone.
bool takes(const SavedCase& saved, RunTraits more);
bool release_takes(const EngineConfig& engine, RunTraits traits);
void draw_traffic(Draw& draw, SavedCase& saved);
// Under policy `priority`: each request more important than those before it, and the first a long
// prompt in chunks of some blocks.
void raise_priorities(Draw& draw, SavedCase& saved);
// Under policy `priority`, where nothing stands against it: all requests of one priority and
// arrival, in small chunks and without prefix caching, the first two as long as they may be.
void make_equals(Draw& draw, SavedCase& saved);
void draw_fault_plan(Draw& draw, SavedCase& saved);

}  // namespace lockstep
