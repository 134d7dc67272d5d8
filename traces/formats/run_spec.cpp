#include "traces/formats/run_spec.h"

#include <algorithm>
#include <array>

#include "base/check.h"

namespace lockstep {
namespace {

constexpr std::array kKinds = std::to_array<std::pair<ConnectorKind, std::string_view>>({
    {ConnectorKind::peers, "peers"},
    {ConnectorKind::host, "host"},
    {ConnectorKind::one_group_peers, "one-group-peers"},
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

}  // namespace lockstep
