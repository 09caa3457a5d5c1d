#include "stitch/rref/agent/argument_resolver.h"

#include <functional>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/rref/agent/object_access.h"
#include "stitch/rref/agent/object_server.h"

namespace stitch::rref {
namespace {

using Then = base::UniqueFunction<void()>;

// Shared by the waits and requests that it has started. Thread contract: any thread; its lock is
// never held across a call to anything else.
class Resolution : public std::enable_shared_from_this<Resolution> {
 public:
  Resolution(std::shared_ptr<RRefAgent> rrefs, std::shared_ptr<rpc::IncomingCall> call,
             const IncomingRefs& refs, rpc::GivenArguments& given, Then then)
      : rrefs_(std::move(rrefs)),
        refs_(refs),
        given_(given),
        left_(refs.arguments().size()),
        values_(refs.arguments().size()),
        call_(std::move(call)),
        then_(std::move(then)) {}

  // Under the execution context of the call: its deadline and its autograd context are those of the
  // requests.
  void start() {
    const auto stop = rpc::ExecutionContext::current().stop;
    on_stop_.emplace(stop->token(), [weak = weak_from_this()] {
      if (const auto self = weak.lock())
        self->fail(
            Error(ErrorCode::cancelled, "it was cancelled while it waited for its arguments"));
    });
    const auto keep = call();
    if (!keep) return;
    for (std::size_t i = 0; i < refs_.arguments().size(); ++i) {
      const ReferredArgument& argument = refs_.arguments()[i];
      try {
        get(i, refs_.id(argument.index), refs_.handle(argument.index));
      } catch (...) {
        fail_argument(i, to_error(std::current_exception()));
      }
      if (!call()) return;
    }
  }
  void set_object(std::size_t i, rpc::OwnedObject object) {
    rpc::GivenArgument value;
    value.object = std::move(object);
    set(i, std::move(value));
  }
  void set_reply(std::size_t i, rpc::InMessage reply) {
    rpc::GivenArgument value;
    value.reply = std::make_shared<rpc::InMessage>(std::move(reply));
    set(i, std::move(value));
  }
  void fail_argument(std::size_t i, const Error& error) {
    const auto position = refs_position(i);
    if (position) fail(error.with_prefix("argument " + std::to_string(*position + 1)));
  }

 private:
  void get(std::size_t i, const RRefId& id, const HandlePtr& handle);

  [[nodiscard]] std::shared_ptr<rpc::IncomingCall> call() const {
    const base::MutexLock lock(mutex_);
    return call_;
  }
  // Nothing once the call has ended: refs_ is its attachment.
  [[nodiscard]] std::optional<std::uint32_t> refs_position(std::size_t i) const {
    const auto keep = call();
    if (!keep) return std::nullopt;
    return refs_.arguments()[i].position;
  }
  void set(std::size_t i, rpc::GivenArgument value) {
    std::shared_ptr<rpc::IncomingCall> call;
    {
      const base::MutexLock lock(mutex_);
      if (!call_) return;
      values_[i] = std::move(value);
      values_[i].position = refs_.arguments()[i].position;
      values_[i].type = refs_.arguments()[i].type;
      if (--left_ > 0) return;
      call.swap(call_);
      given_.set(std::move(values_));
    }
    std::exchange(then_, nullptr)();
  }
  void fail(const Error& error) {
    std::shared_ptr<rpc::IncomingCall> call;
    std::vector<std::uint64_t> requests;
    std::vector<rpc::GivenArgument> values;  // destroyed without the lock
    {
      const base::MutexLock lock(mutex_);
      if (!call_) return;
      call.swap(call_);
      requests.swap(requests_);
      values.swap(values_);
    }
    then_ = nullptr;  // it may keep the call
    call->fail(error);
    for (const std::uint64_t request : requests)
      rpc::agent_of(*call).outgoing_calls().abandon_call(request);
  }

  const std::shared_ptr<RRefAgent> rrefs_;
  const IncomingRefs& refs_;    // while call_ is there
  rpc::GivenArguments& given_;  // likewise
  mutable base::Mutex mutex_;
  std::size_t left_ STITCH_GUARDED_BY(mutex_);
  std::vector<rpc::GivenArgument> values_ STITCH_GUARDED_BY(mutex_);
  std::vector<std::uint64_t> requests_ STITCH_GUARDED_BY(mutex_);      // for copies, of the agent
  std::shared_ptr<rpc::IncomingCall> call_ STITCH_GUARDED_BY(mutex_);  // null: over
  Then then_;  // belongs to the thread that takes call_
  std::optional<std::stop_callback<std::function<void()>>> on_stop_;
};

// The reply of an owner.
class PendingArgument final : public rpc::PendingCall {
 public:
  PendingArgument(std::shared_ptr<Resolution> resolution, std::size_t i)
      : resolution_(std::move(resolution)), i_(i) {}
  void on_reply(rpc::InMessage& message) override {
    resolution_->set_reply(i_, std::move(message));
  }
  void on_error(const Error& error) override { resolution_->fail_argument(i_, error); }

 private:
  const std::shared_ptr<Resolution> resolution_;
  const std::size_t i_;
};

void Resolution::get(std::size_t i, const RRefId& id, const HandlePtr& handle) {
  if (id.owner == rrefs_->lifetime().self()) {
    static_cast<void>(require_usable(*handle, "RRef::to_here"));
    // Until then the message of the call keeps the object.
    rrefs_->when_created(id, [self = shared_from_this(), i](const std::shared_ptr<void>& object,
                                                            const std::optional<Error>& failure) {
      if (failure) {
        self->fail_argument(i, not_created(*failure));
      } else {
        self->set_object(i, *static_cast<const rpc::OwnedObject*>(object.get()));
      }
    });
    return;
  }
  ObjectRequest request = begin_fetch(handle, {});
  const std::uint64_t started = rpc::start_call(
      *request.agent, *request.to, "RRef::to_here", std::chrono::nanoseconds(0),
      std::move(request.message), std::make_shared<PendingArgument>(shared_from_this(), i));
  {
    const base::MutexLock lock(mutex_);
    if (call_) {
      requests_.push_back(started);
      return;
    }
  }
  request.agent->outgoing_calls().abandon_call(started);  // all have come, or the call has failed
}

}  // namespace

void resolve_arguments(const std::shared_ptr<RRefAgent>& rrefs,
                       const std::shared_ptr<rpc::IncomingCall>& call, const IncomingRefs& refs,
                       rpc::GivenArguments& given, Then then) {
  const auto resolution = std::make_shared<Resolution>(rrefs, call, refs, given, std::move(then));
  rpc::agent_of(*call).dispatch(
      call, [call, resolution] { call->run_task([&] { resolution->start(); }); });
}

}  // namespace stitch::rref
