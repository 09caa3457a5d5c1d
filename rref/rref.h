#pragma once

#include <chrono>
#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <type_traits>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/rpc/calls.h"
#include "stitch/rpc/worker.h"
#include "stitch/rref/agent/object_access.h"
#include "stitch/rref/remote_call.h"

namespace stitch {

namespace dist_autograd {
class Context;
}

// A reference to an object of type T that lives on one worker, its owner. A value: copy it, send it
// as an argument or result, keep it in structs. The object lives while any RRef to it exists in any
// process or message, and is destroyed on the owner's user-function threads after the last one.
// Requests about an object that is still being created wait on its owner. They fail with the error
// of a failed creation, with `disconnected` where the owner is gone, and with `shutting_down` after
// this worker's shutdown; functions that return a future report errors through it.
//
// Where a remote function has a parameter T, an RRef<T> may be the argument of rpc_sync, rpc_async,
// remote and notify: the callee gets a copy of the object from its owner once it has been created,
// within the deadline of the call and without a thread that waits. T must be sendable and copyable.
// The owner itself gets a copy of the T: of a tensor another handle of the same memory, which it
// does not change in place. (A constructor gets its arguments as they are: the RRef.)
//
// Thread contract: as std::shared_ptr; only methods that say so wait.
template <class T>
class [[nodiscard]] RRef {
 public:
  using value_type = T;  // the type of the object

  // Refers to nothing; only assigning, sending and valid() are allowed.
  RRef() = default;
  // For the layers above.
  explicit RRef(rref::HandlePtr handle) : handle_(std::move(handle)) {}
  // False when it refers to nothing.
  [[nodiscard]] bool valid() const noexcept { return handle_ != nullptr; }

  // True when the object lives on this worker.
  [[nodiscard]] bool is_owner() const { return handle()->is_owner(); }
  // The worker on which the object lives.
  [[nodiscard]] const WorkerInfo& owner() const { return handle()->owner(); }
  // The owner is known to know of the object.
  [[nodiscard]] bool confirmed_by_owner() const { return handle()->confirmed_by_owner(); }
  // A printable id of the object, "rref 7.1/3.1/42"; equal for all references to it.
  [[nodiscard]] std::string describe() const { return rref::to_string(handle()->id()); }
  // The same; "no rref" when it refers to nothing.
  friend std::string to_string(const RRef& rref) {
    return rref.valid() ? rref.describe() : "no rref";
  }
  friend std::ostream& operator<<(std::ostream& out, const RRef& rref) {
    return out << to_string(rref);
  }
  // Whether they refer to the same object, or both to nothing.
  friend bool operator==(const RRef& a, const RRef& b) {
    return a.handle_ == b.handle_ || (a.handle_ && b.handle_ && a.handle_->id() == b.handle_->id());
  }

  // The same reference; calls through it wait at most `timeout` (0: no limit) instead of
  // Options::rpc_timeout.
  template <class Rep, class Period>
  RRef with_timeout(std::chrono::duration<Rep, Period> timeout) const {
    RRef copy = *this;
    rref::HandleUse use = copy.use();
    use.timeout = std::chrono::duration_cast<std::chrono::nanoseconds>(timeout);
    copy.use_ = std::make_shared<const rref::HandleUse>(std::move(use));
    return copy;
  }

  // The same reference; calls and fetches through it (not backward()) do this where the limits of
  // the owner keep them back: with WhenFull::refuse they fail with `overloaded` (see WhenFull).
  [[nodiscard]] RRef with_when_full(WhenFull when_full) const {
    RRef copy = *this;
    rref::HandleUse use = copy.use();
    use.when_full = when_full;
    copy.use_ = std::make_shared<const rref::HandleUse>(std::move(use));
    return copy;
  }

  // A copy of the object, fetched from the owner; on the owner a copy of the object itself, without
  // a message.
  Future<T> to_here_async() const {
    if constexpr (std::is_void_v<T> || Sendable<T>) {
      return detail::fetch<T>(handle(), use());
    } else {
      static_assert(detail::WhyNot<T, detail::Object<T>>::kSaid);
      return {};
    }
  }
  // The same, waiting. Throws its Error.
  T to_here() const {
    const rpc::AnswerWaitScope waits;
    return to_here_async().get();
  }
  template <class Rep, class Period>
  T to_here(std::chrono::duration<Rep, Period> timeout) const {
    const rpc::AnswerWaitScope waits;
    return with_timeout(timeout).to_here_async().get();
  }

  // The object itself; valid while an RRef to it exists. Waits for its creation, at most as long as
  // to_here(). Throws Error(invalid_argument), naming the owner, on any other worker.
  std::add_lvalue_reference_t<T> local_value() const requires(!std::is_void_v<T>) {
    const rpc::OwnedObject value = rref::local_value(*handle(), use().timeout);
    if (*value.type != typeid(T)) throw rref::wrong_type(*handle_, *value.type, typeid(T));
    return *static_cast<T*>(value.object.get());
  }

