#include "stitch/rpc/agent/agent.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/base/callback_scope.h"
#include "stitch/base/name_list.h"
#include "stitch/rpc/agent/gather_exchange.h"
#include "stitch/rpc/agent/graceful_shutdown.h"
#include "stitch/rpc/agent/incoming_call.h"
#include "stitch/rpc/future/live_runtimes.h"
#include "stitch/rpc/message/tensor_codec.h"
#include "stitch/transport/self_transfer.h"

namespace stitch::rpc {

namespace {

// Of the names that an answer to a call of an unknown function carries.
constexpr std::size_t kMaxNamesBytes = 16 << 10;
// Of control frames that wait for one peer: beyond it such an answer carries no names.
constexpr std::size_t kManyControlBytes = 1 << 20;

}  // namespace

Agent::Agent(Options options, WorkerInfo self, std::shared_ptr<base::EventLoop> loop,
             std::shared_ptr<transport::BlockPool> receive_pool)
    : options_(std::move(options)),
      self_(std::move(self)),
      loop_(std::move(loop)),
      receive_pool_(std::move(receive_pool)),
      pool_(options_.num_threads, "stitch-" + self_.name),
      stop_callbacks_(options_.num_threads, "stitch-" + self_.name),
      leave_(std::make_unique<GracefulShutdown>(*this)),
      board_(std::make_unique<GatherExchange>()) {
  set_frame_handler(wire::kLeave,
                    [this](InMessage message) { leave_->on_message(std::move(message)); });
  for (const auto factory : extension_factories()) extensions_.push_back(factory(*this));
}

Agent::~Agent() {
  // A worker whose start failed was never shut down: its endpoints must be quiet before anything
  // here goes.
  if (peers_) peers_->close();
}

void Agent::start(std::unique_ptr<PeerTable> peers, const std::vector<Member>& members,
                  std::shared_ptr<void> rendezvous) {
  peers_ = std::move(peers);
  rendezvous_ = std::move(rendezvous);
  control_bytes_ = std::vector<std::atomic<std::size_t>>(members.size());
  const auto watch = [this](void (Agent::*fire)()) {
    return std::make_shared<DeadlineWatch>(loop_, [weak = weak_from_this(), fire] {
      if (const auto agent = weak.lock()) ((*agent).*fire)();
    });
  };
  calls_watch_ = watch(&Agent::expire_calls);
  incoming_watch_ = watch(&Agent::expire_incoming);
  peers_->start(
      members, self_.id,
      {.on_message =
           [this](const auto& connection, const WorkerInfo& from, transport::Message message) {
             on_message(connection, from, std::move(message));
           },
       .place = [this](const WorkerInfo& from, const base::Bytes& frame,
                       std::size_t size) { return place(from, frame, size); },
       .on_lost = [this](const WorkerInfo& peer,
                         const Error& reason) { on_peer_lost(peer, reason); },
       .call_at =
           [this](Clock::time_point when, base::UniqueFunction<void()> task) {
             loop_->call_at(when, [weak = weak_from_this(), task = std::move(task)]() mutable {
               if (const auto agent = weak.lock()) task();
             });
           },
       .wanted = [this](std::uint64_t call) { return calls_.contains(call); }});
}

bool Agent::abandon_call(std::uint64_t call_id) {
  if (forked()) return false;
  const auto record = calls_.take(call_id);
  if (!record) return false;
  tell_cancelled(*record->to, call_id);
  return true;
}

namespace {

// libtorch's state of a thread that has done nothing: grad mode on, no guards.
const at::ThreadLocalState& fresh_thread_state() {
  static const at::ThreadLocalState state = [] {
    std::optional<at::ThreadLocalState> fresh;
    std::thread([&fresh] { fresh.emplace(); }).join();
    return *fresh;
  }();
  return state;
}

// Whether this thread has no guard of libtorch's that what runs on it would feel. The sets of fresh
// threads are all alike.
bool is_fresh_state() {
  static const auto fresh = [] {
    const at::ThreadLocalStateGuard guard(fresh_thread_state());
    return c10::impl::tls_local_dispatch_key_set();
  }();
  const auto now = c10::impl::tls_local_dispatch_key_set();
  return at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled() &&
         now.included_ == fresh.included_ && now.excluded_ == fresh.excluded_;
}

}  // namespace

void Agent::in_fresh_state(const std::function<void()>& task) {
  std::optional<at::ThreadLocalStateGuard> guard;
  try {
    guard.emplace(fresh_thread_state());
  } catch (const std::system_error&) {
    // No thread to have it from: what waits for the task must not wait for ever.
  }
  task();
}

bool Agent::help(const std::atomic<bool>& done, Clock::time_point deadline) {
  if (forked()) throw_if_stopped();  // nobody will ever set it
  if (calls_.size() == 0 || stopped()) return done.load(std::memory_order_acquire);
  if (is_fresh_state()) return peers_->help(done, deadline);
  // Messages for others are not to feel the guards that this thread waits under.
  const at::ThreadLocalStateGuard guard(fresh_thread_state());
  return peers_->help(done, deadline);
}

namespace {

// Counts one more at its end.
class Counting {
 public:
  explicit Counting(std::atomic<std::uint64_t>* count) noexcept : count_(count) {}
  ~Counting() {
    if (count_ != nullptr) count_->fetch_add(1);
  }
  Counting(const Counting&) = delete;
  Counting& operator=(const Counting&) = delete;

