#include "stitch/rpc/agent.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "stitch/rpc/board.h"
#include "stitch/rpc/incoming_call.h"
#include "stitch/rpc/leave.h"
#include "stitch/rpc/tensor_codec.h"
#include "stitch/transport/byte_io.h"
#include "stitch/transport/callback_scope.h"
#include "stitch/transport/selection.h"

namespace stitch {

namespace {

// Callers have that long to say themselves that a call's deadline has passed, which they do unless
// they are stopped or cut off. So a handler does not answer the moment its caller gives up.
constexpr std::chrono::milliseconds kGraceOfCallers{10};
// Of the names that an answer to a call of an unknown function carries.
constexpr std::size_t kMaxNamesBytes = 16 << 10;
// Of control frames that wait for one peer: beyond it such an answer carries no names.
constexpr std::size_t kManyControlBytes = 1 << 20;

std::string milliseconds(std::chrono::nanoseconds duration) {
  const double ms = std::chrono::duration<double, std::milli>(duration).count();
  std::string text = std::to_string(ms);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " ms";
}

std::string call_text(const CallTable::Record& record) {
  return "call " + std::string(record.function) + "() to " + to_string(*record.to);
}

Error about(const CallTable::Record& record, const Error& cause, const std::string& text) {
  return Error(cause.code(), call_text(record) + ' ' + text)
      .with_worker(record.to->name)
      .with_function(std::string(record.function))
      .with_remote(cause.remote());
}

}  // namespace

Agent::Agent(Options options, WorkerInfo self, std::shared_ptr<transport::EventLoop> loop,
             std::shared_ptr<transport::BlockPool> receive_pool)
    : options_(std::move(options)),
      self_(std::move(self)),
      loop_(std::move(loop)),
      receive_pool_(std::move(receive_pool)),
      pool_(options_.num_threads, "stitch-" + self_.name),
      leave_(std::make_unique<Leave>(*this)),
      board_(std::make_unique<Board>()) {
  set_frame_handler(wire::kLeave,
                    [this](InMessage message) { leave_->on_message(std::move(message)); });
  for (const auto factory : detail::extension_factories()) extensions_.push_back(factory(*this));
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
       .place = [this](const WorkerInfo& from, const transport::Bytes& frame,
                       std::size_t size) { return place(from, frame, size); },
       .on_lost = [this](const WorkerInfo& peer,
                         const Error& reason) { on_peer_lost(peer, reason); },
       .call_at =
           [this](Clock::time_point when, UniqueFunction<void()> task) {
             loop_->call_at(when, [weak = weak_from_this(), task = std::move(task)]() mutable {
               if (const auto agent = weak.lock()) task();
             });
           },
       .wanted = [this](std::uint64_t call) { return calls_.contains(call); }});
}

OutMessage Agent::begin_request(std::uint64_t function_id) {
  OutMessage message(wire::kRequest);
  transport::ByteWriter out(message.frame.body());
  out.write(std::uint64_t{0});
  out.write(function_id);
  out.write(std::int64_t{0});
  return message;
}

namespace {

// Fills in what begin_request() left open.
void complete_header(OutMessage& message, std::uint64_t call_id, std::chrono::nanoseconds timeout) {
  std::byte* const header = message.frame.body().data() + transport::FrameBuilder::body_offset();
  const auto id = transport::to_wire_order(call_id);
  const auto ns = transport::to_wire_order(static_cast<std::int64_t>(timeout.count()));
  std::memcpy(header, &id, sizeof(id));
  std::memcpy(header + 16, &ns, sizeof(ns));
}

}  // namespace

std::chrono::nanoseconds Agent::effective_timeout(
    std::optional<std::chrono::nanoseconds> timeout) const {
  if (timeout && timeout->count() < 0) {
    throw Error(ErrorCode::invalid_argument,
                "timeout of " + std::to_string(timeout->count()) + " ns is negative");
  }
  const std::chrono::nanoseconds limit = timeout.value_or(options_.rpc_timeout);
  const auto deadline = Ambient::current().deadline;
  if (deadline == Clock::time_point::max()) return limit;
  const auto left =
      std::max(std::chrono::nanoseconds(1),
               std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now()));
  return limit.count() == 0 ? left : std::min(limit, left);
}

