#include "stitch/rref/object_server.h"

#include <string>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/base/demangle.h"

namespace stitch::rref {
namespace {

using namespace std::chrono_literals;

// What a request about an object is told if the creation of the object failed.
Error not_created(const Error& failure) {
  constexpr const char* kPrefix = "its object was not created";
  // The text of the refusal is for the creator, who knows the function's name.
  if (failure.code() == ErrorCode::unimplemented) {
    return Error(failure.code(), std::string(kPrefix) +
                                     ": the function that was to make it is not registered there")
        .with_function("remote");
  }
  return failure.with_prefix(kPrefix);
}

void start_creation_timer(const std::shared_ptr<rpc::IncomingCall>& call, IncomingRefs& refs) {
  const auto timeout = refs.create()->timeout;
  const auto deadline = base::deadline_or_none(timeout);
  if (deadline == rpc::Clock::time_point::max()) return;
  refs.creation_timer = call->agent().loop().call_at(deadline, [weak = std::weak_ptr(call),
                                                                timeout] {
    const auto late = weak.lock();
    if (!late) return;
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count();
    late->fail(Error(ErrorCode::timeout, "creation timed out after " + std::to_string(ms) + " ms"));
    // Not from a user-function thread: such handlers may occupy all of them.
    late->request_stop();
  });
}

// Answers with the encoded object.
void send_object(const std::shared_ptr<rpc::IncomingCall>& call, const rpc::OwnedObject& object) {
  call->run_task([&] {
    if (object.encode == nullptr)
      throw Error(ErrorCode::invalid_argument,
                  "an object of type " + base::demangle(object.type->name()) + " cannot be sent");
    call->reply([&](rpc::OutArchive& archive) {
      object.encode(archive, object.object.get());
      archive.seal();
    });
  });
}

}  // namespace

HandlePtr ObjectServer::own(rpc::OwnedObject value) const {
  const auto alive = rrefs_->require_agent();
  const RRefId id = rrefs_->lifetime().add_object(box(std::move(value)));
  return std::make_shared<Handle>(rrefs_, id, alive->self());
}

// A method may still run on an object whose entry was deleted, and may end on any thread: so the
// pointer itself has the object destroyed on the user-function threads. After stop(), on the thread
// that drops the last reference.
std::shared_ptr<void> ObjectServer::box(rpc::OwnedObject value) const {
  return std::shared_ptr<rpc::OwnedObject>(
      new rpc::OwnedObject(std::move(value)),
      [weak = std::weak_ptr(rrefs_)](rpc::OwnedObject* last) {
        std::unique_ptr<rpc::OwnedObject> owned(last);
        const auto rrefs = weak.lock();
        const auto alive = rrefs ? rrefs->agent() : nullptr;
        if (!alive) return;
        try {
          alive->post([owned = std::move(owned)]() mutable { owned.reset(); });
        } catch (const std::exception&) {
          // Out of memory: it was destroyed here.
        }
      });
}

bool ObjectServer::take_over(const std::shared_ptr<rpc::IncomingCall>& call) const {
  auto* refs = call->message().find_attachment<IncomingRefs>();
  if (refs == nullptr || (!refs->create() && !refs->target())) return false;
  if (refs->create()) {
    if (call->function() != nullptr) refs->set_creating(call->function()->name);
    start_creation_timer(call, *refs);
  }
  if (!refs->target()) {
    serve(call, *refs, nullptr);
    return true;
  }
  Lifetime& lifetime = rrefs_->lifetime();
  const RRefId& id = refs->target_id();
  if (id.owner != lifetime.self() || !lifetime.owned(id)) {
    call->fail(lifetime.status(id).lost.value_or(
        Error(ErrorCode::disconnected,
              to_string(id) + " is not owned by " + to_string(call->agent().self()))));
    return true;
  }
  // After the creation, if that has not ended; no thread waits. The message keeps the object until
  // the call is answered.
  rrefs_->when_created(id, [server = *this, call, refs](const std::shared_ptr<void>& object,
                                                        const std::optional<Error>& failure) {
    if (failure) {
      call->fail(not_created(*failure));
    } else {
      refs->keep(object);
      server.serve(call, *refs, static_cast<const rpc::OwnedObject*>(object.get()));
    }
  });
  return true;
}

void ObjectServer::serve(const std::shared_ptr<rpc::IncomingCall>& call, const IncomingRefs& refs,
                         const rpc::OwnedObject* target) const {
  rpc::Agent& agent = call->agent();
  if (target != nullptr && refs.target()->use == TargetUse::await) {
    call->reply([](rpc::OutArchive&) {});
    return;
  }
  if (target != nullptr && refs.target()->use == TargetUse::fetch) {
    agent.post([call, target] { send_object(call, *target); });
    return;
  }
  const rpc::Function* function = call->function();
  const std::type_info* wanted = function == nullptr ? nullptr : function->object_type;
  if (function == nullptr || (target != nullptr) != (wanted != nullptr)) {
    call->fail(Error(ErrorCode::protocol,
                     "the request does not name a function that fits what it is about"));
    return;
  }
  if (wanted != nullptr && *wanted != *target->type) {
    call->fail(Error(ErrorCode::invalid_argument,
                     "the object is of type " + base::demangle(target->type->name()) + ", not " +
                         base::demangle(wanted->name()) + ", which the method belongs to"));
    return;
  }
  void* object = target == nullptr ? nullptr : target->object.get();
  if (refs.create()) {
    agent.dispatch(call, [server = *this, call, id = refs.create()->id, object] {
      server.serve_creation(call, id, object);
    });
  } else {
    agent.dispatch(call, [call, object] { call->run(object); });
  }
}

void ObjectServer::serve_creation(const std::shared_ptr<rpc::IncomingCall>& call, const RRefId& id,
                                  void* object) const {
  call->run_keeping(object, [server = *this, call, id](rpc::OwnedObject value,
                                                       std::exception_ptr exception) {
    auto* const refs = call->message().find_attachment<IncomingRefs>();
    if (refs->creation_timer != 0) call->agent().loop().cancel(refs->creation_timer);
    if (!exception) {
      RRefAgent& rrefs = *server.rrefs_;
      rrefs.perform(rrefs.lifetime().resolve(id, server.box(std::move(value)), std::nullopt));
      call->reply([](rpc::OutArchive&) {});
      return;
    }
    try {
      std::rethrow_exception(exception);
    } catch (const rpc::CallRefused& refused) {
      call->fail(refused);
    } catch (...) {
      call->fail_in_handler(exception);  // IncomingRefs::on_answer() makes it the object's outcome
    }
  });
}

}  // namespace stitch::rref
