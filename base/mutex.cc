#include "stitch/base/mutex.h"

#include <sched.h>
#include <unistd.h>

#include <cstdint>

#include "stitch/base/descriptor.h"

namespace stitch::base {

namespace {
const Descriptor waking;  // stands for: set() writes to the descriptor now
}  // namespace

// The waiter enters its descriptor before it looks at the flag, set() stores the flag before it
// looks for a descriptor: one of the two sees the other.
bool AwaitedFlag::wake_through(const Descriptor& eventfd) noexcept {
  const Descriptor* none = nullptr;
  if (!waker_.compare_exchange_strong(none, &eventfd)) return false;
  if (!set_.load()) return true;
  wake_no_more(eventfd);
  return false;
}

void AwaitedFlag::wake_no_more(const Descriptor& eventfd) noexcept {
  for (const Descriptor* entered = &eventfd; !waker_.compare_exchange_weak(entered, nullptr);
       entered = &eventfd) {
    if (entered == nullptr) return;
    sched_yield();  // for the length of a system call
  }
}

void AwaitedFlag::wake() noexcept {
  const Descriptor* eventfd = waker_.load();
  if (eventfd == nullptr || eventfd == &waking || !waker_.compare_exchange_strong(eventfd, &waking))
    return;
  const std::uint64_t one = 1;
  static_cast<void>(!::write(eventfd->get(), &one, sizeof(one)));
  waker_.store(nullptr);
}

}  // namespace stitch::base
