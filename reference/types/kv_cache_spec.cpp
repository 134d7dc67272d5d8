#include "reference/types/kv_cache_spec.h"

#include <algorithm>
#include <cctype>

namespace lockstep {
namespace {

constexpr auto kDTypes = std::to_array<Named<DType>>({
    {DType::bf16, "bf16"},
    {DType::fp16, "fp16"},
    {DType::fp32, "fp32"},
    {DType::fp8_e4m3, "fp8"},
    {DType::fp8_e4m3, "fp8_e4m3"},  // read, never written
    {DType::fp8_e5m2, "fp8_e5m2"},
    {DType::int8, "int8"},
    {DType::uint8, "uint8"},
});

}  // namespace

std::int32_t draft_module_of(const KVCacheConfig& plan, const std::string& layer_name) {
  for (std::size_t module = 0; module < plan.draft_modules.size(); ++module)
    if (std::ranges::find(plan.draft_modules[module], layer_name) !=
        plan.draft_modules[module].end())
      return static_cast<std::int32_t>(module);
  return -1;
}

std::string_view name_of(DType dtype) { return name_in(kDTypes, dtype); }
std::optional<DType> dtype_from_name(std::string_view name) { return value_in(kDTypes, name); }
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
std::string planned_name_of(KVQuantMode mode) {
  std::string name(name_of(mode));
  std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::toupper(c); });
  return name;
}
std::optional<KVQuantMode> kv_quant_mode_from_planned_name(std::string_view name) {
  for (std::size_t i = 0; i < kWords<KVQuantMode>.size(); ++i)
    if (planned_name_of(static_cast<KVQuantMode>(i)) == name) return static_cast<KVQuantMode>(i);
  return std::nullopt;
}

}  // namespace lockstep
