// One file, though long: the writing and the reading of each frame, side by side.

#include "stitch/transport/gpu/transfer_frames.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/base/error.h"

namespace stitch::transport::gpu {
namespace {

using base::ByteReader;
using base::Bytes;
using base::ByteWriter;
using FrameBytes = std::span<const std::byte>;

constexpr std::size_t kMaxText = 2048;
constexpr std::uint32_t kMaxDevices = 256;

class Writer : public ByteWriter {
 public:
  explicit Writer(Bytes& out, FrameKind kind) : ByteWriter(out) { write(kind); }
  void write_pair(const PairName& pair) {
    write(pair.source_device);
    write(pair.destination_device);
    write(pair.epoch);
  }
  void write_text(std::string_view text) { write_string(text.substr(0, kMaxText)); }
};

class Reader : public ByteReader {
 public:
  Reader(FrameBytes frame, std::string_view what) : ByteReader(frame, what) {
    (void)read<FrameKind>();
  }
  PairName read_pair() {
    PairName pair;
    pair.source_device = read<std::uint32_t>();
    pair.destination_device = read<std::uint32_t>();
    pair.epoch = read<std::uint64_t>();
    if (pair.source_device >= kMaxDevices || pair.destination_device >= kMaxDevices) {
      throw Error(ErrorCode::protocol, "device transfer frame names devices " +
                                           std::to_string(pair.source_device) + " and " +
                                           std::to_string(pair.destination_device) + ", at most " +
                                           std::to_string(kMaxDevices) + " are possible");
    }
    return pair;
  }
  std::string read_text() {
    std::string text = read_string();
    if (text.size() <= kMaxText) return text;
    throw Error(ErrorCode::protocol, "device transfer frame has a text of more than 2048 bytes");
  }
  bool read_flag() {
    const auto flag = read<std::uint8_t>();
    if (flag <= 1) return flag == 1;
    throw Error(ErrorCode::protocol,
                "device transfer frame has flag " + std::to_string(flag) + ", expected 0 or 1");
  }
};

// Frames that name a transfer and say nothing else, or a pair.
Bytes encode_id(FrameKind kind, std::uint64_t id) {
  Bytes out;
  Writer(out, kind).write(id);
  return out;
}
std::uint64_t decode_id(FrameBytes bytes, std::string_view what) {
  Reader reader(bytes, what);
  const auto id = reader.read<std::uint64_t>();
  reader.expect_end();
  return id;
}
Bytes encode_pair(FrameKind kind, const PairName& pair) {
  Bytes out;
  Writer(out, kind).write_pair(pair);
  return out;
}
PairName decode_pair(FrameBytes bytes, std::string_view what) {
  Reader reader(bytes, what);
  const PairName pair = reader.read_pair();
  reader.expect_end();
  return pair;
}

}  // namespace

Bytes encode(const HelloFrame& frame) {
  Bytes out;
  Writer writer(out, FrameKind::hello);
  writer.write(frame.uid);
  writer.write(frame.process.host[0]);
  writer.write(frame.process.host[1]);
  writer.write(frame.process.process);
  writer.write(frame.nccl_version);
  writer.write(static_cast<std::uint32_t>(frame.device_uuids.size()));
  for (const auto& uuid : frame.device_uuids) out.append(uuid.data(), uuid.size());
  return out;
}
HelloFrame decode_hello(FrameBytes bytes) {
  Reader reader(bytes, "HELLO frame");
  HelloFrame frame;
  frame.uid = reader.read<std::uint64_t>();
  frame.process.host[0] = reader.read<std::uint64_t>();
  frame.process.host[1] = reader.read<std::uint64_t>();
  frame.process.process = reader.read<std::uint64_t>();
  frame.nccl_version = reader.read<std::int32_t>();
  const std::uint32_t devices = reader.read_count(16);
  if (devices > kMaxDevices) {
    throw Error(ErrorCode::protocol, "HELLO frame has " + std::to_string(devices) +
                                         " devices, the limit is " + std::to_string(kMaxDevices));
  }
  frame.device_uuids.resize(devices);
  for (auto& uuid : frame.device_uuids) {
    std::memcpy(uuid.data(), reader.take(uuid.size()).data(), uuid.size());
  }
  reader.expect_end();
  return frame;
}

Bytes encode(const RtsFrame& frame) {
  Bytes out;
  Writer writer(out, FrameKind::rts);
  writer.write(frame.id);
  writer.write(frame.path);
  writer.write_pair(frame.pair);
  writer.write(frame.bytes);
  writer.write(frame.clock);
  return out;
}
RtsFrame decode_rts(FrameBytes bytes) {
  Reader reader(bytes, "RTS frame");
  RtsFrame frame;
  frame.id = reader.read<std::uint64_t>();
  const auto path = reader.read<std::uint8_t>();
  if (path >= kPaths) {
    throw Error(ErrorCode::protocol, "RTS frame has path " + std::to_string(path) +
                                         ", the last one is " + std::to_string(kPaths - 1));
  }
  frame.path = static_cast<Path>(path);
  frame.pair = reader.read_pair();
  frame.bytes = reader.read<std::uint64_t>();
  frame.clock = reader.read<std::uint64_t>();
  reader.expect_end();
  return frame;
}

Bytes encode(const CtsFrame& frame) {
  Bytes out;
  Writer writer(out, FrameKind::cts);
  writer.write(frame.id);
  writer.write_pair(frame.pair);
  writer.write(frame.clock);
  return out;
}
CtsFrame decode_cts(FrameBytes bytes) {
  Reader reader(bytes, "CTS frame");
  CtsFrame frame;
  frame.id = reader.read<std::uint64_t>();
  frame.pair = reader.read_pair();
  frame.clock = reader.read<std::uint64_t>();
  reader.expect_end();
  return frame;
}

Bytes encode(const RetryFrame& frame) { return encode_id(FrameKind::retry, frame.id); }
RetryFrame decode_retry(FrameBytes bytes) { return {decode_id(bytes, "RETRY frame")}; }

Bytes encode(const DeclineFrame& frame) { return encode_id(FrameKind::decline, frame.id); }
DeclineFrame decode_decline(FrameBytes bytes) { return {decode_id(bytes, "DECLINE frame")}; }

Bytes encode(const GrantFrame& frame) {
  Bytes out;
  Writer writer(out, FrameKind::grant);
  writer.write(frame.id);
  writer.write(frame.chunks);
  return out;
}
GrantFrame decode_grant(FrameBytes bytes) {
  Reader reader(bytes, "GRANT frame");
  GrantFrame frame;
  frame.id = reader.read<std::uint64_t>();
  frame.chunks = reader.read<std::uint32_t>();
  reader.expect_end();
  return frame;
}

Bytes encode(const DataFrame& frame) {
  Bytes out;
  Writer writer(out, FrameKind::data);
  writer.write(frame.id);
  writer.write(frame.offset);
  writer.write_bytes(frame.bytes);
  return out;
}
DataFrame decode_data(FrameBytes bytes) {
  Reader reader(bytes, "DATA frame");
  DataFrame frame;
  frame.id = reader.read<std::uint64_t>();
  frame.offset = reader.read<std::uint64_t>();
  frame.bytes = reader.take(reader.remaining());
  return frame;
}

Bytes encode(const FinishedFrame& frame) {
  Bytes out;
  Writer writer(out, FrameKind::finished);
  writer.write(frame.id);
  writer.write_pair(frame.pair);
  writer.write(frame.failed);
  writer.write_text(frame.text);
  return out;
}
FinishedFrame decode_finished(FrameBytes bytes) {
  Reader reader(bytes, "FINISHED frame");
  FinishedFrame frame;
  frame.id = reader.read<std::uint64_t>();
  frame.pair = reader.read_pair();
  frame.failed = reader.read_flag() ? 1 : 0;
  frame.text = reader.read_text();
  reader.expect_end();
  return frame;
}

Bytes encode(const CancelFrame& frame) {
  Bytes out;
  Writer writer(out, FrameKind::cancel);
  writer.write(frame.id);
  writer.write(frame.code);
  writer.write_text(frame.text);
  return out;
}
CancelFrame decode_cancel(FrameBytes bytes) {
  Reader reader(bytes, "CANCEL frame");
  CancelFrame frame;
  frame.id = reader.read<std::uint64_t>();
  frame.code = reader.read<std::uint8_t>();
  frame.text = reader.read_text();
  reader.expect_end();
  return frame;
}

Bytes encode(const ForgetFrame& frame) { return encode_id(FrameKind::forget, frame.id); }
ForgetFrame decode_forget(FrameBytes bytes) { return {decode_id(bytes, "FORGET frame")}; }

Bytes encode(const CommOpenFrame& frame) {
  Bytes out;
  Writer writer(out, FrameKind::comm_open);
  writer.write_pair(frame.pair);
  writer.write(frame.nccl_version);
  writer.write(frame.piece_bytes);
  out.append(frame.unique_id.internal, sizeof(frame.unique_id.internal));
  return out;
}
CommOpenFrame decode_comm_open(FrameBytes bytes) {
  Reader reader(bytes, "COMM_OPEN frame");
  CommOpenFrame frame;
  frame.pair = reader.read_pair();
  frame.nccl_version = reader.read<std::int32_t>();
  frame.piece_bytes = reader.read<std::uint64_t>();
  constexpr std::size_t kBytes = sizeof(frame.unique_id.internal);
  std::memcpy(frame.unique_id.internal, reader.take(kBytes).data(), kBytes);
  reader.expect_end();
  return frame;
}

Bytes encode(const CommReadyFrame& frame) { return encode_pair(FrameKind::comm_ready, frame.pair); }
CommReadyFrame decode_comm_ready(FrameBytes bytes) {
  return {decode_pair(bytes, "COMM_READY frame")};
}

Bytes encode(const CommBreakFrame& frame) {
  Bytes out;
  Writer writer(out, FrameKind::comm_break);
  writer.write_pair(frame.pair);
  writer.write(frame.from_source);
  writer.write_text(frame.text);
  return out;
}
CommBreakFrame decode_comm_break(FrameBytes bytes) {
  Reader reader(bytes, "COMM_BREAK frame");
  CommBreakFrame frame;
  frame.pair = reader.read_pair();
  frame.from_source = reader.read_flag() ? 1 : 0;
  frame.text = reader.read_text();
  reader.expect_end();
  return frame;
}

FrameKind kind_of(FrameBytes frame) {
  if (frame.empty()) throw Error(ErrorCode::protocol, "device transfer frame is empty");
  const auto kind = static_cast<std::uint8_t>(frame[0]);
  if (kind < static_cast<std::uint8_t>(FrameKind::hello) ||
      kind > static_cast<std::uint8_t>(FrameKind::decline)) {
    throw Error(ErrorCode::protocol, "device transfer frame has kind " + std::to_string(kind));
  }
  return static_cast<FrameKind>(kind);
}

}  // namespace stitch::transport::gpu
