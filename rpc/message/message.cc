#include "stitch/rpc/message/message.h"

#include <algorithm>
#include <utility>

namespace stitch::rpc {

DepartingAttachments::~DepartingAttachments() {
  if (!attachments_.empty())
    notify(Error(ErrorCode::cancelled, "the message was dropped before it was sent"));
}

void DepartingAttachments::notify(const std::optional<Error>& error) noexcept {
  for (const auto& each : std::exchange(attachments_, {})) each->on_sent(error);
}

std::size_t total_bytes(const transport::Message& message) {
  std::size_t bytes = message.frame.size();
  for (const auto& buffer : message.buffers) bytes += buffer.bytes;
  return bytes;
}

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t at = 0; at < text.size();) {
    const auto end = std::min(text.find('\n', at), text.size());
    lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return lines;
}

InMessage::InMessage(transport::Message message, WorkerInfo sender)
    : raw(std::move(message)), view(raw), from(std::move(sender)) {}

}  // namespace stitch::rpc
