#include "stitch/transport/wire/frame.h"

#include "stitch/base/error.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz {
namespace {

using transport::Buffer;

// The input: how many large buffers come with the frame, the size of each in KiB, the frame.
bool run(Bytes input) {
  Choices choices(input);
  transport::Message message;
  const unsigned buffers = choices.byte() % 8;
  for (unsigned i = 0; i < buffers; ++i) {
    message.buffers.push_back(transport::allocate_buffer({}, std::size_t{choices.byte()} * 1024));
  }
  message.frame = copy_of(choices.rest());
  static_cast<void>(transport::peek_frame(message.frame));
  try {
    const transport::FrameView view(message);
    touch(view.body());
    for (const auto& section : view.sections()) touch(section.bytes);
    for (const auto& each : view.buffers()) {
      if (each.in_frame)
        touch({static_cast<const std::byte*>(each.buffer.data), each.buffer.bytes});
    }
    return true;
  } catch (const Error&) {
    return false;
  }
}

std::vector<base::Bytes> seeds() {
  std::vector<base::Bytes> list;
  for (const unsigned large : {0u, 2u}) {
    transport::FrameBuilder builder(7);
    builder.body().append("body of a frame", 15);
    builder.end_body();
    const std::string section = "section";
    builder.add_section(0x100, std::as_bytes(std::span(section)));
    builder.add_section(0x101, {});
    Buffer small = transport::allocate_buffer({}, 100);
    std::memset(small.data, 1, small.bytes);
    builder.add_buffer(small);
    for (unsigned i = 0; i < large; ++i)
      builder.add_buffer(transport::allocate_buffer({}, std::size_t{20 + i} * 1024));
    const transport::Message message = std::move(builder).finish();
    base::Bytes seed;
    base::ByteWriter out(seed);
    out.write(static_cast<std::uint8_t>(message.buffers.size()));
    for (const auto& buffer : message.buffers)
      out.write(static_cast<std::uint8_t>(buffer.bytes / 1024));
    out.write_bytes({message.frame.data(), message.frame.size()});
    list.push_back(std::move(seed));
  }
  return list;
}

}  // namespace

const Target frame{"frame", run, seeds, 64, std::size_t{4} << 20};

}  // namespace stitch::fuzz
