#include "stitch/transport/gpu/transfer_frames.h"

#include <cstring>
#include <string_view>
#include <type_traits>

#include "stitch/base/byte_io.h"
#include "stitch/base/error.h"

namespace stitch::transport::gpu {
namespace {

using base::Bytes;
using FrameBytes = std::span<const std::byte>;
using Uuids = std::vector<std::array<char, 16>>;

constexpr std::size_t kMaxText = 2048;
constexpr std::uint32_t kMaxDevices = 256;

[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorCode::protocol, text); }

class Writer {
 public:
  explicit Writer(Bytes& out) : out_(out), writer_(out) {}
  template <class... Fields>
  Writer& operator()(const Fields&... fields) {
    (put(fields), ...);
    return *this;
  }
  Writer& flag(std::uint8_t flag) { return (*this)(flag); }

 private:
  void put(base::WireScalar auto number) { writer_.write(number); }
  void put(const PairName& pair) {
    (*this)(pair.source_device, pair.destination_device, pair.epoch);
  }
  void put(const ProcessIdentity& each) { (*this)(each.host[0], each.host[1], each.process); }
  void put(const std::string& text) {
    writer_.write_string(std::string_view(text).substr(0, kMaxText));
  }
  void put(FrameBytes bytes) { writer_.write_bytes(bytes); }
  void put(const nccl::UniqueId& id) { out_.append(id.internal, sizeof(id.internal)); }
  void put(const Uuids& uuids) {
    put(static_cast<std::uint32_t>(uuids.size()));
    for (const auto& uuid : uuids) out_.append(uuid.data(), uuid.size());
  }

  Bytes& out_;
  base::ByteWriter writer_;
};

class Reader {
 public:
  Reader(FrameBytes frame, std::string_view what) : reader_(frame, what) {
    (void)reader_.read<FrameKind>();
  }
  template <class... Fields>
  Reader& operator()(Fields&... fields) {
    (get(fields), ...);
    return *this;
  }
  Reader& flag(std::uint8_t& flag) {
    get(flag);
    if (flag > 1)
      refuse("device transfer frame has flag " + std::to_string(flag) + ", expected 0 or 1");
    return *this;
  }
  void expect_end() { reader_.expect_end(); }

 private:
  template <base::WireScalar T>
  void get(T& number) {
    number = reader_.read<T>();
  }
  void get(Path& path) {
    const auto number = reader_.read<std::uint8_t>();
    if (number >= kPaths)
      refuse("RTS frame has path " + std::to_string(number) + ", the last one is " +
             std::to_string(kPaths - 1));
    path = static_cast<Path>(number);
  }
  void get(PairName& pair) {
    (*this)(pair.source_device, pair.destination_device, pair.epoch);
    if (pair.source_device < kMaxDevices && pair.destination_device < kMaxDevices) return;
    refuse("device transfer frame names devices " + std::to_string(pair.source_device) + " and " +
           std::to_string(pair.destination_device) + ", at most " + std::to_string(kMaxDevices) +
           " are possible");
  }
  void get(ProcessIdentity& each) { (*this)(each.host[0], each.host[1], each.process); }
  void get(std::string& text) {
    text = reader_.read_string();
    if (text.size() > kMaxText) refuse("device transfer frame has a text of more than 2048 bytes");
  }
  void get(FrameBytes& bytes) { bytes = reader_.take(reader_.remaining()); }
  void get(nccl::UniqueId& id) {
    std::memcpy(id.internal, reader_.take(sizeof(id.internal)).data(), sizeof(id.internal));
  }
  void get(Uuids& uuids) {
    const std::uint32_t devices = reader_.read_count(16);
    if (devices > kMaxDevices)
      refuse("HELLO frame has " + std::to_string(devices) + " devices, the limit is " +
             std::to_string(kMaxDevices));
    uuids.resize(devices);
    for (auto& uuid : uuids) std::memcpy(uuid.data(), reader_.take(uuid.size()).data(), 16);
  }

