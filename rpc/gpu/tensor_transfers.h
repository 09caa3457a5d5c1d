#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/bytes.h"
#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"
#include "stitch/rpc/gpu/device_bridge.h"
#include "stitch/rpc/gpu/transfer_hooks.h"
#include "stitch/rpc/gpu/transfer_section.h"
#include "stitch/rpc/message/worker_info.h"
#include "stitch/transport/gpu/device_transfers.h"

namespace stitch::rpc {

class OutgoingTransfers;

// The bytes of tensors that go from a device of one worker to a device of another without being
// part of a message: DeviceTransfers, with memory and streams of libtorch. Part of DeviceTensors,
// where there are devices, CUDA and a DeviceBridge. Thread contract: any thread.
class TensorTransfers {
 public:
  // Whether workers of this process can have one; their members' records say so.
  [[nodiscard]] static bool possible() noexcept;
  // Why not, where there are devices.
  [[nodiscard]] static std::string why_not();
  // Throws Error(invalid_argument) when CUDA cannot be used after all.
  TensorTransfers(const WorkerInfo& self, TransferHooks hooks);

  // Throws Error(invalid_argument) while the current stream of that device is being captured: to be
  // asked for each device of a message before anything is queued there, which would be part of the
  // graph.
  void refuse_capture(c10::Device device) const;
  // What a message takes along: add(), then seal(), then begin() once the message is sent. If
  // begin() is not called nothing happens.
  [[nodiscard]] std::shared_ptr<OutgoingTransfers> prepare();
  // Asks for all transfers of a message. `then` is called once, on a lane: with their memory, in
  // the order of the section, or with why they have not arrived, naming device and peer. Their
  // source counts them as under way until `acknowledgment` has no owner: to be kept until the
  // message has been routed. Throws Error(protocol), and does not call it, for a transfer that has
  // been asked for already.
  using Arrived =
      base::UniqueFunction<void(std::vector<c10::Storage> memory, const std::optional<Error>&,
                                std::shared_ptr<void> acknowledgment)>;
  void receive(const WorkerInfo& from, const TransferSection& section, Arrived then);
  // In place of receive(): they are not wanted. Throws Error(protocol) for one that has been asked
  // for already, and when the peer has named too many that it does not announce.
  void refuse(const WorkerInfo& from, const TransferSection& section, const Error& why);
  // Throws Error(protocol) for bytes that no correct peer sends.
  void on_frame(const WorkerInfo& from, std::span<const std::byte> frame);
  void on_peer_lost(const WorkerInfo& peer, const Error& why);
  // Fails what is under way. May wait for a device that hangs.
  void stop();
  // Transfers that have not ended, and messages that have not begun theirs or whose `then` has not
  // returned: 0 once nothing is on its way.
  [[nodiscard]] std::size_t under_way() const;
  // "gpu.sent_bytes.peer.worker1.cuda:0", "gpu.path_failures.nccl.worker1.cuda:0" and so on;
  // "gpu.transfer_retries", "gpu.broken_communicators", ...
  void debug_info(std::map<std::string, std::int64_t>& numbers) const;

 private:
  friend class OutgoingTransfers;
  using Counter = std::atomic<std::size_t>;
  // A message that prepare() or receive() is about, while it exists. May outlive the transfers.
  class OnItsWay {
   public:
    explicit OnItsWay(std::shared_ptr<Counter> messages) : messages_(std::move(messages)) {
      messages_->fetch_add(1);
    }
    ~OnItsWay() { messages_->fetch_sub(1); }
    OnItsWay(const OnItsWay&) = delete;
    OnItsWay& operator=(const OnItsWay&) = delete;

   private:
    const std::shared_ptr<Counter> messages_;
  };
  struct Arriving;
  void receive_one(const WorkerInfo& from, transport::gpu::PeerId peer,
                   const TransferSection::Transfer& transfer, std::size_t place,
                   const std::shared_ptr<Arriving>& arriving);
  [[nodiscard]] transport::gpu::PeerId peer_id(const WorkerInfo& worker) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] WorkerInfo worker_of(transport::gpu::PeerId peer) const STITCH_EXCLUDES(mutex_);

  const WorkerInfo self_;
  const TransferHooks hooks_;
  const DeviceBridge& bridge_;
  const transport::gpu::CudaApi& cuda_;
  const std::shared_ptr<Counter> messages_ = std::make_shared<Counter>(0);
  mutable base::Mutex mutex_;
  // By life. The number of a peer is its place here, plus 1.
  std::map<std::pair<WorkerId, std::uint64_t>, transport::gpu::PeerId> ids_
      STITCH_GUARDED_BY(mutex_);
  std::vector<WorkerInfo> workers_ STITCH_GUARDED_BY(mutex_);
  std::unique_ptr<transport::gpu::DeviceTransfers> transfers_;  // last: it calls the others
};

// What one message takes along. Not thread-safe; used by the thread that sends, one after another.
class OutgoingTransfers {
 public:
  // Tensors from this size on have a transfer and memory of their own; smaller ones that go from
  // one device to one device are packed into one.
  static constexpr std::size_t kPackBelow = std::size_t{1} << 20;

  explicit OutgoingTransfers(TensorTransfers& transfers)
      : transfers_(transfers), on_its_way_(transfers.messages_) {}
  // A dense tensor on a CUDA device, not empty, that travels as `cast` if there is one. What it
  // needs is queued on the device's current stream. REQUIRES: grad mode is off.
  void add(std::uint32_t tensor, const at::Tensor& original, c10::Device there,
           std::optional<at::ScalarType> cast);
  // Queues the packing, notes on the current streams when all bytes are there, and returns the
  // section. Throws Error(invalid_argument) while a stream is being captured.
  [[nodiscard]] base::Bytes seal();
  // Of all its transfers. After seal().
  [[nodiscard]] std::size_t bytes() const noexcept { return section_.bytes(); }
  // The message is on its way to `to`. `until_ended` (may be null) is kept until the last of them
  // has ended here; a lane may be its last owner.
  void begin(const WorkerInfo& to, const std::shared_ptr<void>& until_ended) noexcept;

 private:
  struct Event;
  struct Stash;
  struct Piece {
    at::Tensor bytes;  // dense
    c10::Device from;
    c10::Device to;
    std::shared_ptr<Event> ready{};
  };
  struct Small {
    std::size_t described;  // in section_.tensors, with the type that it is packed as
    at::Tensor source;
  };
  void describe(std::uint32_t tensor, const at::Tensor& original, const at::Tensor& sent,
                at::ScalarType type, at::IntArrayRef strides);
  void pack(c10::Device from, c10::Device to, const std::vector<Small>& tensors);

  TensorTransfers& transfers_;  // not used by the destructor
  const TensorTransfers::OnItsWay on_its_way_;
  TransferSection section_;
  std::vector<Piece> pieces_;  // by transfer
  std::map<std::pair<c10::DeviceIndex, c10::DeviceIndex>, std::vector<Small>> small_;
};

}  // namespace stitch::rpc
