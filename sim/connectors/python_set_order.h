// The order in which CPython (3.11 and later, PYTHONHASHSEED=0) goes through a set of names.
//
// vLLM frees the blocks of requests that were sent in the order of a set, and the order decides
// which blocks are handed out first. A recording holds such names sorted, so the order is worked
// out as the interpreter of the recordings does: SipHash-1-3 with a zero key, open addressing in a
// table of 8 places and more (CPython: Python/pyhash.c, Objects/setobject.c).
//
// Not followed: sets that names were removed from, names beyond ASCII.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

std::uint64_t python_hash(std::string_view name);

// `names`, inserted one after the other into an empty set, in the set's order.
std::vector<std::string> in_python_set_order(const std::vector<std::string>& names);

}  // namespace lockstep
