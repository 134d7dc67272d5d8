// A model as its cache sees it: kinds of layers with the figures of the whole model, and the order
// of the layers. What one tensor-parallel rank keeps follows from it.
//
// 1. A rank holds num_kv_heads / tp heads; if tp is larger, heads are replicated, at least one
//    each. MLA rows, hidden states and windows of MLA rows are replicated on every rank.
// 2. State tensors are split along their heads or channels; every split must be even.
// Rules: vllm/model_executor/layers/mamba/mamba_utils.py, vllm/config/model.py.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "reference/types/engine_config.h"
#include "reference/types/plan_options.h"

namespace lockstep {

struct ModelSpec;
// Layers that only a draft model has (LayerKind::is_draft).
std::int64_t num_draft_layers(const ModelSpec& model);

// Which states a recurrent layer keeps.
enum class StateFamily : std::uint8_t {
  gated_delta_net,   // conv [kernel - 1 + drafts, k + k + v channels], ssm [v heads, v dim, k dim]
  kda,               // three convs (q, k, v) as in gated_delta_net, recurrent [heads, dim, dim]
  mamba2,            // conv [kernel - 1 + drafts, channels], ssm [heads, head dim, state size]
  mamba1,            // conv [kernel - 1, channels], ssm [channels, state size]
  linear_attention,  // one [heads, dim, dim]
  short_conv,        // one conv [kernel - 1 + drafts, channels]
};
// Figures of the whole model; those that a family does not use stay 0.
struct StateFigures {
  StateFamily family = StateFamily::gated_delta_net;
  std::int64_t num_heads = 0;  // value heads, where keys have heads of their own
  std::int64_t head_dim = 0;   // of a value head
  std::int64_t num_k_heads = 0;
  std::int64_t head_k_dim = 0;
  std::int64_t intermediate_size = 0;  // channels of mamba1, mamba2 and short_conv
  std::int64_t n_groups = 0;           // mamba2; groups of linear_attention's norm, 0: unknown
  std::int64_t state_size = 0;         // mamba1, mamba2
  std::int64_t conv_kernel = 0;
  bool operator==(const StateFigures&) const = default;
};

struct LayerKind {
  std::string name;  // "attn": layer 3 of this kind is "layers.3.attn"
  // Token caches: num_kv_heads of the whole model; block_size 0 unless the model fixes it; states
  // are worked out from `states` below.
  KVCacheSpec spec;
  bool has_own_dtype = false;  // spec.dtype stands; otherwise the option kv_dtype does
  StateFigures states;
  std::optional<DType> conv_dtype;  // absent: the model's
  std::optional<DType> ssm_dtype;   // absent: the model's
  // Tokens between the places where a prefill can export a state from inside a chunk; 0: nowhere;
  // absent: as the release's layer of that family can.
  std::optional<std::int64_t> prefill_checkpoint_alignment;
  bool is_draft = false;  // of the drafter (MTP, EAGLE): there with PlanOptions::has_drafter alone
  std::int64_t index_topk = 0;  // sparse attention: rows that it reads, as its indexer chooses
  std::string backend;          // of releases that overlay groups; empty: as the options say
  bool operator==(const LayerKind&) const = default;
};

struct ModelSpec {
  struct Layer {
    std::int64_t index = 0;  // of the model's layer; several caches may belong to one
    std::size_t kind = 0;
    bool operator==(const Layer&) const = default;
  };
  std::string name;
  DType dtype = DType::bf16;
  std::int64_t max_model_len = 32768;
  std::int64_t max_model_len_limit = 0;  // of --max-model-len, by the config.json; 0: unknown
  std::int64_t mamba_chunk_size = 256;
  std::int64_t mtp_modules = 1;          // num_nextn_predict_layers
  std::int64_t num_hidden_layers = 0;    // 0: up to the last layer with a cache
  std::int64_t num_attention_heads = 0;  // queries; 0: unknown, and not checked against tp
  bool supports_pp = true;               // the model class can be cut into pipeline stages
  // First layer whose cache later layers read; pipeline stages share no caches.
  std::optional<std::int64_t> first_shared_layer;
  std::string kv_cache_dtype;  // of a quantized checkpoint: fp8, ...; empty: the model's dtype
  std::vector<std::string> assumptions;  // of the reader of a config.json, one line each
  std::vector<LayerKind> kinds;
  std::vector<Layer> layers;
  bool operator==(const ModelSpec&) const = default;
};

// What each layer keeps on one rank, block sizes open. Refused: heads or channels that tp does not
// divide.
Result<LayerSpecs> layer_specs(const ModelSpec& model, const PlanOptions& options);

// Puts the model's figures into the options, and the backend that vLLM serves latent rows in fp8
// with: FLASHMLA, or TRITON_MLA for other blocks. Refused, as vLLM does: ranks, stages and formats
// that the model does not have. REQUIRES: the format is chosen.
Result<void> take_model(const ModelSpec& model, PlanOptions& options);

// Refuses a named backend that cannot serve the model on a Hopper GPU, with the reason of vLLM
// 0.33.0 (v1/attention/backend.py, validate_configuration()). REQUIRES: the format is chosen.
Result<void> check_backend(const ModelSpec& model, const PlanOptions& options);

// The cache format that the checkpoint asks for, put into options that name none.
Result<void> take_checkpoint_format(const ModelSpec& model, PlanOptions& options);
std::string_view format_of(const PlanOptions& options);  // its name

// A cache of hidden states in addition to the model's own, for the extraction of `num_layers`
// layers' states.
NamedSpec hidden_state_layer(std::int64_t num_layers, std::int64_t hidden_size, DType dtype);

// Defaults of a release's server for options that are not set (`vllm serve MODEL`).
//
// 1. The options that the model supports: asynchronous scheduling, reservation, retention, where
//    states are kept, and whether a prefill exports one from inside a chunk. The sizes of a batch
//    follow the GPU, and are not here.
// 2. Kernels are those of a Hopper GPU; elsewhere a release may serve without checkpoints.
// 3. A profile with its own policies is served as its release is.
// Read in vllm/config/{scheduler,cache,vllm}.py, vllm/model_executor/models/config.py and
// get_kv_cache_spec() of the layers, of every release from 0.20.2 to 0.33.0.

struct ServingDefaults {
  bool async_scheduling = true;
  bool scheduler_reserve_full_isl = true;
  std::int32_t prefix_cache_retention_interval = kDenseRetention;
};

// `engine` says the release and the drafts.
ServingDefaults serving_defaults(const EngineConfig& engine);

// Whether the release, so served, plans windows for the batch that is scheduled while another one
// is computed (PlanOptions::async_scheduling). REQUIRES: engine names a profile.
bool plans_async(const EngineConfig& engine);

// Where the states of `model` are kept for prefix hits; none: without prefix caching or states.
MambaCacheMode served_cache_mode(const EngineConfig& engine, const ModelSpec& model);

// Tokens of a block of states in a plan of these layers.
using StateBlock = std::function<Result<std::int64_t>(const LayerSpecs&)>;

// Puts into the specs of states what their mixers export from inside a prefill: as the release
// does, or as the model file says. Gated delta nets export on the grid of their own blocks, which
// `state_block` computes; without it, aligned_sizes(). REQUIRES: options.mamba_cache_mode is the
// layers'. Refused: what state_block refuses.
Result<void> take_served_checkpoints(std::string_view release, const ModelSpec& model,
                                     const PlanOptions& options, LayerSpecs& layers,
                                     const StateBlock& state_block = {});

}  // namespace lockstep
