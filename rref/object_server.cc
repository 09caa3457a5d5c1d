#include "stitch/rref/object_server.h"

#include <cstdint>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/deadline.h"
#include "stitch/base/demangle.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/default_streams.h"
#include "stitch/rpc/future/current_streams.h"
#include "stitch/rpc/future/execution_context.h"
#include "stitch/rref/argument_resolver.h"
#include "stitch/rref/creation_answers.h"
#include "stitch/rref/serialized.h"

namespace stitch::rref {

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

namespace {

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

// The call whose function this thread runs to keep its result.
thread_local const rpc::IncomingCall* creating_here = nullptr;
// While the outcome of a creation is stored at the end of a task: where a request for a copy of the
// new object is put. To wake another thread for it takes longer than to serve it.
thread_local base::UniqueFunction<void()>* served_next = nullptr;

class ServedNext {
 public:
  explicit ServedNext(bool at_end) noexcept { served_next = at_end ? &task_ : nullptr; }
  ~ServedNext() { served_next = nullptr; }
  void run() {
    served_next = nullptr;
    if (task_) task_();
  }

 private:
  base::UniqueFunction<void()> task_;
};

// The memory that an object takes, as far as it is known from its type: itself, and the elements of
// tensors, texts and vectors of numbers; 0 for others.
std::size_t known_bytes(const rpc::OwnedObject& value) {
  const auto tensor_bytes = [](const at::Tensor& tensor) {
    if (!tensor.defined()) return sizeof(tensor);
    const auto elements = [](const at::Tensor& dense) {
      return static_cast<std::size_t>(dense.numel()) * dense.itemsize();
    };
    if (tensor.is_sparse())
      return sizeof(tensor) + elements(tensor._indices()) + elements(tensor._values());
    return sizeof(tensor) + (tensor.layout() == at::kStrided ? elements(tensor) : std::size_t{0});
  };
  const void* const at = value.object.get();
  if (*value.type == typeid(at::Tensor)) return tensor_bytes(*static_cast<const at::Tensor*>(at));
  if (*value.type == typeid(std::vector<at::Tensor>)) {
    std::size_t bytes = sizeof(std::vector<at::Tensor>);
    for (const at::Tensor& each : *static_cast<const std::vector<at::Tensor>*>(at))
      bytes += tensor_bytes(each);
    return bytes;
  }
  std::size_t bytes = 0;
  const auto is_vector_of = [&]<class T>(T) {
    if (*value.type != typeid(std::vector<T>)) return false;
    bytes = sizeof(std::vector<T>) + static_cast<const std::vector<T>*>(at)->size() * sizeof(T);
    return true;
  };
  if (is_vector_of(0) || is_vector_of(std::int64_t{}) || is_vector_of(0.0F) || is_vector_of(0.0))
    return bytes;
  if (*value.type == typeid(std::string))
    return sizeof(std::string) + static_cast<const std::string*>(at)->size();
  if (*value.type == typeid(int) || *value.type == typeid(float)) return sizeof(int);
  if (*value.type == typeid(std::int64_t) || *value.type == typeid(double)) return sizeof(double);
  return 0;
}

// The memory of an object that is a tensor, or a vector of them, is not used again, once it is
// gone, before what requests about it have queued has ended: it may belong to another stream.
void keep_for_default_streams(const rpc::OwnedObject& value) {
  rpc::ArrivedMemory memory;
  const auto add = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return;
    if (tensor.is_sparse()) {
      for (const at::Tensor& part : {tensor._indices(), tensor._values()})
        memory.add(part.storage(), part.device());
    } else if (tensor.has_storage()) {
      memory.add(tensor.storage(), tensor.device());
    }
  };
  const void* const at = value.object.get();
  if (*value.type == typeid(at::Tensor)) {
    add(*static_cast<const at::Tensor*>(at));
  } else if (*value.type == typeid(std::vector<at::Tensor>)) {
    for (const at::Tensor& each : *static_cast<const std::vector<at::Tensor>*>(at)) add(each);
  }
  memory.use_on_default_streams();
}

// Whether an object is encoded without running code of the program and in a microsecond or two: so
// the thread that reads a request for it may answer.
bool encodes_quickly(const rpc::OwnedObject& value) {
  constexpr std::size_t kSmallBytes = std::size_t{64} << 10;
  if (*value.type == typeid(at::Tensor)) {
    const auto& tensor = *static_cast<const at::Tensor*>(value.object.get());
    return !tensor.defined() ||
           (tensor.layout() == at::kStrided && tensor.device().is_cpu() &&
            static_cast<std::size_t>(tensor.numel()) * tensor.itemsize() <= kSmallBytes);
  }
  if (*value.type == typeid(std::string))
    return static_cast<const std::string*>(value.object.get())->size() <= kSmallBytes;
  return *value.type == typeid(int) || *value.type == typeid(std::int64_t) ||
         *value.type == typeid(float) || *value.type == typeid(double) ||
         *value.type == typeid(bool);
}

// A method may still run on an object whose entry was deleted, and may end on any thread: so the
// last reference has the object destroyed on the user-function threads. After stop(), on the thread
// that drops it.
class SharedBox final : public OwnedBox {
 public:
  explicit SharedBox(const std::shared_ptr<RRefAgent>& rrefs) : rrefs_(rrefs) {}
  ~SharedBox() {
    const auto rrefs = rrefs_.lock();
    if (rrefs) rrefs->add_bytes_known(-static_cast<std::int64_t>(bytes));
    if (RRefAgent::destroys_here()) return;
    const auto alive = rrefs ? rrefs->agent() : nullptr;
    if (!alive) return;
    try {
      alive->post([last = std::move(object), last_turns = std::move(turns)]() mutable {
        last_turns.reset();
        last.reset();
      });
    } catch (const std::exception&) {
      // Out of memory: it is destroyed here.
    }
  }
  SharedBox(const SharedBox&) = delete;
  SharedBox& operator=(const SharedBox&) = delete;

