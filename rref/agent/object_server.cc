#include "stitch/rref/agent/object_server.h"

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/deadline.h"
#include "stitch/base/error.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/default_streams.h"
#include "stitch/rpc/future/current_streams.h"
#include "stitch/rpc/future/execution_context.h"
#include "stitch/rref/agent/argument_resolver.h"
#include "stitch/rref/agent/object_access.h"

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

// Saturates: a peer may send a small tensor of enormous sizes.
std::size_t elements_bytes(const at::Tensor& dense) {
  std::size_t bytes = 0;
  return __builtin_mul_overflow(static_cast<std::size_t>(dense.numel()), dense.itemsize(), &bytes)
             ? std::numeric_limits<std::size_t>::max() / 4
             : bytes;
}

// The memory that an object takes, as far as it is known from its type: itself, and the elements of
// tensors, texts and vectors of numbers; 0 for others.
std::size_t known_bytes(const rpc::OwnedObject& value) {
  const auto tensor_bytes = [](const at::Tensor& tensor) {
    if (!tensor.defined()) return sizeof(tensor);
    if (tensor.is_sparse())
      return sizeof(tensor) + elements_bytes(tensor._indices()) + elements_bytes(tensor._values());
    return sizeof(tensor) + (tensor.layout() == at::kStrided ? elements_bytes(tensor) : 0);
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
    return !tensor.defined() || (tensor.layout() == at::kStrided && tensor.device().is_cpu() &&
                                 elements_bytes(tensor) <= kSmallBytes);
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
    alive->post([last = std::move(object), last_turns = std::move(turns)]() mutable {
      last_turns.reset();
      last.reset();
    });
  }
  SharedBox(const SharedBox&) = delete;
  SharedBox& operator=(const SharedBox&) = delete;

 private:
  const std::weak_ptr<RRefAgent> rrefs_;
};

std::shared_ptr<void> make_box(const std::shared_ptr<RRefAgent>& rrefs, rpc::OwnedObject value) {
  auto box = std::make_shared<SharedBox>(rrefs);
  static_cast<rpc::OwnedObject&>(*box) = std::move(value);
  if (runs_one_at_a_time(*box->type)) box->turns = std::make_unique<TurnQueue>();
  box->bytes = known_bytes(*box);  // from here on its destructor subtracts them
  rrefs->add_bytes_known(static_cast<std::int64_t>(box->bytes));
  return std::shared_ptr<rpc::OwnedObject>(std::move(box));
}

// A request about an object: to create one, to call a method of one, to fetch one, to wait until
// one exists. It goes from state to state; where it has to wait, what it waits for keeps it, and no
// thread waits. Moved, not copied. Thread contract: one thread at a time.
class ServedRequest {
 public:
  ServedRequest(std::shared_ptr<rpc::IncomingCall> call, IncomingRefs& refs)
      : call_(std::move(call)), refs_(&refs) {}
  // Goes on until it has been answered, has to wait, or runs.
  void advance() &&;

 private:
  // What the request needs next.
  enum class Needs : std::uint8_t { arguments, target, turn, nothing };
  void wait_for_arguments() &&;
  void wait_for_target() &&;
  void wait_for_turn() &&;
  void answer() &&;
  void run() &&;
  // The function has returned `value`, the object to be created.
  void keep(rpc::OwnedObject value) &&;
  [[nodiscard]] bool uses(TargetUse use) const noexcept {
    return target_ != nullptr && refs_->target()->use == use;
  }

  std::shared_ptr<rpc::IncomingCall> call_;
  IncomingRefs* refs_;                // an attachment of the call
  const OwnedBox* target_ = nullptr;  // the object that it is about, kept by refs_; or null
  Needs needs_ = Needs::arguments;
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
  handle->own(rrefs_->lifetime().add_object(make_box(rrefs_, std::move(value)),
                                            rpc::IncomingCall::function_here()));
  return handle;
}

bool ObjectServer::take_over(const std::shared_ptr<rpc::IncomingCall>& call) const {
  auto* refs = call->message().find_attachment<IncomingRefs>();
  if (refs == nullptr || (!refs->create() && !refs->target() && refs->arguments().empty()))
    return false;
  if (refs->create()) {
    if (call->function() != nullptr) refs->set_creating(call->function()->name);
    refs->limit_creation(call);
  }
  ServedRequest(call, *refs).advance();
  return true;
}

