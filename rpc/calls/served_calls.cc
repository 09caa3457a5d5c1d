#include "stitch/rpc/calls/served_calls.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string_view>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/base/callback_scope.h"
#include "stitch/base/name_list.h"
#include "stitch/base/recycler.h"
#include "stitch/rpc/calls/post_where_read.h"
#include "stitch/rpc/calls/unknown_function.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/peers/duration_text.h"

namespace stitch::rpc {

namespace {

// With that much control traffic waiting for a peer, answers to it carry no lists of names.
constexpr std::size_t kManyControlBytes = 1 << 20;

Error never_served(const WorkerInfo& self) {
  return Error(ErrorCode::shutting_down,
               to_string(self) + " is shutting down; Worker::serve() was not called there");
}

}  // namespace

ServedCalls::ServedCalls(const Options& options, const AgentState& state, const WorkerInfo& self,
                         const Extensions& extensions, Sender& sender, ThreadPool& pool,
                         std::string thread_name)
    : state_(state),
      self_(self),
      extensions_(extensions),
      sender_(sender),
      pool_(pool),
      stop_callbacks_(options.num_threads, std::move(thread_name)),
      serving_(options.start_serving ? Serving::yes : Serving::not_yet) {}

void ServedCalls::start(const std::shared_ptr<Runtime>& runtime,
                        const std::shared_ptr<base::EventLoop>& loop) {
  runtime_ = runtime;
  watch_ = std::make_shared<DeadlineWatch>(loop, [this, weak = runtime_] {
    if (const auto alive = weak.lock()) expire();
  });
}

void ServedCalls::on_request(const std::shared_ptr<transport::Connection>& connection,
                             InMessage&& message) {
  base::ByteReader in(message.view.body(), "request");
  CallHeader header;
  header.call_id = in.read<std::uint64_t>();
  header.function_id = in.read<std::uint64_t>();
  header.time.left = in.read<std::int64_t>();
  header.time.deadline = in.read<std::int64_t>();
  PeerLife& life = sender_.life(message.from);
  const bool one_clock = life.member.same_host && connection->within_host();
  const auto call = std::allocate_shared<IncomingCall>(
      base::RecyclingAllocator<IncomingCall>(), std::shared_ptr<Runtime>(runtime_), *this,
      connection, std::move(message), header, one_clock);
  PeerFlow& flow = *life.flow;
  const char* const exceeded = flow.budget.count_received(call->bytes());
  call->counted_in(flow);
  try {
    for (const auto& extension : extensions_) extension->on_receive(call->message());
  } catch (...) {
    call->leave_unanswered();  // refuse() answers it
    throw;
  }
  state_.events().record_at(call->arrived(), "call received", call->caller().id.value(),
                            call->caller().epoch, call->id(), call->function_name());
  switch (table_.add(call)) {
    case IncomingTable::Added::serve:
      // Its caller may have been lost before on_peer_lost() could find it.
      if (header.time.left < 0 || life.lost.load()) call->request_stop();
      break;
    case IncomingTable::Added::cancelled:
      call->request_stop();  // it will not be run
      break;
    case IncomingTable::Added::duplicate:
      call->leave_unanswered();
      throw Error(ErrorCode::protocol,
                  "request " + std::to_string(header.call_id) + " is being served already");
  }
  watch(call->deadline());
  if (const auto why = refusal(*call, exceeded)) {
    call->fail(*why);
    return;
  }
  if (serving_.load(std::memory_order_acquire) != Serving::yes && waits_to_begin(call)) return;
  begin(call);
}

bool ServedCalls::waits_to_begin(const std::shared_ptr<IncomingCall>& call) {
  if (call->function() != nullptr && call->function()->before_serving) return false;
  base::MutexLock lock(mutex_);
  if (serving_.load() == Serving::yes) return false;
  if (serving_.load() == Serving::not_yet) {
    call->note_queued();
    waiting_.push_back(call);
    return true;
  }
  lock.unlock();
  call->fail(never_served(self_));
  return true;
}

void ServedCalls::serve() {
  const base::CallbackScope callback;  // inline functions run here
  for (;;) {
    std::vector<std::shared_ptr<IncomingCall>> calls;
    {
      base::MutexLock lock(mutex_);
      if (serving_.load() != Serving::not_yet) return;
      if (waiting_.empty()) {
        serving_.store(Serving::yes, std::memory_order_release);
        return;
      }
      calls.swap(waiting_);
    }
    for (const auto& call : calls) {
      try {
        begin(call);
      } catch (...) {
        call->fail(to_error(std::current_exception()));
      }
    }
  }
}

void ServedCalls::never_serve() {
  std::vector<std::shared_ptr<IncomingCall>> calls;
  {
    base::MutexLock lock(mutex_);
    if (serving_.load() != Serving::not_yet) return;
    serving_.store(Serving::never);
    calls.swap(waiting_);
  }
  for (const auto& call : calls) call->fail(never_served(self_));
}

void ServedCalls::begin(const std::shared_ptr<IncomingCall>& call) {
  for (const auto& extension : extensions_) {
    if (extension->take_over(call)) return;
  }
  if (call->function() == nullptr || call->function()->object_type != nullptr) {
    call->fail(
        Error(ErrorCode::protocol, "the request names no function that can run without an object"));
    return;
  }
  if (call->function()->run_inline) {
    call->run();
    return;
  }
  call->await_turn();
  dispatch(call, [this, call] { run(call); });
}

void ServedCalls::run(const std::shared_ptr<IncomingCall>& call) {
  UnwrittenReplies& replies = call->flow()->replies;
  if (replies.many()) [[unlikely]] {
    base::UniqueFunction<void()> again = [this, call] {
      dispatch(call, [this, call] { run(call); });
    };
    if (replies.park(again)) return;
  }
  if (call->begin_turn()) call->run();
}

std::optional<Error> ServedCalls::refusal(const IncomingCall& call, const char* exceeded) const {
  if (exceeded != nullptr) {
    const PeerLimits& limits = call.flow()->limits();
    const std::size_t limit = exceeded == PeerBudget::kBytesName ? limits.bytes : limits.calls;
    return Error(ErrorCode::overloaded, std::string("calls waiting there exceed four times ") +
                                            exceeded + ' ' + std::to_string(limit));
  }
  if (state_.stopped() || (state_.refuses_requests() && call.caller().id != self_.id))
    return Error(ErrorCode::shutting_down, to_string(self_) + " is shutting down");
  if (call.names_function() && call.function() == nullptr) {
    // A caller that sends small requests and does not read must not make large answers pile up.
    const bool reads = sender_.control_bytes(call.caller()) < kManyControlBytes;
    return Error(ErrorCode::unimplemented, reads ? registered_function_names() : std::string());
  }
  return std::nullopt;
}

void ServedCalls::dispatch(const std::shared_ptr<IncomingCall>& call,
                           base::UniqueFunction<void()> task) {
  if (call->function() != nullptr && call->function()->run_inline) {
    task();
    return;
  }
  call->note_queued();
  if (post_where_read(call->connection(), pool_, std::shared_ptr<Runtime>(runtime_), task)) return;
  call->fail(Error(ErrorCode::shutting_down, to_string(self_) + " is shutting down"));
}

void ServedCalls::refuse(const std::shared_ptr<transport::Connection>& connection,
                         const WorkerInfo& from, std::uint64_t call_id, const Error& error) {
  if (call_id != 0) sender_.send_error_reply(from, connection, call_id, error);  // 0: one-way
}

void ServedCalls::on_cancel(const InMessage& message) {
  base::ByteReader in(message.view.body(), "cancel");
  if (const auto call = table_.cancel(message.from, in.read<std::uint64_t>())) call->request_stop();
}

void ServedCalls::on_peer_lost(const WorkerInfo& peer) {
  for (const auto& call : table_.list(peer)) call->request_stop();
  table_.forget_cancels(peer);
}

void ServedCalls::forget(const IncomingCall& call) {
  table_.remove(call);
  if (call.flow() == nullptr || !call.one_way()) return;
  if (const auto told = call.flow()->one_way.handled(call.bytes())) give_room(call.caller(), *told);
}

void ServedCalls::on_ask_room(const InMessage& message) {
  base::ByteReader in(message.view.body(), "room");
  give_room(message.from, sender_.flow(message.from).one_way.asked(in.read<std::uint64_t>()));
}

void ServedCalls::give_room(const WorkerInfo& to, const OneWayCredits::Handled& handled) noexcept {
  OutMessage message(wire::kGiveRoom);
  base::ByteWriter out(message.frame.body());
  out.write(handled.calls);
  out.write(handled.bytes);
  sender_.send_while_possible(to, std::move(message));
}

const std::string& ServedCalls::holders(Clock::time_point now) {
  if (now - holders_found_ < kAgain) return holders_;
  struct Holder {
    Clock::time_point since = Clock::time_point::max();
    int threads = 0;
  };
  std::map<std::string_view, Holder> functions;
  for (const auto& call : table_.list(std::nullopt)) {
    const auto progress = call->progress();
    if (progress.stage != IncomingCall::Stage::running) continue;
    Holder& holder = functions[call->function() == nullptr ? "unknown" : call->function_name()];
    holder.since = std::min(holder.since, progress.since);
    ++holder.threads;
  }
  std::vector<std::pair<std::string_view, Holder>> longest(functions.begin(), functions.end());
  std::ranges::sort(longest, {}, [](const auto& each) { return each.second.since; });
  constexpr std::size_t kNamed = 4;
  if (longest.size() > kNamed) longest.resize(kNamed);
  holders_.clear();
  for (const auto& [function, holder] : longest) {
    holders_ += holders_.empty() ? " behind " : " and ";
    holders_ += std::string(function) + "() (running " + duration_text(now - holder.since) +
                " on " + std::to_string(holder.threads) + " of " +
                std::to_string(pool_.max_running()) + " threads)";
  }
  holders_found_ = now;
  return holders_;
}

void ServedCalls::stop_all() {
  for (const auto& call : table_.list(std::nullopt)) call->request_stop();
}

std::uint64_t ServedCalls::busy() const {
  std::uint64_t busy = 0;
  for (const auto& call : table_.list(std::nullopt)) busy += call->stop_requested() ? 0 : 1;
  return busy;
}

std::string ServedCalls::running() const {
  std::vector<std::string> names;
  for (const auto& call : table_.list(std::nullopt)) {
    if (call->function() != nullptr) names.push_back(call->function()->name + "()");
  }
  return base::join_names(names);
}

void ServedCalls::watch(Clock::time_point deadline) { watch_->watch(deadline); }

void ServedCalls::expire() {
  const auto now = Clock::now();
  const auto expired = table_.expired(now);
  watch(expired.next);
  const bool served = serving_.load() == Serving::yes;
  for (const auto& call : expired.calls) {
    const bool queued = call->progress().stage == IncomingCall::Stage::queued;
    const std::string why = !queued ? "" : served ? holders(now) : ", before Worker::serve()";
    call->stop_at_deadline(call->where(now) + why);
  }
}

}  // namespace stitch::rpc
