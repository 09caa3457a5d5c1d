#pragma once

#include <concepts>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "stitch/rpc/message/sendable.h"
#include "stitch/rref/agent/object_access.h"

namespace stitch {

// A T whose methods never run concurrently: remote<Serialized<T>>("ps0", ...) or
// make_rref(Serialized<T>(...)). The owner runs the calls of its methods one at a time, in the
// order in which they arrive, from whichever workers they come; no thread waits for a turn. A
// coroutine method has its turn until it is over, also while it awaits. References are
// RRef<Serialized<T>>, methods are named as those of T: rref.rpc_sync<&T::method>(...). A method
// must not wait for a call of another method of the same object. local_value() gives the object
// itself and goes round its turns; to_here() does not exist: a method returns what is wanted. T: a
// class that is not final. Thread contract: as T.
template <class T>
class Serialized : public T {
  static_assert(std::is_class_v<T> && !std::is_final_v<T>,
                "stitch: Serialized<T> needs a class that is not final");
  template <class First, class... Rest>
  static constexpr bool kConstructs = std::is_constructible_v<T, First&&, Rest&&...> &&
                                      !std::same_as<std::remove_cvref_t<First>, Serialized>;

 public:
  Serialized() { note_type(); }
  Serialized(const Serialized&) = default;
  Serialized(Serialized&&) = default;
  Serialized& operator=(const Serialized&) = default;
  Serialized& operator=(Serialized&&) = default;
  // Constructs the T from the arguments.
  template <class First, class... Rest>
  requires(kConstructs<First, Rest...>) explicit Serialized(First&& first, Rest&&... rest)
      : T(std::forward<First>(first), std::forward<Rest>(rest)...) {
    note_type();
  }

 private:
  // The owner recognizes objects by their type; there is none before it has been made.
  static void note_type() {
    static const bool noted = (rref::note_one_at_a_time(typeid(Serialized)), true);
    static_cast<void>(noted);
  }
};

namespace detail {
template <class T>
struct IsSendable<Serialized<T>> : std::false_type {};
}  // namespace detail

}  // namespace stitch
