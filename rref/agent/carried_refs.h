#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "stitch/base/recycler.h"
#include "stitch/rpc/message/message.h"
#include "stitch/rref/agent/carried_sections.h"
#include "stitch/rref/agent/object_access.h"
#include "stitch/rref/agent/time_limits.h"
#include "stitch/rref/agent/turn_queue.h"
#include "stitch/rref/lifetime/lifetime.h"

namespace stitch::rpc {
class IncomingCall;
}

// References inside messages, between their sections (carried_sections.h) and the lifetime tables.
namespace stitch::rref {

// The references of a message that is being written. They are pinned when the message is about to
// leave (G1, case "send"), and unpinned when it certainly never leaves. Owned by its message. Not
// thread-safe; destroyed on any thread.
class OutgoingRefs final : public rpc::Attachment {
 public:
  ~OutgoingRefs() override;
  [[nodiscard]] static void* operator new(std::size_t bytes) { return base::take_recycled(bytes); }
  static void operator delete(void* at, std::size_t bytes) noexcept { base::recycle(at, bytes); }
  // The index of `handle` in the body: one per object, for all its copies.
  std::uint32_t add(const HandlePtr& handle);
  void create(const CreateRequest& request) { create_ = request; }
  void target(const HandlePtr& handle, TargetUse use) { target_ = TargetRequest{add(handle), use}; }
  void argument(std::uint32_t position, const HandlePtr& handle, std::uint64_t type) {
    arguments_.push_back({position, add(handle), type});
  }

  // Pins every reference and writes the sections. Throws Error(invalid_argument) for a reference
  // that belongs to another worker of this process.
  void leave(const std::shared_ptr<RRefAgent>& sender, rpc::OutMessage& message,
             const WorkerInfo& to);
  void on_sent(const std::optional<Error>& error) override;

 private:
  void unpin() noexcept;

  std::vector<HandlePtr> handles_;
  std::unordered_map<RRefId, std::uint32_t, RRefIdHash> index_;  // of handles_, if they are many
  std::optional<CreateRequest> create_;
  std::optional<TargetRequest> target_;
  std::vector<ReferredArgument> arguments_;
  std::shared_ptr<RRefAgent> sender_;
  WorkerLife to_;
  std::vector<CarriedRef> pinned_;
};

// The references of a message that is being processed: each keeps its object alive until the answer
// leaves or the message is destroyed. Owned by its message. Thread contract: as InMessage.
class IncomingRefs final : public rpc::Attachment {
 public:
  // Reads the sections. Null if the message has none. Throws Error(protocol), having changed
  // nothing, if they are malformed.
  static std::unique_ptr<IncomingRefs> read(const std::shared_ptr<RRefAgent>& receiver,
                                            const rpc::InMessage& message);
  ~IncomingRefs() override;
  [[nodiscard]] static void* operator new(std::size_t bytes) { return base::take_recycled(bytes); }
  static void operator delete(void* at, std::size_t bytes) noexcept { base::recycle(at, bytes); }

  [[nodiscard]] const std::shared_ptr<RRefAgent>& receiver() const noexcept { return receiver_; }
  // A handle for the index-th reference. Throws Error(invalid_argument) if there is none.
  [[nodiscard]] HandlePtr handle(std::uint32_t index) const;
  [[nodiscard]] const std::optional<CreateRequest>& create() const noexcept { return create_; }
  [[nodiscard]] const std::optional<TargetRequest>& target() const noexcept { return target_; }
  [[nodiscard]] const RRefId& target_id() const { return ids_.at(target_->index); }
  [[nodiscard]] const std::vector<ReferredArgument>& arguments() const noexcept {
    return arguments_;
  }
  [[nodiscard]] const RRefId& id(std::uint32_t index) const { return ids_.at(index); }
  // The turn of the request at an object whose methods run one at a time; ends with the message.
  void keep_turn(Turn turn) { turn_ = std::move(turn); }
  // Limits the time of the creation. Called before it starts.
  void limit_creation(const std::shared_ptr<rpc::IncomingCall>& call);
  void end_limit() noexcept;
  // True for the first outcome of the creation, which the caller stores before the answer leaves,
  // so that the creator and the owner agree.
  [[nodiscard]] bool claim_outcome() noexcept { return !claimed_.exchange(true); }
  // The object to be created is the result of `function`, a registered name. Called before the
  // creation.
  void set_creating(std::string_view function) { creating_ = function; }
  // Keeps the target of the request alive as long as the message, because the answer may leave
  // while the function still runs. Called before the function runs.
  void keep(std::shared_ptr<void> object) { object_ = std::move(object); }
  [[nodiscard]] const std::shared_ptr<void>& object() const noexcept { return object_; }

  void on_answer(const std::optional<Error>& error) override;

 private:
  IncomingRefs(std::shared_ptr<RRefAgent> receiver, const WorkerLife& sender)
      : receiver_(std::move(receiver)), sender_(sender) {}
  // `if_not_created` makes the error of a creation that has no outcome yet.
  template <class MakeError>
  void end(MakeError&& if_not_created) noexcept;
  void store_failure(const Error& why) noexcept;
  [[nodiscard]] Error creation_failed(const Error& why) const;

  const std::shared_ptr<RRefAgent> receiver_;
  const WorkerLife sender_;
  std::vector<RRefId> ids_;
  std::shared_ptr<void> object_;
  std::string_view creating_;
  bool ended_ = false;
  std::atomic<bool> claimed_{false};
  std::optional<CreateRequest> create_;
  std::optional<TargetRequest> target_;
  std::vector<ReferredArgument> arguments_;
  TimeLimits::Limit limit_;  // of the creation
  Turn turn_;                // of object_; ends first
};

}  // namespace stitch::rref
