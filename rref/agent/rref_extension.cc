#include "stitch/rref/agent/object_access.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/given_arguments.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rref/agent/carried_refs.h"
#include "stitch/rref/agent/frame_kinds.h"
#include "stitch/rref/agent/object_server.h"
#include "stitch/rref/agent/rref_agent.h"

namespace stitch::rref {
namespace {

class RRefExtension final : public rpc::Extension {
 public:
  explicit RRefExtension(rpc::Agent& agent)
      : rrefs(std::make_shared<RRefAgent>(agent)), server_(rrefs) {
    agent.set_frame_handler(wire::kLedgerFrame,
                            [weak = std::weak_ptr(rrefs)](rpc::InMessage message) {
                              if (const auto alive = weak.lock())
                                alive->accept_ledger(message.from, message.view.body());
                            });
  }
  ~RRefExtension() override {
    rrefs->stop();
    rrefs->destroy_remaining();
  }

  void on_send(rpc::OutMessage& message, const WorkerInfo& to) override {
    if (auto* refs = message.find_attachment<OutgoingRefs>()) refs->leave(rrefs, message, to);
  }
  void on_receive(rpc::InMessage& message) override {
    auto refs = IncomingRefs::read(rrefs, message);
    if (!refs) return;
    const bool given = !refs->arguments().empty();
    message.attachments.push_back(std::move(refs));
    if (given) message.attachments.push_back(std::make_unique<rpc::GivenArguments>());
  }
  void on_decode(rpc::InMessage& message, rpc::ExecutionContext& context) override {
    const auto* refs = message.find_attachment<IncomingRefs>();
    if (refs != nullptr && refs->create()) {
      context.deadline =
          std::min(context.deadline, base::deadline_or_none(refs->create()->timeout));
    }
  }
  bool take_over(const std::shared_ptr<rpc::IncomingCall>& call) override {
    return server_.take_over(call);
  }
  void on_peer_lost(const WorkerInfo& peer, const Error& reason) override {
    rrefs->on_peer_lost(peer, reason);
  }
  void on_member_dead(const WorkerInfo& dead, const Error& reason) override {
    rrefs->on_member_over(dead, std::string(": ") + reason.what());
  }
  void on_member_left(const WorkerInfo& left) override {
    rrefs->on_member_over(left, ": it has left");
  }
  void on_member_joined(const WorkerInfo& joined) override { rrefs->on_member_joined(joined); }
  void stop() override { rrefs->stop(); }
  void on_all_ended() override { rrefs->destroy_remaining(); }
  void report(rpc::Page page, rpc::Report& report) override {
    if (page == rpc::Page::rrefs) report.push_back(rrefs->unfinished());
  }
  void debug_info(std::map<std::string, std::int64_t>& numbers) override {
    rrefs->debug_info(numbers);
  }

  const std::shared_ptr<RRefAgent> rrefs;

 private:
  const ObjectServer server_;
};

}  // namespace

int register_rref_extension() {
  static const int index =
      rpc::register_extension([](rpc::Agent& agent) -> std::unique_ptr<rpc::Extension> {
        return std::make_unique<RRefExtension>(agent);
      });
  return index;
}

std::shared_ptr<RRefAgent> rrefs_of(rpc::Agent& agent) {
  return static_cast<RRefExtension&>(agent.extension(kRRefExtension)).rrefs;
}

}  // namespace stitch::rref
