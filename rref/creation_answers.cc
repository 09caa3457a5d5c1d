#include "stitch/rref/creation_answers.h"

#include <chrono>
#include <utility>

#include <ATen/core/Tensor.h>

#include "stitch/base/byte_io.h"
#include "stitch/rpc/future/execution_context.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rref/carried_sections.h"
#include "stitch/rref/frame_kinds.h"
#include "stitch/rref/rref_agent.h"

namespace stitch::rref {

namespace {

// How long an answer waits behind other work of this worker.
constexpr std::chrono::milliseconds kDelay{1};

std::size_t bytes_of_tensors(const rpc::OutMessage& message) {
  std::size_t bytes = 0;
  for (const at::Tensor& tensor : message.tensors) {
    if (tensor.defined()) bytes += static_cast<std::size_t>(tensor.numel()) * tensor.itemsize();
  }
  return bytes;
}

}  // namespace

class CreationAnswers::Riding final : public rpc::Attachment {
 public:
  void ride(std::weak_ptr<CreationAnswers> answers, const WorkerInfo& to,
            std::vector<std::uint64_t> calls) {
    answers_ = std::move(answers);
    to_ = to;
    calls_ = std::move(calls);
  }
  [[nodiscard]] const std::vector<std::uint64_t>& calls() const { return calls_; }
  void on_sent(const std::optional<Error>& error) override {
    const auto answers = answers_.lock();
    if (!answers || calls_.empty()) return;
    // If the peer is lost, its calls end with that.
    if (error) answers->add_all(to_, calls_, true);
    answers->waiting_.fetch_sub(calls_.size());
  }

 private:
  std::weak_ptr<CreationAnswers> answers_;
  WorkerInfo to_;
  std::vector<std::uint64_t> calls_;
};

void CreationAnswers::add(const WorkerInfo& caller, std::uint64_t id, bool later) {
  add_all(caller, {&id, 1}, later);
}

void CreationAnswers::add_all(const WorkerInfo& caller, std::span<const std::uint64_t> calls,
                              bool later) {
  bool full = false;
  std::shared_ptr<rpc::Agent> alive;
  {
    base::MutexLock lock(mutex_);
    if (agent_ == nullptr) return;
    Waiting& list = lists_[life_of(caller)];
    if (list.calls.empty()) list.caller = caller;
    list.calls.insert(list.calls.end(), calls.begin(), calls.end());
    waiting_.fetch_add(calls.size());
    full = list.calls.size() >= kMaxTogether;
    if (later && !full && !timer_runs_) {
      alive = agent_->weak_from_this().lock();
      timer_runs_ = alive != nullptr;
    }
  }
  if (full) flush(caller);
  if (!alive) return;
  alive->loop().call_at(rpc::Clock::now() + kDelay, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->flush_all();
  });
}

bool CreationAnswers::any(const WorkerInfo& caller) const {
  if (waiting_.load(std::memory_order_relaxed) == 0) return false;
  base::MutexLock lock(mutex_);
  const auto found = lists_.find(life_of(caller));
  return found != lists_.end() && !found->second.calls.empty();
}

std::vector<std::uint64_t> CreationAnswers::take(const WorkerInfo& caller) {
  base::MutexLock lock(mutex_);
  const auto found = lists_.find(life_of(caller));
  return found == lists_.end() ? std::vector<std::uint64_t>()
                               : std::exchange(found->second.calls, {});
}

void CreationAnswers::send(rpc::Agent& agent, const WorkerInfo& caller,
                           const std::vector<std::uint64_t>& calls) {
  try {
    rpc::OutMessage message(wire::kCreatedFrame);
    write_created(message.frame.body(), calls);
    agent.send_control(caller, std::move(message));
  } catch (const Error&) {
    // The peer is lost, or this worker has shut down: its calls end with that.
  }
  waiting_.fetch_sub(calls.size());
}

void CreationAnswers::flush(const WorkerInfo& caller) {
  if (waiting_.load() == 0) return;
  const auto calls = take(caller);
  if (calls.empty()) return;
  if (const auto alive = agent()) {
    send(*alive, caller, calls);
  } else {
    waiting_.fetch_sub(calls.size());
  }
}

void CreationAnswers::flush_all() {
  std::vector<Waiting> all;
  {
    base::MutexLock lock(mutex_);
    timer_runs_ = false;
    for (auto at = lists_.begin(); at != lists_.end();) {
      if (at->second.calls.empty()) {  // since the last time: it may be over
        at = lists_.erase(at);
        continue;
      }
      all.push_back({at->second.caller, std::exchange(at->second.calls, {})});
      ++at;
    }
  }
  const auto alive = agent();
  for (const Waiting& each : all) {
    if (alive) {
      send(*alive, each.caller, each.calls);
    } else {
      waiting_.fetch_sub(each.calls.size());
    }
  }
}

void CreationAnswers::ride(rpc::OutMessage& message, const WorkerInfo& to) {
  if (waiting_.load(std::memory_order_relaxed) == 0) return;
  // A request may wait for room at its receiver, which may wait for these answers; what is on
  // devices waits for them.
  if (message.frame.kind() == rpc::wire::kRequest || !message.placements.empty() ||
      rpc::ExecutionContext::current().streams)
    return;
  if (message.frame.body().size() + bytes_of_tensors(message) > kMaxBytes) return;
  if (!any(to)) return;
  Riding& riding = message.attachment<Riding>();  // they wait again if what follows throws
  riding.ride(weak_from_this(), to, take(to));
  if (riding.calls().empty()) return;
  base::Bytes bytes;
  write_created(bytes, riding.calls());
  message.frame.add_section(wire::kCreatedSection, bytes.span());
}

void CreationAnswers::stop() {
  base::MutexLock lock(mutex_);
  agent_ = nullptr;
  for (auto& [life, list] : lists_) waiting_.fetch_sub(list.calls.size());
  lists_.clear();
}

std::shared_ptr<rpc::Agent> CreationAnswers::agent() const {
  base::MutexLock lock(mutex_);
  return agent_ == nullptr ? nullptr : agent_->weak_from_this().lock();
}

void CreationAnswers::accept(rpc::Agent& agent, const WorkerInfo& from,
                             std::span<const std::byte> bytes) {
  for (const std::uint64_t call : read_created(bytes)) {
    transport::FrameBuilder reply(rpc::wire::kReply);
    base::ByteWriter(reply.body()).write(call);
    reply.end_body();
    agent.outgoing_calls().on_answer(rpc::InMessage(std::move(reply).finish(), from));
  }
}

}  // namespace stitch::rref