  base::ByteReader reader_;
};

template <class Frame>
struct KindOf;
#define STITCH_KIND(Frame, kind, name)                   \
  template <>                                            \
  struct KindOf<Frame> {                                 \
    static constexpr FrameKind kKind = FrameKind::kind;  \
    static constexpr const char* kName = #name " frame"; \
  };
#define STITCH_FRAMES(X)                    \
  X(HelloFrame, hello, HELLO)               \
  X(RtsFrame, rts, RTS)                     \
  X(CtsFrame, cts, CTS)                     \
  X(RetryFrame, retry, RETRY)               \
  X(GrantFrame, grant, GRANT)               \
  X(DataFrame, data, DATA)                  \
  X(FinishedFrame, finished, FINISHED)      \
  X(CancelFrame, cancel, CANCEL)            \
  X(ForgetFrame, forget, FORGET)            \
  X(CommOpenFrame, comm_open, COMM_OPEN)    \
  X(CommReadyFrame, comm_ready, COMM_READY) \
  X(CommBreakFrame, comm_break, COMM_BREAK)
STITCH_FRAMES(STITCH_KIND)
#undef STITCH_KIND

// The fields of each frame behind its kind, in the order of PROTOCOL.md. RETRY and FORGET name a
// transfer and say nothing else.
template <class Io, class Frame>
void fields(Io& io, Frame& frame) {
  using Kind = std::remove_const_t<Frame>;
  if constexpr (std::is_same_v<Kind, HelloFrame>) {
    io(frame.uid, frame.process, frame.nccl_version, frame.device_uuids);
  } else if constexpr (std::is_same_v<Kind, RtsFrame>) {
    io(frame.id, frame.path, frame.pair, frame.bytes, frame.clock);
  } else if constexpr (std::is_same_v<Kind, CtsFrame>) {
    io(frame.id, frame.pair, frame.clock);
  } else if constexpr (std::is_same_v<Kind, GrantFrame>) {
    io(frame.id, frame.chunks);
  } else if constexpr (std::is_same_v<Kind, DataFrame>) {
    io(frame.id, frame.offset, frame.bytes);
  } else if constexpr (std::is_same_v<Kind, FinishedFrame>) {
    io(frame.id, frame.pair).flag(frame.failed)(frame.text);
  } else if constexpr (std::is_same_v<Kind, CancelFrame>) {
    io(frame.id, frame.code, frame.text);
  } else if constexpr (std::is_same_v<Kind, CommOpenFrame>) {
    io(frame.pair, frame.nccl_version, frame.piece_bytes, frame.unique_id);
  } else if constexpr (std::is_same_v<Kind, CommReadyFrame>) {
    io(frame.pair);
  } else if constexpr (std::is_same_v<Kind, CommBreakFrame>) {
    io(frame.pair).flag(frame.from_source)(frame.text);
  } else {
    io(frame.id);
  }
}

}  // namespace

template <class Frame>
Bytes encode(const Frame& frame) {
  Bytes out;
  Writer writer(out);
  writer(KindOf<Frame>::kKind);
  fields(writer, frame);
  return out;
}

template <class Frame>
Frame decode(FrameBytes bytes) {
  Reader reader(bytes, KindOf<Frame>::kName);
  Frame frame;
  fields(reader, frame);
  reader.expect_end();
  return frame;
}

#define STITCH_CODED(Frame, kind, name) \
  template Bytes encode(const Frame&);  \
  template Frame decode(FrameBytes);
STITCH_FRAMES(STITCH_CODED)
#undef STITCH_CODED
#undef STITCH_FRAMES

FrameKind kind_of(FrameBytes frame) {
  if (frame.empty()) refuse("device transfer frame is empty");
  const auto kind = static_cast<std::uint8_t>(frame[0]);
  if (kind < static_cast<std::uint8_t>(FrameKind::hello) ||
      kind > static_cast<std::uint8_t>(FrameKind::forget))
    refuse("device transfer frame has kind " + std::to_string(kind));
  return static_cast<FrameKind>(kind);
}

}  // namespace stitch::transport::gpu
