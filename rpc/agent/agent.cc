// One file, though long: how the parts of a worker are put together, and what each is told.
#include "stitch/rpc/agent/agent.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "stitch/base/byte_io.h"
#include "stitch/base/callback_scope.h"
#include "stitch/base/deadline.h"
#include "stitch/base/freed_memory.h"
#include "stitch/base/name_list.h"
#include "stitch/rpc/agent/bounded_task.h"
#include "stitch/rpc/agent/gather_exchange.h"
#include "stitch/rpc/agent/graceful_shutdown.h"
#include "stitch/rpc/agent/membership_service.h"
#include "stitch/rpc/agent/torch_state.h"
#include "stitch/rpc/agent/worker_report.h"
#include "stitch/rpc/calls/call_table.h"
#include "stitch/rpc/calls/post_where_read.h"
#include "stitch/rpc/future/live_runtimes.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/message/life_text.h"
#include "stitch/rpc/options/security_options.h"
#include "stitch/transport/self_transfer.h"

namespace stitch::rpc {

Agent::Agent(Options options, WorkerInfo self, std::shared_ptr<base::EventLoop> loop,
             std::shared_ptr<transport::BlockPool> receive_pool)
    : options_(std::move(options)),
      self_(std::move(self)),
      loop_(std::move(loop)),
      receive_pool_(std::move(receive_pool)),
      pool_(options_.num_threads, "stitch-" + self_.name),
      graceful_shutdown_(std::make_unique<GracefulShutdown>(*this)),
      gather_exchange_(std::make_unique<GatherExchange>(self_)),
      membership_(std::make_unique<MembershipService>(*this)) {
  base::keep_freed_memory();
  static_cast<void>(has_fresh_torch_state());  // its first use makes a thread
  set_frame_handler(wire::kLeave, [this](InMessage message) {
    graceful_shutdown_->on_message(std::move(message));
  });
  set_frame_handler(wire::kMembership,
                    [this](InMessage message) { membership_->on_frame(std::move(message)); });
  set_frame_handler(wire::kTransfer,
                    [this](InMessage message) { device_tensors_.on_transfer_frame(message); });
  for (const auto factory : extension_factories()) extensions_.push_back(factory(*this));
}

Agent::~Agent() {
  // A worker whose start failed was never shut down: its endpoints must be quiet before anything
  // here is destroyed. Transfers use them, and the sender.
  if (device_tensors_.has_transfers()) device_tensors_.stop_transfers();
  if (peers_) peers_->close();
}

void Agent::start(std::unique_ptr<PeerTable> peers, const std::vector<Member>& members,
                  std::shared_ptr<void> rendezvous) {
  peers_ = std::move(peers);
  rendezvous_ = std::move(rendezvous);
  const auto self = shared_from_this();
  std::vector<DeviceTensors::Worker> workers;
  for (const auto& member : members) workers.push_back({member.info, member.devices});
  device_tensors_.start(
      std::move(workers), self_.id,
      {.send_frame = [this](
                         const WorkerInfo& to,
                         base::Bytes frame) { sender_.send_transfer_frame(to, std::move(frame)); },
       .give_up = [this](const WorkerInfo& to, const Error& why) { peers_->give_up(to, why); },
       // What is sealed between workers is not sent in plain beside them.
       .unsealed =
           options_.encryption.value_or(transport::Encryption::off) == transport::Encryption::off ||
           insecure_is_allowed(),
       .paths = options_.gpu_paths});
  sender_.start(self, *peers_);
  dumps_.start(self);
  outgoing_calls_.start(self, *peers_, loop_, served_calls_.stop_callbacks());
  served_calls_.start(self, loop_);
  peers_->record_events(shared_events());
  peers_->set_limits(
      {options_.max_inflight_bytes, options_.max_inflight_calls, options_.max_frame_bytes});
  membership_->start(members);
  peers_->start(
      members, self_.id,
      {.on_message =
           [this](const auto& connection, const WorkerInfo& from, transport::Message message) {
             on_message(connection, from, std::move(message));
           },
       .place = [this](const WorkerInfo& from, const base::Bytes& frame,
                       std::size_t size) { return outgoing_calls_.place(from, frame, size); },
       .on_lost = [this](const WorkerInfo& peer,
                         const Error& reason) { on_peer_lost(peer, reason); },
       .call_at =
           [this](Clock::time_point when, base::UniqueFunction<void()> task) {
             loop_->call_at(when, [weak = weak_from_this(), task = std::move(task)]() mutable {
               if (const auto agent = weak.lock()) task();
             });
           },
       .on_notice =
           [this](const WorkerInfo& from, const transport::Message& message, bool opened_here) {
             const base::CallbackScope callback;
             membership_->on_notice(from, message, opened_here);
           },
       .on_heartbeat =
           [this](const WorkerInfo& from, const Digests& digests) {
             const base::CallbackScope callback;
             membership_->on_heartbeat(from, digests);
           },
       .obituary = [this](const WorkerInfo& info) { return membership_->obituary(info); },
       .deadline = [this](std::uint64_t call) { return outgoing_calls_.deadline(call); }});
  membership_->begin();
  peers_->begin_heartbeats(membership_->heartbeat_interval());
}

void Agent::set_membership(MembershipHooks hooks) { membership_->set_hooks(std::move(hooks)); }

void Agent::admit(const MemberCard& card,
                  std::function<void(const std::optional<Error>& refusal, bool here)> done) {
  const base::CallbackScope callback;
  membership_->admit(card, std::move(done));
}

// ---- messages

namespace {

// The message that this thread is handling: whose it is, and over what it came.
struct Delivery {
  const Agent* agent = nullptr;
  transport::Connection* connection = nullptr;
};
constinit thread_local Delivery delivery_here;

class DeliveryScope {
 public:
  explicit DeliveryScope(Delivery delivery) noexcept
      : outer_(std::exchange(delivery_here, delivery)) {}
  ~DeliveryScope() { delivery_here = outer_; }
  DeliveryScope(const DeliveryScope&) = delete;
  DeliveryScope& operator=(const DeliveryScope&) = delete;

