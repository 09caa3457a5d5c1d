#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "stitch/rpc/future/future.h"

namespace stitch {

namespace detail {

[[noreturn]] void throw_empty_member(const char* operation, std::size_t index);

// Counts down the members of a when_all and remembers the first failure and how many there were.
class GroupCountdown {
 public:
  explicit GroupCountdown(std::size_t members) : left_(members) {}
  // True for the last member.
  bool arrive(const std::exception_ptr& exception) {
    if (exception && failures_.fetch_add(1) == 0) first_ = exception;
    return left_.fetch_sub(1, std::memory_order_acq_rel) == 1;
  }
  // REQUIRES: all have arrived. The first failure, saying how many more there were; null when there
  // was none.
  [[nodiscard]] std::exception_ptr failure() const noexcept;

 private:
  std::atomic<std::size_t> left_;
  std::atomic<std::size_t> failures_{0};
  std::exception_ptr
      first_;  // written by the one that raised failures_ from 0, read after all have arrived
};

}  // namespace detail

namespace detail {
// Throws Error(invalid_argument) when `future`, the one at `index`, is empty.
template <class T>
void require_member(const char* operation, const Future<T>& future, std::size_t index) {
  if (!future.valid()) throw_empty_member(operation, index);
}
template <class... Ts>
void require_members(const char* operation, const Future<Ts>&... futures) {
  [[maybe_unused]] std::size_t index = 0;
  (require_member(operation, futures, index++), ...);
}
template <class T>
void require_members(const char* operation, const std::vector<Future<T>>& futures) {
  for (std::size_t i = 0; i < futures.size(); ++i) require_member(operation, futures[i], i);
}
}  // namespace detail

namespace detail {

template <class T>
using StateOf = std::shared_ptr<FutureState<T>>;
template <class T>
std::shared_ptr<const std::vector<StateOf<T>>> states_of(const std::vector<Future<T>>& futures) {
  std::vector<StateOf<T>> states;
  states.reserve(futures.size());
  for (const auto& future : futures) states.push_back(future.shared_state());
  return std::make_shared<const std::vector<StateOf<T>>>(std::move(states));
}
template <class T>
typename FutureState<T>::Stored stored_in(const StateOf<T>& state) {
  const Future<T> member(state);
  if constexpr (std::is_void_v<T>) {
    member.get();
    return {};
  } else {
    return member.get();
  }
}
// The memory that these members bring, for a future that hands it on. REQUIRES: all are ready.
template <class... States>
std::shared_ptr<const rpc::ArrivedMemory> arrived_in(const States&... states) {
  if ((!states->arrived() && ...)) return nullptr;
  return rpc::together({states->arrived()...});
}
template <class T>
std::shared_ptr<const rpc::ArrivedMemory> arrived_in(const std::vector<StateOf<T>>& states) {
  std::vector<std::shared_ptr<const rpc::ArrivedMemory>> parts;
  for (const auto& state : states) {
    if (state->arrived()) parts.push_back(state->arrived());
  }
  return rpc::together(std::move(parts));
}
template <class T>
std::exception_ptr error_in(const StateOf<T>& state) {
  const Future<T> member(state);
  return member.has_error() ? std::make_exception_ptr(member.error()) : nullptr;
}

}  // namespace detail

// Completes when all have: with their values in order, or with the first error, whose text counts
// the others. Tensors on devices are handed over where the values are (docs/gpu_placement.md).
// Cancelling it cancels them all. Throws Error(invalid_argument) when one is empty, as when_any()
// does.
template <class T>
[[nodiscard]] auto when_all(std::vector<Future<T>> futures) {
  detail::require_members("when_all()", futures);
  using Values = std::conditional_t<std::is_void_v<T>, void,
                                    std::vector<typename detail::FutureState<T>::Stored>>;
  Promise<Values> promise;
  auto result = promise.future();
  const auto members = detail::states_of(futures);
  const auto finish = [members, promise] {
    promise.fulfil(
        [&]() -> Values {
          if constexpr (!std::is_void_v<T>) {
            Values values;
            values.reserve(members->size());
            for (const auto& member : *members) values.push_back(detail::stored_in(member));
            return values;
          }
        },
        nullptr, detail::arrived_in(*members));
  };
  if (members->empty()) {
    finish();
    return result;
  }
  auto countdown = std::make_shared<detail::GroupCountdown>(members->size());
  promise.set_canceller([members](detail::ToStop& more) {
    more.insert(more.end(), members->begin(), members->end());
    return true;
  });
  for (const auto& member : *members) {
    member->on_ready([countdown, finish, promise, &member] {
      if (!countdown->arrive(detail::error_in<T>(member))) return;
      if (auto failure = countdown->failure()) {
        promise.set_exception(failure);
      } else {
        finish();
      }
    });
  }
  return result;
}

// As above for futures of different types: Future<std::tuple<...>>, with std::monostate for void.
template <class... Ts>
[[nodiscard]] Future<std::tuple<typename detail::FutureState<Ts>::Stored...>> when_all(
    Future<Ts>... futures) {
  detail::require_members("when_all()", futures...);
  using Values = std::tuple<typename detail::FutureState<Ts>::Stored...>;
  Promise<Values> promise;
  auto result = promise.future();
  const auto members =
      std::make_shared<const std::tuple<detail::StateOf<Ts>...>>(futures.shared_state()...);
  auto countdown = std::make_shared<detail::GroupCountdown>(sizeof...(Ts));
  promise.set_canceller([members](detail::ToStop& more) {
    std::apply([&](const auto&... each) { (more.push_back(each), ...); }, *members);
    return true;
  });
  const auto watch = [&]<class T>(const detail::StateOf<T>& member) {
    member->on_ready([countdown, members, promise, &member] {
      if (!countdown->arrive(detail::error_in<T>(member))) return;
      if (auto failure = countdown->failure()) {
        promise.set_exception(failure);
      } else {
        promise.fulfil(
            [&] {
              return std::apply(
                  [](const auto&... each) { return Values(detail::stored_in(each)...); }, *members);
            },
            nullptr,
            std::apply([](const auto&... each) { return detail::arrived_in(each...); }, *members));
      }
    });
  };
  if constexpr (sizeof...(Ts) == 0) {
    promise.set_value(Values{});
  } else {
    std::apply([&](const auto&... each) { (watch(each), ...); }, *members);
  }
  return result;
}

namespace detail {

// The watches of a when_any() on its members, which end with its outcome.
template <class Value>
class Race {
 public:
  explicit Race(const Promise<Value>& promise) : promise_(promise) {}
  // Completes the promise with what `make` makes of this member if it is the first.
  template <class T, class Make>
  void watch(const StateOf<T>& member, Make make) {
    watches_.emplace_back(member, [promise = promise_, taken = taken_, member, make] {
      if (taken->test_and_set(std::memory_order_acq_rel)) return;
      promise.fulfil([&]() -> Value { return make(Future<T>(member)); }, nullptr,
                     member->arrived());
    });
  }
  // To be called when all are watched: a stop goes on to all of them.
  void begin() && {
    promise_.set_canceller([watches = std::move(watches_)](ToStop& more) {
      for (const auto& watch : watches) more.push_back(watch.state());
      return true;
    });
  }

