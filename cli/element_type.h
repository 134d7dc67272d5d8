// What the elements of a K/V cache are called on the command line: a dtype, or how the cache is
// quantised where that says more than one.
#pragma once

#include <optional>
#include <string_view>

#include "reference/types/kv_cache_spec.h"

namespace lockstep {

struct ElementType {
  DType dtype = DType::bf16;
  KVQuantMode mode = KVQuantMode::none;  // of K/V pairs
};

std::optional<ElementType> element_type_from_name(std::string_view name);
std::string_view name_of(const ElementType& type);

}  // namespace lockstep
