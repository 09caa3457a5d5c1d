// One file, though long: what each event of a connection does to the life that it belongs to.
#include "stitch/rpc/peers/peer_table.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>
#include <vector>

#include "stitch/base/byte_io.h"
#include "stitch/base/random.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/message/life_text.h"
#include "stitch/rpc/peers/duration_text.h"

namespace stitch::rpc {

namespace {

// What has been received is acknowledged within this time, if nothing else is sent meanwhile.
constexpr std::chrono::milliseconds kAcknowledgeWithin{100};

// Connections of workers that are no members which wait for a first message or to be known.
constexpr std::size_t kMaxStrangers = 256;

}  // namespace

std::string scheme_of(const std::string& address) { return address.substr(0, address.find(':')); }

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
      members_
          .add(member, [this](PeerLife& life) STITCH_NO_THREAD_SAFETY_ANALYSIS { complete(life); })
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
      if (auto why = objection(hello, addresses[peer_connection->address])) throw std::move(*why);
    };
  }
  events.on_open = [this, peer_connection](const ConnectionPtr& connection) {
    on_open(peer_connection, connection);
  };
  events.on_message = [this, peer_connection](const ConnectionPtr& connection,
                                              transport::Message message) {
    if (peer_connection->bound.load(std::memory_order_acquire)) {
      receive(peer_connection, std::move(message));
    } else {
      on_first_message(peer_connection, connection, std::move(message));
    }
  };
  events.place = [this, peer_connection](const ConnectionPtr&, const base::Bytes& frame,
                                         std::size_t bytes) {
    if (!peer_connection->bound.load(std::memory_order_acquire)) return transport::Buffer{};
    peer_connection->session->acknowledged_ahead(frame);
    return events_.place(peer_connection->peer->info(), frame, bytes);
  };
  events.on_closed = [this, peer_connection](const ConnectionPtr& connection, const Error& reason) {
    on_closed(peer_connection, reason, connection->no_process_listens());
  };
  return events;
}

void PeerTable::receive(const PeerConnectionPtr& sender, transport::Message&& message) {
  PeerLife& from = *sender->peer;  // constant once bound, as the session
  if (from.over.load(std::memory_order_acquire)) [[unlikely]]
    return;
  const auto& session = sender->session;
  bool acknowledge = false;
  try {
    const Session::Arrival arrival = session->receive(message);
    if (arrival == Session::Arrival::unnumbered) [[unlikely]]
      return on_unnumbered(sender, message);
    // From here on the message has been received: if it is not delivered now, it never is.
    if (arrival == Session::Arrival::deliver)
      events_.on_message(session, from.info(), std::move(message));
    acknowledge = session->received_one();
  } catch (...) {
    give_up(from, error_of_message(from.info()));
    return;
  }
  if (acknowledge) [[unlikely]]
    events_.call_at(events_.now() + kAcknowledgeWithin, [session] { session->acknowledge_now(); });
}

void PeerTable::on_unnumbered(const PeerConnectionPtr& sender, const transport::Message& message) {
  const auto head = transport::peek_frame(message.frame);
  if (head && head->kind == wire::kReceived) return;
  PeerLife& life = *sender->peer;
  if (head && head->kind == wire::kHeartbeat) {
    base::ByteReader in(head->body, "heartbeat");
    Digests digests{};
    for (auto& each : digests) each = in.read<std::uint64_t>();
    in.expect_end();
    if (events_.on_heartbeat) events_.on_heartbeat(life.info(), digests);
    return;
  }
  Effects effects;
  {
    base::MutexLock lock(mutex_);
    if (!head || head->kind != wire::kBind)
      throw Error(ErrorCode::protocol, "message without a number");
    peer(life).on_bind(sender, Bind::decode(head->body), effects);
  }
  carry_out(life, std::move(effects));
}

