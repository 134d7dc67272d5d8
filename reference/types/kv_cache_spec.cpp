#include "reference/types/kv_cache_spec.h"
#include "base/check.h"
#include "reference/types/view_types.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <utility>

namespace lockstep {
namespace {

template <class E>
struct Name {
  E value;
  std::string_view name;
};

constexpr std::array kDTypes = std::to_array<Name<DType>>({
    {DType::bf16, "bf16"},
    {DType::fp16, "fp16"},
    {DType::fp32, "fp32"},
    {DType::fp8_e4m3, "fp8"},
    {DType::fp8_e4m3, "fp8_e4m3"},  // read, never written
    {DType::fp8_e5m2, "fp8_e5m2"},
    {DType::int8, "int8"},
    {DType::uint8, "uint8"},
});
constexpr std::array kQuantModes = std::to_array<Name<KVQuantMode>>({
    {KVQuantMode::none, "none"},
    {KVQuantMode::fp8_per_tensor, "fp8_per_tensor"},
    {KVQuantMode::int8_per_token_head, "int8_per_token_head"},
    {KVQuantMode::fp8_per_token_head, "fp8_per_token_head"},
    {KVQuantMode::nvfp4, "nvfp4"},
    {KVQuantMode::int4_per_token_head, "int4_per_token_head"},
    {KVQuantMode::nvfp4_ds_mla, "nvfp4_ds_mla"},
    {KVQuantMode::turboquant_k8v4, "turboquant_k8v4"},
    {KVQuantMode::turboquant_4bit_nc, "turboquant_4bit_nc"},
    {KVQuantMode::turboquant_k3v4_nc, "turboquant_k3v4_nc"},
    {KVQuantMode::turboquant_3bit_nc, "turboquant_3bit_nc"},
});
constexpr std::array kModes = std::to_array<Name<MambaCacheMode>>({
    {MambaCacheMode::none, "none"},
    {MambaCacheMode::align, "align"},
    {MambaCacheMode::all, "all"},
});

template <class E, std::size_t N>
std::string_view find_name(const std::array<Name<E>, N>& table, E value) {
  for (const auto& row : table)
    if (row.value == value) return row.name;
  return "?";
}

template <class E, std::size_t N>
std::optional<E> find_value(const std::array<Name<E>, N>& table, std::string_view name) {
  for (const auto& row : table)
    if (row.name == name) return row.value;
  return std::nullopt;
}

}  // namespace

std::int32_t draft_module_of(const KVCacheConfig& plan, const std::string& layer_name) {
  for (std::size_t module = 0; module < plan.draft_modules.size(); ++module)
    if (std::ranges::find(plan.draft_modules[module], layer_name) !=
        plan.draft_modules[module].end())
      return static_cast<std::int32_t>(module);
  return -1;
}

std::string_view name_of(DType dtype) { return find_name(kDTypes, dtype); }
std::string_view name_of(MambaCacheMode mode) { return find_name(kModes, mode); }
std::string_view name_of(KVQuantMode mode) { return find_name(kQuantModes, mode); }
std::optional<CacheKind> cache_kind_from_name(std::string_view word) {
  const auto row = std::ranges::find(kCacheKinds, word, &CacheKindTraits::word);
  if (row == kCacheKinds.end()) return std::nullopt;
  return row->kind;
}
std::optional<CacheKind> cache_kind_from_planned_name(std::string_view word) {
  for (const CacheKindTraits& traits : kCacheKinds)
    if (planned_name_of(traits.kind) == word) return traits.kind;
  return std::nullopt;
}
std::optional<DType> dtype_from_name(std::string_view name) { return find_value(kDTypes, name); }
std::optional<MambaCacheMode> mamba_cache_mode_from_name(std::string_view name) {
  return find_value(kModes, name);
}
std::optional<KVQuantMode> kv_quant_mode_from_name(std::string_view name) {
  return find_value(kQuantModes, name);
}
std::string planned_name_of(KVQuantMode mode) {
  std::string name(name_of(mode));
  std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::toupper(c); });
  return name;
}
std::optional<KVQuantMode> kv_quant_mode_from_planned_name(std::string_view name) {
  for (const auto& row : kQuantModes)
    if (planned_name_of(row.value) == name) return row.value;
  return std::nullopt;
}

namespace {

constexpr std::array kBackends = std::to_array<std::pair<AttentionBackend, std::string_view>>({
    {AttentionBackend::flash_attn, "flash_attn"},
    {AttentionBackend::flashinfer, "flashinfer"},
    {AttentionBackend::triton_attn, "triton_attn"},
    {AttentionBackend::triton_mla, "triton_mla"},
    {AttentionBackend::flashmla, "flashmla"},
    {AttentionBackend::cache_only, "cache_only"},
    {AttentionBackend::any_size, "any_size"},
});

constexpr std::array<std::string_view, 8> kLayouts = {"NHD",   "HND",   "LBNHC", "LBHNC",
                                                      "LHBNC", "BLNHC", "BLHNC", "BHLNC"};

}  // namespace

std::string_view name_of(AttentionBackend backend) {
  for (const auto& [value, name] : kBackends)
    if (value == backend) return name;
  return "?";
}
std::string_view name_of(CacheLayout layout) { return kLayouts[static_cast<std::size_t>(layout)]; }

std::optional<AttentionBackend> attention_backend_from_name(std::string_view name) {
  for (const auto& [value, known] : kBackends)
    if (known == name) return value;
  return std::nullopt;
}
std::optional<CacheLayout> cache_layout_from_name(std::string_view name) {
  const auto found = std::ranges::find(kLayouts, name);
  if (found == kLayouts.end()) return std::nullopt;
  return static_cast<CacheLayout>(found - kLayouts.begin());
}

}  // namespace lockstep
