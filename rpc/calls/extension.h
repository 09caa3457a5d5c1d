#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "stitch/rpc/calls/report.h"
#include "stitch/rpc/future/execution_context.h"
#include "stitch/rpc/message/message.h"

namespace stitch::rpc {

class Agent;
class IncomingCall;

// How a layer above (references, autograd) takes part in calls without this layer knowing it: every
// Agent owns one Extension of each registered kind and calls it while the agent is alive. Thread
// contract: every method may run on several threads concurrently; no lock of the agent is held. An
// exception thrown by a method becomes the error of the call concerned, if there is one.
class Extension {
 public:
  virtual ~Extension() = default;

  // A request or reply to `to` is about to be sent; its body and its tensors are complete. May add
  // sections and attachments. Runs on the sending thread under the call's execution context.
  virtual void on_send(OutMessage& message, const WorkerInfo& to) {}
  // A request, reply or error reply has arrived; only its frame has been parsed. May add
  // attachments. Reader thread.
  virtual void on_receive(InMessage& message) {}
  // The tensors of a request or reply have been decoded; user code has not seen them. `context` is
  // the execution context of its handler (for a reply: one with the worker alone). Pool thread for
  // requests, reader thread for replies.
  virtual void on_decode(InMessage& message, ExecutionContext& context) {}
  // True if this extension handles the request by itself: it will run or refuse it. Reader thread,
  // after on_receive.
  virtual bool take_over(const std::shared_ptr<IncomingCall>& call) { return false; }
  // The connection to `peer` broke. Within this epoch of the peer there will be no other one.
  virtual void on_peer_lost(const WorkerInfo& peer, const Error& reason) {}
  // `dead` was declared dead: the binding verdict, once a life, on every live worker; after
  // on_peer_lost() of that life.
  virtual void on_member_dead(const WorkerInfo& dead, const Error& reason) {}
  // A new life is a member; before any of its messages.
  virtual void on_member_joined(const WorkerInfo& joined) {}
  // A worker left gracefully while the world goes on.
  virtual void on_member_left(const WorkerInfo& left) {}
  // A life of which this worker hears first that it is over, dead or left: it never was a member
  // here.
  virtual void on_past_member(const WorkerInfo& past, const Error& reason) {
    on_member_dead(past, reason);
  }
  // The number of operations that graceful shutdown must wait for.
  [[nodiscard]] virtual std::size_t active() { return 0; }
  // All workers of a fixed world have agreed to leave: this one closes soon. It may take until the
  // deadline. On the thread that shuts down, before stop().
  virtual void on_all_leave(std::chrono::steady_clock::time_point deadline) {}
  // The worker is shutting down: completes or drops everything. Before the thread pool closes.
  virtual void stop() {}
  // After stop(), when every handler and every callback here has returned. Not called if one was
  // still running at the end of the time limit; what it uses then lives as long as the agent.
  virtual void on_all_ended() {}
  // Adds the tables that this layer has about what is under way. Must not need a user-function
  // thread; takes only locks that are held briefly.
  virtual void report(Page page, Report& report) {}
  virtual void debug_info(std::map<std::string, std::int64_t>& numbers) {}
};

using Extensions = std::vector<std::unique_ptr<Extension>>;
using ExtensionFactory = std::unique_ptr<Extension> (*)(Agent& agent);
// Adds an extension to every Agent constructed from now on. Returns its index for
// Agent::extension(). To be called by the initialisation of a namespace-scope variable.
int register_extension(ExtensionFactory factory);

[[nodiscard]] const std::vector<ExtensionFactory>& extension_factories();

}  // namespace stitch::rpc
