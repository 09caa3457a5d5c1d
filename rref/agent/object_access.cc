#include "stitch/rref/agent/object_access.h"

#include <atomic>
#include <memory>
#include <typeindex>
#include <unordered_set>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/base/recycler.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/calls/incoming_call.h"
#include "stitch/rref/agent/carried_refs.h"
#include "stitch/rref/agent/object_server.h"
#include "stitch/rref/agent/rref_agent.h"

namespace stitch::rref {
namespace {

constexpr std::uint32_t kNoReference = 0xffffffff;

Error not_made(const Error& why, std::string_view function, const WorkerInfo& to) {
  return why
      .with_prefix("call " + std::string(function) + "() to " + to_string(to) + " was not made")
      .with_worker(to.name)
      .with_function(std::string(function));
}

// The creator has no time limit of its own: the owner decides the outcome, so that both agree.
class PendingCreation final : public rpc::PendingCall {
 public:
  PendingCreation(std::shared_ptr<RRefAgent> rrefs, const RRefId& id)
      : rrefs_(std::move(rrefs)), id_(id) {}
  void on_reply(rpc::InMessage&) override {
    rrefs_->carry_out(rrefs_->lifetime().answered(id_, std::nullopt));
  }
  void on_error(const Error& error) override {
    Lifetime& lifetime = rrefs_->lifetime();
    if (id_.owner == lifetime.self()) {
      rrefs_->carry_out(
          lifetime.resolve(id_, nullptr, error));  // ignored if its creation has ended
    } else if (error.remote()) {
      rrefs_->carry_out(lifetime.answered(id_, error));
    } else {
      rrefs_->carry_out(lifetime.create_not_sent(id_, error));
    }
  }