std::optional<Error> PeerTable::objection(const transport::Hello& hello,
                                          const std::string& address) const {
  if (auto why = members_.objection(hello)) return why;
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
  bool hears_first = false;
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
    auto why = objection(hello, connection->describe());
    PeerLife* const life = members_.life(claimed.id, claimed.epoch);
    const bool waits =
        opened->target == nullptr &&
        (why ? events_.on_notice != nullptr && claimed.id != self_ && !members_.refusal(claimed)
             : !life->announced.load());
    const bool refuse = !(waits && !closing_) && (why || life->over.load());
    // One that is told the end of its life may have sent something by now. If the connection closed
    // before that is read, TCP would drop what it is told. Half of the places are for joiners.
    hears_first = refuse && opened->target == nullptr && !closing_ &&
                  events_.on_notice != nullptr && strangers_.size() < kMaxStrangers / 2;
    if ((waits && !closing_) || hears_first) add_stranger(opened, effects);
    if (refuse) {
      if (!why) why = life->peer->lost();
      refused.emplace(claimed, why.value_or(Error(ErrorCode::disconnected, "it is over")));
    } else if (!waits || closing_) {
      opened->peer = life;
      record("connection opened", *life);
      peer(*opened->peer).on_open(opened, effects);
    }
  }
  if (refused) refuse_connection(connection, refused->first, refused->second, hears_first);
  if (opened->peer != nullptr && !refused) {
    carry_out(*opened->peer, std::move(effects));
  } else {
    for (auto& each : effects.close) each.first->close(each.second);
  }
}

void PeerTable::add_stranger(const PeerConnectionPtr& opened, Effects& effects) {
  if (strangers_.size() >= kMaxStrangers) {  // the one that has been silent longest
    effects.close.emplace_back(
        strangers_.front()->connection,
        Error(ErrorCode::overloaded, "too many workers that are no members are connected"));
    strangers_.erase(strangers_.begin());
  }
  strangers_.push_back(opened);
}

void PeerTable::refuse_connection(const ConnectionPtr& connection, const WorkerInfo& claimed,
                                  const Error& reason, bool hears_first) const {
  auto message = events_.obituary ? events_.obituary(claimed) : std::nullopt;
  if (!message) return connection->close(reason);
  connection->send(std::move(*message),
                   [connection, reason, hears_first](const std::optional<Error>& error) {
                     if (error || !hears_first) connection->close(reason);
                   });
}

void PeerTable::on_first_message(const PeerConnectionPtr& sender, const ConnectionPtr& connection,
                                 transport::Message message) {
  const auto head = transport::peek_frame(message.frame);
  const PeerLife* from = nullptr;  // of a notice
  Effects effects;
  PeerLife* life = nullptr;
  try {
    base::MutexLock lock(mutex_);
    if (sender->ended) return;
    life = sender->peer;
    if (std::erase(strangers_, sender) != 0)  // it tries again
      throw Error(ErrorCode::disconnected, "this worker does not know its peer as a member yet");
    const bool notice = head && head->kind == wire::kMembership;
    if (notice && (sender->peer != nullptr || sender->target != nullptr)) {
      from = sender->peer != nullptr ? sender->peer : sender->target;
    } else if (life == nullptr || !head || head->kind != wire::kBind) {
      throw Error(ErrorCode::protocol, "message over connection " + connection->describe() +
                                           " before both sides took it into use");
    } else {
      peer(*life).on_bind(sender, Bind::decode(head->body), effects);
    }
  } catch (const Error& error) {
    connection->close(error);
    return;
  }
  if (from != nullptr) {
    if (events_.on_notice) events_.on_notice(from->info(), message, sender->target != nullptr);
    return;
  }
  if (effects.attach) record("connection bound", *life);
  carry_out(*life, std::move(effects));
}

void PeerTable::on_closed(const PeerConnectionPtr& closed, const Error& reason,
                          bool no_process_listens) {
  Effects effects;
  PeerLife* life = nullptr;
  {
    base::MutexLock lock(mutex_);
    if (closed->ended) return;
    closed->ended = true;
    std::erase(strangers_, closed);
    if (!started_) {
      closed->connection.reset();
      std::erase(early_, closed);
      return;
    }
    life = closed->target != nullptr ? closed->target : closed->peer;
    if (life == nullptr) return;  // it never identified itself, or was refused
    record(closed->bound ? "connection lost" : "connection closed", *life);
    if (closed->bound)
      life->heard.store(closed->connection->heard().time_since_epoch().count(),
                        std::memory_order_relaxed);
    peer(*life).on_closed(closed, reason, no_process_listens, effects);
    closed->connection.reset();
  }
  carry_out(*life, std::move(effects));
}

// ---- effects

