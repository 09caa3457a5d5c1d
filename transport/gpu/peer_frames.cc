// Who a peer is, and where each of its frames goes.

#include <utility>

#include "stitch/transport/gpu/device_transfers_impl.h"

namespace stitch::transport::gpu {

void DeviceTransfers::Impl::on_hello(PeerId from, HelloFrame hello) {
  bool greet = false;
  {
    const base::MutexLock lock(mutex_);
    Peer& peer = peers_[from];
    if (peer.hello) throw Error(ErrorCode::protocol, "second HELLO frame of device transfers");
    peer.hello = std::move(hello);
    greet = !std::exchange(peer.hello_sent, true);
  }
  if (greet) {
    send_frame(from, encode(HelloFrame{uid_, options_.identity, own_nccl(), lanes_.uuids()}));
  }
}

void DeviceTransfers::Impl::on_frame(PeerId from, std::span<const std::byte> frame) {
  {
    const base::MutexLock lock(mutex_);
    Peer& peer = peers_[from];
    if (closed_ || peer.lost) return;
    if (peer.silent) peer.silent = std::chrono::nanoseconds(0);
  }
  switch (kind_of(frame)) {
    case FrameKind::hello:
      return on_hello(from, decode_hello(frame));
    case FrameKind::rts:
      return on_rts(from, decode_rts(frame));
    case FrameKind::cts:
      return on_cts(from, decode_cts(frame));
    case FrameKind::decline:
      return on_decline(from, decode_decline(frame));
    case FrameKind::retry:
      return on_retry(from, decode_retry(frame).id, "RETRY");
    case FrameKind::grant:
      return on_grant(from, decode_grant(frame));
    case FrameKind::data:
      return on_data(from, decode_data(frame));
    case FrameKind::finished:
      return on_finished(from, decode_finished(frame));
    case FrameKind::cancel:
      return on_cancel(from, decode_cancel(frame));
    case FrameKind::forget:
      return on_forget(from, decode_forget(frame));
    case FrameKind::alive:
      return (void)decode_alive(frame);  // to have heard of it is all
    case FrameKind::comm_open:
      return on_comm_open(from, decode_comm_open(frame));
    case FrameKind::comm_ready:
      return on_comm_ready(from, decode_comm_ready(frame));
    case FrameKind::comm_break:
      return on_comm_break(from, decode_comm_break(frame));
    case FrameKind::comm_waits:
      return on_comm_waits(from, decode_comm_waits(frame));
  }
}

}  // namespace stitch::transport::gpu