 private:
  const Promise<Value> promise_;
  const std::shared_ptr<std::atomic_flag> taken_ = std::make_shared<std::atomic_flag>();
  std::vector<Watch> watches_;
};
template <std::size_t I, class Variant, class T>
Variant alternative_of(const Future<T>& member) {
  if constexpr (std::is_void_v<T>) {
    member.get();
    return Variant(std::in_place_index<I>);
  } else {
    return Variant(std::in_place_index<I>, member.get());
  }
}

}  // namespace detail

// Completes with the first of `futures` that completes: its index and value, or its error. At least
// one must be given. The others go on; cancelling the returned future cancels all that have not
// ended.
template <class T>
[[nodiscard]] auto when_any(std::vector<Future<T>> futures) {
  using Value = std::conditional_t<std::is_void_v<T>, std::size_t,
                                   std::pair<std::size_t, typename detail::FutureState<T>::Stored>>;
  if (futures.empty())
    throw Error(ErrorCode::invalid_argument, "when_any needs at least one future");
  detail::require_members("when_any()", futures);
  Promise<Value> promise;
  auto result = promise.future();
  detail::Race<Value> race(promise);
  for (std::size_t i = 0; i < futures.size(); ++i) {
    race.watch(futures[i].shared_state(), [i](const Future<T>& member) -> Value {
      if constexpr (std::is_void_v<T>) {
        member.get();
        return i;
      } else {
        return Value(i, member.get());
      }
    });
  }
  std::move(race).begin();
  return result;
}
template <class T, class... Ts>
requires(std::is_same_v<T, Ts>&&...)
    [[nodiscard]] auto when_any(Future<T> first, Future<Ts>... others) {
  return when_any(std::vector<Future<T>>{std::move(first), std::move(others)...});
}
// As above for futures of different types: a variant, whose index() says which one it was, with
// std::monostate for void.
template <class T, class... Ts>
requires(!(std::is_same_v<T, Ts> && ...))
    [[nodiscard]] auto when_any(Future<T> first, Future<Ts>... others) {
  detail::require_members("when_any()", first, others...);
  using Value = std::variant<typename detail::FutureState<T>::Stored,
                             typename detail::FutureState<Ts>::Stored...>;
  Promise<Value> promise;
  auto result = promise.future();
  detail::Race<Value> race(promise);
  race.watch(first.shared_state(), &detail::alternative_of<0, Value, T>);
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    (race.watch(others.shared_state(), &detail::alternative_of<I + 1, Value, Ts>), ...);
  }
  (std::index_sequence_for<Ts...>());
  std::move(race).begin();
  return result;
}

}  // namespace stitch
