#include "stitch/rpc/message.h"

#include <utility>

namespace stitch {

InMessage::InMessage(transport::Message message, WorkerInfo sender)
    : raw(std::make_unique<const transport::Message>(std::move(message))), view(*raw), from(std::move(sender)) {}

}  // namespace stitch
