#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
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

// What a group holds of its members: one hold of each, until it gives them up or lets them go.
class GroupInterest {
 public:
  template <class... Ts>
  explicit GroupInterest(const Future<Ts>&... futures) {
    in_->reserve(sizeof...(Ts));
    (in_->push_back(make_interest(futures.shared_state())), ...);
  }
  template <class T>
  explicit GroupInterest(const std::vector<Future<T>>& futures) {
    in_->reserve(futures.size());
    for (const auto& future : futures) in_->push_back(make_interest(future.shared_state()));
  }
  void cancel() const {
    for (const auto& member : *in_) member->cancel(Cancel::all);
  }
  // Calls `gone` for each whose callback is not called any more.
  template <class Gone>
  void give_up(Gone gone) const {
    for (const auto& member : *in_) {
      if (!member->cancel(Cancel::own_work)) gone();
    }
  }
  // All but those whose callback has begun.
  void release() const {
    for (const auto& member : *in_) member->release();
  }
  // Calls `watch_all`, which calls watch() for each. Where it throws, for want of memory, the
  // members are let go.
  template <class WatchAll>
  void begin(WatchAll watch_all) const {
    try {
      watch_all();
    } catch (...) {
      release();
      throw;
    }
  }
  // Has `callback` called once the member at `index` is complete, unless it is given up.
  template <class Callback>
  void watch(std::size_t index, Callback callback) const {
    const auto& member = (*in_)[index];
    member->watch(FutureStateBase::one_callback([member, callback = std::move(callback)]() mutable {
      if (member->begin() != Interest::Begin::no) callback();
    }));
  }

 private:
  using Members = std::vector<std::shared_ptr<Interest>>;
  const std::shared_ptr<Members> in_ = std::make_shared<Members>();
};

// One that a when_all() gives up counts as one that has failed; the others still come.
template <class Value>
void cancel_together(const Promise<Value>& promise, const GroupInterest& interest,
                     const std::shared_ptr<GroupCountdown>& countdown) {
  promise.set_canceller(
      [interest, countdown, weak = std::weak_ptr(promise.shared_state())](Cancel how) {
        if (how == Cancel::all) {
          interest.cancel();
          return false;
        }
        interest.give_up([&] {
          if (!countdown->arrive(given_up_work())) return;
          if (const auto state = weak.lock()) state->set_exception(countdown->failure());
        });
        return true;
      });
}
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
  const detail::GroupInterest interest(futures);
  futures.clear();  // here, and not at the end of the caller's expression
  const auto finish = [members, promise] {
    promise.fulfil([&]() -> Values {
      if constexpr (!std::is_void_v<T>) {
        Values values;
        values.reserve(members->size());
        for (const auto& member : *members) values.push_back(detail::stored_in(member));
        promise.shared_state()->set_arrived(detail::arrived_in(*members));
        return values;
      }
    });
  };
  if (members->empty()) {
    finish();
    return result;
  }
  auto countdown = std::make_shared<detail::GroupCountdown>(members->size());
  detail::cancel_together(promise, interest, countdown);
  interest.begin([&] {
    for (std::size_t i = 0; i < members->size(); ++i) {
      interest.watch(i, [countdown, finish, promise, &member = (*members)[i]] {
        if (!countdown->arrive(detail::error_in<T>(member))) return;
        if (auto failure = countdown->failure()) {
          promise.set_exception(failure);
        } else {
          finish();
        }
      });
    }
  });
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
  const detail::GroupInterest interest(futures...);
  ((futures = {}), ...);
  detail::cancel_together(promise, interest, countdown);
  std::size_t index = 0;
  const auto watch = [&]<class T>(const detail::StateOf<T>& member) {
    interest.watch(index++, [countdown, members, promise, &member] {
      if (!countdown->arrive(detail::error_in<T>(member))) return;
      if (auto failure = countdown->failure()) {
        promise.set_exception(failure);
      } else {
        promise.fulfil([&] {
          return std::apply(
              [&](const auto&... each) {
                Values values(detail::stored_in(each)...);
                promise.shared_state()->set_arrived(detail::arrived_in(each...));
                return values;
              },
              *members);
        });
      }
    });
  };
  if constexpr (sizeof...(Ts) == 0) {
    promise.set_value(Values{});
  } else {
    interest.begin([&] { std::apply([&](const auto&... each) { (watch(each), ...); }, *members); });
  }
  return result;
}