  // Calls a method of the object on its owner: rref.rpc_async<&T::method>(args...). Arguments and
  // results as for stitch::rpc_async().
  template <auto Method, class... Args>
  auto rpc_async(Args&&... args) const {
    return detail::call_method<T, Method>(handle(), use(), std::forward<Args>(args)...);
  }
  // Does not compile: write rpc_async<&T::method>(arguments...).
  template <detail::FunctionValue F, class... Args>
  rpc::AnyValue rpc_async(F&&, Args&&...) const {
    return detail::refuse_function_value<F>();
  }
  // The same, waiting. Throws its Error.
  template <auto Method, class... Args>
  auto rpc_sync(Args&&... args) const {
    const rpc::AnswerWaitScope waits;
    return rpc_async<Method>(std::forward<Args>(args)...).get();
  }
  // Does not compile: write rpc_sync<&T::method>(arguments...).
  template <detail::FunctionValue F, class... Args>
  rpc::AnyValue rpc_sync(F&&, Args&&...) const {
    return detail::refuse_function_value<F>();
  }
  // As rpc_async(), but the result stays on the owner.
  template <auto Method, class... Args>
  auto remote(Args&&... args) const {
    using R = typename rpc::TraitsOf<Method>::Result;
    return RRef<R>(
        detail::create_by_method<T, Method>(handle(), use(), std::forward<Args>(args)...));
  }

  // Does not compile: write remote<&T::method>(arguments...).
  template <detail::FunctionValue F, class... Args>
  rpc::AnyValue remote(F&&, Args&&...) const {
    return detail::refuse_function_value<F>();
  }
  // Completes when the creation has ended, with its error if it failed; with `timeout` if that
  // takes longer than to_here() would wait.
  Future<void> when_created() const { return rref::when_created(handle(), use()); }

  // Runs distributed backward from the owner's tensor, wherever it lives, and waits. Defined by
  // dist_autograd/rref_backward.h.
  void backward(dist_autograd::Context& context) const requires std::same_as<T, at::Tensor>;

  // How messages carry references. Only they can: nothing else would keep the object.
  void save(rpc::OutArchive& archive) const {
    rref::write_reference(archive, handle_, detail::type_id<T>());
  }
  // The counterpart of save().
  void load(rpc::InArchive& archive) {
    handle_ = rref::read_reference(archive, detail::type_id<T>(), base::demangle(typeid(T).name()));
  }
  // Throws Error(invalid_argument): other archives carry no references.
  template <class Archive>
  requires(!std::same_as<Archive, rpc::OutArchive>) void save(Archive&) const {
    throw Error(ErrorCode::invalid_argument,
                "an RRef can be written into a message only, not into another archive: nothing "
                "would keep its object");
  }
  // The counterpart of the save() that throws.
  template <class Archive>
  requires(!std::same_as<Archive, rpc::InArchive>) void load(Archive&) {
    throw Error(ErrorCode::invalid_argument,
                "an RRef can be read from a message only, not from another archive");
  }

  // For layers above: what this RRef and its copies share, not null. Throws Error(invalid_argument)
  // if it refers to nothing.
  [[nodiscard]] const rref::HandlePtr& handle() const {
    if (!handle_) throw Error(ErrorCode::invalid_argument, "this RRef refers to nothing");
    return handle_;
  }

 private:
  [[nodiscard]] const rref::HandleUse& use() const {
    static const rref::HandleUse kUsual;
    return use_ ? *use_ : kUsual;
  }

