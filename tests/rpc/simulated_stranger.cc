#include "tests/rpc/simulated_stranger.h"

#include <memory>
#include <utility>

#include "stitch/rpc/agent/bind_frame.h"
#include "stitch/rpc/message/frame_kinds.h"

namespace stitch::rpc::test {

transport::ConnectionEvents stranger_events(int manner, std::uint64_t token,
                                            transport::Message evil) {
  const auto shared = std::make_shared<const transport::Message>(std::move(evil));
  const auto send = [shared](transport::Connection& to, std::uint64_t number) {
    transport::Message copy;
    copy.frame.append(shared->frame.data(), shared->frame.size());
    transport::put_numbers(copy.frame, {.number = number, .received = {}});
    to.send(std::move(copy), nullptr);
  };
  transport::ConnectionEvents events;
  events.on_open = [manner, send](const auto& connection) {
    if (manner == 0) send(*connection, 0);
  };
  events.on_message = [=](const auto& connection, const transport::Message& message) {
    const auto head = transport::peek_frame(message.frame);
    if (!head || head->kind != wire::kBind || manner == 1) return;
    Bind bind = Bind::decode(head->body);
    if (bind.step == Bind::Step::offer) {
      bind.step = manner == 2 ? Bind::Step::confirm : Bind::Step::accept;
      bind.token = token;
      connection->send(bind.encode(), nullptr);
    }
    send(*connection, 1);
  };
  events.on_closed = [](const auto&, const Error&) {};
  return events;
}

}  // namespace stitch::rpc::test
