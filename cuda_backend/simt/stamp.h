// The thread that touched a byte, and the time, in one word of a shadow cell.
//
// launch 22 bits | cta tag 20 | thread 10 | epoch 10 | flags 2, from the top. Zero: never.
// Two stamps that differ only in their flags are the same thread between two synchronisations.
//
//  1. launch counts launches and host copies together; host copies have tag, thread and epoch 0.
//  2. A cta tag is the linear index of the CTA, or, after 1,023 epochs, another tag from the
//     scheduler (cta_scheduler.h). So epochs never wrap.
//  3. A thread's epoch rises at barriers and __syncwarp only.
#pragma once

#include <cstdint>

namespace simt {

using Stamp = std::uint64_t;

inline constexpr unsigned kFlagBits = 2, kEpochBits = 10, kThreadBits = 10, kTagBits = 20,
                          kLaunchBits = 22;
static_assert(kFlagBits + kEpochBits + kThreadBits + kTagBits + kLaunchBits == 64);
inline constexpr unsigned kEpochShift = kFlagBits, kThreadShift = kEpochShift + kEpochBits,
                          kTagShift = kThreadShift + kThreadBits,
                          kLaunchShift = kTagShift + kTagBits;
inline constexpr std::uint32_t kMaxEpoch = (1u << kEpochBits) - 1;
inline constexpr std::uint32_t kMaxTag = (1u << kTagBits) - 1;
inline constexpr std::uint32_t kMaxLaunch = (1u << kLaunchBits) - 1;

// Flags of a write stamp.
inline constexpr Stamp kUndefined = 1;  // written, by a copy of unwritten bytes
inline constexpr Stamp kAtomic = 2;
// Flags of a read stamp: other readers since the last write.
inline constexpr Stamp kReaderAlone = 0, kReadersInWarp = 1, kReadersInCta = 2, kReadersInGrid = 3;
inline constexpr Stamp kFlagMask = 3;

constexpr Stamp make_stamp(std::uint32_t launch, std::uint32_t tag, std::uint32_t thread,
                           std::uint32_t epoch) {
  return (Stamp{launch} << kLaunchShift) | (Stamp{tag} << kTagShift) |
         (Stamp{thread} << kThreadShift) | (Stamp{epoch} << kEpochShift);
}
constexpr std::uint32_t launch_of(Stamp s) { return static_cast<std::uint32_t>(s >> kLaunchShift); }
constexpr std::uint32_t tag_of(Stamp s) {
  return static_cast<std::uint32_t>(s >> kTagShift) & kMaxTag;
}
constexpr std::uint32_t thread_of(Stamp s) {
  return static_cast<std::uint32_t>(s >> kThreadShift) & ((1u << kThreadBits) - 1);
}
constexpr std::uint32_t epoch_of(Stamp s) {
  return static_cast<std::uint32_t>(s >> kEpochShift) & kMaxEpoch;
}
constexpr bool is_undefined(Stamp written) { return written == 0 || (written & kUndefined) != 0; }
constexpr Stamp without_flags(Stamp s) { return s & ~kFlagMask; }
constexpr bool same_launch(Stamp a, Stamp b) { return (a ^ b) >> kLaunchShift == 0; }
constexpr bool same_thread(Stamp a, Stamp b) { return (a ^ b) >> kThreadShift == 0; }
constexpr bool same_warp(Stamp a, Stamp b) { return (a ^ b) >> (kThreadShift + 5) == 0; }

}  // namespace simt
