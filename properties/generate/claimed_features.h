// The words with which an engine or a worker claims support, and the generator's features behind
// each word. Without the word, the generator excludes all features of `of`. `lockstep
// check-adapter` tries a claimed word with cases that all have `tried_with`.
//
// Not included: words for requests and messages that are never generated, and words that only
// workers have (cli/options/worker_option.h).
#pragma once

#include <string_view>

#include "properties/generate/generator.h"

namespace lockstep {

struct ClaimedFeature {
  std::string_view word;  // as in EngineHello::features; with a final ':' a prefix
  // Features that need the word, and are excluded without it.
  FeatureSet of;
  // Features that a case must have to exercise the word: those of `of` that the word is about, with
  // others that make it visible. Salts, for example, show only where prefixes are shared.
  FeatureSet tried_with;
  bool is_kind = false;  // true if it is a kind of layer, which workers claim too

  // Returns true if a process that claims `claimed` supports this row.
  constexpr bool covers(std::string_view claimed) const {
    return word.ends_with(':') ? claimed.starts_with(word) : claimed == word;
  }
};

inline constexpr ClaimedFeature kClaimedFeatures[] = {
    {"full", {Feature::full_attention}, {Feature::full_attention}, true},
    {"mla", {Feature::mla}, {Feature::mla}, true},
    {"sliding_window", {Feature::sliding_window}, {Feature::sliding_window}, true},
    {"chunked_local", {Feature::chunked_local}, {Feature::chunked_local}, true},
    {"mamba",
     {Feature::states, Feature::prefill_checkpoints, Feature::hits_inside_blocks},
     {Feature::states},
     true},
    {"hidden_state", {Feature::hidden_state}, {Feature::hidden_state}, true},
    {"async_scheduling",
     {Feature::async_scheduling, Feature::async_connectors},
     {Feature::async_scheduling}},
    {"priority",
     {Feature::priority_policy, Feature::priorities},
     {Feature::priority_policy, Feature::priorities}},
    {"spec:", {Feature::drafts}, {Feature::drafts}},
    {"dcp", {Feature::context_parallel, Feature::whole_caches}, {Feature::context_parallel}},
    {"dcp_sharded", {Feature::whole_caches}, {Feature::whole_caches}},
    {"pcp", {Feature::context_parallel}, {Feature::context_parallel}},
    {"no_chunked_prefill", {Feature::no_chunked_prefill}, {Feature::no_chunked_prefill}},
    {"cache_salt", {Feature::salts}, {Feature::salts, Feature::shared_prefixes}},
    {"reset_prefix_cache", {Feature::resets}, {Feature::resets}},
    {"reset_running", {Feature::running_resets}, {Feature::resets, Feature::running_resets}},
    {"pause_state", {Feature::pauses}, {Feature::pauses}},
    {"connector",
     {Feature::connector_peers, Feature::failing_loads, Feature::load_failure_fails},
     {Feature::connector_peers}},
};

}  // namespace lockstep
