// What every command's exit status means.
#pragma once

namespace lockstep {

inline constexpr int kExitAgreed = 0;     // everything that was compared is equal
inline constexpr int kExitDisagreed = 1;  // a divergence, a violation, a mismatch
inline constexpr int kExitRefused = 2;    // an input or an option is wrong, or a device failed
inline constexpr int kExitStuck = 3;      // requests wait for ever

}  // namespace lockstep
