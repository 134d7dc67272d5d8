#include "cli/element_type.h"

#include <array>

namespace lockstep {
namespace {

constexpr auto kQuantised = std::to_array<ElementType>({
    {DType::int8, KVQuantMode::int8_per_token_head},
    {DType::fp8_e4m3, KVQuantMode::fp8_per_token_head},
    {DType::uint8, KVQuantMode::nvfp4},
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
