#include "cuda_backend/simt/fiber.h"

#include <sys/mman.h>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#elif defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace simt {

using boost::context::detail::transfer_t;

namespace {
constexpr std::size_t kGuardBytes = 4096;
constexpr std::size_t kColourBytes = 5 * 64;
constexpr std::size_t kColouredBytes = 8192;

// Of fibers that this thread has destroyed: a search makes an executor for each case.
thread_local std::vector<VirtualRange> spare_stacks;

// Both sides of a switch: the fiber that stops and the fiber that continues.
struct Passage {
  Fiber* from;
  Fiber* to;
};
}  // namespace

Fiber::~Fiber() {
#if defined(__SANITIZE_ADDRESS__)
  // Or what is mapped here next would have this stack's red zones.
  if (stack_) __asan_unpoison_memory_region(stack_.base() + kGuardBytes, kStackBytes);
#elif defined(__SANITIZE_THREAD__)
  if (stack_ && thread_ != nullptr) __tsan_destroy_fiber(thread_);
#endif
  if (stack_) spare_stacks.push_back(std::move(stack_));
}

bool Fiber::map_stack(unsigned colour) {
  if (!spare_stacks.empty()) {
    stack_ = std::move(spare_stacks.back());
    spare_stacks.pop_back();
  } else if (stack_ = VirtualRange::reserve(kGuardBytes + kStackBytes);
             !stack_ || mprotect(stack_.base(), kGuardBytes, PROT_NONE) != 0) {
    return false;
  }
  stack_begin_ = stack_.begin() + kGuardBytes;
  usable_bytes_ = kStackBytes - colour * kColourBytes % kColouredBytes;
  sanitizer_bottom_ = stack_.base() + kGuardBytes;
  sanitizer_size_ = kStackBytes;
  return true;
}

void Fiber::restart(Entry entry) {
  entry_ = entry;
  std::byte* bottom = stack_.base() + kGuardBytes;
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(bottom, kStackBytes);  // abandoned frames left their red zones
  sanitizer_fake_stack_ = nullptr;
#elif defined(__SANITIZE_THREAD__)
  if (thread_ != nullptr) __tsan_destroy_fiber(thread_);  // and its calls that never returned
  thread_ = __tsan_create_fiber(0);
#endif
  context_ =
      boost::context::detail::make_fcontext(bottom + usable_bytes_, usable_bytes_, &Fiber::begin);
}

void Fiber::arrive(transfer_t transfer) {
  const Passage passage = *static_cast<const Passage*>(transfer.data);
  passage.from->context_ = transfer.fctx;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(passage.to->sanitizer_fake_stack_,
                                  &passage.from->sanitizer_bottom_, &passage.from->sanitizer_size_);
#endif
}

void Fiber::begin(transfer_t transfer) {
  const Passage passage = *static_cast<const Passage*>(transfer.data);
  arrive(transfer);
  passage.to->entry_();
}

void Fiber::switch_to(Fiber& from, Fiber& to) {
  Passage passage{&from, &to};
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from.sanitizer_fake_stack_, to.sanitizer_bottom_,
                                 to.sanitizer_size_);
#elif defined(__SANITIZE_THREAD__)
  if (!from.stack_) from.thread_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(to.thread_, 0);
#endif
  arrive(boost::context::detail::jump_fcontext(to.context_, &passage));
}

}  // namespace simt
