#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "stitch/dist_autograd/context.h"
#include "stitch/dist_autograd/context_release.h"
#include "stitch/dist_autograd/context_table.h"
#include "stitch/dist_autograd/protocol/messages.h"
#include "stitch/dist_autograd/recording.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/calls/extension.h"

namespace stitch::rpc {
class InArchive;
}

namespace stitch::dist_autograd {

class Pass;

// Distributed autograd's part of an agent: has calls and replies recorded, starts passes, and
// brings messages to their passes and contexts. One lives in every Agent and is owned by it. Thread
// contract: any thread, as Extension says. What may run long (plans, marking, tensors, nodes) is
// done like requests (Agent::post_where_read), or by the thread in backward() if that has read the
// message; ACK, QUIET, CLOSE_MARKING, DONE and ABORT are handled immediately, but for those that
// may start marking.
class Engine final : public rpc::Extension {
 public:
  explicit Engine(rpc::Agent& agent);
  // The engine of an agent.
  [[nodiscard]] static Engine& of(rpc::Agent& agent);

  [[nodiscard]] ContextTable& contexts() noexcept { return contexts_; }
  // Ends a context of this worker, here and on all participants. Its passes end with `cancelled`;
  // returns when none of their nodes runs here.
  void end_context(const std::shared_ptr<ContextState>& context) {
    rpc::Agent::outside_delivery([&] { release_.end_context(context); });
  }
  // Starts a backward pass from here; its nodes run on the pool and where messages are read.
  // Throws Error(invalid_argument) for invalid roots or options.
  [[nodiscard]] Future<void> backward_async(const std::shared_ptr<ContextState>& context,
                                            std::vector<at::Tensor> roots, const Options& options,
                                            std::shared_ptr<AtSettled> at_settled);
  // The same, and waits: this thread runs nodes of the pass and reads messages meanwhile. Throws
  // the error of the pass.
  void backward(const std::shared_ptr<ContextState>& context, std::vector<at::Tensor> roots,
                const Options& options, std::shared_ptr<AtSettled> at_settled);

  // For Pass.
  [[nodiscard]] LinkId next_link() noexcept { return recording_.next_link(); }
  // The context fails with `error`, unless it has failed or ended, because of the pass of `header`,
  // which has been aborted. What follows as for spread_failure().
  void fail_context(ContextState& context, const wire::PassHeader& header, const Error& error,
                    std::set<WorkerId> told) noexcept;
  // Ends the other passes of the context here, and sends ABORT to `told` and, when it is the first
  // failure, to all that may read its gradients.
  void spread_failure(const ContextState& context, const wire::PassHeader& header,
                      std::set<WorkerId> told, ContextState::FailEffects effects) noexcept;
  // Passes as the table of the report that tells of them.
  [[nodiscard]] rpc::Table table_of(const std::vector<std::shared_ptr<Pass>>& passes);
  void count_gradients(std::size_t links) noexcept {
    gradients_sent_.fetch_add(links, std::memory_order_relaxed);
  }

  // Extension
  void on_send(rpc::OutMessage& message, const WorkerInfo& to) override {
    recording_.on_send(message, to);
  }
  void on_decode(rpc::InMessage& message, rpc::ExecutionContext& execution) override {
    recording_.on_decode(message, execution);
  }
  void on_peer_lost(const WorkerInfo& peer, const Error& reason) override;
  void on_member_dead(const WorkerInfo& dead, const Error& reason) override;
  void on_member_left(const WorkerInfo& left) override;
  std::size_t active() override;
  void stop() override;
  void report(rpc::Page page, rpc::Report& report) override;
  void debug_info(std::map<std::string, std::int64_t>& numbers) override;

 private:
  // A pass that has been prepared, and the checked gradients of its roots.
  struct NewPass {
    std::shared_ptr<Pass> pass;
    std::vector<at::Tensor> gradients;
    rpc::Clock::time_point deadline;
  };
  [[nodiscard]] NewPass make_pass(const std::shared_ptr<ContextState>& context,
                                  std::vector<at::Tensor> roots, const Options& options,
                                  std::shared_ptr<AtSettled> at_settled);
  void on_frame(rpc::InMessage message);
  // The frames that open no pass; `pass` is null when it is unknown here or has ended.
  void handle(std::uint16_t kind, const wire::PassHeader& header, const std::shared_ptr<Pass>& pass,
              const rpc::InMessage& message, rpc::InArchive& archive);
  void on_quiet(const wire::PassHeader& header, const std::shared_ptr<Pass>& pass,
                const WorkerInfo& from, const wire::OlderPasses& older);
  // Does what a message of a pass asks for and what may take long: on this thread after polling, if
  // it drives the pass (`collect`), else like a request.
  void serve(bool collect, base::UniqueFunction<void()> task);
  void open_and_handle(rpc::InMessage message);
  void on_abort(const wire::PassHeader& header, const Error& error) noexcept;
  void refuse_to_end(const wire::PassHeader& header, const WorkerInfo& from);
  // Why a message of a pass in that context, which is unknown here, is refused.
  [[nodiscard]] Error not_here(const ContextId& context) const;
  // The context and pass of a message; each is null when it is unknown here or has ended.
  struct Target {
    std::shared_ptr<ContextState> context;
    std::shared_ptr<Pass> pass;
  };
  [[nodiscard]] Target find(const wire::PassHeader& header) const;

  rpc::Agent& agent_;
  ContextTable contexts_;
  ContextRelease release_;
  Recording recording_;
  std::atomic<std::uint64_t> gradients_sent_{0};
};

}  // namespace stitch::dist_autograd