void ServedRequest::advance() && {
  switch (needs_) {
    case Needs::arguments:
      needs_ = Needs::target;
      if (!refs_->arguments().empty()) return std::move(*this).wait_for_arguments();
      [[fallthrough]];
    case Needs::target:
      needs_ = Needs::turn;
      if (refs_->target()) return std::move(*this).wait_for_target();
      [[fallthrough]];
    case Needs::turn:
      needs_ = Needs::nothing;
      // To wait for an object's creation is not to use it.
      if (target_ != nullptr && target_->turns && !uses(TargetUse::await))
        return std::move(*this).wait_for_turn();
      [[fallthrough]];
    case Needs::nothing:
      return std::move(*this).answer();
  }
}

void ServedRequest::wait_for_arguments() && {
  auto& given = *call_->message().find_attachment<rpc::GivenArguments>();
  const auto call = call_;
  const IncomingRefs& refs = *refs_;
  resolve_arguments(refs.receiver(), call, refs, given,
                    [request = std::move(*this)]() mutable { std::move(request).advance(); });
}

void ServedRequest::wait_for_target() && {
  RRefAgent& rrefs = *refs_->receiver();  // kept by the agent, and that by the call
  const RRefId id = refs_->target_id();
  if (id.owner != rrefs.lifetime().self() || !rrefs.lifetime().owns(id)) {
    call_->fail(rrefs.loss_of(id).value_or(
        Error(ErrorCode::disconnected,
              to_string(id) + " is not owned by " + to_string(rpc::agent_of(*call_).self()))));
    return;
  }
  call_->note_object(id.creator.id, id.k);
  // The message keeps the object until the call is answered.
  rrefs.when_created(id, [request = std::move(*this)](const std::shared_ptr<void>& object,
                                                      const std::optional<Error>& failure) mutable {
    if (failure) return request.call_->fail(not_created(*failure));
    request.refs_->keep(object);
    request.target_ = static_cast<const OwnedBox*>(static_cast<rpc::OwnedObject*>(object.get()));
    std::move(request).advance();
  });
}

void ServedRequest::wait_for_turn() && {
  const std::shared_ptr<void> object = refs_->object();  // the queue is part of it
  TurnQueue& turns = *target_->turns;
  turns.wait([request = std::move(*this), &turns]() mutable {
    request.refs_->keep_turn(Turn(turns));
    std::move(request).advance();
  });
}

void ServedRequest::answer() && {
  rpc::Agent& agent = rpc::agent_of(*call_);
  if (uses(TargetUse::await)) return call_->reply();
  if (uses(TargetUse::fetch)) {
    // In turns each answer lets the next request begin: not on one another's stack.
    if (!target_->turns && encodes_quickly(*target_)) return send_object(call_, *target_);
    agent.dispatch(call_, [call = call_, target = target_] { send_object(call, *target); });
    return;
  }
  const rpc::Function* function = call_->function();
  const std::type_info* wanted = function == nullptr ? nullptr : function->object_type;
  if (function == nullptr || (target_ != nullptr) != (wanted != nullptr)) {
    call_->fail(Error(ErrorCode::protocol,
                      "the request does not name a function that fits what it is about"));
    return;
  }
  if (wanted != nullptr && *wanted != *target_->type) {
    call_->fail(Error(ErrorCode::invalid_argument,
                      "the object is of type " + base::demangle(target_->type->name()) + ", not " +
                          base::demangle(wanted->name()) + ", which the method belongs to"));
    return;
  }
  const auto call = call_;
  agent.dispatch(call, [request = std::move(*this)]() mutable { std::move(request).run(); });
}

void ServedRequest::run() && {
  void* const object = target_ == nullptr ? nullptr : target_->object.get();
  if (!refs_->create()) return call_->run(object);
  const auto call = call_;
  call->run_keeping(object, [request = std::move(*this)](rpc::OwnedObject value,
                                                         std::exception_ptr exception) mutable {
    if (!exception) return std::move(request).keep(std::move(value));
    // IncomingRefs::on_answer() makes it the object's outcome.
    request.call_->fail_in_handler(exception);
  });
}

void ServedRequest::keep(rpc::OwnedObject value) && {
  RRefAgent& rrefs = *refs_->receiver();
  auto box = make_box(refs_->receiver(), std::move(value));  // what this throws is the outcome
  if (!refs_->claim_outcome()) return;  // its time has passed: the answer says so
  refs_->end_limit();
  Effects created = rrefs.lifetime().resolve(refs_->create()->id, std::move(box), std::nullopt);
  // A function that forked has returned in the child, too.
  if (rpc::agent_of(*call_).forked()) return;
  call_->reply();
  rrefs.carry_out(std::move(created));
}

}  // namespace stitch::rref
