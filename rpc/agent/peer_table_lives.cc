// What a PeerTable knows of the lives of its workers.

#include <algorithm>
#include <utility>

#include "stitch/base/random.h"
#include "stitch/rpc/agent/duration_text.h"
#include "stitch/rpc/agent/peer_table.h"

namespace stitch::rpc {

namespace {

// A worker that was heard of within this time is reported as alive.
// What a peer may leave unacknowledged, beside max_inflight_bytes.
constexpr std::size_t kMinPassedOn = std::size_t{64} << 20;

}  // namespace

// ---- lives

Life& PeerTable::known(const WorkerInfo& info) const {
  if (Life* life = members_.life(info.id, info.epoch)) return *life;
  static_cast<void>(members_.find(info));  // says why not
  throw Error(ErrorCode::not_found, to_string(info) + " is not in this world");
}

void PeerTable::complete(Life& life) {
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

std::shared_ptr<Session> PeerTable::make_session(Life& life) {
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

Life& PeerTable::add_life(const Member& member) {
  Effects effects;
  Life* added = nullptr;
  {
    base::MutexLock lock(mutex_);
    added = &members_.add(member,
                          [this](Life& life) STITCH_NO_THREAD_SAFETY_ANALYSIS { complete(life); });
    if (Life* former = added->previous) {
      former->over.store(true, std::memory_order_release);
      peer(*former).lose(
          Error(ErrorCode::disconnected, "it is now epoch " + std::to_string(member.info.epoch)),
          effects);
    }
  }
  if (added->previous != nullptr) perform(*added->previous, std::move(effects));
  return *added;
}

void PeerTable::admit(Life& life) {
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
  Life* life = members_.life(info.id, info.epoch);
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
  perform(*life, std::move(effects));
}

std::vector<PeerTable::Link> PeerTable::links() {
  std::vector<Link> links;
  base::MutexLock lock(mutex_);
  members_.for_each([&](Life& life) STITCH_NO_THREAD_SAFETY_ANALYSIS {
    const auto& bound = peer(life).bound();
    if (!bound || !bound->connection || bound->in_process) return;
    const auto when = heard(life);
    life.heard.store(when.time_since_epoch().count(), std::memory_order_relaxed);
    links.push_back({&life, when});
  });
  return links;
}

// It cannot be heard while this side does not read. REQUIRES: a bound connection.
PeerTable::Clock::time_point PeerTable::heard(const Life& life) const {
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
    members_.for_each([&](const Life& life) STITCH_NO_THREAD_SAFETY_ANALYSIS {
      const auto& bound = peer(life).bound();
      if (bound && !bound->in_process) sessions.push_back(bound->session);
    });
  }
  for (const auto& session : sessions) session->beat(digest_.load());
}

void PeerTable::trim() {
  std::vector<ConnectionPtr> connections;
  {
    base::MutexLock lock(mutex_);
    members_.for_each([&](const Life& life) STITCH_NO_THREAD_SAFETY_ANALYSIS {
      const auto& bound = peer(life).bound();
      if (bound && bound->connection && !bound->in_process)
        connections.push_back(bound->connection);
    });
  }
  for (const auto& connection : connections) connection->trim();
}

std::vector<const Life*> PeerTable::unconnected() const {
  std::vector<const Life*> lives;
  base::MutexLock lock(mutex_);
  if (closing_) return lives;
  members_.for_each([&](const Life& life) STITCH_NO_THREAD_SAFETY_ANALYSIS {
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

void PeerTable::on_timer(Life& life) {
  Effects effects;
  {
    base::MutexLock lock(mutex_);
    peer(life).on_timer(effects);
  }
  perform(life, std::move(effects));
}

// ---- state

bool PeerTable::closing() const {
  base::MutexLock lock(mutex_);
  return closing_;
}

std::optional<Error> PeerTable::lost(WorkerId id) const {
  const Life* life = members_.life(id);
  if (life == nullptr) return std::nullopt;
  base::MutexLock lock(mutex_);
  return peer(*life).lost();
}

std::optional<Error> PeerTable::lost(const WorkerInfo& info) const {
  const Life& life = known(info);
  base::MutexLock lock(mutex_);
  return peer(life).lost();
}

std::string PeerTable::condition(const WorkerInfo& info) const {
  const Life& life = known(info);
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
  members_.for_each([&](const Life& life) STITCH_NO_THREAD_SAFETY_ANALYSIS {
    for (const Life* each = &life; each != nullptr; each = each->previous)
      count += each != &life || peer(*each).lost() ? 1 : 0;
  });
  return count;
}

bool PeerTable::connected(const WorkerInfo& info) const {
  const Life& life = known(info);
  base::MutexLock lock(mutex_);
  return peer(life).bound() != nullptr;
}

std::size_t PeerTable::connections() const {
  base::MutexLock lock(mutex_);
  std::size_t count = 0;
  members_.for_each([&](const Life& life)
                        STITCH_NO_THREAD_SAFETY_ANALYSIS { count += peer(life).bound() ? 1 : 0; });
  return count;
}

std::uint64_t PeerTable::failed_tries() const {
  base::MutexLock lock(mutex_);
  std::uint64_t count = 0;
  members_.for_each([&](const Life& life) STITCH_NO_THREAD_SAFETY_ANALYSIS {
    count += peer(life).failed_attempts();
  });
  return count;
}

bool PeerTable::awaits_acknowledgment(Unacknowledged what) const {
  base::MutexLock lock(mutex_);
  bool awaits = false;
  members_.for_each([&](const Life& life) STITCH_NO_THREAD_SAFETY_ANALYSIS {
    awaits = awaits || (peer(life).bound() && life.session->awaits(what));
  });
  return awaits;
}

void PeerTable::debug_info(std::map<std::string, std::int64_t>& numbers) const {
  numbers.emplace("rpc.connections", static_cast<std::int64_t>(connections()));
  numbers.emplace("rpc.failed_tries_to_connect", static_cast<std::int64_t>(failed_tries()));
  members_.for_each([&](const Life& life) {
    const std::string key = "rpc.peer." + life.info().name + ".connect_failures.";
    if (life.over.load(std::memory_order_acquire)) return;
    base::MutexLock lock(mutex_);
    // A worker may name an address twice.
    peer(life).for_each_failed_address([&](const std::string& address, std::uint64_t failures) {
      numbers[key + address] += static_cast<std::int64_t>(failures);
    });
  });
  members_.for_each([&](const Life& life) {
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
  members_.for_each([&](const Life& life) {
    for (const Life* each = &life; each != nullptr; each = each->previous) {
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