namespace {

// The request that this thread is sending, the innermost one. One that is written before the sender
// returns was never queued, which is the rule, and costs the call table nothing.
class Sending {
 public:
  Sending(const Agent& agent, std::uint64_t id) noexcept
      : agent_(&agent), id_(id), outer_(std::exchange(here, this)) {}
  ~Sending() { here = outer_; }
  Sending(const Sending&) = delete;
  Sending& operator=(const Sending&) = delete;
  [[nodiscard]] bool done() const noexcept { return done_; }
  // Whether it is the one that this thread is sending.
  [[nodiscard]] static bool note_done(const Agent& agent, std::uint64_t id) noexcept {
    if (here == nullptr || here->agent_ != &agent || here->id_ != id) return false;
    here->done_ = true;
    return true;
  }

 private:
  static thread_local Sending* here;
  const Agent* const agent_;
  const std::uint64_t id_;
  Sending* const outer_;
  bool done_ = false;
};

thread_local Sending* Sending::here = nullptr;

}  // namespace

std::uint64_t Agent::start_call(const WorkerInfo& to, std::string_view function,
                                std::chrono::nanoseconds timeout, OutMessage message,
                                std::shared_ptr<PendingCall> pending) {
  if (stopped()) throw_if_stopped();
  CallTable::Record record{std::move(pending), &peers_->find(to.id), function, timeout,
                           Clock::time_point::max()};
  if (timeout.count() > 0) {
    const auto now = Clock::now();
    if (timeout < Clock::time_point::max() - now) record.deadline = now + timeout;
  }
  const Clock::time_point deadline = record.deadline;
  const std::uint64_t id = calls_.add(std::move(record));
  const Sending sending(*this, id);
  try {
    calls_watch_->watch(deadline);
    complete_header(message, id, timeout);
    Outgoing out = lay_out(to, message, true, false);
    if (message.attachments.empty()) {
      // Small enough to need no memory of its own: most calls are like this.
      peers_->send(
          to, nullptr, std::move(out.message),
          [self = shared_from_this(), counted = out.counted,
           id](const std::optional<Error>& error) {
            self->sent(counted);
            self->request_done(id, error);
          },
          id);
    } else {
      peers_->send(
          to, nullptr, std::move(out.message),
          [self = shared_from_this(), counted = out.counted, id,
           attachments = DepartingAttachments(std::move(message.attachments))](
              const std::optional<Error>& error) mutable {
            self->sent(counted);
            attachments.tell(error);
            self->request_done(id, error);
          },
          id);
    }
  } catch (...) {
    const Error error = to_error(std::current_exception());
    fail_call(id, error, std::string("was not made: ") + error.what());
  }
  if (!sending.done()) calls_.note_queued(id);
  // The worker may have stopped between the first look and the entry in the table: nobody else
  // would complete the call then.
  if (stopped())
    fail_call(id, Error(ErrorCode::shutting_down, ""), "failed: this worker is shutting down");
  return id;
}

void Agent::fail_call(std::uint64_t call_id, const Error& error, const std::string& what) noexcept {
  if (const auto record = calls_.take(call_id))
    record->pending->on_error(about(*record, error, what));
}

void Agent::request_done(std::uint64_t call_id, const std::optional<Error>& error) {
  const bool at_once = Sending::note_done(*this, call_id);
  if (error) {
    fail_call(call_id, *error, std::string("failed: ") + error->what());
  } else if (!at_once) {
    calls_.note_sent(call_id, Clock::now());
  }
}

std::string Agent::timeout_text(const CallTable::Record& record) const {
  std::string text =
      "timed out after " + milliseconds(record.timeout) + "; " + peers_->condition(record.to->id);
  if (record.queued && !record.sent) return text + ", call was never sent";
  const auto queued =
      record.sent ? *record.sent - (record.deadline - record.timeout) : std::chrono::nanoseconds(0);
  if (queued < std::chrono::milliseconds(1)) return text + ", call was sent at once";
  return text + ", call was queued " + duration_text(queued);
}

void Agent::expire_calls() {
  const auto expired = calls_.take_expired(Clock::now());
  calls_watch_->watch(expired.next);
  for (const auto& record : expired.records) {
    record.pending->on_error(about(record, Error(ErrorCode::timeout, ""), timeout_text(record)));
    tell_cancelled(*record.to, record.id);
  }
}

