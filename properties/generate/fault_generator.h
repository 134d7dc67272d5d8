// Faults out of choices: a few of them, of a few kinds, early enough that most of them meet
// somebody.
//
// (1) Same choices and room, same plan.
// (2) Every kind is drawn; which of them take effect depends on the traffic.
#pragma once

#include <cstdint>

#include "properties/generate/choices.h"
#include "sim/engine/faults.h"

namespace lockstep {

struct FaultRoom {
  std::int64_t steps = 32;  // faults begin before this one
  std::int64_t faults_max = 6;
  std::int64_t blocks_of_request = 1;  // of the largest one: a pool pinched to them holds it alone
};

FaultPlan draw_faults(ChoiceSource& choices, const FaultRoom& room);

}  // namespace lockstep