 private:
  const Delivery outer_;
};

// Increments a counter, if there is one, when destroyed.
class CountAtEnd {
 public:
  explicit CountAtEnd(std::atomic<std::uint64_t>* count) noexcept : count_(count) {}
  void leave() noexcept { count_ = nullptr; }
  ~CountAtEnd() {
    if (count_ != nullptr) count_->fetch_add(1);
  }
  CountAtEnd(const CountAtEnd&) = delete;
  CountAtEnd& operator=(const CountAtEnd&) = delete;

 private:
  std::atomic<std::uint64_t>* count_;
};

// It is routed without its tensors: what else it brings is taken note of, and its call or its pass
// gets the error.
void note_missing_buffers(InMessage& message, const WorkerInfo& self) {
  Error why(ErrorCode::overloaded, "a message of " + std::to_string(total_bytes(message.raw)) +
                                       " bytes cannot be received by " + to_string(self) +
                                       ": out of memory");
  if (message.view.kind() == wire::kTransfer) throw why;
  message.arrival = std::make_unique<Arrival>();
  message.arrival->error = std::move(why);
  message.arrival->bytes = total_bytes(message.raw);
  message.arrival->read = std::chrono::steady_clock::now();
}

}  // namespace

// The endpoints let all frames be as long as those of membership.
void Agent::check_frame(std::uint16_t kind, std::size_t bytes, const WorkerInfo& from) const {
  const std::size_t limit = wire::max_frame_bytes(kind, options_.max_frame_bytes);
  if (bytes <= limit) [[likely]]
    return;
  throw Error(ErrorCode::out_of_range, "frame of " + std::to_string(bytes) + " bytes from " +
                                           to_string(from) + " exceeds max_frame_bytes " +
                                           std::to_string(limit) + " there");
}

void Agent::on_message(const std::shared_ptr<transport::Connection>& connection,
                       const WorkerInfo& from, transport::Message bytes) {
  const base::CallbackScope callback;
  const DeliveryScope delivery({this, connection.get()});
  const auto head = transport::peek_frame(bytes.frame);
  const std::uint16_t kind = head ? head->kind : 0;
  std::uint64_t call_id = 0;  // of a request or reply
  if (head && head->body.size() >= sizeof(call_id)) {
    std::memcpy(&call_id, head->body.data(), sizeof(call_id));
    call_id = base::to_wire_order(call_id);
  }
  try {
    // Counted once everything that it starts is counted as busy, the destructors of what it brings
    // included: rpc/PROTOCOL.md, L2.
    CountAtEnd received(wire::is_work(kind) ? &received_ : nullptr);
    check_frame(kind, bytes.frame.size(), from);
    InMessage message(std::move(bytes), from);
    if (transport::lacks_buffers(message.raw)) [[unlikely]]
      note_missing_buffers(message, self_);
    if (message.view.section(wire::kDevices) != nullptr && wire::is_work(kind)) [[unlikely]] {
      received.leave();  // once its transfers have come
      on_device_message(connection, std::move(message), call_id);
      return;
    }
    route(connection, std::move(message));
  } catch (...) {
    on_failed_message(connection, from, kind, call_id);
  }
}

void Agent::on_failed_message(const std::shared_ptr<transport::Connection>& connection,
                              const WorkerInfo& from, std::uint16_t kind, std::uint64_t call_id) {
  const Error error = error_of_message(from);
  // A malformed message closes its connection; the other connections are not affected.
  if (error.code() == ErrorCode::protocol || !fail_call_of(connection, from, kind, call_id, error))
    connection->close(error);
}

void Agent::route(const std::shared_ptr<transport::Connection>& connection, InMessage&& message) {
  const std::uint16_t kind = message.view.kind();
  switch (kind) {
    case wire::kRequest:
      if (faults_) [[unlikely]]
        faults_->on_call();
      served_calls_.on_request(connection, std::move(message));
      return;
    case wire::kReply:
    case wire::kErrorReply:
      outgoing_calls_.on_answer(std::move(message));
      return;
    case wire::kCancel:
      served_calls_.on_cancel(message);
      return;
    case wire::kAskRoom:
      served_calls_.on_ask_room(message);
      return;
    case wire::kGiveRoom:
      outgoing_calls_.on_give_room(message);
      return;
    default:
      break;
  }
  const auto handler = frame_handlers_.find(kind);
  if (handler == frame_handlers_.end())
    throw Error(ErrorCode::protocol, "frame kind " + std::to_string(kind) + " is unknown");
  handler->second(std::move(message));
}

bool Agent::fail_call_of(const std::shared_ptr<transport::Connection>& connection,
                         const WorkerInfo& from, std::uint16_t kind, std::uint64_t call_id,
                         const Error& error) noexcept {
  switch (kind) {
    case wire::kRequest:
      served_calls_.refuse(connection, from, call_id, error);
      return true;
    case wire::kReply:
    case wire::kErrorReply:
      outgoing_calls_.fail_answered(call_id, from, error);
      return true;
    default:
      return false;  // what waits for this frame learns of the loss of the peer
  }
}

void Agent::on_peer_lost(const WorkerInfo& peer, const Error& reason) {
  const base::CallbackScope callback;
  events().record("peer lost", peer.id.value(), peer.epoch);
  if (PeerLife* life = peers_->life(peer)) life->lost.store(true);
  outgoing_calls_.on_peer_lost(peer, reason);
  served_calls_.on_peer_lost(peer);
  device_tensors_.on_peer_lost(peer, reason);
  gather_exchange_->on_lost(peer);
  for_each_extension([&](Extension& extension) { extension.on_peer_lost(peer, reason); });
  graceful_shutdown_->on_peer_lost(peer);
  membership_->on_link_lost(peer, reason);
}

std::vector<WorkerInfo> Agent::live_members() const {
  std::vector<WorkerInfo> live;
  for (auto& card : membership_->live_cards()) live.push_back(std::move(card.info));
  return live;
}

std::vector<KnownLife> Agent::known_lives() const { return membership_->lives(); }

// ---- running code

void Agent::post(base::UniqueFunction<void()> task) {
  if (forked() || !pool_.post(task)) task();
}

void Agent::post_for_device(c10::Device device, base::UniqueFunction<void()> task) {
  if (forked() || !device_threads_.post(device, task)) post(std::move(task));
}

void Agent::run_stop(base::UniqueFunction<void()> task) {
  if (forked()) {
    task();
  } else {
    served_calls_.stop_callbacks().run(std::move(task));
  }
}

base::UniqueFunction<void()> Agent::call_at(Clock::time_point when,
                                            base::UniqueFunction<void()> task) {
  const auto timer =
      loop_->call_at(when, [weak = weak_from_this(), task = std::move(task)]() mutable {
        if (const auto agent = weak.lock()) agent->post(std::move(task));
      });
  return [loop = loop_, timer] { loop->cancel(timer); };
}

bool Agent::delivers_here() noexcept { return delivery_here.agent != nullptr; }

void Agent::outside_delivery(const std::function<void()>& task) {
  const DeliveryScope none({});
  task();
}

void Agent::post_where_read(base::UniqueFunction<void()> task) {
  if (delivery_here.agent != this || forked()) {
    post(std::move(task));
  } else if (!rpc::post_where_read(*delivery_here.connection, pool_, shared_from_this(), task)) {
    task();
  }
}

void Agent::in_fresh_state(const std::function<void()>& task) {
  const FreshTorchState fresh;
  task();
}

bool Agent::help(base::AwaitedFlag& done, Clock::time_point deadline) {
  if (forked()) throw_if_stopped();  // in the child it would never be set
  if (outgoing_calls_.size() == 0) return done.is_set();
  return poll(done, deadline);
}

bool Agent::poll(base::AwaitedFlag& done, Clock::time_point deadline) {
  if (stopped()) return done.is_set();
  // Messages are handled on this thread, and must not run under its guards.
  std::optional<FreshTorchState> fresh;
  if (!has_fresh_torch_state()) fresh.emplace();
  return peers_->help(done, deadline);
}

// ---- numbers

Agent::Activity Agent::activity() {
  Activity activity;
  // A request goes from the devices to the calls being served, its answer back to them: asked
  // before and after, they do not miss either.
  const std::size_t waited = device_tensors_.waiting();
  activity.busy = outgoing_calls_.busy();
  activity.busy += served_calls_.busy();
  activity.busy += std::max(waited, device_tensors_.waiting());
  for_each_extension([&](Extension& extension) { activity.busy += extension.active(); });
  activity.sent = sender_.sent();
  activity.received = received_.load();
  return activity;
}

std::map<std::string, std::int64_t> Agent::debug_info() {
  if (forked()) throw_if_stopped();
  const auto pool = receive_pool_->statistics();
  std::map<std::string, std::int64_t> numbers{
      {"rpc.receive_pool_kept_bytes", static_cast<std::int64_t>(pool.kept_bytes)},
      {"rpc.receive_pool_used_bytes", static_cast<std::int64_t>(pool.used_bytes)},
      {"rpc.receive_pool_reused", static_cast<std::int64_t>(pool.reused)},
      {"rpc.receive_pool_fresh", static_cast<std::int64_t>(pool.fresh)},
      {"rpc.calls_made", static_cast<std::int64_t>(outgoing_calls_.size())},
      {"rpc.calls_served", static_cast<std::int64_t>(served_calls_.size())},
      {"rpc.messages_received", static_cast<std::int64_t>(received_.load())},
      {"rpc.pool_threads", pool_.threads()},
      {"rpc.pool_threads_missed", static_cast<std::int64_t>(pool_.threads_missed())},
      {"rpc.callbacks_thrown", static_cast<std::int64_t>(detail::callbacks_thrown())},
      {"rpc.pool_queue", static_cast<std::int64_t>(pool_.queued())},
      {"rpc.gatherings", static_cast<std::int64_t>(gather_exchange_->size())},
  };
  sender_.debug_info(numbers);
  device_tensors_.debug_info(numbers);
  peers_->debug_info(numbers);
  const auto failed = transport::failed_trials();
  for (const char* name : {"shm", "tcp", "tensorpipe-shm", "uv"}) {
    const auto found = failed.find(name);
    numbers.emplace(std::string("transport.failed_trials.") + name,
                    found == failed.end() ? 0 : found->second);
  }
  for_each_extension([&](Extension& extension) { extension.debug_info(numbers); });
  return numbers;
}

// ---- messages that bring tensors to devices: they are routed once these have arrived

void Agent::on_device_message(const std::shared_ptr<transport::Connection>& connection,
                              InMessage&& incoming, std::uint64_t call_id) {
  const auto message = std::make_shared<InMessage>(std::move(incoming));
  DeviceTensors::Announced transfers;
  std::size_t bytes = total_bytes(message->raw);
  const auto read = Clock::now();
  std::optional<Error> failure;
  try {
    transfers = device_tensors_.announced(*message);
    if (message->arrival) throw *message->arrival->error;  // its buffers are missing
    // What waits for its tensors is counted here, as a request that waits for its turn.
    std::shared_ptr<PeerFlow> counted;
    const char* exceeded = nullptr;
    PeerFlow& flow = sender_.flow(message->from);
    if (message->view.kind() == wire::kRequest) {
      bytes = flow.counted(bytes, transfers ? transfers->bytes() : 0);
      const auto end = [bytes](PeerFlow* at) { at->budget.end_received(bytes); };
      exceeded = flow.budget.count_received(bytes);
      counted = std::shared_ptr<PeerFlow>(&flow, end);
    } else if (transfers && message->view.kind() != wire::kReply) {
      bytes = flow.counted_data(bytes, transfers->bytes());
      const auto end = [bytes](PeerFlow* at) { at->end_received_data(bytes); };
      exceeded = flow.count_received_data(bytes) ? nullptr : PeerBudget::kBytesName;
      counted = std::shared_ptr<PeerFlow>(&flow, end);
    }
    if (exceeded != nullptr)
      throw Error(ErrorCode::overloaded,
                  std::string("messages whose tensors have not come exceed ") + exceeded);
    if (message->view.kind() == wire::kReply && !outgoing_calls_.awaits(call_id, message->from))
      throw Error(ErrorCode::cancelled, "no call waits for this result");
    device_tensors_.receive(message, transfers,
                            [agent = shared_from_this(), connection, call_id, bytes, read,
                             counted = std::move(counted)](
                                InMessage&& arrived, const std::optional<Error>& why) mutable {
                              counted.reset();  // from here on on_request() counts it
                              if (arrived.arrival) arrived.arrival->bytes = bytes;
                              if (arrived.arrival) arrived.arrival->read = read;
                              if (!why && !arrived.arrival->error &&
                                  arrived.view.kind() == wire::kReply &&
                                  agent->store_later(connection, arrived, call_id))
                                return;
                              agent->on_arrived(connection, std::move(arrived), call_id, why);
                            });
    return;
  } catch (...) {
    failure = to_error(std::current_exception());
  }
  // One that makes sense is routed without its tensors, as when a device has no memory for them:
  // so what else it brings is taken note of, and its call gets the error.
  if (failure->code() != ErrorCode::protocol) {
    device_tensors_.refuse_transfers(message->from, transfers, *failure);
    message->tensors.clear();
    message->arrival = std::make_unique<Arrival>();
    message->arrival->error = std::exchange(failure, std::nullopt);
    message->arrival->bytes = bytes;
    message->arrival->read = read;
  }
  on_arrived(connection, std::move(*message), call_id, failure);
}

bool Agent::store_later(const std::shared_ptr<transport::Connection>& connection, InMessage& reply,
                        std::uint64_t call_id) {
  auto gate = std::make_unique<DeviceGate>();
  try {
    const auto stream = outgoing_calls_.store_later(call_id, reply);
    if (!stream) return false;
    for (const auto& tensor : reply.tensors) gate->keep(tensor);
    gate->add(*stream);
  } catch (const std::exception& exception) {
    reply.arrival->error = device_error("its result could not be stored", exception);
    return false;
  }
  device_tensors_.when_open(
      std::move(gate), [agent = shared_from_this(), connection, call_id,
                        message = std::move(reply)](const std::optional<Error>& error) mutable {
        if (error) message.arrival->error = error;
        agent->on_arrived(connection, std::move(message), call_id, std::nullopt);
      });
  return true;
}

void Agent::on_arrived(const std::shared_ptr<transport::Connection>& connection,
                       InMessage&& message, std::uint64_t call_id,
                       const std::optional<Error>& failure) {
  const WorkerInfo from = message.from;
  const std::uint16_t kind = message.view.kind();
  // Its sender may leave as soon as it hears of the arrival, and then nothing waits any more for
  // what it has sent: so that is after the message has been routed.
  std::shared_ptr<void> acknowledgment;
  if (message.arrival) acknowledgment = std::move(message.arrival->acknowledgment);
  // Also if it was dropped; once everything that it starts is counted as busy.
  const CountAtEnd received(&received_);
  try {
    // Nothing waits any more for what a life that is lost sent, also if its worker is back.
    if (!stopped() && !peers_->lost(from)) {
      if (failure) throw *failure;
      route(connection, std::move(message));
    }
  } catch (...) {
    on_failed_message(connection, from, kind, call_id);
  }
}

// ---- ending: with all others, by leaving them, or because it was declared dead

std::optional<Error> Agent::why_not_here() const {
  if (state_.ended()) return std::nullopt;
  const std::string called = "shutdown of " + to_string(self_) + " was called from ";
  if (serves_here()) {
    return Error(ErrorCode::invalid_argument,
                 called + "one of its own handlers, which it would wait for");
  }
  if (base::CallbackScope::on_this_thread() || served_calls_.on_stop_callback_thread()) {
    return Error(
        ErrorCode::invalid_argument,
        called + "an inline function, an on_ready or a stop callback, which must not wait");
  }
  return std::nullopt;
}

std::optional<Error> Agent::shutdown(bool graceful, std::chrono::nanoseconds timeout,
                                     std::optional<std::chrono::nanoseconds> wait) {
  if (forked()) return std::nullopt;
  if (auto refusal = why_not_here()) throw std::move(*refusal);
  auto deadline = base::deadline_after(timeout);
  const bool waits = graceful && !options_.world_size.is_elastic();
  if (!state_.begin_shutdown()) {
    constexpr auto kNone = std::chrono::nanoseconds::max();
    const auto longest = wait.value_or(kNone) < kNone - timeout ? *wait + timeout : kNone;
    return await_first_shutdown(waits ? base::deadline_after(longest) : deadline);
  }
  served_calls_.never_serve();
  std::optional<Error> error;
  if (waits) {
    const auto until = wait ? base::deadline_after(*wait) : Clock::time_point::max();
    if ((error = graceful_shutdown_->run(until, timeout))) dump_shutdown();
    deadline = graceful_shutdown_->deadline();
  } else if (graceful) {
    error = leave(deadline);
  }
  // Even past the deadline, closing has a second. A dump of the timeout takes its time from that.
  const auto now = Clock::now();
  const auto late =
      std::clamp<Clock::duration>(now - deadline, Clock::duration::zero(), Dumps::kTimeToWrite);
  stop_everything(std::max(deadline, now + std::chrono::seconds(1) - late));
  state_.end();
  return error;
}

std::optional<Error> Agent::await_first_shutdown(Clock::time_point deadline) {
  constexpr std::chrono::seconds kTimeForClosing{1};  // of the first call, beyond its limit
  const bool limited = deadline < Clock::time_point::max() - kTimeForClosing;
  if (state_.await_end(limited ? deadline + kTimeForClosing : Clock::time_point::max()))
    return std::nullopt;
  std::string text = "a second shutdown of " + to_string(self_) +
                     " has reached its time limit: the first one still ";
  const auto waiting = graceful_shutdown_->waiting();
  dumps_.on_timeout("shutdown timed out", {});
  if (!waiting) {
    text += "runs";
  } else {
    std::vector<std::string> names;
    for (const WorkerId id : waiting->missing) names.push_back(to_string(peers_->find(id)));
    text += std::string("waits for ") + waiting->what + ": " + base::join_names(names);
  }
  return Error(ErrorCode::timeout, text);
}

void Agent::dump_shutdown() noexcept {
  dumps_.on_shutdown_timeout(shutdown_table(*this, graceful_shutdown_->waited()));
}

void Agent::fence(const Error& error) {
  state_.fence(error);
  peers_->for_each([&](const PeerLife& life) { peers_->end(life.info(), error, true); });
}

std::optional<Error> Agent::leave(Clock::time_point deadline) {
  // Calls that have come are served to their end; others may call without end.
  constexpr std::chrono::seconds kTimeForNewCalls{1};
  constexpr std::chrono::seconds kTimeForAcknowledgments{1};
  const auto refuse_from = std::min(Clock::now() + kTimeForNewCalls, deadline);
  std::chrono::microseconds pause(200);
  for (;;) {
    const auto busy = std::max(activity().busy, outgoing_calls_.unhandled());
    // LEFT overtakes large messages, and its receivers end their connections.
    if (busy == 0 && !peers_->awaits_acknowledgment(Unacknowledged::large)) break;
    if (Clock::now() >= deadline) {
      if (busy == 0) break;
      const std::string running = served_calls_.running();
      dump_shutdown();
      membership_->leave(deadline);  // the others are told, and not waited for
      return Error(ErrorCode::timeout, "shutdown of " + to_string(self_) +
                                           " was not graceful: it still makes or serves " +
                                           std::to_string(busy) + " calls" +
                                           (running.empty() ? "" : "; it serves " + running));
    }
    if (Clock::now() >= refuse_from) state_.refuse_requests();
    std::this_thread::sleep_for(pause);  // calls and acknowledgments are counted, without an event
    pause = std::min<std::chrono::microseconds>(pause * 2, std::chrono::milliseconds(10));
  }
  membership_->leave(deadline);
  // What has not been acknowledged would be lost with a connection that breaks now. Acknowledgments
  // come within 0.1 s, without an event: sessions are asked.
  const auto acknowledged_by = std::min(deadline, Clock::now() + kTimeForAcknowledgments);
  while (peers_->awaits_acknowledgment(Unacknowledged::any) && Clock::now() < acknowledged_by)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return std::nullopt;
}

void Agent::stop_everything(Clock::time_point deadline) {
  constexpr std::chrono::milliseconds kTimeForTransports{100};
  state_.stop();
  membership_->stop();
  peers_->expect_closing();
  {
    const base::CallbackScope callbacks;
    outgoing_calls_.stop();
    // Ahead of the calls that wait for it: they are told why.
    gather_exchange_->close(
        Error(ErrorCode::shutting_down, to_string(self_) + " is shutting down"));
    served_calls_.stop_all();
    for_each_extension([](Extension& extension) { extension.stop(); });
  }
  if (device_tensors_.has_transfers() &&
      !run_until(deadline - kTimeForTransports,
                 [self = shared_from_this()] { self->device_tensors_.stop_transfers(); }))
    report_left_behind("a device does not end what was queued on it");
  if (!device_tensors_.stop(deadline - kTimeForTransports))
    report_left_behind("it still waits for a device");
  pool_.close();
  bool handlers_ended = pool_.join_until(deadline - kTimeForTransports);
  if (!handlers_ended) {
    const std::string running = served_calls_.running();
    report_left_behind("handlers still run: " + (running.empty() ? "unknown" : running));
  }
  // They have a moment to end also where handlers have taken all the time.
  if (!device_threads_.close_until(
          std::max(deadline - kTimeForTransports, Clock::now() + std::chrono::milliseconds(20)))) {
    handlers_ended = false;
    report_left_behind("nodes of backward passes still run on devices");
  }
  if (!served_calls_.stop_callbacks().close_until(deadline - kTimeForTransports))
    report_left_behind("stop callbacks still run");
  // A function that blocks where it must not (inline, on_ready) keeps a thread of the transports;
  // this thread must not wait for it without end.
  const bool closed = run_until(deadline, [self = shared_from_this()] {
    self->peers_->close();
    self->rendezvous_.reset();
    self->loop_->close();
  });
  if (!closed && handlers_ended)  // else a handler may run on a thread that reads
    report_left_behind("an inline function or a callback blocks one of its threads");
  dumps_.stop();
  if (handlers_ended && closed)
    for_each_extension([](Extension& extension) { extension.on_all_ended(); });
}

void Agent::report_left_behind(const std::string& what) const {
  std::fprintf(stderr, "stitch: %s leaves while %s\n", to_string(self_).c_str(), what.c_str());
}

}  // namespace stitch::rpc