namespace detail {

// A when_any(): which of its members is the first, and how many are not.
class GroupRace {
 public:
  explicit GroupRace(std::size_t members) : left_(members) {}
  // True for the first that calls it.
  bool take() { return !taken_.test_and_set(std::memory_order_acq_rel); }
  // One is not the first. True for the last, where all are not.
  bool lose() { return left_.fetch_sub(1, std::memory_order_acq_rel) == 1; }

 private:
  std::atomic_flag taken_;
  std::atomic<std::size_t> left_;
};

// Where it is stopped no member is the first, and it ends once all have.
template <class Value>
void cancel_together(const Promise<Value>& promise, const GroupInterest& interest,
                     const std::shared_ptr<GroupRace>& race) {
  promise.set_canceller([interest, race, weak = std::weak_ptr(promise.shared_state())](Cancel how) {
    if (how == Cancel::all) {
      interest.cancel();
      return false;
    }
    if (!race->take()) return true;
    interest.give_up([&] {
      if (!race->lose()) return;
      if (const auto state = weak.lock()) state->set_exception(given_up_work());
    });
    return true;
  });
}
// Completes `promise` with what `make` makes of the member, unless another member was first; then
// the group lets the others go.
template <class Value, class T, class Make>
void offer_to_any(const Promise<Value>& promise, const std::shared_ptr<GroupRace>& race,
                  const GroupInterest& interest, std::size_t index, const StateOf<T>& member,
                  Make make) {
  interest.watch(index, [promise, race, interest, state = member, make] {
    if (!race->take()) {
      if (race->lose()) promise.set_exception(given_up_work());
      return;
    }
    interest.release();  // first: who sees the outcome may be the only one that holds a loser
    if (!state->exception()) promise.shared_state()->set_arrived(state->arrived());
    promise.fulfil([&]() -> Value { return make(Future<T>(state)); });
  });
}
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
// one must be given. Cancelling it cancels them all; without that the others continue.
template <class T>
[[nodiscard]] auto when_any(std::vector<Future<T>> futures) {
  using Value = std::conditional_t<std::is_void_v<T>, std::size_t,
                                   std::pair<std::size_t, typename detail::FutureState<T>::Stored>>;
  if (futures.empty())
    throw Error(ErrorCode::invalid_argument, "when_any needs at least one future");
  detail::require_members("when_any()", futures);
  Promise<Value> promise;
  auto result = promise.future();
  const detail::GroupInterest interest(futures);
  const auto members = detail::states_of(futures);
  futures.clear();  // here, and not at the end of the caller's expression
  const auto race = std::make_shared<detail::GroupRace>(members->size());
  detail::cancel_together(promise, interest, race);
  interest.begin([&] {
    for (std::size_t i = 0; i < members->size(); ++i) {
      detail::offer_to_any<Value, T>(promise, race, interest, i, (*members)[i],
                                     [i](const Future<T>& member) -> Value {
                                       if constexpr (std::is_void_v<T>) {
                                         member.get();
                                         return i;
                                       } else {
                                         return Value(i, member.get());
                                       }
                                     });
    }
  });
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
  const detail::GroupInterest interest(first, others...);
  const std::tuple members(first.shared_state(), others.shared_state()...);
  first = {};
  ((others = {}), ...);
  const auto race = std::make_shared<detail::GroupRace>(1 + sizeof...(Ts));
  detail::cancel_together(promise, interest, race);
  interest.begin([&] {
    detail::offer_to_any<Value, T>(promise, race, interest, 0, std::get<0>(members),
                                   &detail::alternative_of<0, Value, T>);
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      (detail::offer_to_any<Value, Ts>(promise, race, interest, I + 1, std::get<I + 1>(members),
                                       &detail::alternative_of<I + 1, Value, Ts>),
       ...);
    }
    (std::index_sequence_for<Ts...>());
  });
  return result;
}

}  // namespace stitch