void PeerTable::carry_out(PeerLife& life, Effects effects) noexcept {
  for (auto& each : effects.close) each.first->close(each.second);
  if (effects.detach) effects.detach->detach(effects.detach_from);
  if (effects.send_bind) send_bind(effects);
  if (effects.attach) attach(life, effects);
  if (effects.passed_over) say_passed_over(life, *effects.passed_over);
  if (effects.fail_waiting) life.session->fail_waiting(*effects.fail_waiting);
  if (effects.end) {
    std::optional<Error> later;
    {
      base::MutexLock lock(mutex_);
      later = peer(life).lost();
    }
    life.session->end(*effects.end, *later);
    if (life.echo) life.echo->end(*effects.end, *later);
  }
  if (effects.lost) events_.on_lost(life.info(), *effects.lost);
  for (const auto when : effects.timers) events_.call_at(when, [this, &life] { on_timer(life); });
  if (effects.connect) connect(effects.connect);
}

// Once for each transport: it would be the same for many peers.
void PeerTable::say_passed_over(const PeerLife& life,
                                const std::pair<std::string, Error>& address) {
  {
    base::MutexLock lock(mutex_);
    if (!passed_over_.insert(scheme_of(address.first)).second) return;
  }
  const std::string line = "stitch: " + address.first + " is not used with " +
                           to_string(life.info()) +
                           ", another transport is: " + address.second.what();
  if (events_.say) return events_.say(line);
  std::fprintf(stderr, "%s\n", line.c_str());
}

void PeerTable::send_bind(Effects& effects) {
  effects.bind.received = effects.bind_session->received();
  transport::SendDone done;
  if (effects.close_after_bind) {
    done = [connection = effects.send_bind](const std::optional<Error>&) {
      connection->close(Error(ErrorCode::disconnected, "the peer is lost to this worker"));
    };
  }
  effects.send_bind->send(effects.bind.encode(), std::move(done));
}

void PeerTable::attach(PeerLife& life, const Effects& effects) {
  try {
    effects.attach->attach(effects.attach_to, effects.generation, effects.received_by_peer);
  } catch (const Error& error) {
    give_up(life, error);
  }
}

