#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "stitch/rpc/future/execution_context.h"
#include "stitch/rpc/message/message.h"

namespace stitch::rpc {

class Agent;
class IncomingCall;

// How a layer above takes part in calls without this layer knowing it: one Extension of each kind
// lives in every Agent. Owned by the agent, which outlives no callback into it. Thread contract:
// every method may run on several threads at once; no lock of the agent is held. What they throw
// becomes the error of the call concerned, where there is one.
class Extension {
 public:
  virtual ~Extension() = default;

  // A request or reply is about to leave for `to`; its body and its tensors are complete. May add
  // sections and attachments. Runs on the sending thread under the ambient of the call.
  virtual void on_send(OutMessage& message, const WorkerInfo& to) {}
  // A request, reply or error reply has arrived; nothing but its frame has been read. May add
  // attachments. Reader thread.
  virtual void on_receive(InMessage& message) {}
  // The tensors of a request or reply have been made; user code has not seen them. `ambient` is
  // what its handler will run under (for a reply: that of the caller). Pool thread for requests,
  // reader thread for replies.
  virtual void on_decode(InMessage& message, ExecutionContext& ambient) {}
  // A request wants something else than to be run and replied to: true when this extension has
  // taken charge of it and will run or refuse it. Reader thread, after on_receive.
  virtual bool take_over(const std::shared_ptr<IncomingCall>& call) { return false; }
  // The connection to `peer` broke: that life of it is over.
  virtual void on_peer_lost(const WorkerInfo& peer, const Error& reason) {}
  // How many things graceful shutdown must wait for.
  [[nodiscard]] virtual std::size_t active() { return 0; }
  // The worker is leaving: complete or drop everything, for good. Before the thread pool closes.
  virtual void stop() {}
  // After stop(), when every handler and every callback here has returned; not called when one was
  // left behind at the end of the time limit: what it uses lives as long as the agent.
  virtual void on_all_ended() {}
  virtual void debug_info(std::map<std::string, std::int64_t>& numbers) {}
};

using ExtensionFactory = std::unique_ptr<Extension> (*)(Agent& agent);
// Makes every Agent constructed from now on have one of these. Returns its index for
// Agent::extension(). Meant for the initialisation of a namespace-scope variable.
int register_extension(ExtensionFactory factory);

[[nodiscard]] const std::vector<ExtensionFactory>& extension_factories();

}  // namespace stitch::rpc