 private:
  const std::shared_ptr<RRefAgent> rrefs_;
  const RRefId id_;
};

struct SerializedTypes {
  std::atomic<bool> any{false};
  base::Mutex mutex;
  std::unordered_set<std::type_index> noted STITCH_GUARDED_BY(mutex);
};

SerializedTypes& serialized_types() {
  static SerializedTypes types;
  return types;
}

}  // namespace

Handle::Handle(std::shared_ptr<RRefAgent> rrefs) : rrefs_(std::move(rrefs)) {}

const WorkerInfo& Handle::owner() const { return rrefs_->known_info_of(id_.owner); }

Handle::~Handle() {
  if (owns_) rrefs_->carry_out(rrefs_->lifetime().drop_local(id_));
}

bool Handle::is_owner() const noexcept { return id_.owner == rrefs_->lifetime().self(); }

bool Handle::confirmed_by_owner() const { return rrefs_->lifetime().status(id_).confirmed; }

Error wrong_type(const Handle& handle, const std::type_info& actual, const std::type_info& wanted) {
  return Error(ErrorCode::invalid_argument, to_string(handle.id()) + " is an object of type " +
                                                base::demangle(actual.name()) + ", not " +
                                                base::demangle(wanted.name()));
}

HandlePtr own(const std::shared_ptr<rpc::Agent>& agent, rpc::OwnedObject value) {
  return ObjectServer(rrefs_of(*agent)).own(std::move(value));
}

namespace {

std::shared_ptr<rpc::Agent> require_running(const Handle& handle) {
  auto agent = handle.rrefs()->agent();
  if (!agent)
    throw Error(ErrorCode::shutting_down,
                to_string(handle.id()) + " cannot be used: its worker has shut down");
  return agent;
}

}  // namespace

std::shared_ptr<rpc::Agent> require_usable(const Handle& handle, std::string_view function) {
  auto agent = require_running(handle);
  if (const auto lost = handle.rrefs()->loss_of(handle.id()))
    throw rpc::CallRefused(not_made(*lost, function, handle.owner()));
  return agent;
}

namespace {

ObjectRequest begin_request(const HandlePtr& handle, TargetUse target, std::uint64_t function_id,
                            std::string_view function, const HandleUse& use) {
  auto agent = require_usable(*handle, function);
  agent->throw_if_stopped();
  rpc::Request message = rpc::begin_request(function_id, use.when_full);
  message->attachment<OutgoingRefs>().target(handle, target);
  return {std::move(agent), &handle->owner(), std::move(message)};
}

}  // namespace

ObjectRequest begin_method_call(const HandlePtr& handle, const HandleUse& use,
                                std::uint64_t function_id, std::string_view function) {
  return begin_request(handle, TargetUse::call, function_id, function, use);
}

ObjectRequest begin_fetch(const HandlePtr& handle, const HandleUse& use) {
  return begin_request(handle, TargetUse::fetch, 0, "RRef::to_here", use);
}

ObjectRequest begin_wait(const HandlePtr& handle, const HandleUse& use, std::string_view function) {
  return begin_request(handle, TargetUse::await, 0, function, use);
}

void write_argument(rpc::OutMessage& request, std::size_t position, const HandlePtr& handle,
                    std::uint64_t type) {
  request.attachment<OutgoingRefs>().argument(static_cast<std::uint32_t>(position), handle, type);
}

ObjectRequest begin_creation(const std::shared_ptr<rpc::Agent>& agent, const Target& target,
                             std::uint64_t function_id) {
  agent->throw_if_stopped();
  target.expect_no_into("remote()");
  const WorkerInfo& to = target.resolve(agent->peers());
  return {agent, &to, rpc::begin_request(function_id, target.when_full())};
}

std::exception_ptr current_error() noexcept {
  try {
    throw;
  } catch (const Error&) {
    return std::current_exception();
  } catch (...) {
    return std::make_exception_ptr(to_error(std::current_exception()));
  }
}

HandlePtr create(ObjectRequest request, const std::string& function,
                 std::optional<std::chrono::nanoseconds> limit) {
  const auto timeout = request.agent->outgoing_calls().effective_timeout(limit);
  const auto rrefs = rrefs_of(*request.agent);
  Lifetime& lifetime = rrefs->lifetime();
  const WorkerInfo& to = *request.to;
  const auto handle = std::make_shared<Handle>(rrefs);
  RRefId id;
  try {
    static_cast<void>(rrefs->known_info_of(life_of(to)));  // while this worker has not shut down
    id = life_of(to) == lifetime.self() ? lifetime.add_object(nullptr, &function)
                                        : lifetime.begin_create(life_of(to), &function);
  } catch (const Error& error) {
    throw not_made(error, function, to);
  }
  handle->own(id);
  try {
    rrefs->record("reference created", id, function);
    request.message->attachment<OutgoingRefs>().create({id, timeout});
    request.agent->outgoing_calls().start_call(
        to, function, std::chrono::nanoseconds(0), std::move(*request.message),
        std::allocate_shared<PendingCreation>(base::RecyclingAllocator<PendingCreation>(), rrefs,
                                              id));
  } catch (...) {  // the request has not left
    const Error why = not_made(to_error(std::current_exception()), function, to);
    rrefs->carry_out(id.owner == lifetime.self() ? lifetime.resolve(id, nullptr, why)
                                                 : lifetime.create_not_sent(id, why));
    throw;
  }
  return handle;
}

namespace {

// What a limited wait for a creation says when its time has passed.
struct LateCreation {
  std::weak_ptr<RRefAgent> rrefs;
  RRefId id;
  std::chrono::nanoseconds timeout;
  base::UniqueFunction<void(const Error&)> on_timeout;

