// What an engine or a worker claims to support, word by word, and the generator features of each
// word. A process that does not claim a word receives none of `of`; `lockstep check-adapter` tries
// a word with cases that all have `tried_with`.
//
// Not here: words of requests and messages that are never generated, and words of workers only
// (cli/options/worker_option.h).
#pragma once

#include <string_view>

#include "properties/generate/generator.h"

namespace lockstep {

struct ClaimedFeature {
  std::string_view word;  // of EngineHello::features; what it begins with, where it ends in ':'
  FeatureSet of;
  FeatureSet tried_with;
  bool is_kind = false;  // a kind of layers, which workers claim too

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
    {"connector",
     {Feature::connector_peers, Feature::failing_loads, Feature::load_failure_fails},
     {Feature::connector_peers}},
};

}  // namespace lockstep
