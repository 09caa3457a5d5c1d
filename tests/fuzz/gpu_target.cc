// The frames of transfers between devices (transport/gpu/PROTOCOL.md).
#include <string>

#include "stitch/transport/gpu/transfer_frames.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz::device_transfers {

using namespace transport::gpu;  // NOLINT: its frames

// Longer texts are cut by the encoders.
constexpr std::size_t kMaxText = 2048;

template <class Frame>
static void check_again(const Frame& frame, Bytes bytes) {
  if constexpr (requires { frame.text; }) {
    if (frame.text.size() > kMaxText) return;
  }
  require(same(encode(frame).span(), bytes), "a frame of transfers, written again");
}

static void read_again(FrameKind kind, Bytes bytes) {
  switch (kind) {
    case FrameKind::hello:
      return check_again(decode<HelloFrame>(bytes), bytes);
    case FrameKind::rts:
      return check_again(decode<RtsFrame>(bytes), bytes);
    case FrameKind::cts:
      return check_again(decode<CtsFrame>(bytes), bytes);
    case FrameKind::retry:
      return check_again(decode<RetryFrame>(bytes), bytes);
    case FrameKind::grant:
      return check_again(decode<GrantFrame>(bytes), bytes);
    case FrameKind::data:
      return check_again(decode<DataFrame>(bytes), bytes);
    case FrameKind::finished:
      return check_again(decode<FinishedFrame>(bytes), bytes);
    case FrameKind::cancel:
      return check_again(decode<CancelFrame>(bytes), bytes);
    case FrameKind::comm_open:
      return check_again(decode<CommOpenFrame>(bytes), bytes);
    case FrameKind::comm_ready:
      return check_again(decode<CommReadyFrame>(bytes), bytes);
    case FrameKind::comm_break:
      return check_again(decode<CommBreakFrame>(bytes), bytes);
    case FrameKind::forget:
      return check_again(decode<ForgetFrame>(bytes), bytes);
  }
  fail("a kind of frame of transfers that does not exist was accepted");
}

static bool run(Bytes input) {
  return accepts([&] { read_again(kind_of(input), input); });
}

static Seeds seeds() {
  Seeds list;
  const auto add = [&](const char* name, const auto& frame) {
    list.push_back({name, encode(frame)});
  };
  const PairName pair{1, 2, 3};
  HelloFrame hello;
  hello.uid = 5;
  hello.process = {{1, 2}, 3};
  hello.nccl_version = 22807;
  hello.device_uuids.resize(2);
  add("hello", hello);
  add("rts", RtsFrame{7, Path::nccl, pair, 4096, 9});
  add("cts", CtsFrame{7, pair, 9});
  add("retry", RetryFrame{7});
  add("grant", GrantFrame{7, 4});
  const std::string bytes = "bytes of a tensor";
  add("data", DataFrame{7, 64, std::as_bytes(std::span(bytes))});
  add("finished", FinishedFrame{7, pair, 1, "no memory"});
  add("cancel", CancelFrame{7, 3, "cancelled"});
  add("forget", ForgetFrame{7});
  add("comm-open", CommOpenFrame{pair, 22807, 1 << 20, {}});
  add("comm-ready", CommReadyFrame{pair});
  add("comm-break", CommBreakFrame{pair, 1, "it failed"});
  return list;
}

}  // namespace stitch::fuzz::device_transfers

namespace stitch::fuzz {
const Target gpu{"gpu", device_transfers::run, device_transfers::seeds};
}  // namespace stitch::fuzz