  void report() {
    const auto alive = rrefs.lock();
    const WorkerInfo owner = alive ? alive->known_info_of(id.owner) : WorkerInfo{};
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count();
    on_timeout(Error(ErrorCode::timeout, to_string(id) + " was not created by " + to_string(owner) +
                                             " within " + std::to_string(ms) + " ms")
                   .with_worker(owner.name));
  }
};

// Ends a limit, also where what was to end it is dropped.
struct TakeOut {
  std::shared_ptr<RRefAgent> rrefs;
  void operator()(TimeLimits::Limit* limit) const noexcept {
    rrefs->time_limits().remove(*limit);
    delete limit;
  }
};

}  // namespace

void run_when_created(const Handle& handle, Created waiter) {
  handle.rrefs()->when_created(handle.id(), std::move(waiter));
}

base::UniqueFunction<void()> limit_wait(const Handle& handle,
                                        const std::shared_ptr<rpc::Agent>& agent,
                                        std::optional<std::chrono::nanoseconds> limit,
                                        base::UniqueFunction<void(const Error&)> on_timeout) {
  const auto timeout = agent->outgoing_calls().effective_timeout(limit);
  const auto deadline = base::deadline_or_none(timeout);
  if (deadline == rpc::Clock::time_point::max()) return nullptr;
  const auto rrefs = handle.rrefs();
  std::unique_ptr<TimeLimits::Limit, TakeOut> waiting(new TimeLimits::Limit, TakeOut{rrefs});
  waiting->passed = [late = std::allocate_shared<LateCreation>(
                         base::RecyclingAllocator<LateCreation>(),
                         LateCreation{rrefs, handle.id(), timeout, std::move(on_timeout)})] {
    late->report();
  };
  rrefs->time_limits().add(*waiting, deadline, agent->loop());
  return [waiting = std::move(waiting)]() mutable { waiting.reset(); };
}

Future<void> when_created(const HandlePtr& handle, const HandleUse& use) {
  try {
    constexpr const char* kName = "RRef::when_created";
    const auto agent = require_running(*handle);
    RRefAgent& rrefs = *handle->rrefs();
    Promise<void> promise;
    Waiter waiter = [promise](const std::shared_ptr<void>&, const std::optional<Error>& failure) {
      if (failure) {
        promise.set_error(*failure);
      } else {
        promise.set_value();
      }
    };
    Lifetime::Watch watch = rrefs.lifetime().watch_creation(handle->id(), waiter);
    if (watch.lost) {
      const Error why = rrefs.loss_of(handle->id()).value_or(*watch.lost);
      throw rpc::CallRefused(not_made(why, kName, handle->owner()));
    }
    if (!watch.tracked) {  // only the owner knows
      auto request = begin_wait(handle, use, kName);
      return detail::start_call<void>(agent, handle->owner(), kName, use.timeout,
                                      std::move(request.message));
    }
    rrefs.carry_out(std::move(watch.effects));
    complete_by(promise, *handle, agent, use.timeout);
    return promise.future();
  } catch (const Error&) {
    return make_failed_future<void>();
  }
}

rpc::OwnedObject local_value(const Handle& handle,
                             std::optional<std::chrono::nanoseconds> timeout) {
  const auto agent = require_usable(handle, "RRef::local_value");
  if (!handle.is_owner()) {
    throw Error(ErrorCode::invalid_argument,
                to_string(handle.id()) + " is owned by " + to_string(handle.owner()) + ", not by " +
                    to_string(agent->self()) +
                    " that asked for its local value; use to_here() or call a method of it");
  }
  Promise<rpc::OwnedObject> promise;
  run_when_created(
      handle, [promise](const std::shared_ptr<void>& object, const std::optional<Error>& failure) {
        if (failure) {
          promise.set_error(*failure);
        } else {
          promise.set_value(*static_cast<const rpc::OwnedObject*>(object.get()));
        }
      });
  complete_by(promise, handle, agent, timeout);
  return promise.future().get();
}

void refuse_reply(const std::shared_ptr<rpc::IncomingCall>& call) {
  call->fail(Error(ErrorCode::protocol, "a constructor's result can only be kept"));
}

void write_reference(rpc::OutArchive& archive, const HandlePtr& handle, std::uint64_t type) {
  archive.write(handle == nullptr ? kNoReference
                                  : archive.message().attachment<OutgoingRefs>().add(handle));
  archive.write(type);
}

HandlePtr read_reference(rpc::InArchive& archive, std::uint64_t type, std::string_view type_name) {
  std::uint32_t index = 0;
  std::uint64_t written = 0;
  archive.read(index);
  archive.read(written);
  if (written != type)
    throw Error(ErrorCode::invalid_argument, "a reference to another type arrived where RRef<" +
                                                 std::string(type_name) + "> is expected");
  if (index == kNoReference) return nullptr;
  const auto* refs = archive.message().find_attachment<IncomingRefs>();
  if (refs == nullptr)
    throw Error(ErrorCode::invalid_argument, "the message names a reference but carries none");
  return refs->handle(index);
}

void note_one_at_a_time(const std::type_info& type) {
  SerializedTypes& all = serialized_types();
  const base::MutexLock lock(all.mutex);
  all.noted.emplace(type);
  all.any.store(true);
}

bool runs_one_at_a_time(const std::type_info& type) {
  SerializedTypes& all = serialized_types();
  if (!all.any.load()) return false;
  const base::MutexLock lock(all.mutex);
  return all.noted.contains(type);
}

}  // namespace stitch::rref
