#include "reference/types/view_types.h"

#include <algorithm>
#include <array>
#include <utility>

namespace lockstep {
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
