#include "stitch/rpc/agent/peer_table.h"

#include <time.h>

#include <utility>

#include "stitch/rpc/agent/call_table.h"
#include "stitch/rpc/message/message.h"

namespace stitch::rpc {

namespace {

// The steady clock, milliseconds coarse, at the cost of a few nanoseconds.
std::chrono::steady_clock::rep coarse_now() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
             std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec))
      .count();
}

// Connections of workers that are no members which wait for a first message or to be known.
constexpr std::size_t kMaxStrangers = 256;

transport::Message bind_message() {
  transport::FrameBuilder frame(wire::kBind);
  frame.end_body();
  return std::move(frame).finish();
}

std::string scheme_of(const std::string& address) { return address.substr(0, address.find(':')); }

}  // namespace

PeerTable::~PeerTable() { close(); }

std::vector<std::string> PeerTable::listen(EndpointPtr endpoint) {
  auto addresses =
      endpoint->listen([this] { return events_for(std::make_shared<PeerConnection>()); });
  for (const auto& address : addresses) by_scheme_.emplace(scheme_of(address), endpoint);
  endpoints_.push_back(std::move(endpoint));
  return addresses;
}

void PeerTable::start(const std::vector<Member>& members, WorkerId self, Events events) {
  events_ = std::move(events);
  self_ = self;
  std::vector<PeerConnectionPtr> early;
  {
    base::MutexLock lock(mutex_);
    for (const Member& member : members)
      members_.add(member, [this](Life& life) STITCH_NO_THREAD_SAFETY_ANALYSIS { complete(life); })
          .announced.store(true);
    started_ = true;
    early.swap(early_);
  }
  for (const PeerConnectionPtr& each : early) {
    ConnectionPtr connection;
    {
      base::MutexLock lock(mutex_);
      connection = each->connection;
    }
    if (connection) on_open(each, connection);
  }
}

// ---- events of connections

transport::ConnectionEvents PeerTable::events_for(const PeerConnectionPtr& peer_connection) {
  transport::ConnectionEvents events;
  if (peer_connection->target) {
    events.check_peer = [this, peer_connection](const transport::Hello& hello) {
      const auto& addresses = peer_connection->target->member.addresses;
      if (auto why = objection(*peer_connection, hello, addresses[peer_connection->address]))
        throw std::move(*why);
    };
  }
  events.on_open = [this, peer_connection](const ConnectionPtr& connection) {
    on_open(peer_connection, connection);
  };
  events.on_message = [this, peer_connection](const ConnectionPtr& connection,
                                              transport::Message message) {
    if (peer_connection->bound.load(std::memory_order_acquire)) {
      receive(*peer_connection, connection, std::move(message));
    } else {
      on_first_message(peer_connection, connection, std::move(message));
    }
  };
  events.place = [this, peer_connection](const ConnectionPtr&, const base::Bytes& frame,
                                         std::size_t bytes) {
    if (!peer_connection->bound.load(std::memory_order_acquire)) return transport::Buffer{};
    return events_.place(peer_connection->peer->info(), frame, bytes);
  };
  events.on_closed = [this, peer_connection](const ConnectionPtr&, const Error& reason) {
    on_closed(peer_connection, reason);
  };
  return events;
}

void PeerTable::receive(const PeerConnection& sender, const ConnectionPtr& connection,
                        transport::Message message) {
  Life& from = *sender.peer;  // constant once bound
  if (from.over.load(std::memory_order_acquire)) [[unlikely]]
    return;
  from.heard.store(coarse_now(), std::memory_order_relaxed);
  events_.on_message(connection, from.info(), std::move(message));
}

std::optional<Error> PeerTable::objection(const PeerConnection& peer_connection,
                                          const transport::Hello& hello,
                                          const std::string& address) const {
  if (auto why = members_.objection(hello)) return why;
  if (peer_connection.target && peer_connection.target->info().id.value() != hello.id) {
    return Error(ErrorCode::unauthenticated, Members::claimed_identity(hello) + " answers where " +
                                                 to_string(peer_connection.target->info()) +
                                                 " should");
  }
  // A worker connects to itself within the process only.
  if (hello.id == self_.value() && !address.starts_with("loopback:")) {
    return Error(ErrorCode::unauthenticated,
                 Members::claimed_identity(hello) + " claims to be this worker itself");
  }
  return std::nullopt;
}

