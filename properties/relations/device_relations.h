// Relations held against devices: two cases that differ in what is none of a request's business
// leave attention to read the same, place by place (device_reading.h).
//
// (1) A change that moves nothing leaves every page as it was too, after every step; states
//     included.
// (2) Over ranks of context parallelism, attention over a request is a mean of the ranks' own, one
//     weight a head: what a combination by their softmax sums comes to, whatever the sums are.
//
// Not checked: (2) for more than two ranks, and whether the weight is the right one (kernel tests
// combine with sums).
#pragma once

#include <cstdint>
#include <optional>

#include "properties/relations/device_reading.h"
#include "properties/relations/relations.h"

namespace lockstep {

struct DeviceCheck {
  std::string refused;        // why the device takes the other case not; empty: it does
  std::int64_t compared = 0;  // places that both runs read, digests and outputs
  std::int64_t pages = 0;     // steps after which all pages were compared
  std::optional<Breach> breach;
};

// Nothing: the relation does not apply. Errors: what the engine or the device refuses of `saved`.
// REQUIRES: why_not_read(saved) is empty.
Result<std::optional<DeviceCheck>> check_on_device(const SavedCase& saved, const Relation& relation,
                                                   const BackendFactory& make_backend);

}  // namespace lockstep
