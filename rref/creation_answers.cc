#include "stitch/rref/creation_answers.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include <ATen/core/Tensor.h>

#include "stitch/base/byte_io.h"
#include "stitch/base/patience.h"
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
  void set_receiver(std::weak_ptr<CreationAnswers> answers, const WorkerInfo& to) {
    to_ = to;
    answers_ = std::move(answers);
  }
  void take(Calls calls) noexcept { calls_ = std::move(calls); }
  [[nodiscard]] const Calls& calls() const { return calls_; }
  void on_sent(const std::optional<Error>& error) override {
    const auto answers = answers_.lock();
    if (!answers || calls_.empty()) return;
    // If the peer is lost, its calls end with that.
    if (error) answers->wait_again(to_, calls_);
    answers->waiting_.fetch_sub(calls_.size());
  }

 private:
  std::weak_ptr<CreationAnswers> answers_;
  WorkerInfo to_;
  Calls calls_;
};

void CreationAnswers::add(const WorkerInfo& caller, std::uint64_t id, bool later) {
  if (!add_all(caller, {&id, 1}, later, WhenFull::send))
    flush_all();  // without a timer they would stay
}

bool CreationAnswers::add_all(const WorkerInfo& caller, std::span<const std::uint64_t> calls,
                              bool later, WhenFull when_full) {
  bool full = false;
  std::shared_ptr<rpc::Agent> alive;
  {
    base::MutexLock lock(mutex_);
    if (agent_ == nullptr) return true;
    const rpc::Life* const life = agent_->peers().life(caller);
    if (life == nullptr) return true;  // no such worker waits
    Waiting& list = lists_[life_of(caller)];
    list.caller = &life->info();
    list.calls.insert(list.calls.end(), calls.begin(), calls.end());
    waiting_.fetch_add(calls.size());
    full = when_full == WhenFull::send && list.calls.size() >= kMaxTogether;
    if (later && !full && !timer_.runs()) alive = agent_->weak_from_this().lock();
  }
  if (full) flush(caller);
  if (!alive) return true;
  try {
    timer_.start(alive->loop(), rpc::Clock::now() + kDelay, [weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->flush_all();
    });
  } catch (...) {
    return false;
  }
  return true;
}

bool CreationAnswers::any(const WorkerInfo& caller) const {
  if (waiting_.load(std::memory_order_relaxed) == 0) return false;
  base::MutexLock lock(mutex_);
  const auto found = lists_.find(life_of(caller));
  return found != lists_.end() && !found->second.calls.empty();
}

CreationAnswers::Calls CreationAnswers::take(const WorkerInfo& caller) {
  base::MutexLock lock(mutex_);
  const auto found = lists_.find(life_of(caller));
  if (found == lists_.end()) return {};
  Calls& calls = found->second.calls;
  if (calls.size() <= kMaxCreated) return std::exchange(calls, {});
  const auto rest = calls.begin() + kMaxCreated;
  Calls taken(calls.begin(), rest);
  calls.erase(calls.begin(), rest);
  return taken;
}

bool CreationAnswers::send(rpc::Agent& agent, const WorkerInfo& caller,
                           std::span<const std::uint64_t> calls) {
  for (std::size_t sent = 0; sent < calls.size();) {
    const auto some = calls.subspan(sent, std::min<std::size_t>(calls.size() - sent, kMaxCreated));
    try {
      rpc::OutMessage message(wire::kCreatedFrame);
      write_created(message.frame.body(), some);
      agent.send_control(caller, std::move(message));
    } catch (const Error&) {
      // The peer is lost, or this worker has shut down: its calls end with that.
    } catch (const std::bad_alloc&) {
      wait_again(caller, calls.subspan(sent));
      waiting_.fetch_sub(calls.size());
      return false;
    }
    sent += some.size();
  }
  waiting_.fetch_sub(calls.size());
  return true;
}

void CreationAnswers::wait_again(const WorkerInfo& caller,
                                 std::span<const std::uint64_t> calls) noexcept {
  try {
    // Without a timer they wait for the next answer. Not sent here, however many they are: this may
    // be within a send that has just found no memory, and the next one would find none either.
    static_cast<void>(add_all(caller, calls, true, WhenFull::wait));
  } catch (...) {
    if (const auto alive = agent()) give_up(*alive, caller);
  }
}

void CreationAnswers::give_up(rpc::Agent& agent, const WorkerInfo& caller) noexcept {
  try {
    if (agent.peers().closing() || agent.peers().lost(caller)) return;
    agent.peers().give_up(
        caller,
        to_error(std::current_exception()).with_prefix("answers of creations cannot be sent"));
  } catch (...) {
    // Out of memory for an error, too: nothing can be told to the peer.
  }
}

void CreationAnswers::flush(const WorkerInfo& caller) {
  while (waiting_.load() != 0) {
    const auto calls = take(caller);
    if (calls.empty()) return;
    if (const auto alive = agent()) {
      if (!send(*alive, caller, calls)) return;
    } else {
      waiting_.fetch_sub(calls.size());
    }
  }
}

void CreationAnswers::flush_all() {
  Lists all;
  timer_.fired();  // first: what comes later has another one
  {
    base::MutexLock lock(mutex_);
    all.swap(lists_);
  }
  const auto alive = agent();
  for (const auto& [life, each] : all) {
    if (each.calls.empty()) continue;
    if (alive) {
      send(*alive, *each.caller, each.calls);
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
  Riding& riding = message.attachment<Riding>();
  riding.set_receiver(weak_from_this(), to);
  riding.take(take(to));  // from here on they wait again if something throws
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
  // They are not sent again.
  const auto calls = base::patiently([&] { return read_created(bytes); });
  for (const std::uint64_t call : calls) {
    try {
      agent.outgoing_calls().on_answer(base::patiently([&] {
        transport::FrameBuilder reply(rpc::wire::kReply);
        base::ByteWriter(reply.body()).write(call);
        reply.end_body();
        return rpc::InMessage(std::move(reply).finish(), from);
      }));
    } catch (const std::bad_alloc&) {
      agent.outgoing_calls().fail_answered(call, from, to_error(std::current_exception()));
    }
  }
}

}  // namespace stitch::rref