void PeerTable::connect(const PeerConnectionPtr& attempt) {
  const std::string& address = attempt->target->member.addresses[attempt->address];
  ConnectionPtr connection;
  try {
    const EndpointPtr& endpoint = by_scheme_.find(scheme_of(address))->second;
    const WorkerInfo& whom = attempt->target->info();
    connection = endpoint->connect(address, {whom.id.value(), whom.epoch}, events_for(attempt));
  } catch (const Error& error) {
    on_closed(attempt, error, false);
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

// ---- sending and ending

// ---- sending

void PeerTable::send(const WorkerInfo& to, const ConnectionPtr& connection,
                     transport::Message message, transport::SendDone done, std::uint64_t call_id) {
  PeerLife& life = known_life(to);
  if (connection) {
    connection->send(std::move(message), std::move(done));
  } else {
    life.session->send(std::move(message), std::move(done), call_id);
  }
}

void PeerTable::reach(WorkerId id) { reach(*members_.life(id)); }

void PeerTable::try_to_reach(const WorkerInfo& info) {
  PeerLife* life = members_.life(info.id, info.epoch);
  if (life == nullptr) return;
  Effects effects;
  {
    base::MutexLock lock(mutex_);
    peer(*life).try_to_connect(effects);
  }
  carry_out(*life, std::move(effects));
}

void PeerTable::reach(PeerLife& life) {
  Effects effects;
  {
    base::MutexLock lock(mutex_);
    peer(life).connect(effects);
  }
  carry_out(life, std::move(effects));
}

bool PeerTable::help(base::AwaitedFlag& done, std::chrono::steady_clock::time_point deadline) {
  for (const auto& endpoint : endpoints_) {
    if (endpoint->help(done, deadline)) return true;
  }
  return done.is_set();
}

// ---- ending

void PeerTable::give_up(const WorkerInfo& given_up, const Error& reason) {
  give_up(known_life(given_up), reason);
}

void PeerTable::give_up(PeerLife& life, const Error& reason) {
  Effects effects;
  {
    base::MutexLock lock(mutex_);
    peer(life).give_up(reason, effects);
  }
  carry_out(life, std::move(effects));
}

void PeerTable::expect_closing() {
  base::MutexLock lock(mutex_);
  closing_ = true;
  members_.for_each([&](PeerLife& life)
                        STITCH_NO_THREAD_SAFETY_ANALYSIS { peer(life).expect_closing(); });
}

void PeerTable::close() noexcept {
  expect_closing();
  heartbeats_.stop();
  say_goodbye();
  for (const auto& endpoint : endpoints_) endpoint->close();
  for (const auto& endpoint : endpoints_) endpoint->join();
  const Error closed(ErrorCode::shutting_down, "this worker has shut down");
  std::vector<PeerLife*> lives;
  {
    base::MutexLock lock(mutex_);
    early_.clear();
    strangers_.clear();
    members_.for_each([&](PeerLife& life) {
      for (PeerLife* each = &life; each != nullptr; each = each->previous) lives.push_back(each);
    });
  }
  for (PeerLife* life : lives) {
    Effects effects;
    {
      base::MutexLock lock(mutex_);
      peer(*life).close(closed, effects);
    }
    carry_out(*life, std::move(effects));
  }
}

// Spares the peers the attempt to replace their connections to this worker.
void PeerTable::say_goodbye() {
  std::vector<ConnectionPtr> bound;
  {
    base::MutexLock lock(mutex_);
    members_.for_each([&](PeerLife& life) STITCH_NO_THREAD_SAFETY_ANALYSIS {
      const auto& connection = peer(life).bound();
      if (connection && life.info().id != self_) bound.push_back(connection->connection);
    });
  }
  Bind gone;
  gone.step = Bind::Step::gone;
  for (const auto& connection : bound) connection->send(gone.encode(), nullptr);
}

// ---- lives

namespace {

// A worker that was heard of within this time is reported as alive.
// What a peer may leave unacknowledged, beside max_inflight_bytes.
constexpr std::size_t kMinPassedOn = std::size_t{64} << 20;

}  // namespace

// ---- lives

PeerLife& PeerTable::known_life(const WorkerInfo& info) const {
  if (PeerLife* life = members_.life(info.id, info.epoch)) return *life;
  static_cast<void>(members_.find(info));  // says why not
  throw Error(ErrorCode::not_found, to_string(info) + " is not in this world");
}

void PeerTable::complete(PeerLife& life) {
  std::vector<bool> reachable;
  for (const auto& address : life.member.addresses)
    reachable.push_back(by_scheme_.contains(scheme_of(address)));
  life.session = make_session(life);
  if (life.info().id == self_) life.echo = make_session(life);
  life.peer = std::make_unique<Peer>(life, self_, std::move(reachable), reconnect_timeout_,
                                     base::random_number() | 1, events_.now);
  life.flow.emplace(limits_.with(life.member.limits));
  if (closing_) life.peer->expect_closing();
}

std::shared_ptr<Session> PeerTable::make_session(PeerLife& life) {
  // Both what this worker has asked for and its answers may be on the way to one peer.
  const std::size_t max_passed_on =
      kMinPassedOn + 2 * std::min(limits_.bytes, std::size_t{1} << 48);
  const std::size_t max_untold =
      std::clamp(limits_.bytes / 64, std::size_t{1} << 20, std::size_t{32} << 20);
  return std::make_shared<Session>(
      Session::Events{
          .deadline = [this](std::uint64_t call_id) { return events_.deadline(call_id); },
          .on_close = [this, &life](const Error& why) { give_up(life, why); },
          .on_unconnected = [this, &life] { reach(life); }},
      max_passed_on, max_untold);
}

PeerLife& PeerTable::add_life(const Member& member) {
  Effects effects;
  PeerLife* added = nullptr;
  {
    base::MutexLock lock(mutex_);
    added = &members_.add(
        member, [this](PeerLife& life) STITCH_NO_THREAD_SAFETY_ANALYSIS { complete(life); });
    if (PeerLife* former = added->previous) {
      former->over.store(true, std::memory_order_release);
      peer(*former).lose(
          Error(ErrorCode::disconnected, "it is now epoch " + std::to_string(member.info.epoch)),
          effects);
    }
  }
  if (added->previous != nullptr) carry_out(*added->previous, std::move(effects));
  return *added;
}

void PeerTable::admit(PeerLife& life) {
  std::vector<std::pair<PeerConnectionPtr, ConnectionPtr>> waiting;
  {
    base::MutexLock lock(mutex_);
    life.announced.store(true);
    std::erase_if(strangers_, [&](const PeerConnectionPtr& each) {
      const transport::Hello& hello = each->connection->peer();
      if (hello.id != life.info().id.value() || hello.epoch != life.info().epoch) return false;
      waiting.emplace_back(each, each->connection);
      return true;
    });
  }
  for (const auto& [each, connection] : waiting) on_open(each, connection);
}

void PeerTable::end(const WorkerInfo& info, const Error& reason, bool over, bool tell) {
  PeerLife* life = members_.life(info.id, info.epoch);
  if (life == nullptr) return;
  Effects effects;
  {
    base::MutexLock lock(mutex_);
    if (over) life->over.store(true, std::memory_order_release);
    if (tell) {
      peer(*life).part(reason, effects);
    } else {
      peer(*life).lose(reason, effects);
    }
  }
  carry_out(*life, std::move(effects));
}

std::vector<PeerTable::Link> PeerTable::links() {
  std::vector<Link> links;
  base::MutexLock lock(mutex_);
  members_.for_each([&](PeerLife& life) STITCH_NO_THREAD_SAFETY_ANALYSIS {
    const auto& bound = peer(life).bound();
    if (!bound || !bound->connection || bound->in_process) return;
    const auto when = heard(life);
    life.heard.store(when.time_since_epoch().count(), std::memory_order_relaxed);
    links.push_back({&life, when});
  });
  return links;
}

// It cannot be heard while this side does not read. REQUIRES: a bound connection.
PeerTable::Clock::time_point PeerTable::heard(const PeerLife& life) const {
  const transport::Connection& connection = *peer(life).bound()->connection;
  return connection.holds_back() ? Clock::now() : connection.heard();
}

void PeerTable::begin_heartbeats(std::chrono::nanoseconds interval) {
  heartbeats_.start(interval, [this] { beat(); });
}

void PeerTable::beat() noexcept {
  std::vector<std::shared_ptr<Session>> sessions;
  {
    base::MutexLock lock(mutex_);
    members_.for_each([&](const PeerLife& life) STITCH_NO_THREAD_SAFETY_ANALYSIS {
      const auto& bound = peer(life).bound();
      if (bound && !bound->in_process) sessions.push_back(bound->session);
    });
  }
  Digests digests{};  // two that were told at once may mix: the next heartbeat has what is right
  for (std::size_t i = 0; i < kDigests; ++i) digests[i] = digests_[i].load();
  for (const auto& session : sessions) session->beat(digests);
}

void PeerTable::trim() {
  std::vector<ConnectionPtr> connections;
  {
    base::MutexLock lock(mutex_);
    members_.for_each([&](const PeerLife& life) STITCH_NO_THREAD_SAFETY_ANALYSIS {
      const auto& bound = peer(life).bound();
      if (bound && bound->connection && !bound->in_process)
        connections.push_back(bound->connection);
    });
  }
  for (const auto& connection : connections) connection->trim();
}

std::vector<const PeerLife*> PeerTable::unconnected() const {
  std::vector<const PeerLife*> lives;
  base::MutexLock lock(mutex_);
  if (closing_) return lives;
  members_.for_each([&](const PeerLife& life) STITCH_NO_THREAD_SAFETY_ANALYSIS {
    const Peer& about = peer(life);
    if (life.info().id == self_ || about.bound() || about.broken() || about.lost()) return;
    const auto& addresses = life.member.addresses;
    const auto first = std::ranges::find_if(
        addresses, [&](const auto& address) { return by_scheme_.contains(scheme_of(address)); });
    // Within a process all end together.
    if (first != addresses.end() && !first->starts_with("loopback:")) lives.push_back(&life);
  });
  return lives;
}

void PeerTable::on_timer(PeerLife& life) {
  Effects effects;
  {
    base::MutexLock lock(mutex_);
    peer(life).on_timer(effects);
  }
  carry_out(life, std::move(effects));
}

// ---- state

bool PeerTable::closing() const {
  base::MutexLock lock(mutex_);
  return closing_;
}

std::optional<Error> PeerTable::lost(WorkerId id) const {
  const PeerLife* life = members_.life(id);
  if (life == nullptr) return std::nullopt;
  base::MutexLock lock(mutex_);
  return peer(*life).lost();
}

std::optional<Error> PeerTable::lost(const WorkerInfo& info) const {
  const PeerLife& life = known_life(info);
  base::MutexLock lock(mutex_);
  return peer(life).lost();
}

std::string PeerTable::condition(const WorkerInfo& info) const {
  const PeerLife& life = known_life(info);
  base::MutexLock lock(mutex_);
  const Peer& about = peer(life);
  if (about.lost()) return "worker is gone";
  if (const auto& broken = about.broken()) {
    return "worker has had no connection for " + duration_text(events_.now() - broken->since) +
           ", another one is tried: " + broken->reason.what() +
           (about.failure() ? std::string("; ") + about.failure()->what() : std::string());
  }
  if (!about.bound()) {
    return "worker is not connected" +
           (about.failure() ? std::string(": ") + about.failure()->what() : std::string(" yet"));
  }
  const Clock::duration silent = Clock::now() - heard(life);
  return "worker was last heard " + duration_text(std::max(silent, Clock::duration::zero())) +
         " ago";
}

std::size_t PeerTable::lost_lives() const {
  base::MutexLock lock(mutex_);
  std::size_t count = 0;
  members_.for_each([&](const PeerLife& life) STITCH_NO_THREAD_SAFETY_ANALYSIS {
    for (const PeerLife* each = &life; each != nullptr; each = each->previous)
      count += each != &life || peer(*each).lost() ? 1 : 0;
  });
  return count;
}

bool PeerTable::connected(const WorkerInfo& info) const {
  const PeerLife& life = known_life(info);
  base::MutexLock lock(mutex_);
  return peer(life).bound() != nullptr;
}

std::size_t PeerTable::connections() const {
  base::MutexLock lock(mutex_);
  std::size_t count = 0;
  members_.for_each([&](const PeerLife& life)
                        STITCH_NO_THREAD_SAFETY_ANALYSIS { count += peer(life).bound() ? 1 : 0; });
  return count;
}

std::uint64_t PeerTable::failed_tries() const {
  base::MutexLock lock(mutex_);
  std::uint64_t count = 0;
  members_.for_each([&](const PeerLife& life) STITCH_NO_THREAD_SAFETY_ANALYSIS {
    count += peer(life).failed_attempts();
  });
  return count;
}

bool PeerTable::awaits_acknowledgment(Unacknowledged what) const {
  base::MutexLock lock(mutex_);
  bool awaits = false;
  members_.for_each([&](const PeerLife& life) STITCH_NO_THREAD_SAFETY_ANALYSIS {
    awaits = awaits || (peer(life).bound() && life.session->awaits(what));
  });
  return awaits;
}

void PeerTable::debug_info(std::map<std::string, std::int64_t>& numbers) const {
  numbers.emplace("rpc.connections", static_cast<std::int64_t>(connections()));
  numbers.emplace("rpc.failed_tries_to_connect", static_cast<std::int64_t>(failed_tries()));
  members_.for_each([&](const PeerLife& life) {
    const std::string key = "rpc.peer." + life.info().name + ".connect_failures.";
    if (life.over.load(std::memory_order_acquire)) return;
    base::MutexLock lock(mutex_);
    // A worker may name an address twice.
    peer(life).for_each_failed_address([&](const std::string& address, std::uint64_t failures) {
      numbers[key + address] += static_cast<std::int64_t>(failures);
    });
  });
  members_.for_each([&](const PeerLife& life) {
    const auto add_traffic = [&, key = "rpc.peer." + life.info().name](const Session& session) {
      const auto traffic = session.statistics();
      numbers[key + ".messages_sent"] += static_cast<std::int64_t>(traffic.sent);
      numbers[key + ".bytes_sent"] += static_cast<std::int64_t>(traffic.sent_bytes);
      numbers[key + ".messages_received"] += static_cast<std::int64_t>(traffic.received);
      numbers[key + ".bytes_received"] += static_cast<std::int64_t>(traffic.received_bytes);
    };
    add_traffic(*life.session);
    if (life.echo) add_traffic(*life.echo);
  });
  Session::Statistics all;
  const auto add = [&all](const Session& session) {
    const auto one = session.statistics();
    all.reconnects += one.reconnects;
    all.resent += one.resent;
    all.duplicates_dropped += one.duplicates_dropped;
    all.kept_messages += one.kept_messages;
    all.kept_bytes += one.kept_bytes;
  };
  members_.for_each([&](const PeerLife& life) {
    for (const PeerLife* each = &life; each != nullptr; each = each->previous) {
      add(*each->session);
      if (each->echo) add(*each->echo);
    }
  });
  numbers.emplace("rpc.reconnects", static_cast<std::int64_t>(all.reconnects));
  numbers.emplace("rpc.resent", static_cast<std::int64_t>(all.resent));
  numbers.emplace("rpc.duplicates_dropped", static_cast<std::int64_t>(all.duplicates_dropped));
  numbers.emplace("rpc.kept_messages", static_cast<std::int64_t>(all.kept_messages));
  numbers.emplace("rpc.kept_bytes", static_cast<std::int64_t>(all.kept_bytes));
  for (const auto& endpoint : endpoints_) {
    for (const auto& [name, count] : endpoint->counters()) numbers[name] += count;
  }
}

}  // namespace stitch::rpc