  rref::HandlePtr handle_;
  std::shared_ptr<const rref::HandleUse> use_;  // null: as usual
};

namespace detail {
template <class T>
requires(!std::is_void_v<T>) struct StandIn<RRef<T>, T> {
  static constexpr bool kExists = kCanStandIn<T>;
  static void write(rpc::OutMessage& message, std::size_t position, const RRef<T>& reference) {
    rref::write_argument(message, position, reference.handle(), type_id<T>());
  }
};
}  // namespace detail

// Owns `value` here, on the current worker, and returns the first reference to it. Requests about
// it come after what this thread's current streams of devices have queued.
template <class T>
RRef<T> make_rref(T value) {
  const auto agent = rpc::current_agent();
  return RRef<T>(rref::own(agent, rpc::OwnedObject::of(std::make_shared<T>(std::move(value)))));
}

// Calls F on the target and keeps the result there. Returns immediately; an error there becomes the
// error of the object's creation. Throws errors found here: an unknown worker, an argument that
// cannot be sent, no current worker. The target's timeout limits the creation; the owner enforces
// it, so that all workers agree on the outcome.
template <auto F, class... Args>
auto remote(Target target, Args&&... args) {
  return RRef<typename rpc::TraitsOf<F>::Result>(
      detail::create_by_function<F>(rpc::current_agent(), target, std::forward<Args>(args)...));
}
template <auto F, class... Args>
auto remote(TargetOptions target, Args&&... args) {
  return stitch::remote<F>(Target(std::move(target)), std::forward<Args>(args)...);
}
// Does not compile: write remote<f>(target, arguments...).
template <detail::FunctionValue F, class... Args>
rpc::AnyValue remote(F&&, Args&&...) {
  return detail::refuse_function_value<F>();
}
// Constructs a T on the target from the arguments, each sent as its own decayed type (text as
// std::string). T need be neither sendable nor copyable nor movable.
template <class T, class... Args>
RRef<T> remote(Target target, Args&&... args) {
  return RRef<T>(
      detail::create_by_constructor<T>(rpc::current_agent(), target, std::forward<Args>(args)...));
}
template <class T, class... Args>
RRef<T> remote(TargetOptions target, Args&&... args) {
  return stitch::remote<T>(Target(std::move(target)), std::forward<Args>(args)...);
}

template <auto F, class... Args>
auto Worker::remote(Target target, Args&&... args) {
  return RRef<typename rpc::TraitsOf<F>::Result>(
      detail::create_by_function<F>(agent(), target, std::forward<Args>(args)...));
}
template <auto F, class... Args>
auto Worker::remote(TargetOptions target, Args&&... args) {
  return remote<F>(Target(std::move(target)), std::forward<Args>(args)...);
}
template <class T, class... Args>
auto Worker::remote(Target target, Args&&... args) {
  return RRef<T>(detail::create_by_constructor<T>(agent(), target, std::forward<Args>(args)...));
}
template <class T, class... Args>
auto Worker::remote(TargetOptions target, Args&&... args) {
  return remote<T>(Target(std::move(target)), std::forward<Args>(args)...);
}
template <class T>
auto Worker::make_rref(T value) {
  return RRef<T>(rref::own(agent(), rpc::OwnedObject::of(std::make_shared<T>(std::move(value)))));
}

// How far an object, or this worker's hold on it, has come. rref/lifetime/PROTOCOL.md has the
// rules.
enum class RRefState : std::uint8_t {
  pending,      // owned here: being created, or known from references only
  ready,        // owned here
  failed,       // owned here: its creation failed
  creating,     // of another worker: asked for, not answered yet
  borrowed,     // of another worker: in use on the word of a sender
  registering,  // of another worker: about to be counted by the owner
  registered,   // of another worker: the owner counts this worker as a holder
  lost,         // of another worker: its owner is gone
};
// "pending", "ready", ...
[[nodiscard]] std::string_view to_string(RRefState state) noexcept;

// One object that a worker owns, or that it refers to.
struct RRefInfo {
  std::string id;      // as RRef::describe()
  WorkerInfo owner;    // the worker that has the object; without a name if it is not known
  WorkerInfo creator;  // the worker that made the object or asked for it
  RRefState state = RRefState::lost;  // as this worker sees it
  // The function or class whose result the object is; for one made by make_rref(), the called
  // function that ran on that thread. Empty if it is not known here: there was none, or it was
  // received from another worker.
  std::string made_by;
  std::string type;  // of the object; empty where it is not known
  std::optional<std::size_t>
      bytes;  // when it was made: of tensors, texts, numbers and vectors
              // of tensors or numbers; of other types and other workers' objects unknown
  std::chrono::nanoseconds age{0};  // since this worker has known of it
  std::vector<WorkerInfo> holders;  // owned here: the other workers that hold it
  std::uint32_t local = 0;          // handles, and messages being handled, of this worker
  std::uint32_t in_messages = 0;    // messages sent that carry it and are not settled
};
// One line: id, state, type, bytes, age, holders.
std::ostream& operator<<(std::ostream& out, const RRefInfo& info);

// All objects that the worker owns for references, and all of others that it refers to, the oldest
// first. A picture of one moment, for people and tests; takes time for each reference. Throws
// Error(shutting_down) after shutdown. Any thread.
[[nodiscard]] std::vector<RRefInfo> rrefs(const Worker& worker);
// The same of the current worker.
[[nodiscard]] std::vector<RRefInfo> rrefs();

}  // namespace stitch

// Equal for references to the same object.
template <class T>
struct std::hash<stitch::RRef<T>> {
  std::size_t operator()(const stitch::RRef<T>& rref) const {
    return rref.valid() ? stitch::rref::RRefIdHash{}(rref.handle()->id()) : 0;
  }
};