void Agent::expire_incoming() {
  const auto expired = incoming_.expired(Clock::now() - kGraceOfCallers);
  if (expired.next != Clock::time_point::max())
    incoming_watch_->watch(expired.next + kGraceOfCallers);
  for (const auto& call : expired.calls) call->request_stop();
}

void Agent::run_stop_callbacks(std::stop_source source) {
  std::shared_ptr<ThreadPool> pool;
  UniqueFunction<void()> task = [source = std::move(source)]() mutable { source.request_stop(); };
  try {
    MutexLock lock(stops_mutex_);
    if (!stops_ && !stops_closed_)
      stops_ = std::make_shared<ThreadPool>(options_.num_threads, "stitch-" + self_.name);
    pool = stops_;
  } catch (const std::exception&) {
    // No thread to be had: then here.
  }
  if (!pool || !pool->post(task)) task();
}

void Agent::start_notify(const WorkerInfo& to, OutMessage message) {
  throw_if_stopped();
  complete_header(message, 0, std::chrono::nanoseconds(0));
  send(to, nullptr, std::move(message), true, false, nullptr);
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
bool in_fresh_state() {
  static const auto fresh = [] {
    const at::ThreadLocalStateGuard guard(fresh_thread_state());
    return c10::impl::tls_local_dispatch_key_set();
  }();
  const auto now = c10::impl::tls_local_dispatch_key_set();
  return at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled() &&
         now.included_ == fresh.included_ && now.excluded_ == fresh.excluded_;
}

}  // namespace

bool Agent::help(const std::atomic<bool>& done, Clock::time_point deadline) {
  if (forked()) throw_if_stopped();  // nobody will ever set it
  if (calls_.size() == 0 || stopped()) return done.load(std::memory_order_acquire);
  if (in_fresh_state()) return peers_->help(done, deadline);
  // Messages for others are not to feel the guards that this thread waits under.
  const at::ThreadLocalStateGuard guard(fresh_thread_state());
  return peers_->help(done, deadline);
}

void Agent::tell_cancelled(const WorkerInfo& to, std::uint64_t call_id) noexcept {
  try {
    OutMessage message(wire::kCancel);
    transport::ByteWriter(message.frame.body()).write(call_id);
    send_control(to, std::move(message));
  } catch (const std::exception&) {
    // Out of memory: the callee goes on for nobody, until its own deadline.
  }
}

Agent::Outgoing Agent::lay_out(const WorkerInfo& to, OutMessage& message, bool hooks,
                               bool control) {
  try {
    const auto kind = message.frame.kind();
    const auto check_frame = [this](std::size_t bytes) {
      if (bytes > options_.max_frame_bytes) {
        throw Error(ErrorCode::out_of_range, "message of " + std::to_string(bytes) +
                                                 " bytes exceeds max_frame_bytes " +
                                                 std::to_string(options_.max_frame_bytes));
      }
    };
    // What is too much already is refused before an extension has noted that it leaves.
    check_frame(message.frame.body().size());
    if (!control) check_inflight(outgoing_bytes_.load(), message.frame.body().size());
    message.frame.end_body();
    message.frame.set_inline_bytes(options_.inline_bytes);
    encode_tensors(message);
    if (hooks) for_each_extension([&](Extension& extension) { extension.on_send(message, to); });
    Outgoing out{std::move(message.frame).finish(), {}};
    check_frame(out.message.frame.size());
    out.counted = {total_bytes(out.message) + (control ? kControlFrameCost : 0), to.id, control};
    count(to, out.counted);
    if (kind != wire::kLeave) sent_.fetch_add(1);
    return out;
  } catch (...) {
    DepartingAttachments(std::move(message.attachments)).tell(to_error(std::current_exception()));
    throw;
  }
}

void Agent::check_inflight(std::size_t queued, std::size_t bytes) const {
  if (queued + bytes > options_.max_inflight_bytes) {
    throw Error(ErrorCode::overloaded, "message of " + std::to_string(bytes) +
                                           " bytes would exceed max_inflight_bytes " +
                                           std::to_string(options_.max_inflight_bytes));
  }
}

