#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "stitch/dist_autograd/context.h"
#include "stitch/dist_autograd/context_table.h"
#include "stitch/dist_autograd/messages.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/agent/extension.h"

namespace stitch::dist_autograd {

class Pass;

// Distributed autograd's part of an agent: hangs contexts and links on calls and replies, and
// brings messages of passes to their passes. One lives in every Agent and is owned by it. Thread
// contract: any thread, as Extension says. What may run long (plans, tensors) goes to the thread
// pool; acknowledgements, ends and aborts are handled where they arrive.
class Engine final : public rpc::Extension {
 public:
  explicit Engine(rpc::Agent& agent);
  // The engine of an agent.
  [[nodiscard]] static Engine& of(rpc::Agent& agent);

  [[nodiscard]] ContextTable& contexts() noexcept { return contexts_; }
  // Ends a context of this worker, here and on every participant. Its passes end with `cancelled`;
  // returns when none of their nodes runs here.
  void end_context(const std::shared_ptr<ContextState>& context);
  // Starts a backward pass from here. Throws Error(invalid_argument) when roots or options make no
  // sense.
  [[nodiscard]] Future<void> backward(const std::shared_ptr<ContextState>& context,
                                      std::vector<at::Tensor> roots, const Options& options);

  [[nodiscard]] LinkId next_link() noexcept {
    return {agent_.self().id, next_link_.fetch_add(1, std::memory_order_relaxed)};
  }
  // The context has failed with `error`, found by the pass of `header`, which has been aborted:
  // ends its other passes here and tells everybody who must not use its numbers, and `told`.
  void spread_failure(const ContextState& context, const wire::PassHeader& header,
                      ContextState::Failing failing, std::set<WorkerId> told);
  void count_gradients(std::size_t links) noexcept {
    gradients_sent_.fetch_add(links, std::memory_order_relaxed);
  }

  // Extension
  void on_send(rpc::OutMessage& message, const WorkerInfo& to) override;
  void on_decode(rpc::InMessage& message, rpc::ExecutionContext& ambient) override;
  void on_peer_lost(const WorkerInfo& peer, const Error& reason) override;
  std::size_t active() override;
  void stop() override;
  void debug_info(std::map<std::string, std::int64_t>& numbers) override;

 private:
  void on_frame(rpc::InMessage message);
  void open_and_handle(rpc::InMessage message);
  void on_abort(const WorkerInfo& from, const wire::PassHeader& header, const Error& error);
  void on_release(const WorkerInfo& from, const wire::Release& release_of);
  void on_hold(const WorkerInfo& from, const wire::Hold& hold);
  void release(const std::vector<WorkerInfo>& peers, const wire::Release& release_of);
  void refuse(const WorkerInfo& to, const wire::PassHeader& header, const Error& error);
  void send_abort(const WorkerInfo& to, const wire::PassHeader& header, const Error& error);
  // Sends what nobody would say again: what `make` makes, when need be more than once.
  void tell(const WorkerInfo& to, std::function<rpc::OutMessage()> make);
  // recording.cc: the context of a request, which `from` has told this worker by it. Null when it
  // has ended. Throws Error(protocol) for one that cannot exist.
  [[nodiscard]] std::shared_ptr<ContextState> join(const ContextId& id, const WorkerInfo& from);
  // Tells the homes of contexts that this worker knows through `lost` only that it takes part.
  void hold_contexts_told_by(const WorkerInfo& lost);
  void hold(WorkerId home, std::uint64_t epoch, std::vector<std::uint64_t> contexts);
  // Throws Error(protocol) for a life of a worker that does not exist.
  void expect_life(WorkerId worker, std::uint64_t epoch, const char* what);

  rpc::Agent& agent_;
  ContextTable contexts_;
  std::atomic<std::uint64_t> next_link_{1};
  std::atomic<std::uint64_t> gradients_sent_{0};
};

}  // namespace stitch::dist_autograd
