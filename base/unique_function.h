#pragma once

#include <cstddef>
#include <new>
#include <type_traits>
#include <utility>

namespace stitch::base {

template <class Signature>
class UniqueFunction;

// A move-only std::function: callables that own move-only state, small ones (48 bytes) without an
// allocation. Calling an empty one is undefined. Thread contract: as the callable it holds.
template <class R, class... Args>
class UniqueFunction<R(Args...)> {
 public:
  UniqueFunction() noexcept = default;
  UniqueFunction(std::nullptr_t) noexcept {}  // NOLINT: empty function, as std::function
  template <class F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, UniqueFunction> &&
           std::is_invocable_r_v<R, std::decay_t<F>&, Args...>)
      UniqueFunction(F&& callable) {  // NOLINT: implicit, as std::function
    using Callable = std::decay_t<F>;
    if constexpr (fits_inline<Callable>()) {
      ::new (static_cast<void*>(storage_)) Callable(std::forward<F>(callable));
      operations_ = &kInline<Callable>;
    } else {
      ::new (static_cast<void*>(storage_)) Callable*(new Callable(std::forward<F>(callable)));
      operations_ = &kHeap<Callable>;
    }
  }
  UniqueFunction(UniqueFunction&& other) noexcept { take(other); }
  UniqueFunction& operator=(UniqueFunction&& other) noexcept {
    if (this != &other) {
      reset();
      take(other);
    }
    return *this;
  }
  ~UniqueFunction() { reset(); }

  explicit operator bool() const noexcept { return operations_ != nullptr; }
  R operator()(Args... args) { return operations_->call(storage_, std::forward<Args>(args)...); }

 private:
  static constexpr std::size_t kInlineBytes = 48;
  struct Operations {
    R (*call)(void*, Args&&...);
    void (*move)(void* from, void* to) noexcept;
    void (*destroy)(void*) noexcept;
  };
  template <class Callable>
  static constexpr bool fits_inline() {
    return sizeof(Callable) <= kInlineBytes && alignof(Callable) <= alignof(std::max_align_t) &&
           std::is_nothrow_move_constructible_v<Callable>;
  }
  template <class Callable>
  static constexpr Operations kInline{
      [](void* at, Args&&... args) -> R {
        return (*static_cast<Callable*>(at))(std::forward<Args>(args)...);
      },
      [](void* from, void* to) noexcept {
        ::new (to) Callable(std::move(*static_cast<Callable*>(from)));
        static_cast<Callable*>(from)->~Callable();
      },
      [](void* at) noexcept { static_cast<Callable*>(at)->~Callable(); }};
  template <class Callable>
  static constexpr Operations kHeap{
      [](void* at, Args&&... args) -> R {
        return (**static_cast<Callable**>(at))(std::forward<Args>(args)...);
      },
      [](void* from, void* to) noexcept { ::new (to) Callable*(*static_cast<Callable**>(from)); },
      [](void* at) noexcept { delete *static_cast<Callable**>(at); }};

  void take(UniqueFunction& other) noexcept {
    operations_ = std::exchange(other.operations_, nullptr);
    if (operations_ != nullptr) operations_->move(other.storage_, storage_);
  }
  void reset() noexcept {
    if (operations_ != nullptr) std::exchange(operations_, nullptr)->destroy(storage_);
  }

  const Operations* operations_ = nullptr;
  alignas(std::max_align_t) std::byte storage_[kInlineBytes];
};

}  // namespace stitch::base