void PeerTable::on_open(const PeerConnectionPtr& opened, const ConnectionPtr& connection) {
  Effects effects;
  std::optional<std::pair<WorkerInfo, Error>> refused;
  {
    base::MutexLock lock(mutex_);
    if (opened->ended) return;
    opened->connection = connection;
    opened->in_process = connection->describe().starts_with("loopback:");
    if (!started_) {
      early_.push_back(opened);
      return;
    }
    const transport::Hello& hello = connection->peer();
    const WorkerInfo claimed{hello.name, WorkerId(hello.id), hello.epoch};
    auto why = objection(*opened, hello, connection->describe());
    Life* const life = members_.life(claimed.id, claimed.epoch);
    const bool waits =
        opened->target == nullptr &&
        (why ? events_.on_stranger != nullptr && claimed.id != self_ && !members_.refusal(claimed)
             : !life->announced.load());
    if (waits && !closing_) {
      if (strangers_.size() >= kMaxStrangers) {  // the one that has been silent longest
        effects.close.emplace_back(
            strangers_.front()->connection,
            Error(ErrorCode::overloaded, "too many workers that are no members are connected"));
        strangers_.erase(strangers_.begin());
      }
      strangers_.push_back(opened);
    } else if (why || life->over.load()) {
      if (!why) why = life->peer->lost();
      refused.emplace(claimed, why.value_or(Error(ErrorCode::disconnected, "it is over")));
    } else {
      opened->peer = life;
      record("connection opened", *life);
      peer(*opened->peer).on_open(opened, effects);
    }
  }
  if (refused) {
    auto message = events_.obituary ? events_.obituary(refused->first) : std::nullopt;
    if (message) {
      connection->send(std::move(*message),
                       [connection, reason = refused->second](const std::optional<Error>&) {
                         connection->close(reason);
                       });
    } else {
      connection->close(refused->second);
    }
  }
  perform(std::move(effects));
}

void PeerTable::on_first_message(const PeerConnectionPtr& sender, const ConnectionPtr& connection,
                                 transport::Message message) {
  const auto head = transport::peek_frame(message.frame);
  bool bound = false;
  bool stranger = false;
  const Life* from = nullptr;  // of a notice
  Effects effects;
  {
    base::MutexLock lock(mutex_);
    if (sender->ended) return;
    stranger = std::erase(strangers_, sender) != 0;
    const bool notice = head && head->kind == wire::kMembership;
    if (stranger) {
      // Its first message decides.
    } else if (notice && (sender->peer != nullptr || sender->target != nullptr)) {
      from = sender->peer != nullptr ? sender->peer : sender->target;
    } else if (!sender->peer || !head || head->kind != wire::kBind) {
      effects.close.emplace_back(
          connection,
          Error(ErrorCode::protocol, "message over connection " + connection->describe() +
                                         " before both sides took it into use"));
    } else {
      bound = peer(*sender->peer).on_bind(sender, effects);
      if (bound) sender->peer->heard.store(coarse_now(), std::memory_order_relaxed);
    }
  }
  perform(std::move(effects));
  if (stranger) {
    const transport::Hello& hello = connection->peer();
    events_.on_stranger(connection, {hello.name, WorkerId(hello.id), hello.epoch},
                        std::move(message));
  }
  if (from != nullptr && events_.on_notice) events_.on_notice(from->info(), std::move(message));
  if (!bound) return;
  record("connection bound", *sender->peer);
  if (sender->target) connection->send(bind_message(), nullptr);
  send_waiting(sender, connection);
}

void PeerTable::send_waiting(const PeerConnectionPtr& bound, const ConnectionPtr& connection) {
  for (;;) {
    std::vector<Peer::WaitingMessage> batch;
    {
      base::MutexLock lock(mutex_);
      batch = peer(*bound->peer).take_waiting(bound);
    }
    if (batch.empty()) return;
    for (auto& each : batch) {
      if (each.call_id != 0 && !events_.wanted(each.call_id)) {
        each.message = {};
        each.done(Error(ErrorCode::cancelled, "it was not wanted any more before it was sent"));
      } else {
        connection->send(std::move(each.message), std::move(each.done));
      }
    }
  }
}

void PeerTable::on_closed(const PeerConnectionPtr& closed, const Error& reason) {
  Effects effects;
  {
    base::MutexLock lock(mutex_);
    if (closed->ended) return;
    closed->ended = true;
    closed->connection.reset();
    std::erase(strangers_, closed);
    if (!started_) {
      std::erase(early_, closed);
      return;
    }
    const Life* life = closed->target != nullptr ? closed->target : closed->peer;
    if (life == nullptr) return;  // it never identified itself, or was refused
    record(closed->bound ? "connection lost" : "connection closed", *life);
    peer(*life).on_closed(closed, reason, effects);
  }
  perform(std::move(effects));
}

