#include "stitch/rref/call_order.h"

#include <exception>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/base/patience.h"
#include "stitch/rpc/agent/send_reliably.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rref/frame_kinds.h"
#include "stitch/rref/rref_agent.h"

namespace stitch::rref {

CallOrder::CallOrder(std::shared_ptr<RRefAgent> rrefs, const WorkerInfo& owner)
    : rrefs_(std::move(rrefs)), owner_(owner), stream_(rrefs_->new_stream()) {}

CallOrder::~CallOrder() {
  if (const std::uint64_t total = next_.load(); total > 0) tell(true, total);
}

void CallOrder::skip(std::uint64_t number) const noexcept { tell(false, number); }

void CallOrder::tell(bool end, std::uint64_t number) const noexcept {
  try {
    const auto alive = rrefs_->agent();
    if (!alive || alive->forked()) return;  // the order is the parent's
    base::patiently([&] {
      rpc::send_reliably(*alive, owner_, [stream = stream_, end, number] {
        rpc::OutMessage message(wire::kOrderFrame);
        base::ByteWriter out(message.frame.body());
        out.write(stream);
        out.write(static_cast<std::uint8_t>(end ? 1 : 0));
        out.write(number);
        return message;
      });
    });
  } catch (const std::exception&) {
    // No memory even to try again later: what waits for this number ends at its deadline.
  }
}

}  // namespace stitch::rref
