#include "stitch/rref/agent/carried_refs.h"

#include <string>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/base/deadline.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/function_runner.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rref/agent/rref_agent.h"

namespace stitch::rref {
namespace {

void add_section(rpc::OutMessage& message, std::uint16_t kind, const base::Bytes& bytes) {
  message.frame.add_section(kind, bytes.span());
}

CarriedBytes::Section section_of(const rpc::InMessage& message, std::uint16_t kind) {
  const auto* section = message.view.section(kind);
  return section == nullptr ? std::nullopt : CarriedBytes::Section(section->bytes);
}

CarriedBytes sections_of(const rpc::InMessage& message) {
  return {section_of(message, wire::kCarriedSection), section_of(message, wire::kCreateSection),
          section_of(message, wire::kTargetSection), section_of(message, wire::kArgumentsSection)};
}

// The name of the function that a request names; null if it is not registered.
const std::string* function_of(const rpc::InMessage& request) {
  base::ByteReader in(request.view.body(), "request");
  static_cast<void>(in.read<std::uint64_t>());
  const auto* function = rpc::FunctionRegistry::instance().find(in.read<std::uint64_t>());
  return function == nullptr ? nullptr : &function->name;
}

}  // namespace

OutgoingRefs::~OutgoingRefs() { unpin(); }

std::uint32_t OutgoingRefs::add(const HandlePtr& handle) {
  constexpr std::size_t kFew = 8;
  const auto next = static_cast<std::uint32_t>(handles_.size());
  if (next < kFew) {
    for (std::uint32_t i = 0; i < next; ++i) {
      if (handles_[i]->id() == handle->id()) return i;
    }
  } else {
    if (index_.empty()) {
      for (std::uint32_t i = 0; i < next; ++i) index_.emplace(handles_[i]->id(), i);
    }
    const auto [found, fresh] = index_.try_emplace(handle->id(), next);
    if (!fresh) return found->second;
  }
  handles_.push_back(handle);
  return next;
}

void OutgoingRefs::leave(const std::shared_ptr<RRefAgent>& sender, rpc::OutMessage& message,
                         const WorkerInfo& to) {
  to_ = life_of(to);
  for (const HandlePtr& handle : handles_) {
    if (handle->rrefs() != sender) {
      throw Error(ErrorCode::invalid_argument,
                  to_string(handle->id()) + " belongs to worker " +
                      std::to_string(handle->rrefs()->lifetime().self().id) +
                      " of this process and cannot be sent by worker " +
                      std::to_string(sender->lifetime().self().id));
    }
  }
  if (!handles_.empty()) sender->require_alive(to);
  sender_ = sender;
  if (!handles_.empty()) {
    pinned_.reserve(handles_.size());
    for (const HandlePtr& handle : handles_)
      pinned_.push_back(sender->lifetime().pin(handle->id(), to_));
    add_section(message, wire::kCarriedSection, encode(std::span<const CarriedRef>(pinned_)));
    handles_.clear();  // from here on the pins keep the objects alive
  }
  if (create_) add_section(message, wire::kCreateSection, encode(*create_));
  if (target_) add_section(message, wire::kTargetSection, encode(*target_));
  if (!arguments_.empty()) {
    add_section(message, wire::kArgumentsSection,
                encode(std::span<const ReferredArgument>(arguments_)));
  }
}

void OutgoingRefs::on_sent(const std::optional<Error>& error) {
  // If the peer may have received the message, it may have passed the references on: their pins
  // stay, as all pins towards dead workers do. Most errors mean that it certainly did not.
  const bool may_have_arrived =
      !error || (error->code() == ErrorCode::disconnected && sender_ && !sender_->knows_losses());
  if (may_have_arrived) pinned_.clear();
  unpin();
}

void OutgoingRefs::unpin() noexcept {
  for (const CarriedRef& carried : std::exchange(pinned_, {}))
    sender_->carry_out(sender_->lifetime().unpin(carried, to_));
}

std::unique_ptr<IncomingRefs> IncomingRefs::read(const std::shared_ptr<RRefAgent>& receiver,
                                                 const rpc::InMessage& message) {
  const CarriedBytes sections = sections_of(message);
  if (!sections.any()) return nullptr;
  CarriedSections carried = CarriedSections::read(sections);
  std::unique_ptr<IncomingRefs> refs(new IncomingRefs(receiver, life_of(message.from)));
  refs->target_ = carried.target;
  refs->arguments_ = std::move(carried.arguments);
  // Everything is read and valid; nothing has been changed before this point.
  refs->ids_.reserve(carried.refs.size());
  for (CarriedRef& each : carried.refs) {
    std::optional<Error> lost;
    if (each.lost) {
      lost = receiver->loss_told_by(message.from, each.id.owner);
    } else {
      lost = receiver->why_not_owner(each.id.owner);
      each.lost = lost.has_value();
    }
    receiver->carry_out(receiver->lifetime().receive(each, refs->sender_, lost));
    refs->ids_.push_back(each.id);
  }
  if (carried.create) {
    // In a message to this worker itself, the entry exists since remote() was called.
    if (refs->sender_ != receiver->lifetime().self() &&
        !receiver->lifetime().create(carried.create->id, refs->sender_, function_of(message)))
      throw Error(ErrorCode::protocol, to_string(carried.create->id) + " is requested twice");
    refs->create_ = carried.create;
  }
  return refs;
}

IncomingRefs::~IncomingRefs() {
  if (create_) end_limit();
  end([] { return Error(ErrorCode::cancelled, "its creation was dropped before it ended"); });
}

HandlePtr IncomingRefs::handle(std::uint32_t index) const {
  if (index >= ids_.size()) {
    throw Error(ErrorCode::invalid_argument, "the message names reference " +
                                                 std::to_string(index) + ", it carries " +
                                                 std::to_string(ids_.size()));
  }
  return receiver_->adopt(ids_[index]);
}

void IncomingRefs::on_answer(const std::optional<Error>& error) {
  end([&] {
    return error ? *error : Error(ErrorCode::internal, "its creation was answered before it ended");
  });
}

void IncomingRefs::limit_creation(const std::shared_ptr<rpc::IncomingCall>& call) {
  const auto timeout = create_->timeout;
  const auto deadline = base::deadline_or_none(timeout);
  if (deadline == TimeLimits::Time::max()) return;
  limit_.passed = [weak = std::weak_ptr(call), timeout] {
    const auto late = weak.lock();
    auto* const refs = late ? late->message().find_attachment<IncomingRefs>() : nullptr;
    if (refs == nullptr) return;
    if (!refs->claim_outcome()) return;  // it has just ended
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count();
    const Error why(ErrorCode::timeout, "creation timed out after " + std::to_string(ms) + " ms");
    refs->store_failure(why);
    late->fail(why);
    // Not from a user-function thread: such handlers may occupy all of them.
    late->request_stop();
  };
  receiver_->time_limits().add(limit_, deadline, rpc::agent_of(*call).loop());
}

void IncomingRefs::end_limit() noexcept { receiver_->time_limits().remove(limit_); }

template <class MakeError>
void IncomingRefs::end(MakeError&& if_not_created) noexcept {
  if (std::exchange(ended_, true)) return;
  // Every request to create ends with an outcome of its object; the first one is kept.
  if (create_ && claim_outcome()) {
    end_limit();
    store_failure(if_not_created());
  }
  for (const RRefId& id : ids_)
    receiver_->carry_out(receiver_->lifetime().message_done(id, sender_));
}

void IncomingRefs::store_failure(const Error& why) noexcept {
  receiver_->carry_out(receiver_->lifetime().resolve(create_->id, nullptr, creation_failed(why)));
}

// The error that the creator's own call ends with, so that every use of the object fails alike.
Error IncomingRefs::creation_failed(const Error& why) const {
  // This refusal lists the registered functions: it is for the creator, who knows the name it used.
  if (why.code() == ErrorCode::unimplemented && creating_.empty()) return why;
  const std::string function(creating_.empty() ? std::string_view("remote") : creating_);
  const bool of_another = why.code() == ErrorCode::disconnected && !why.worker().empty();
  return why.with_prefix("call " + function + "() to " + to_string(receiver_->self()) + " failed")
      .with_worker(of_another ? why.worker() : receiver_->self().name)
      .with_function(function);
}

}  // namespace stitch::rref