 private:
  const std::weak_ptr<RRefAgent> rrefs_;
};

}  // namespace

HandlePtr ObjectServer::own(rpc::OwnedObject value) const {
  static_cast<void>(rrefs_->require_agent());
  // Calls that bring no tensor to a device use it under the default streams, and a fetch does.
  rpc::default_streams_wait_for_current();
  keep_for_default_streams(value);
  // While this worker has not shut down.
  static_cast<void>(rrefs_->known_info_of(rrefs_->lifetime().self()));
  auto handle = std::make_shared<Handle>(rrefs_);
  handle->own(
      rrefs_->lifetime().add_object(box(std::move(value)), rpc::IncomingCall::function_here()));
  return handle;
}

std::shared_ptr<void> ObjectServer::box(rpc::OwnedObject value) const {
  auto box = std::make_shared<SharedBox>(rrefs_);
  static_cast<rpc::OwnedObject&>(*box) = std::move(value);
  if (runs_one_at_a_time(*box->type)) box->turns = std::make_unique<TurnQueue>();
  box->bytes = known_bytes(*box);  // from here on its destructor subtracts them
  rrefs_->add_bytes_known(static_cast<std::int64_t>(box->bytes));
  return std::shared_ptr<rpc::OwnedObject>(std::move(box));
}

bool ObjectServer::take_over(const std::shared_ptr<rpc::IncomingCall>& call) const {
  auto* refs = call->message().find_attachment<IncomingRefs>();
  if (refs == nullptr || (!refs->create() && !refs->target() && refs->arguments().empty()))
    return false;
  rpc::GivenArguments* given = nullptr;
  if (!refs->arguments().empty()) {
    // Before anything can answer the call, on another thread.
    call->message().attachments.push_back(std::make_unique<rpc::GivenArguments>());
    given = static_cast<rpc::GivenArguments*>(call->message().attachments.back().get());
  }
  if (refs->create()) {
    if (call->function() != nullptr) refs->set_creating(call->function()->name);
    refs->limit_creation(call);
  }
  if (given == nullptr) {
    find_target(call, *refs);
  } else {
    resolve_arguments(rrefs_, call, *refs, *given,
                      [server = *this, refs](const std::shared_ptr<rpc::IncomingCall>& resolved) {
                        server.find_target(resolved, *refs);
                      });
  }
  return true;
}

void ObjectServer::find_target(const std::shared_ptr<rpc::IncomingCall>& call,
                               IncomingRefs& refs) const {
  if (!refs.target()) {
    take_turn(call, refs, nullptr);
    return;
  }
  Lifetime& lifetime = rrefs_->lifetime();
  const RRefId& id = refs.target_id();
  if (id.owner != lifetime.self() || !lifetime.owns(id)) {
    call->fail(rrefs_->why_lost(id).value_or(
        Error(ErrorCode::disconnected,
              to_string(id) + " is not owned by " + to_string(call->agent().self()))));
    return;
  }
  call->note_object(id.creator.id, id.k);
  // The message keeps the object until the call is answered.
  rrefs_->when_created(id, [server = *this, call, refs = &refs](
                               const std::shared_ptr<void>& object,
                               const std::optional<Error>& failure) {
    if (failure) {
      call->fail(not_created(*failure));
    } else {
      refs->keep(object);
      server.take_turn(call, *refs,
                       static_cast<const OwnedBox*>(static_cast<rpc::OwnedObject*>(object.get())));
    }
  });
}

