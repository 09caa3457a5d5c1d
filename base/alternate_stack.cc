#include "stitch/base/alternate_stack.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>

namespace stitch::base {

namespace {

// Mapped, not allocated: only pages that a handler touches take memory.
class AlternateStack {
 public:
  AlternateStack() = default;
  ~AlternateStack() {
    if (memory_ == nullptr) return;
    // Unless the program has set another one since.
    if (stack_t now{}; ::sigaltstack(nullptr, &now) == 0 && now.ss_sp == memory_) {
      stack_t none{};
      none.ss_flags = SS_DISABLE;
      ::sigaltstack(&none, nullptr);
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
    bytes_ = static_cast<std::size_t>(std::max(kMinBytes, ::sysconf(_SC_SIGSTKSZ)));
    void* const memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED) return;
    stack_t own{};
    own.ss_sp = memory;
    own.ss_size = bytes_;
    if (::sigaltstack(&own, nullptr) != 0) {
      ::munmap(memory, bytes_);
      return;
    }
    memory_ = memory;
  }

 private:
  void* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace

void use_alternate_stack() noexcept {
  thread_local AlternateStack stack;
  stack.use();
}

}  // namespace stitch::base
