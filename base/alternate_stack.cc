#include "stitch/base/alternate_stack.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>

namespace stitch::base {

namespace {

// Mapped, not allocated: only pages that a handler touches take memory. Below it lies a page that
// nothing may touch: a handler that needs more ends there, and not in other memory.
class AlternateStack {
 public:
  AlternateStack() = default;
  ~AlternateStack() {
    if (memory_ == nullptr) return;
    // That of the main thread stays: static objects are destroyed after this, and may overflow.
    if (::gettid() == ::getpid()) return;
    // So does one that is in use: a handler of the program runs on it, and has called exit().
    stack_t now{};
    if (::sigaltstack(nullptr, &now) != 0 || (now.ss_flags & SS_ONSTACK) != 0) return;
    if (now.ss_sp == stack_) {  // unless the program has set another one since
      stack_t none{};
      none.ss_flags = SS_DISABLE;
      if (::sigaltstack(&none, nullptr) != 0) return;
    }
    ::munmap(memory_, bytes_);
  }
  AlternateStack(const AlternateStack&) = delete;
  AlternateStack& operator=(const AlternateStack&) = delete;

  void use() noexcept {
    stack_t now{};
    if (memory_ != nullptr || ::sigaltstack(nullptr, &now) != 0) return;
    if ((now.ss_flags & SS_DISABLE) == 0) return;
    constexpr long kMinBytes = 64L << 10;
    const auto usable = static_cast<std::size_t>(std::max(kMinBytes, ::sysconf(_SC_SIGSTKSZ)));
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    bytes_ = page + usable;
    void* const memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED) return;
    stack_t own{};
    own.ss_sp = static_cast<std::byte*>(memory) + page;
    own.ss_size = usable;
    if (::mprotect(memory, page, PROT_NONE) != 0 || ::sigaltstack(&own, nullptr) != 0) {
      ::munmap(memory, bytes_);
      return;
    }
    memory_ = memory;
    stack_ = own.ss_sp;
  }

 private:
  void* memory_ = nullptr;  // with the page below the stack
  std::size_t bytes_ = 0;
  void* stack_ = nullptr;
};

}  // namespace

void use_alternate_stack() noexcept {
  thread_local AlternateStack stack;
  stack.use();
}

}  // namespace stitch::base
