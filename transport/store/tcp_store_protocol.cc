#include "stitch/transport/store/tcp_store_protocol.h"

#include <span>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/base/printable.h"

namespace stitch::transport {

namespace {

constexpr std::uint16_t kRequestKind = 1;
constexpr std::uint16_t kReplyKind = 2;

// Runs read(); what a store would refuse is a fault of the peer's.
template <class Read>
auto from_peer(const Message& message, std::uint16_t kind, std::string_view what, Read read) {
  try {
    const FrameView frame(message);
    if (frame.kind() != kind || lacks_buffers(message))
      throw Error(ErrorCode::protocol, "it has kind " + std::to_string(frame.kind()));
    base::ByteReader reader(frame.body(), what);
    auto decoded = read(reader, frame);
    reader.expect_end();
    return decoded;
  } catch (const Error& error) {
    throw Error(ErrorCode::protocol,
                "malformed " + std::string(what) + ": " + base::printable(error.what()));
  }
}

}  // namespace

Message encode(const StoreRequest& request) {
  FrameBuilder frame(kRequestKind);
  base::ByteWriter writer(frame.body());
  writer.write(request.number);
  writer.write(request.operation);
  writer.write_string(request.key);
  writer.write_string(request.value);
  writer.write(request.count);
  frame.end_body();
  return std::move(frame).finish();
}

StoreRequest decode_store_request(const Message& message) {
  return from_peer(message, kRequestKind, "request to a store",
                   [](base::ByteReader& reader, const FrameView&) {
                     StoreRequest request;
                     request.number = reader.read<std::uint64_t>();
                     request.operation = reader.read<StoreOperation>();
                     request.key = reader.read_string();
                     request.value = reader.read_string();
                     request.count = reader.read<std::int64_t>();
                     if (request.operation < StoreOperation::set ||
                         request.operation > StoreOperation::stop_waiting)
                       throw Error(ErrorCode::protocol, "it asks for something unknown");
                     const bool empty_allowed = request.operation == StoreOperation::claims ||
                                                request.operation == StoreOperation::stop_waiting;
                     if (!request.key.empty() || !empty_allowed) check_key(request.key);
                     check_value(request.key, request.value);
                     return request;
                   });
}

Message encode(const StoreReply& reply) {
  FrameBuilder frame(kReplyKind);
  base::ByteWriter writer(frame.body());
  writer.write(reply.number);
  writer.write(static_cast<std::uint8_t>(reply.error ? *reply.error : ErrorCode{}));
  writer.write(static_cast<std::uint8_t>(reply.value != nullptr));
  writer.write(reply.count);
  writer.write(static_cast<std::uint32_t>(reply.entries.size()));
  for (const auto& [key, value] : reply.entries) {
    writer.write_string(key);
    writer.write_string(*value);
  }
  frame.end_body();
  if (reply.value && !reply.value->empty()) {
    // Shared by all that get it. A frame's buffers are not written to.
    frame.add_buffer(
        {{}, const_cast<char*>(reply.value->data()), reply.value->size(), reply.value});
  }
  return std::move(frame).finish();
}

StoreReply decode_store_reply(const Message& message) {
  return from_peer(message, kReplyKind, "reply of a store",
                   [](base::ByteReader& reader, const FrameView& frame) {
                     StoreReply reply;
                     reply.number = reader.read<std::uint64_t>();
                     const auto error = reader.read<std::uint8_t>();
                     const auto valued = reader.read<std::uint8_t>();
                     reply.count = reader.read<std::int64_t>();
                     for (auto left = reader.read_count(2 * sizeof(std::uint32_t)); left > 0;
                          --left) {
                       std::string key = reader.read_string();
                       std::string value = reader.read_string();
                       check_entry(key, value);
                       reply.entries.insert_or_assign(
                           std::move(key), std::make_shared<const std::string>(std::move(value)));
                     }
                     if (error > static_cast<std::uint8_t>(ErrorCode::already_exists) ||
                         valued > 1 || frame.buffers().size() > valued)
                       throw Error(ErrorCode::protocol, "it says something unknown");
                     std::string value;
                     if (!frame.buffers().empty()) {
                       const Buffer& buffer = frame.buffers()[0].buffer;
                       if (!(buffer.device == Device{}))
                         throw Error(ErrorCode::protocol, "its value is not in memory");
                       value.assign(static_cast<const char*>(buffer.data), buffer.bytes);
                     }
                     check_value({}, value);
                     if (error != 0) {
                       reply.error = static_cast<ErrorCode>(error);
                       value = base::printable(std::move(value));
                     }
                     if (valued == 1)
                       reply.value = std::make_shared<const std::string>(std::move(value));
                     return reply;
                   });
}

}  // namespace stitch::transport
