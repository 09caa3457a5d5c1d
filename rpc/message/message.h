#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/rpc/message/worker_info.h"
#include "stitch/transport/wire/frame.h"

namespace stitch::rpc {

class ArrivedMemory;

// What a layer above attaches to a message: to an outgoing one between encoding and sending, to an
// incoming one until its handling is complete (its handler has replied, its arguments are
// destroyed). Any thread may destroy it; no lock is held.
class Attachment {
 public:
  virtual ~Attachment() = default;
  // Outgoing requests only: nothing keeps the request from being sent any more. May write into its
  // frame what on_send() has left open. At most once, before on_sent().
  virtual void on_begin(base::Bytes& frame) noexcept {}
  // Outgoing only: the message was handed to the transport (nullopt) or never will be.
  // Called exactly once after on_send(), also when another extension or a limit refused the
  // message, and before its call fails. Must not throw.
  virtual void on_sent(const std::optional<Error>& error) {}
  // Incoming requests only: the answer, or the error that it is, is complete and about to be passed
  // to on_send(); the arguments are destroyed. May be called again when that answer then could not
  // be sent.
  virtual void on_answer(const std::optional<Error>& error) {}
};

// The attachments of a message that is about to be sent. on_sent() of each is called once: by
// notify(), else by the destructor with an error. Not thread-safe.
class DepartingAttachments {
 public:
  DepartingAttachments() = default;
  explicit DepartingAttachments(std::vector<std::unique_ptr<Attachment>> attachments) noexcept
      : attachments_(std::move(attachments)) {}
  DepartingAttachments(DepartingAttachments&&) noexcept = default;
  DepartingAttachments& operator=(DepartingAttachments&&) = delete;
  ~DepartingAttachments();
  // Calls on_begin() of each.
  void begin(base::Bytes& frame) noexcept {
    for (const auto& each : attachments_) each->on_begin(frame);
  }
  void notify(const std::optional<Error>& error) noexcept;
  [[nodiscard]] bool empty() const noexcept { return attachments_.empty(); }

 private:
  std::vector<std::unique_ptr<Attachment>> attachments_;
};

// Its size in memory: the frame and the buffers beside it.
[[nodiscard]] std::size_t total_bytes(const transport::Message& message);

// The lines of a text, each ended by a newline or by the text's end.
[[nodiscard]] std::vector<std::string> split_lines(const std::string& text);

// A message being written: the body through an OutArchive, tensors set aside, sections by the
// layers above. Owned by the sending thread until it is sent. Not thread-safe.
struct OutMessage {
  explicit OutMessage(std::uint16_t kind) : frame(kind) {}

  transport::FrameBuilder frame;
  std::vector<at::Tensor> tensors;  // in the order the body refers to them
  // What is to be known of the tensors that may concern a device, ascending; empty for most
  // messages.
  struct Placement {
    std::uint32_t tensor = 0;
    std::uint32_t argument = 0;           // from 1 on; 0: not of an argument
    std::optional<c10::Device> wanted{};  // on(): over the device map
  };
  std::vector<Placement> placements;
  // The attachment of type T, made on first use; a message has at most one of each type.
  template <class T>
  T& attachment() {
    if (T* found = find_attachment<T>()) return *found;
    attachments.push_back(std::make_unique<T>());
    return static_cast<T&>(*attachments.back());
  }
  template <class T>
  [[nodiscard]] T* find_attachment() const {
    for (const auto& each : attachments) {
      if (auto* found = dynamic_cast<T*>(each.get())) return found;
    }
    return nullptr;
  }
  std::vector<std::unique_ptr<Attachment>> attachments;
  bool refuse_when_full = false;  // a request: not made where it would wait for room
  bool ahead = false;             // a small request, which does not wait for room
};

// Where a tensor of a received message was put, and where it was at its sender. Only for tensors
// that were on a device at one of the two.
struct ArrivedTensor {
  std::uint32_t tensor = 0;
  c10::Device here;
  c10::Device there;
};

// What a message brought to devices.
struct Arrival {
  std::vector<ArrivedTensor> tensors;           // ascending
  std::shared_ptr<const ArrivedMemory> memory;  // null when all are on the CPU here
  std::optional<Error> error;                   // a tensor could not be put on its device
  std::size_t bytes = 0;  // of the message with its transfers, as PeerFlow counts them
  std::chrono::steady_clock::time_point read{};  // when its frame was there
  // Of its transfers: their source hears that they have come when it has no owner any more. Not
  // before the message has been routed: then its sender may leave.
  std::shared_ptr<void> acknowledgment;
};

// A received message, its frame checked. Tensors are made by decode_tensors(), off the reader
// thread where possible. Owned by the code that handles it. Not thread-safe.
struct InMessage {
  InMessage(transport::Message message, WorkerInfo sender);

  transport::Message
      raw;  // the view points into its memory, which stays where it is when this is moved
  transport::FrameView view;
  WorkerInfo from;
  std::vector<at::Tensor> tensors;
  std::unique_ptr<Arrival> arrival;  // of a message with devices: `tensors` are complete; else null
  std::vector<std::unique_ptr<Attachment>>
      attachments;  // what layers above decoded from their sections

  template <class T>
  [[nodiscard]] T* find_attachment() const {
    for (const auto& each : attachments) {
      if (auto* found = dynamic_cast<T*>(each.get())) return found;
    }
    return nullptr;
  }
};

}  // namespace stitch::rpc
