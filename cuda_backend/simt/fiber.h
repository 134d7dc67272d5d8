// A stack and the point where it stopped: a simulated thread runs on it.
//
// Invariants:
//  1. A fiber stays on the OS thread that made it.
//  2. The stack of an abandoned thread is forgotten, never unwound. So the class uses
//     Boost.Context's fcontext, not boost::context::fiber.
#pragma once

#include <boost/context/detail/fcontext.hpp>
#include <cstddef>
#include <cstdint>

#include "cuda_backend/simt/arena.h"

namespace simt {

class Fiber {
 public:
  using Entry = void (*)();  // never returns

  Fiber() = default;  // the stack of the OS thread itself
  Fiber(Fiber&&) = delete;
  ~Fiber();

  // Maps a stack, with an inaccessible page below it. False when the system refuses. Stacks of
  // different colours begin at different cache lines of a page: hundreds of them take turns.
  bool map_stack(unsigned colour);
  // The next switch to this fiber starts entry on an empty stack, whatever was on it.
  void restart(Entry entry);
  bool started() const { return context_ != nullptr; }
  bool owns(std::uintptr_t address) const { return address - stack_begin_ < kStackBytes; }

  // Leaves `from`, which must be the running fiber, and continues `to`.
  static void switch_to(Fiber& from, Fiber& to);

#if defined(__SANITIZE_ADDRESS__)
  static constexpr std::size_t kStackBytes = 256 * 1024;
#else
  static constexpr std::size_t kStackBytes = 64 * 1024;
#endif

 private:
  static void arrive(boost::context::detail::transfer_t transfer);
  static void begin(boost::context::detail::transfer_t transfer);

  boost::context::detail::fcontext_t context_ = nullptr;
  Entry entry_ = nullptr;
  std::uintptr_t stack_begin_ = 1;  // owns() is false without a stack
  VirtualRange stack_;
  std::size_t usable_bytes_ = 0;            // from the lowest address up to where the stack begins
  const void* sanitizer_bottom_ = nullptr;  // stack bounds for ASan, passed at every switch
  std::size_t sanitizer_size_ = 0;
  [[maybe_unused]] void* sanitizer_fake_stack_ = nullptr;
  [[maybe_unused]] void* thread_ = nullptr;  // the thread that TSan sees
};

}  // namespace simt