void Agent::count(const WorkerInfo& to, const Counted& counted) {
  if (!counted.control) {
    const auto before = outgoing_bytes_.fetch_add(counted.bytes);
    try {
      check_inflight(before, counted.bytes);
    } catch (...) {
      sent(counted);
      throw;
    }
    return;
  }
  auto& queued = control_bytes_.at(to.id.value());
  if (queued.fetch_add(counted.bytes) + counted.bytes <= kMostControlBytes) return;
  sent(counted);
  // It would have to be dropped, and whoever waits for it would wait for ever: better that
  // everybody learns it.
  const Error error(ErrorCode::overloaded, to_string(to) + " does not read: control messages of " +
                                               std::to_string(kMostControlBytes >> 20) +
                                               " MiB wait for it");
  peers_->give_up(to.id, error);
  throw error;
}

void Agent::sent(const Counted& counted) noexcept {
  (counted.control ? control_bytes_[counted.to.value()] : outgoing_bytes_).fetch_sub(counted.bytes);
}

void Agent::send(const WorkerInfo& to, const std::shared_ptr<transport::Connection>& connection,
                 OutMessage message, bool hooks, bool control, transport::SendDone done) {
  Outgoing out = lay_out(to, message, hooks, control);
  if (message.attachments.empty() && !done) {
    peers_->send(to, connection, std::move(out.message),
                 [self = shared_from_this(), counted = out.counted](const std::optional<Error>&) {
                   self->sent(counted);
                 });
    return;
  }
  peers_->send(to, connection, std::move(out.message),
               [self = shared_from_this(), counted = out.counted,
                attachments = DepartingAttachments(std::move(message.attachments)),
                done = std::move(done)](const std::optional<Error>& error) mutable {
                 self->sent(counted);
                 attachments.tell(error);
                 if (done) done(error);
               });
}

void Agent::send_frame(const WorkerInfo& to, OutMessage message, transport::SendDone done) {
  send(to, nullptr, std::move(message), false, false, std::move(done));
}

void Agent::send_control(const WorkerInfo& to, OutMessage message, transport::SendDone done) {
  send(to, nullptr, std::move(message), false, true, std::move(done));
}

