#include "stitch/transport/wire/frame.h"

#include <cstring>
#include <limits>

#include "tests/fuzz/targets.h"

namespace stitch::fuzz::frames {

using transport::Buffer;
using transport::FrameView;
using transport::Message;

static Bytes bytes_in(const FrameView::BufferView& view) {
  return {static_cast<const std::byte*>(view.buffer.data), view.buffer.bytes};
}

static Message written_again(const FrameView& view) {
  transport::FrameBuilder builder(view.kind());
  builder.body().append(view.body().data(), view.body().size());
  builder.end_body();
  for (const auto& section : view.sections()) builder.add_section(section.kind, section.bytes);
  for (const auto& each : view.buffers()) {
    builder.set_inline_bytes(each.in_frame ? std::numeric_limits<std::size_t>::max() : 0);
    static_cast<void>(builder.add_buffer(each.buffer));
  }
  return std::move(builder).finish();
}

// What was read is what is read again after it has been written. Sections may overlap: those that
// do are not written, as they could take many times the memory of the frame.
static void check_written_again(const FrameView& view, std::size_t frame_bytes) {
  std::size_t bytes = 0;
  for (const auto& section : view.sections()) bytes += section.bytes.size();
  if (bytes > frame_bytes) return;
  const Message again = written_again(view);
  const FrameView other(again);
  require(other.kind() == view.kind() && same(other.body(), view.body()), "body of a frame");
  require(other.sections().size() == view.sections().size(), "number of sections");
  for (std::size_t i = 0; i < view.sections().size(); ++i) {
    require(other.sections()[i].kind == view.sections()[i].kind &&
                same(other.sections()[i].bytes, view.sections()[i].bytes),
            "section of a frame");
  }
  require(other.buffers().size() == view.buffers().size(), "number of buffers");
  for (std::size_t i = 0; i < view.buffers().size(); ++i) {
    require(other.buffers()[i].buffer.device == view.buffers()[i].buffer.device &&
                same(bytes_in(other.buffers()[i]), bytes_in(view.buffers()[i])),
            "buffer of a frame");
  }
}

// The input: how many large buffers come with the frame, the size of each in KiB, the frame.
static bool run(Bytes input) {
  Choices choices(input);
  Message message;
  const unsigned buffers = choices.byte() % 8;
  for (unsigned i = 0; i < buffers; ++i) {
    Buffer buffer = transport::allocate_buffer({}, std::size_t{choices.byte()} * 1024);
    if (buffer.bytes > 0) std::memset(buffer.data, 0, buffer.bytes);
    message.buffers.push_back(std::move(buffer));
  }
  message.frame = copy_of(choices.rest());
  const auto head = transport::peek_frame(message.frame);
  if (const auto numbers = transport::numbers_of(message.frame)) {
    base::Bytes copy = copy_of(message.frame.span());
    transport::put_numbers(copy, *numbers);
    require(same(copy.span(), message.frame.span()), "numbers of a frame, written again");
  }
  return accepts([&] {
    const FrameView view(message);
    require(head && head->kind == view.kind() && same(head->body, view.body()),
            "the head of a frame differs from the frame");
    touch(view.body());
    for (const auto& section : view.sections()) {
      touch(section.bytes);
      require(view.section(section.kind) != nullptr, "a section is not found");
    }
    for (const auto& each : view.buffers()) touch(bytes_in(each));
    check_written_again(view, message.frame.size());
  });
}

static base::Bytes seed_of(unsigned sections, unsigned small, unsigned large) {
  transport::FrameBuilder builder(static_cast<std::uint16_t>(1 + sections));
  builder.body().append("body of a frame", 15);
  builder.end_body();
  for (unsigned i = 0; i < sections; ++i) {
    const std::string section(7 * i, 's');
    builder.add_section(static_cast<std::uint16_t>(0x100 + i), std::as_bytes(std::span(section)));
  }
  for (unsigned i = 0; i < small + large; ++i) {
    // Large ones between the small ones.
    const bool is_large = small == 0 || (large > 0 && i % 2 == 1 && i / 2 < large);
    Buffer buffer =
        transport::allocate_buffer({}, is_large ? std::size_t{20 + i} * 1024 : 10 * i + 1);
    std::memset(buffer.data, 1, buffer.bytes);
    static_cast<void>(builder.add_buffer(buffer));
  }
  Message message = std::move(builder).finish();
  transport::put_numbers(message.frame, {.number = 7, .received = {5, 6}});
  base::Bytes seed;
  base::ByteWriter out(seed);
  out.write(static_cast<std::uint8_t>(message.buffers.size()));
  for (const auto& buffer : message.buffers)
    out.write(static_cast<std::uint8_t>(buffer.bytes / 1024));
  out.write_bytes(message.frame.span());
  return seed;
}

static Seeds seeds() {
  Seeds list;
  list.push_back({"body", seed_of(0, 0, 0)});
  list.push_back({"sections", seed_of(5, 0, 0)});
  list.push_back({"small-buffers", seed_of(1, 4, 0)});
  list.push_back({"large-buffers", seed_of(2, 0, 3)});
  list.push_back({"mixed-buffers", seed_of(3, 3, 2)});
  return list;
}

}  // namespace stitch::fuzz::frames

namespace stitch::fuzz {
// The buffers beside the frame are announced in KiB.
const Target frame{"frame", frames::run, frames::seeds, 128, std::size_t{8} << 20};
}  // namespace stitch::fuzz