 private:
  std::atomic<std::uint64_t>* const count_;
};

}  // namespace

void Agent::on_message(const std::shared_ptr<transport::Connection>& connection,
                       const WorkerInfo& from, transport::Message bytes) {
  const base::CallbackScope callback;
  const auto head = transport::peek_frame(bytes.frame);
  const std::uint16_t kind = head ? head->kind : 0;
  std::uint64_t call_id = 0;  // of a request or reply
  if (head && head->body.size() >= sizeof(call_id)) {
    std::memcpy(&call_id, head->body.data(), sizeof(call_id));
    call_id = base::to_wire_order(call_id);
  }
  try {
    InMessage message(std::move(bytes), from);
    // When all that it brings about is under way: see Leave, A2.
    const Counting handled(kind == wire::kLeave ? nullptr : &received_);
    switch (kind) {
      case wire::kRequest:
        on_request(connection, std::move(message));
        return;
      case wire::kReply:
      case wire::kErrorReply:
        on_answer(std::move(message));
        return;
      case wire::kCancel:
        on_cancel(std::move(message));
        return;
      default:
        break;
    }
    const auto handler = frame_handlers_.find(kind);
    if (handler == frame_handlers_.end())
      throw Error(ErrorCode::protocol, "frame kind " + std::to_string(kind) + " is unknown");
    handler->second(std::move(message));
  } catch (...) {
    const Error error =
        to_error(std::current_exception()).with_prefix("message from " + to_string(from));
    // What cannot be understood ends its connection; nothing else stops.
    if (error.code() == ErrorCode::protocol || !report(connection, from, kind, call_id, error))
      connection->close(error);
  }
}

bool Agent::report(const std::shared_ptr<transport::Connection>& connection, const WorkerInfo& from,
                   std::uint16_t kind, std::uint64_t call_id, const Error& error) noexcept {
  try {
    switch (kind) {
      case wire::kRequest:
        if (call_id != 0) {
          OutMessage message(wire::kErrorReply);
          base::ByteWriter(message.frame.body()).write(call_id);
          OutArchive archive(message);
          archive(error);
          send_reply(from, connection, std::move(message));
        }
        return true;
      case wire::kReply:
      case wire::kErrorReply:
        if (const auto record = calls_.take(call_id, from)) {
          record->pending->on_error(about(*record, error, std::string("failed: ") + error.what()));
        }
        return true;
      default:
        return false;  // somebody waits for it, and only the loss of the peer will end that
    }
  } catch (...) {
    return false;
  }
}

transport::Buffer Agent::place(const WorkerInfo& from, const base::Bytes& frame,
                               std::size_t bytes) noexcept {
  const auto head = transport::peek_frame(frame);
  std::uint64_t call_id = 0;
  if (!head || head->kind != wire::kReply || head->body.size() < sizeof(call_id)) return {};
  std::memcpy(&call_id, head->body.data(), sizeof(call_id));
  const auto pending = calls_.find(base::to_wire_order(call_id), from);
  return pending ? pending->place(bytes) : transport::Buffer{};
}

void Agent::on_request(const std::shared_ptr<transport::Connection>& connection,
                       InMessage message) {
  base::ByteReader in(message.view.body(), "request");
  CallHeader header;
  header.call_id = in.read<std::uint64_t>();
  header.function_id = in.read<std::uint64_t>();
  header.timeout_ns = in.read<std::int64_t>();
  for_each_extension([&](Extension& extension) { extension.on_receive(message); });
  const auto call = std::allocate_shared<IncomingCall>(base::RecyclingAllocator<IncomingCall>(),
                                                       shared_from_this(), connection,
                                                       std::move(message), header);
  const std::size_t waiting = incoming_bytes_.fetch_add(call->bytes()) + call->bytes();
  switch (incoming_.add(call)) {
    case IncomingTable::Added::serve:
      break;
    case IncomingTable::Added::cancelled:
      call->request_stop();  // it will not be run
      break;
    case IncomingTable::Added::duplicate:
      call->leave_unanswered();
      throw Error(ErrorCode::protocol,
                  "request " + std::to_string(header.call_id) + " is being served already");
  }
  watch_incoming(call->deadline());
  if (waiting > options_.max_inflight_bytes) {
    call->fail(Error(ErrorCode::overloaded, "calls waiting there exceed max_inflight_bytes " +
                                                std::to_string(options_.max_inflight_bytes)));
    return;
  }
  if (stopped()) {
    call->fail(Error(ErrorCode::shutting_down, to_string(self_) + " is shutting down"));
    return;
  }
  if (header.function_id != 0 && call->function() == nullptr) {
    std::string names;  // the caller knows the name it wanted and picks the nearest
    // Not for one who asks again and again and does not read: small requests would grow to large
    // answers.
    const bool reads = control_bytes_[call->caller().id.value()].load() < kManyControlBytes;
    for (const auto& name : FunctionRegistry::instance().names()) {
      if (reads && names.size() < kMaxNamesBytes) names += name + '\n';
    }
    call->fail(Error(ErrorCode::unimplemented, std::move(names)));
    return;
  }
  for (const auto& extension : extensions_) {
    if (extension->take_over(call)) return;
  }
  if (call->function() == nullptr || call->function()->object_type != nullptr) {
    call->fail(
        Error(ErrorCode::protocol, "the request names no function that can run without an object"));
    return;
  }
  dispatch(call, [call] { call->run(); });
}

void Agent::dispatch(const std::shared_ptr<IncomingCall>& call, base::UniqueFunction<void()> task) {
  if (call->function() != nullptr && call->function()->run_inline) {
    task();
    return;
  }
  if (!pool_.post_quietly(task)) {
    call->fail(Error(ErrorCode::shutting_down, to_string(self_) + " is shutting down"));
    return;
  }
  base::UniqueFunction<bool(bool)> work = [self = shared_from_this()](bool here) {
    if (here) return self->pool_.run_one_here();
    self->pool_.wake();
    return false;
  };
  if (!call->defer(work)) pool_.wake();
}

void Agent::on_answer(InMessage message) {
  for_each_extension([&](Extension& extension) { extension.on_receive(message); });
  base::ByteReader in(message.view.body(), "reply");
  const auto call_id = in.read<std::uint64_t>();
  if (!takes_long_to_decode(message)) {
    settle_call(call_id, message);
    return;
  }
  if (!calls_.find(call_id, message.from)) return;
  // This thread reads for everybody. Until another one begins to decode, the call stays in the
  // table, where its deadline, the loss of the peer and shutdown find it.
  base::UniqueFunction<void()> task = [self = shared_from_this(), call_id,
                                       message = std::move(message)]() mutable {
    self->decoding_.fetch_add(1);  // before the table forgets the call: see activity()
    const std::unique_ptr<Agent, void (*)(Agent*)> decoded(
        self.get(), [](Agent* agent) { agent->decoding_.fetch_sub(1); });
    self->settle_call(call_id, message);
  };
  // Never queued behind handlers: they may be blocked until this very answer is there. So where no
  // thread is free it is decoded here, and others wait for that as long as it takes, no longer.
  if (forked() || !pool_.post_if_free(task)) task();
}

void Agent::settle_call(std::uint64_t call_id, InMessage& message) {
  // None: timed out, cancelled or answered twice; the extensions have seen the header.
  if (const auto record = calls_.take(call_id, message.from)) settle(*record, message);
}

void Agent::settle(const CallTable::Record& record, InMessage& message) {
  try {
    ExecutionContext ambient;
    ambient.runtime = shared_from_this();
    decode_tensors(message);
    for_each_extension([&](Extension& extension) { extension.on_decode(message, ambient); });
    if (message.view.kind() == wire::kReply) {
      record.pending->on_reply(message);
      return;
    }
    InArchive archive(message, message.view.body().subspan(sizeof(std::uint64_t)));
    Error error;
    archive(error);
    if (error.code() == ErrorCode::unimplemented &&
        error.function().empty()) {  // of this very function
      // A longer text is not a list of names that a worker wrote.
      auto names =
          split_lines(std::string(std::string_view(error.what()).substr(0, 2 * kMaxNamesBytes)));
      std::string near;
      for (const auto& name :
           base::nearest_names(std::string(record.function), std::move(names), 3))
        near += (near.empty() ? "; near names there: " : ", ") + name;
      record.pending->on_error(about(record, error.with_remote(true),
                                     "failed: the function is not registered there" + near));
      return;
    }
    record.pending->on_error(
        about(record, error.with_remote(true), std::string("failed: ") + error.what()));
  } catch (...) {
    const Error error = to_error(std::current_exception());
    record.pending->on_error(about(
        record, error,
        std::string("failed: its result does not match its type on the caller: ") + error.what()));
  }
}

void Agent::on_cancel(InMessage message) {
  base::ByteReader in(message.view.body(), "cancel");
  if (auto call = incoming_.cancel(message.from.id, in.read<std::uint64_t>())) call->request_stop();
}

void Agent::on_peer_lost(const WorkerInfo& peer, const Error& reason) {
  const base::CallbackScope callback;
  for (auto& record : calls_.take_all(peer)) {
    complete_with_error(record, [&] {
      return about(record, Error(ErrorCode::disconnected, ""),
                   std::string("failed: the worker is gone: ") + reason.what());
    });
  }
  for (auto& call : incoming_.list(peer.id)) call->request_stop();
  for_each_extension([&](Extension& extension) { extension.on_peer_lost(peer, reason); });
  leave_->on_peer_lost();
}

void Agent::forget(const IncomingCall& call) {
  incoming_.remove(call);
  incoming_bytes_.fetch_sub(call.bytes());
}

void Agent::set_frame_handler(std::uint16_t kind, FrameHandler handler) {
  frame_handlers_.insert_or_assign(kind, std::move(handler));
}

void Agent::post(base::UniqueFunction<void()> task) {
  if (forked() || !pool_.post(task)) task();
}

Agent::Activity Agent::activity() {
  Activity activity;
  activity.busy = calls_.size();
  activity.busy += decoding_.load();  // read later: a call goes from there to here
  // A call whose caller has given up concerns nobody else any more.
  for (const auto& call : incoming_.list(std::nullopt))
    activity.busy += call->stop_requested() ? 0 : 1;
  for_each_extension([&](Extension& extension) { activity.busy += extension.active(); });
  activity.sent = sent_.load();
  activity.received = received_.load();
  return activity;
}

std::map<std::string, std::int64_t> Agent::debug_info() {
  if (forked()) throw_if_stopped();
  std::size_t control_bytes = 0;
  for (const auto& each : control_bytes_) control_bytes += each.load();
  const auto pool = receive_pool_->statistics();
  std::map<std::string, std::int64_t> numbers{
      {"rpc.receive_pool_kept_bytes", static_cast<std::int64_t>(pool.kept_bytes)},
      {"rpc.receive_pool_used_bytes", static_cast<std::int64_t>(pool.used_bytes)},
      {"rpc.receive_pool_reused", static_cast<std::int64_t>(pool.reused)},
      {"rpc.receive_pool_fresh", static_cast<std::int64_t>(pool.fresh)},
      {"rpc.calls_made", static_cast<std::int64_t>(calls_.size())},
      {"rpc.calls_served", static_cast<std::int64_t>(incoming_.size())},
      {"rpc.messages_sent", static_cast<std::int64_t>(sent_.load())},
      {"rpc.messages_received", static_cast<std::int64_t>(received_.load())},
      {"rpc.outgoing_bytes", static_cast<std::int64_t>(outgoing_bytes_.load())},
      {"rpc.control_bytes", static_cast<std::int64_t>(control_bytes)},
      {"rpc.incoming_bytes", static_cast<std::int64_t>(incoming_bytes_.load())},
      {"rpc.connections", static_cast<std::int64_t>(peers_->connections())},
      {"rpc.failed_tries_to_connect", static_cast<std::int64_t>(peers_->failed_tries())},
      {"rpc.pool_threads", pool_.threads()},
      {"rpc.pool_threads_missed", static_cast<std::int64_t>(pool_.threads_missed())},
      {"rpc.pool_queue", static_cast<std::int64_t>(pool_.queued())},
  };
  peers_->debug_info(numbers);
  for (const auto& [name, failures] : transport::failed_trials())
    numbers.emplace("transport.failed_trials." + name, failures);
  for_each_extension([&](Extension& extension) { extension.debug_info(numbers); });
  return numbers;
}

}  // namespace stitch::rpc