void ObjectServer::take_turn(const std::shared_ptr<rpc::IncomingCall>& call, IncomingRefs& refs,
                             const OwnedBox* target) const {
  if (refs.order().ordered()) {
    refs.order().wait([server = *this, call, refs = &refs, target] {
      server.take_turn_at_object(call, *refs, target);
    });
  } else {
    take_turn_at_object(call, refs, target);
  }
}

void ObjectServer::take_turn_at_object(const std::shared_ptr<rpc::IncomingCall>& call,
                                       IncomingRefs& refs, const OwnedBox* target) const {
  // To wait for an object's creation is not to use it.
  if (target == nullptr || !target->turns || refs.target()->use == TargetUse::await) {
    serve(call, refs, target);
    return;
  }
  target->turns->wait([server = *this, call, refs = &refs, target] {
    refs->hold(Turn(*target->turns));
    server.serve(call, *refs, target);
  });
}

void ObjectServer::serve(const std::shared_ptr<rpc::IncomingCall>& call, const IncomingRefs& refs,
                         const OwnedBox* target) const {
  rpc::Agent& agent = call->agent();
  if (target != nullptr && refs.target()->use == TargetUse::await) {
    call->reply([](rpc::OutArchive&) {});
    return;
  }
  if (target != nullptr && refs.target()->use == TargetUse::fetch) {
    // In an order, or in turns, each answer lets the next one begin: not on one another's stack.
    if (!refs.order().ordered() && !target->turns && encodes_quickly(*target)) {
      send_object(call, *target);
      return;
    }
    base::UniqueFunction<void()> send = [call, target] { send_object(call, *target); };
    if (served_next != nullptr && !*served_next) {
      *served_next = std::move(send);
    } else {
      agent.dispatch(call, std::move(send));
    }
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
    agent.dispatch(call, [server = *this, call, object] { server.serve_creation(call, object); });
  } else {
    agent.dispatch(call, [call, object] { call->run(object); });
  }
}

void ObjectServer::serve_creation(const std::shared_ptr<rpc::IncomingCall>& call,
                                  void* object) const {
  const auto* const outer = std::exchange(creating_here, call.get());
  call->run_keeping(object, [server = *this, call](rpc::OwnedObject value,
                                                   std::exception_ptr exception) {
    if (!exception) {
      RRefAgent& rrefs = *server.rrefs_;
      auto* const refs = call->message().find_attachment<IncomingRefs>();
      auto box = server.box(std::move(value));  // what this throws is the outcome
      if (!refs->claim_outcome()) return;       // its time has passed: the answer says so
      refs->end_limit();
      Effects created = rrefs.lifetime().resolve(refs->create()->id, std::move(box), std::nullopt);
      server.announce(call, *refs, std::move(created));
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
  creating_here = outer;
}

void ObjectServer::announce(const std::shared_ptr<rpc::IncomingCall>& call, IncomingRefs& refs,
                            Effects created) const {
  rpc::Agent& agent = call->agent();
  if (agent.forked()) return;  // a function that forked has returned in the child, too
  CreationAnswers& answers = rrefs_->creation_answers();
  const WorkerInfo& caller = call->caller();
  const bool here = creating_here == call.get();  // the function has returned on this thread
  // Where more is to be done, it may bring more answers; it may also take long, so this one does
  // not wait for its end. A request for the object that waits is answered now, most often to the
  // same worker.
  const bool more = agent.served_calls().queued();
  bool together = here && !call->one_way() && !rpc::ExecutionContext::current().streams &&
                  (more || !created.run.empty() || answers.any(caller));
  if (together) {
    try {
      answers.add(caller, call->id(), more);
    } catch (const std::bad_alloc&) {
      together = false;  // a reply of its own can fail the call, at least
    }
  }
  if (together) {
    agent.events().record("call served", caller.id.value(), caller.epoch, call->id(),
                          call->function_name());
    call->leave_unanswered();
    refs.on_answer(std::nullopt);
    call->end_held();
  } else {
    call->reply([](rpc::OutArchive&) {});
  }
  ServedNext next(here && agent.serves_here());
  try {
    rrefs_->perform(std::move(created));
  } catch (...) {
    if (together && !more) answers.flush(caller);  // no timer would send it
    throw;
  }
  if (together && !more) answers.flush(caller);
  next.run();
}

}  // namespace stitch::rref
