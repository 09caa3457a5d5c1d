#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

namespace stitch::rpc {

// Libtorch's autocast as one thread has set it: the dtype that it casts to on each kind of device,
// nothing where it is off. Calls carry it, and so do continuations. Plain value.
struct Autocast {
  std::optional<c10::ScalarType> cpu;
  std::optional<c10::ScalarType> cuda;

  [[nodiscard]] bool on() const noexcept { return cpu || cuda; }
  // This thread's.
  [[nodiscard]] static Autocast current();
  // Whether it is on for any kind of device on this thread: a few instructions.
  [[nodiscard]] static bool is_on() noexcept {
    return !(c10::autocast_dispatch_keyset - c10::impl::tls_local_dispatch_key_set().excluded_)
                .empty();
  }
  friend bool operator==(const Autocast&, const Autocast&) = default;
};

// Sets this thread's autocast for a block. The casts of parameters are not kept within it: libtorch
// keeps them for the whole process, where another thread may step the parameter meanwhile. Thread
// contract: made and destroyed by one thread.
class AutocastScope {
 public:
  // Throws Error(invalid_argument), having changed nothing, for a dtype to which this version of
  // torch has no autocast on that kind of device. Which these are does not change.
  explicit AutocastScope(const Autocast& autocast);
  ~AutocastScope();
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  struct Kind {
    bool enabled;
    c10::ScalarType dtype;
  };
  void restore() noexcept;
  const Kind cpu_, cuda_;  // what they were
  const bool cache_;
};

}  // namespace stitch::rpc
