#include "traces/formats/run_spec.h"

#include <algorithm>
#include <array>

#include "base/check.h"
#include "reference/types/host_pages.h"

namespace lockstep {
namespace {

constexpr std::array kKinds = std::to_array<std::pair<ConnectorKind, std::string_view>>({
    {ConnectorKind::peers, "peers"},
    {ConnectorKind::host, "host"},
    {ConnectorKind::one_group_peers, "one-group-peers"},
    {ConnectorKind::page_workers, kHostPagesWord},
});

std::optional<ConnectorKind> kind_from_name(std::string_view name) {
  for (const auto& [kind, known] : kKinds)
    if (known == name) return kind;
  return std::nullopt;
}

}  // namespace

std::string_view name_of(ConnectorKind kind) {
  for (const auto& [known, name] : kKinds)
    if (known == kind) return name;
  LS_CHECK(false, "connector kind {}", static_cast<int>(kind));
}

bool ConnectorSpec::has(ConnectorKind kind) const {
  return std::ranges::find(parts, kind) != parts.end();
}

std::optional<std::vector<ConnectorKind>> connector_parts_from_text(std::string_view text) {
  std::vector<ConnectorKind> parts;
  for (;;) {
    const std::size_t end = std::min(text.find('+'), text.size());
    const auto kind = kind_from_name(text.substr(0, end));
    if (!kind || parts.size() == kConnectorPartsMax) return std::nullopt;
    parts.push_back(*kind);
    if (end == text.size()) return parts;
    text.remove_prefix(end + 1);
  }
}

std::string connector_parts_text(const std::vector<ConnectorKind>& parts) {
  std::string text;
  for (const ConnectorKind kind : parts) text.append(text.empty() ? "" : "+").append(name_of(kind));
  return text.empty() ? "none" : text;
}

namespace {

constexpr auto kQuantised = std::to_array<ElementType>({
    {DType::int8, KVQuantMode::int8_per_token_head},
    {DType::fp8_e4m3, KVQuantMode::fp8_per_token_head},
    {DType::uint8, KVQuantMode::nvfp4},
    {DType::uint8, KVQuantMode::int4_per_token_head},
});

}  // namespace

std::optional<ElementType> element_type_from_name(std::string_view name) {
  for (const ElementType& type : kQuantised)
    if (name == name_of(type.mode)) return type;
  if (const auto dtype = dtype_from_name(name)) return ElementType{*dtype, KVQuantMode::none};
  return std::nullopt;
}

std::string_view name_of(const ElementType& type) {
  return type.mode == KVQuantMode::none ? name_of(type.dtype) : name_of(type.mode);
}

}  // namespace lockstep
