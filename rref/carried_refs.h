#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "stitch/base/event_loop.h"
#include "stitch/rpc/message/archive.h"
#include "stitch/rpc/message/message.h"
#include "stitch/rref/handle.h"
#include "stitch/rref/lifetime/lifetime.h"

// References inside messages. The body holds indexes; the ids and tokens stand in a section of the
// frame, so that a message which is refused or comes too late is settled without decoding its body.
namespace stitch::rref {

// Frame and section kinds of this layer: 0x100 to 0x10f.
namespace wire {
inline constexpr std::uint16_t kLedgerFrame = 0x100;     // a ledger frame on its own
inline constexpr std::uint16_t kCarriedSection = 0x100;  // the references in this message
inline constexpr std::uint16_t kLedgerSection = 0x101;   // a ledger frame riding along
inline constexpr std::uint16_t kCreateSection =
    0x102;  // this request's result is to be kept under an id
inline constexpr std::uint16_t kTargetSection =
    0x103;  // this request is about the object of a carried reference
}  // namespace wire

// What a request wants with the object of its target.
enum class TargetUse : std::uint8_t { call = 1, fetch = 2, await = 3 };

struct CreateRequest {
  RRefId id;
  std::chrono::nanoseconds timeout{0};  // the owner gives up then; 0: never
};
struct TargetRequest {
  std::uint32_t index = 0;  // into the carried references
  TargetUse use = TargetUse::call;
};

// The references of a message being written. Pinned when the message is about to leave (G1, case
// "send"); unpinned if it certainly never does. Not thread-safe; destroyed on any thread.
class OutgoingRefs final : public rpc::Attachment {
 public:
  ~OutgoingRefs() override;
  // The index that stands for `handle` in the body; one per object, however often it is written.
  std::uint32_t add(const HandlePtr& handle);
  void create(const CreateRequest& request) { create_ = request; }
  void target(const HandlePtr& handle, TargetUse use) { target_ = TargetRequest{add(handle), use}; }

  // Pins everything and writes the sections. Throws Error(invalid_argument) for a reference of
  // another worker.
  void leave(const std::shared_ptr<RRefAgent>& sender, rpc::OutMessage& message,
             const WorkerInfo& to);
  void on_sent(const std::optional<Error>& error) override;

 private:
  void unpin();

  std::vector<HandlePtr> handles_;
  std::unordered_map<RRefId, std::uint32_t, RRefIdHash> index_;
  std::optional<CreateRequest> create_;
  std::optional<TargetRequest> target_;
  std::shared_ptr<RRefAgent> sender_;
  WorkerLife to_;
  std::vector<CarriedRef> pinned_;
};

// The references of a message being dealt with: each holds its object until the answer leaves or
// the message goes. Thread contract: as InMessage.
class IncomingRefs final : public rpc::Attachment {
 public:
  // Reads the sections. Null when the message has none of ours. Throws Error(protocol), having
  // changed nothing.
  static std::unique_ptr<IncomingRefs> read(const std::shared_ptr<RRefAgent>& receiver,
                                            const rpc::InMessage& message);
  ~IncomingRefs() override;

  // A handle for the index-th reference. Throws Error(invalid_argument) when there is none.
  [[nodiscard]] HandlePtr handle(std::uint32_t index) const;
  [[nodiscard]] const std::optional<CreateRequest>& create() const noexcept { return create_; }
  [[nodiscard]] const std::optional<TargetRequest>& target() const noexcept { return target_; }
  [[nodiscard]] const RRefId& target_id() const { return ids_.at(target_->index); }
  // The timer that ends the creation; 0: none. Set before the creation starts.
  base::EventLoop::TimerId creation_timer = 0;
  // What is to be created is the result of `function`, a registered name. Before the creation.
  void set_creating(std::string_view function) { creating_ = function; }
  // The object that the request is about: lives as long as the message, whatever becomes of the
  // call (its answer may leave while its function still runs). Before the function is run.
  void keep(std::shared_ptr<void> object) { object_ = std::move(object); }

  void on_answer(const std::optional<Error>& error) override;

 private:
  IncomingRefs(std::shared_ptr<RRefAgent> receiver, const WorkerLife& sender)
      : receiver_(std::move(receiver)), sender_(sender) {}
  void end(const Error& if_not_created);
  [[nodiscard]] Error creation_failed(const Error& why) const;

  const std::shared_ptr<RRefAgent> receiver_;
  const WorkerLife sender_;
  std::vector<RRefId> ids_;
  std::shared_ptr<void> object_;
  std::string_view creating_;
  bool ended_ = false;
  std::optional<CreateRequest> create_;
  std::optional<TargetRequest> target_;
};

// Writes and reads one reference in a body: its index and the type it was made as. A null handle
// travels as such.
void write_reference(rpc::OutArchive& archive, const HandlePtr& handle, std::uint64_t type);
[[nodiscard]] HandlePtr read_reference(rpc::InArchive& archive, std::uint64_t type,
                                       std::string_view type_name);

}  // namespace stitch::rref