// ---- effects

void PeerTable::perform(Effects effects) {
  for (auto& [connection, why] : effects.close) connection->close(why);
  if (effects.send_bind) effects.send_bind->send(bind_message(), nullptr);
  for (auto& each : effects.failed) {
    each.message = {};
    each.done(effects.failure);
  }
  if (effects.lost) events_.on_lost(effects.lost->first->info(), effects.lost->second);
  if (effects.retry) {
    events_.call_at(effects.retry->second, [this, life = effects.retry->first] { retry(*life); });
  }
  if (effects.connect) connect(effects.connect);
}

void PeerTable::connect(const PeerConnectionPtr& attempt) {
  const std::string& address = attempt->target->member.addresses[attempt->address];
  ConnectionPtr connection;
  try {
    const EndpointPtr& endpoint = by_scheme_.find(scheme_of(address))->second;
    connection = endpoint->connect(address, events_for(attempt));
  } catch (...) {
    on_closed(attempt, to_error(std::current_exception()));
    return;
  }
  {
    base::MutexLock lock(mutex_);
    if (attempt->ended) return;
    attempt->connection = connection;
    if (peer(*attempt->target).wants(attempt)) return;
  }
  connection->close(Error(ErrorCode::disconnected, "the connection is not needed"));
}

void PeerTable::retry(Life& life) {
  Effects effects;
  {
    base::MutexLock lock(mutex_);
    peer(life).on_retry_timer(effects);
  }
  perform(std::move(effects));
}

// ---- sending

void PeerTable::send(const WorkerInfo& to, ConnectionPtr connection, transport::Message message,
                     transport::SendDone done, std::uint64_t call_id) {
  Life* life = &known(to);
  if (!life->sent.load(std::memory_order_relaxed))
    life->sent.store(true, std::memory_order_relaxed);
  if (!connection) {
    base::MutexLock lock(mutex_);
    connection = peer(*life).usable();
  }
  if (connection) {
    connection->send(std::move(message), std::move(done));
  } else {
    send_when_bound(*life, {std::move(message), std::move(done), call_id});
  }
}

void PeerTable::send_when_bound(Life& to, Peer::WaitingMessage message) {
  ConnectionPtr connection;  // it may have been bound meanwhile
  Effects effects;
  {
    base::MutexLock lock(mutex_);
    connection = peer(to).usable();
    if (!connection) peer(to).wait(std::move(message), effects);
  }
  if (connection) connection->send(std::move(message.message), std::move(message.done));
  perform(std::move(effects));
}

void PeerTable::reach(WorkerId id) {
  Effects effects;
  {
    base::MutexLock lock(mutex_);
    peer(*members_.life(id)).connect(effects);
  }
  perform(std::move(effects));
}

bool PeerTable::help(const std::atomic<bool>& done,
                     std::chrono::steady_clock::time_point deadline) {
  for (const auto& endpoint : endpoints_) {
    if (endpoint->help(done, deadline)) return true;
  }
  return done.load(std::memory_order_acquire);
}

// ---- ending

void PeerTable::give_up(const WorkerInfo& given_up, const Error& reason) {
  const Life& life = known(given_up);
  ConnectionPtr connection;
  Effects effects;
  {
    base::MutexLock lock(mutex_);
    if (const auto& bound = peer(life).bound()) {
      connection = bound->connection;  // its end makes the peer lost
    } else {
      peer(life).lose(reason, effects);
    }
  }
  if (connection) connection->close(reason);
  perform(std::move(effects));
}

void PeerTable::expect_closing() {
  base::MutexLock lock(mutex_);
  closing_ = true;
  members_.for_each([&](Life& life)
                        STITCH_NO_THREAD_SAFETY_ANALYSIS { peer(life).expect_closing(); });
}

void PeerTable::close() {
  expect_closing();
  for (const auto& endpoint : endpoints_) endpoint->close();
  for (const auto& endpoint : endpoints_) endpoint->join();
  Effects effects;
  const Error closed(ErrorCode::shutting_down, "this worker has shut down");
  {
    base::MutexLock lock(mutex_);
    early_.clear();
    strangers_.clear();
    members_.for_each([&](Life& life) STITCH_NO_THREAD_SAFETY_ANALYSIS {
      for (Life* each = &life; each != nullptr; each = each->previous)
        peer(*each).close(closed, effects);
    });
  }
  effects.failure = closed;
  perform(std::move(effects));
}

}  // namespace stitch::rpc
