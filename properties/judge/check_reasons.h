// What each check demands and why, as a sentence for somebody who has never seen it fail.
#pragma once

#include <string_view>

namespace lockstep {

// `check` as in Outcome::check. Empty: a check that nobody has explained here.
std::string_view reason_of_check(std::string_view check);

}  // namespace lockstep
