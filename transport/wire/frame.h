#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "stitch/base/bytes.h"
#include "stitch/transport/wire/buffer.h"

namespace stitch::transport {

// The unit of transfer: a frame of bytes that FrameBuilder lays out, and the large buffers that are
// sent beside it. WIRE.md has the layout.
struct Message {
  base::Bytes frame;
  std::vector<Buffer> buffers;
};

// Whether a received message has come without its buffers, for which there was no memory: all of
// them have their sizes and no data.
[[nodiscard]] inline bool lacks_buffers(const Message& message) noexcept {
  return std::ranges::any_of(message.buffers, [](const Buffer& buffer) {
    return buffer.data == nullptr && buffer.bytes > 0;
  });
}
// Takes the memory of a message's buffers away, which are to be of these sizes.
inline void leave_out_buffers(Message& message, std::span<const std::size_t> sizes) {
  message.buffers.clear();
  for (const std::size_t bytes : sizes) message.buffers.push_back({{}, nullptr, bytes, nullptr});
}

// Buffers up to this size are copied into the frame by default: one transfer instead of two.
inline constexpr std::size_t kInlineBytes = std::size_t{16} << 10;

// Lays out one frame: kind, body, sections (small typed byte runs that layers attach), buffers.
// Write the body first, straight into body(), then sections and buffers in any order, then
// finish(). Not thread-safe.
class FrameBuilder {
 public:
  explicit FrameBuilder(std::uint16_t kind);
  FrameBuilder(FrameBuilder&&) noexcept = default;
  FrameBuilder& operator=(FrameBuilder&&) noexcept = default;

  // The frame under construction; append the body to it. REQUIRES: end_body() has not been called.
  [[nodiscard]] base::Bytes& body() noexcept { return frame_; }
  // Where the body starts inside body().
  [[nodiscard]] static constexpr std::size_t body_offset() noexcept { return kHeaderBytes; }
  void end_body();
  // The size up to which buffers on the CPU are copied into the frame from now on.
  void set_inline_bytes(std::size_t bytes) noexcept { inline_bytes_ = bytes; }
  [[nodiscard]] std::size_t inline_bytes() const noexcept { return inline_bytes_; }

  // Attaches a section; returns where its bytes are in the frame. REQUIRES: end_body(). Section
  // kinds are defined by the layers above; readers skip unknown ones.
  std::size_t add_section(std::uint16_t kind, std::span<const std::byte> bytes);
  // Attaches a buffer and returns its index: copied into the frame when it is small and on the CPU,
  // else shared until sent. REQUIRES: end_body().
  std::uint32_t add_buffer(Buffer buffer);
  [[nodiscard]] std::uint16_t kind() const noexcept { return kind_; }
  [[nodiscard]] std::uint32_t buffer_count() const noexcept {
    return static_cast<std::uint32_t>(entries_.size());
  }

  [[nodiscard]] Message finish() &&;

  static constexpr std::size_t kHeaderBytes = 64;

 private:
  struct SectionEntry {
    std::uint16_t kind;
    std::uint32_t offset;
    std::uint32_t bytes;
  };
  struct BufferEntry {
    Device device;
    std::uint64_t bytes;
    std::uint32_t offset;  // in the frame; 0: beside it
  };
  std::uint16_t kind_;
  std::size_t body_bytes_ = 0;
  std::size_t inline_bytes_ = kInlineBytes;
  base::Bytes frame_;
  std::vector<SectionEntry> sections_;
  std::vector<BufferEntry> entries_;
  std::vector<Buffer> beside_;
};

// The part of a frame that can be read before its buffers have arrived; nothing when it is
// malformed.
struct FrameHead {
  std::uint16_t kind = 0;
  std::span<const std::byte> body;
};
[[nodiscard]] std::optional<FrameHead> peek_frame(const base::Bytes& frame) noexcept;

// What a session writes into the header of each frame (rpc/PROTOCOL.md, section 6): the frame's
// number, and up to which numbers the sender has received every frame. Two streams are numbered
// apart, as small messages may overtake large ones.
struct FrameNumbers {
  static constexpr std::size_t kStreams = 2;  // 0: small messages, 1: large ones
  static constexpr std::uint64_t kLarge = std::uint64_t{1} << 63;
  std::uint64_t number = 0;  // 0: not numbered; with kLarge: of the large messages
  std::array<std::uint64_t, kStreams> received{};
};
// REQUIRES: the frame has a whole header.
void put_numbers(base::Bytes& frame, const FrameNumbers& numbers) noexcept;
// Nothing when the frame is shorter than a header.
[[nodiscard]] std::optional<FrameNumbers> numbers_of(const base::Bytes& frame) noexcept;

// A checked reader of a received message. The constructor checks every offset, length and count
// against the size of the frame, and throws Error(protocol) naming the field; afterwards nothing
// here can fail. Views are valid as long as the message.
class FrameView {
 public:
  // A reader looks through all of them for each that it wants.
  static constexpr std::size_t kMaxSections = 256;

  explicit FrameView(const Message& message);

  [[nodiscard]] std::uint16_t kind() const noexcept { return kind_; }
  [[nodiscard]] std::span<const std::byte> body() const noexcept { return body_; }
  // The first section of that kind; empty with found() false when there is none.
  struct Section {
    std::uint16_t kind = 0;
    std::span<const std::byte> bytes;
  };
  [[nodiscard]] const std::vector<Section>& sections() const noexcept { return sections_; }
  [[nodiscard]] const Section* section(std::uint16_t kind) const noexcept;
  // Buffers by index. One inside the frame has no keep_alive: copy it before the frame is
  // destroyed.
  struct BufferView {
    Buffer buffer;
    bool in_frame = false;
  };
  [[nodiscard]] const std::vector<BufferView>& buffers() const noexcept { return buffers_; }

 private:
  std::uint16_t kind_ = 0;
  std::span<const std::byte> body_;
  std::vector<Section> sections_;
  std::vector<BufferView> buffers_;
};

}  // namespace stitch::transport