void Agent::send_reply(const WorkerInfo& to,
                       const std::shared_ptr<transport::Connection>& connection,
                       OutMessage message) {
  const bool control = message.frame.kind() == wire::kErrorReply;
  send(to, connection, std::move(message), true, control, nullptr);
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
  const transport::CallbackScope callback;
  const auto head = transport::peek_frame(bytes.frame);
  const std::uint16_t kind = head ? head->kind : 0;
  std::uint64_t call_id = 0;  // of a request or reply
  if (head && head->body.size() >= sizeof(call_id)) {
    std::memcpy(&call_id, head->body.data(), sizeof(call_id));
    call_id = transport::to_wire_order(call_id);
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
          transport::ByteWriter(message.frame.body()).write(call_id);
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

transport::Buffer Agent::place(const WorkerInfo& from, const transport::Bytes& frame,
                               std::size_t bytes) noexcept {
  const auto head = transport::peek_frame(frame);
  std::uint64_t call_id = 0;
  if (!head || head->kind != wire::kReply || head->body.size() < sizeof(call_id)) return {};
  std::memcpy(&call_id, head->body.data(), sizeof(call_id));
  const auto pending = calls_.find(transport::to_wire_order(call_id), from);
  return pending ? pending->place(bytes) : transport::Buffer{};
}

void Agent::on_request(const std::shared_ptr<transport::Connection>& connection,
                       InMessage message) {
  transport::ByteReader in(message.view.body(), "request");
  CallHeader header;
  header.call_id = in.read<std::uint64_t>();
  header.function_id = in.read<std::uint64_t>();
  header.timeout_ns = in.read<std::int64_t>();
  for_each_extension([&](Extension& extension) { extension.on_receive(message); });
  const auto call = std::allocate_shared<IncomingCall>(
      transport::RecyclingAllocator<IncomingCall>(), shared_from_this(), connection,
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
  if (call->deadline() != Clock::time_point::max())
    incoming_watch_->watch(call->deadline() + kGraceOfCallers);
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

void Agent::dispatch(const std::shared_ptr<IncomingCall>& call, UniqueFunction<void()> task) {
  if (call->function() != nullptr && call->function()->run_inline) {
    task();
    return;
  }
  if (!pool_.post_quietly(task)) {
    call->fail(Error(ErrorCode::shutting_down, to_string(self_) + " is shutting down"));
    return;
  }
  UniqueFunction<bool(bool)> work = [self = shared_from_this()](bool here) {
    if (here) return self->pool_.run_one_here();
    self->pool_.wake();
    return false;
  };
  if (!call->defer(work)) pool_.wake();
}

void Agent::on_answer(InMessage message) {
  for_each_extension([&](Extension& extension) { extension.on_receive(message); });
  transport::ByteReader in(message.view.body(), "reply");
  auto record = calls_.take(in.read<std::uint64_t>(), message.from);
  if (!record) return;  // timed out or cancelled; the extensions have seen the header
  try {
    Ambient ambient;
    ambient.agent = shared_from_this();
    decode_tensors(message);
    for_each_extension([&](Extension& extension) { extension.on_decode(message, ambient); });
    if (message.view.kind() == wire::kReply) {
      record->pending->on_reply(message);
      return;
    }
    InArchive archive(message, message.view.body().subspan(sizeof(std::uint64_t)));
    Error error;
    archive(error);
    if (error.code() == ErrorCode::unimplemented &&
        error.function().empty()) {  // of this very function
      auto names = split_lines(error.what());
      std::string near;
      for (const auto& name : nearest_names(std::string(record->function), std::move(names), 3))
        near += (near.empty() ? "; near names there: " : ", ") + name;
      record->pending->on_error(about(*record, error.with_remote(true),
                                      "failed: the function is not registered there" + near));
      return;
    }
    record->pending->on_error(
        about(*record, error.with_remote(true), std::string("failed: ") + error.what()));
  } catch (...) {
    const Error error = to_error(std::current_exception());
    record->pending->on_error(about(
        *record, error,
        std::string("failed: its result does not match its type on the caller: ") + error.what()));
  }
}

void Agent::on_cancel(InMessage message) {
  transport::ByteReader in(message.view.body(), "cancel");
  if (auto call = incoming_.cancel(message.from.id, in.read<std::uint64_t>())) call->request_stop();
}

void Agent::on_peer_lost(const WorkerInfo& peer, const Error& reason) {
  const transport::CallbackScope callback;
  for (auto& record : calls_.take_all(peer)) {
    record.pending->on_error(about(record, Error(ErrorCode::disconnected, ""),
                                   std::string("failed: the worker is gone: ") + reason.what()));
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

void Agent::post(UniqueFunction<void()> task) {
  if (forked() || !pool_.post(task)) task();
}

Agent::Activity Agent::activity() {
  Activity activity;
  activity.busy = calls_.size();
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
  for (const auto& [name, failures] : transport::failed_trials())
    numbers.emplace("transport.failed_trials." + name, failures);
  for_each_extension([&](Extension& extension) { extension.debug_info(numbers); });
  return numbers;
}

void Agent::throw_if_stopped() const {
  if (forked()) {
    throw Error(ErrorCode::invalid_argument,
                to_string(self_) +
                    " belongs to the process that this one was forked from: a forked child can "
                    "only exec, or do without stitch")
        .with_worker(self_.name);
  }
  if (!leaving_.load(std::memory_order_acquire)) return;
  if (stopped()) {
    throw Error(ErrorCode::shutting_down, to_string(self_) + " has shut down")
        .with_worker(self_.name);
  }
  if (ThreadPool::on_any_pool_thread() || transport::CallbackScope::on_this_thread()) return;
  throw Error(ErrorCode::shutting_down,
              to_string(self_) + " is shutting down: only its handlers can begin something new")
      .with_worker(self_.name);
}

std::optional<Error> Agent::why_not_here() const {
  {
    MutexLock lock(ending_mutex_);
    if (ended_) return std::nullopt;
  }
  const std::string called = "shutdown of " + to_string(self_) + " was called from ";
  if (pool_.on_pool_thread()) {
    return Error(ErrorCode::invalid_argument,
                 called + "one of its own handlers, which it would wait for");
  }
  if (transport::CallbackScope::on_this_thread() || on_stop_thread()) {
    return Error(
        ErrorCode::invalid_argument,
        called + "an inline function, an on_ready or a stop callback, which must not wait");
  }
  return std::nullopt;
}

std::optional<Error> Agent::shutdown(bool graceful, std::chrono::nanoseconds timeout) {
  if (forked()) return std::nullopt;
  if (auto refusal = why_not_here()) throw std::move(*refusal);
  {
    MutexLock lock(ending_mutex_);
    if (leaving_.exchange(true)) {
      while (!ended_) ended_changed_.wait(ending_mutex_);
      return std::nullopt;
    }
  }
  // Whatever happens below.
  const std::unique_ptr<Agent, void (*)(Agent*)> ended(this, [](Agent* self) {
    MutexLock lock(self->ending_mutex_);
    self->ended_ = true;
    self->ended_changed_.notify_all();
  });
  const auto now = Clock::now();
  const auto deadline =
      timeout >= Clock::time_point::max() - now ? Clock::time_point::max() : now + timeout;
  std::optional<Error> error;
  if (graceful) {
    try {
      error = leave_->run(deadline);
    } catch (...) {
      error = to_error(std::current_exception());  // whatever it is, everything here still ends
    }
  }
  // However long leaving took, closing gets a moment of its own.
  stop_everything(std::max(deadline, Clock::now() + std::chrono::seconds(1)));
  return error;
}

bool Agent::on_stop_thread() const {
  MutexLock lock(stops_mutex_);
  return stops_ && stops_->on_pool_thread();
}

// Those that come later run where they come up.
void Agent::close_stops(Clock::time_point deadline) {
  std::shared_ptr<ThreadPool> pool;
  {
    MutexLock lock(stops_mutex_);
    stops_closed_ = true;
    pool = std::move(stops_);
  }
  if (!pool) return;
  pool->close();
  if (!pool->join_until(deadline)) {
    std::fprintf(stderr, "stitch: %s leaves while stop callbacks still run\n",
                 to_string(self_).c_str());
  }
}

void Agent::stop_everything(Clock::time_point deadline) {
  // Of the time that closing has: for the threads of the transports.
  constexpr std::chrono::milliseconds kTransports{100};
  stopped_.store(true, std::memory_order_release);
  peers_->expect_closing();
  {
    const transport::CallbackScope callbacks;
    for (auto& record : calls_.take_all()) {
      record.pending->on_error(about(record, Error(ErrorCode::shutting_down, ""),
                                     "failed: this worker is shutting down"));
    }
    for (auto& call : incoming_.list(std::nullopt)) call->request_stop();
    for_each_extension([&](Extension& extension) { extension.stop(); });
    board_->close(Error(ErrorCode::shutting_down, to_string(self_) + " is shutting down"));
  }
  pool_.close();
  if (!pool_.join_until(deadline - kTransports)) {
    std::string running;
    for (auto& call : incoming_.list(std::nullopt)) {
      if (call->function() != nullptr)
        running += (running.empty() ? "" : ", ") + call->function()->name + "()";
    }
    std::fprintf(stderr, "stitch: %s leaves while handlers still run: %s\n",
                 to_string(self_).c_str(), running.empty() ? "unknown" : running.c_str());
  }
  close_stops(deadline - kTransports);
  close_until(deadline);
}

// A function that blocks where it must not (inline, on_ready) keeps a thread of the transports, and
// with it whoever waits for that: that is not to be the thread that shuts down.
void Agent::close_until(Clock::time_point deadline) {
  struct Closing {
    Mutex mutex;
    CondVar changed;
    bool done STITCH_GUARDED_BY(mutex) = false;
  };
  const auto close = [](Agent& agent) {
    agent.peers_->close();
    agent.rendezvous_.reset();
    agent.loop_->close();
  };
  const auto closing = std::make_shared<Closing>();
  std::thread closer;
  try {
    closer = std::thread([self = shared_from_this(), closing, close]() mutable {
      close(*self);
      self.reset();  // whoever waits may be the last to hold it
      MutexLock lock(closing->mutex);
      closing->done = true;
      closing->changed.notify_all();
    });
  } catch (const std::system_error&) {
    close(*this);  // no thread to be had: then as long as it takes
    return;
  }
  bool done = false;
  {
    MutexLock lock(closing->mutex);
    while (!closing->done && closing->changed.wait_until(closing->mutex, deadline)) {
    }
    done = closing->done;
  }
  if (done) {
    closer.join();
    return;
  }
  closer.detach();
  std::fprintf(stderr,
               "stitch: %s leaves while an inline function or a callback blocks one of its "
               "threads\n",
               to_string(self_).c_str());
}

}  // namespace stitch
