#include "reference/cache/request.h"

#include <tuple>
#include <utility>

namespace lockstep {

Request::Request(RequestSpec spec, std::int32_t num_groups)
    : max_tokens(spec.max_tokens),
      eos_token(spec.eos_token.value_or(kNoToken)),
      stop_token_ids(std::move(spec.stop_token_ids)),
      tokens(std::move(spec.prompt)),
      groups(static_cast<std::size_t>(num_groups)),
      name(std::move(spec.name)),
      cache_salt(std::move(spec.cache_salt)),
      arrival_ns(spec.arrival_ns),
      priority(spec.priority) {}

bool Request::before(const Request& other) const {
  return std::tie(priority, arrival_ns, name) <
         std::tie(other.priority, other.arrival_ns, other.name);
}

}  // namespace lockstep
