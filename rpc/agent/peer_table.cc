#include "stitch/rpc/agent/peer_table.h"

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <utility>

#include "stitch/base/name_list.h"
#include "stitch/rpc/message/message.h"

namespace stitch::rpc {

namespace {

// How long it goes on after the first failure: a peer that has died is to be known as dead within
// two seconds, and a shortage of descriptors or memory here has that long to pass. More when the
// peer has answered: then it lives, and binds another connection or refuses this worker.
constexpr std::chrono::milliseconds kPatience{1000};
constexpr std::chrono::milliseconds kPatienceWithTheLiving{5000};
constexpr std::chrono::milliseconds kShortestPause{10};
constexpr std::chrono::milliseconds kLongestPause{200};

// The steady clock, some milliseconds late and for a few nanoseconds.
std::chrono::steady_clock::rep coarse_now() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
             std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec))
      .count();
}

// Whether the peer, or this worker's own endpoint, has said no: trying again changes nothing.
bool is_refusal(const Error& error) {
  switch (error.code()) {
    case ErrorCode::unauthenticated:
    case ErrorCode::protocol:
    case ErrorCode::invalid_argument:
    case ErrorCode::unimplemented:
    case ErrorCode::shutting_down:
      return true;
    default:
      return false;
  }
}

transport::Message bind_message() {
  transport::FrameBuilder frame(wire::kBind);
  frame.end_body();
  return std::move(frame).finish();
}

std::string scheme_of(const std::string& address) { return address.substr(0, address.find(':')); }

std::string quoted_list(const std::vector<std::string>& names) {
  std::string list;
  for (const auto& name : names) list += (list.empty() ? "\"" : ", \"") + name + "\"";
  return list;
}

}  // namespace

PeerTable::~PeerTable() { close(); }

std::vector<std::string> PeerTable::listen(EndpointPtr endpoint) {
  auto addresses = endpoint->listen([this] { return events_for(std::make_shared<Line>()); });
  for (const auto& address : addresses) by_scheme_.emplace(scheme_of(address), endpoint);
  endpoints_.push_back(std::move(endpoint));
  return addresses;
}

void PeerTable::start(const std::vector<Member>& members, WorkerId self, Events events) {
  members_ = members;
  for (const auto& member : members_) {
    infos_.push_back(member.info);
    by_name_.emplace(member.info.name, member.info.id);
  }
  events_ = std::move(events);
  self_ = self;
  heard_ = std::vector<std::atomic<Clock::rep>>(members_.size());
  std::vector<LinePtr> early;
  {
    base::MutexLock lock(mutex_);
    peers_.resize(members_.size());
    for (std::size_t id = 0; id < peers_.size(); ++id)
      peers_[id].refusals.resize(members_[id].addresses.size());
    started_ = true;
    early.swap(early_);
  }
  for (const LinePtr& line : early) {
    ConnectionPtr connection;
    {
      base::MutexLock lock(mutex_);
      connection = line->connection;
    }
    if (connection) on_open(line, connection);
  }
}

const WorkerInfo& PeerTable::find(std::string_view name) const {
  const auto found = by_name_.find(std::string(name));
  if (found != by_name_.end()) return infos_[found->second.value()];
  std::vector<std::string> names;
  for (const auto& info : infos_) names.push_back(info.name);
  auto nearest = base::nearest_names(std::string(name), names, 5);
  if (nearest.empty() && names.size() <= 8) nearest = std::move(names);
  throw Error(ErrorCode::invalid_argument,
              "worker \"" + std::string(name) + "\" is not in this world of " +
                  std::to_string(infos_.size()) +
                  (nearest.empty() ? "" : "; known are " + quoted_list(nearest)))
      .with_worker(std::string(name));
}

const WorkerInfo& PeerTable::find(WorkerId id) const {
  if (id.value() < infos_.size()) return infos_[id.value()];
  throw Error(ErrorCode::invalid_argument, "worker id " + std::to_string(id.value()) +
                                               " is not in this world; ids are 0 to " +
                                               std::to_string(infos_.size() - 1));
}

const WorkerInfo& PeerTable::find(const WorkerInfo& info) const {
  const WorkerInfo& known = find(info.id);
  if (known == info) return known;
  if (known.name != info.name) {
    throw Error(ErrorCode::invalid_argument, to_string(info) + " is not in this world: id " +
                                                 std::to_string(info.id.value()) + " is worker \"" +
                                                 known.name + "\"")
        .with_worker(info.name);
  }
  throw Error(ErrorCode::disconnected,
              "worker \"" + info.name + "\" epoch " + std::to_string(info.epoch) +
                  " is gone; it is now epoch " + std::to_string(known.epoch))
      .with_worker(info.name);
}

transport::ConnectionEvents PeerTable::events_for(const LinePtr& line) {
  transport::ConnectionEvents events;
  if (line->wanted) {
    events.check_peer = [this, line](const transport::Hello& hello) {
      const auto& addresses = members_[line->wanted->value()].addresses;
      if (auto why = objection(*line, hello, addresses[line->address])) throw std::move(*why);
    };
  }
  events.on_open = [this, line](const ConnectionPtr& connection) { on_open(line, connection); };
  events.on_message = [this, line](const ConnectionPtr& connection, transport::Message message) {
    if (line->bound.load(std::memory_order_acquire)) {
      receive(line, connection, std::move(message));
    } else {
      on_first_message(line, connection, message);
    }
  };
  events.place = [this, line](const ConnectionPtr&, const base::Bytes& frame, std::size_t bytes) {
    if (!line->bound.load(std::memory_order_acquire)) return transport::Buffer{};
    return events_.place(infos_[line->peer->value()], frame, bytes);
  };
  events.on_closed = [this, line](const ConnectionPtr&, const Error& reason) {
    on_closed(line, reason);
  };
  return events;
}

void PeerTable::receive(const LinePtr& line, const ConnectionPtr& connection,
                        transport::Message message) {
  const std::uint32_t id = line->peer->value();  // constant once bound
  heard_[id].store(coarse_now(), std::memory_order_relaxed);
  events_.on_message(connection, infos_[id], std::move(message));
}

std::optional<Error> PeerTable::objection(const Line& line, const transport::Hello& hello,
                                          const std::string& address) const {
  const std::string who = "worker \"" + hello.name + "\" (id " + std::to_string(hello.id) +
                          ", epoch " + std::to_string(hello.epoch) + ")";
  if (hello.id >= infos_.size() || infos_[hello.id].name != hello.name)
    return Error(ErrorCode::unauthenticated, who + " is not in this world");
  if (infos_[hello.id].epoch != hello.epoch)
    return Error(ErrorCode::disconnected, who + " is not in this world");
  if (line.wanted && line.wanted->value() != hello.id) {
    return Error(ErrorCode::unauthenticated,
                 who + " answers where " + to_string(infos_[line.wanted->value()]) + " should");
  }
  // Calls to oneself stay within the process; nobody else is this worker.
  if (hello.id == self_.value() && !address.starts_with("loopback:"))
    return Error(ErrorCode::unauthenticated, who + " claims to be this worker itself");
  return std::nullopt;
}

void PeerTable::on_open(const LinePtr& line, const ConnectionPtr& connection) {
  After after;
  {
    base::MutexLock lock(mutex_);
    if (line->ended) return;
    line->connection = connection;
    if (!started_) {
      early_.push_back(line);
      return;
    }
    if (auto why = objection(*line, connection->peer(), connection->describe())) {
      after.close.emplace_back(connection, std::move(*why));
    } else {
      line->peer = WorkerId(connection->peer().id);
      opened(line, connection, after);
    }
  }
  perform(std::move(after));
}

void PeerTable::opened(const LinePtr& line, const ConnectionPtr& connection, After& after) {
  const WorkerId id = *line->peer;
  Peer& peer = peers_[id.value()];
  if (peer.lost) {
    after.close.emplace_back(connection, *peer.lost);
  } else if (line->wanted) {
    // The peer speaks first.
    if (peer.own != line)
      after.close.emplace_back(connection,
                               Error(ErrorCode::disconnected, "the connection is not needed"));
  } else if (id == self_) {
    after.say_bind = connection;
  } else if (peer.bound) {
    after.close.emplace_back(connection, Error(ErrorCode::disconnected,
                                               "a connection to " + to_string(infos_[id.value()]) +
                                                   " is in use already"));
  } else if (peer.own && self_ < id) {
    drop(peer.spare, "the peer opened another connection", after);
    peer.spare = line;
  } else {
    offer(peer, line, after);
  }
}

void PeerTable::offer(Peer& peer, const LinePtr& line, After& after) {
  if (peer.offered != line) drop(peer.offered, "the peer opened another connection", after);
  peer.offered = line;
  peer.failure.reset();  // it lives, and wants to
  after.say_bind = line->connection;
}

void PeerTable::drop(LinePtr& line, const std::string& why, After& after) {
  if (line && line->connection)
    after.close.emplace_back(line->connection, Error(ErrorCode::disconnected, why));
  line.reset();
}

void PeerTable::on_first_message(const LinePtr& line, const ConnectionPtr& connection,
                                 const transport::Message& message) {
  const auto head = transport::peek_frame(message.frame);
  bool bound = false;
  After after;
  {
    base::MutexLock lock(mutex_);
    if (line->ended) return;
    Peer* const peer = line->peer ? &peers_[line->peer->value()] : nullptr;
    if (peer == nullptr || !head || head->kind != wire::kBind) {
      after.close.emplace_back(
          connection,
          Error(ErrorCode::protocol, "message over connection " + connection->describe() +
                                         " before both sides took it into use"));
    } else if (*line->peer == self_ && !line->wanted) {
      line->bound.store(true, std::memory_order_release);  // the answering half of calls to oneself
      return;
    } else if (peer->lost || peer->bound || line != (line->wanted ? peer->own : peer->offered)) {
      after.close.emplace_back(connection,
                               Error(ErrorCode::disconnected, "the connection is not needed"));
    } else {
      peer->bound = line;
      line->bound.store(true, std::memory_order_release);
      (line->wanted ? peer->own : peer->offered).reset();
      drop(peer->own, "another connection is used", after);
      drop(peer->offered, "another connection is used", after);
      drop(peer->spare, "another connection is used", after);
      peer->failure.reset();
      heard_[line->peer->value()].store(coarse_now(), std::memory_order_relaxed);
      bound = true;
    }
  }
  perform(std::move(after));
  if (bound) bind(line, connection);
}

// Sends what has waited. What is sent meanwhile waits behind it.
void PeerTable::bind(const LinePtr& line, const ConnectionPtr& connection) {
  if (line->wanted) connection->send(bind_message(), nullptr);
  const std::size_t id = line->peer->value();
  for (;;) {
    std::vector<Waiting> batch;
    {
      base::MutexLock lock(mutex_);
      Peer& peer = peers_[id];
      if (peer.bound != line || peer.lost) return;
      if (peer.waiting.empty()) {
        peer.connection = connection;
        return;
      }
      batch.swap(peer.waiting);
    }
    for (Waiting& each : batch) {
      if (each.call_id != 0 && !events_.wanted(each.call_id)) {
        each.message = {};
        each.done(Error(ErrorCode::cancelled, "it was not wanted any more before it was sent"));
      } else {
        connection->send(std::move(each.message), std::move(each.done));
      }
    }
  }
}

void PeerTable::on_closed(const LinePtr& line, const Error& reason) {
  After after;
  {
    base::MutexLock lock(mutex_);
    if (line->ended) return;
    line->ended = true;
    line->connection.reset();
    if (!started_) {
      std::erase(early_, line);
      return;
    }
    const auto id = line->wanted ? line->wanted : line->peer;
    if (!id) return;  // it never said who it is, or was not believed
    Peer& peer = peers_[id->value()];
    if (line == peer.bound) {
      lose(*id, reason, after);
    } else if (line == peer.own) {
      own_try_failed(*id, line, reason, after);
    } else if (line == peer.spare) {
      peer.spare.reset();
    } else if (line == peer.offered) {
      peer.offered.reset();
      // It was there to offer it: what failed before that says nothing about it any more.
      peer.failure.reset();
      peer.pause = {};
      if (!peer.waiting.empty()) want(*id, after);
    }
  }
  perform(std::move(after));
}

bool PeerTable::has_endpoint_for(const std::string& address) const {
  return by_scheme_.contains(scheme_of(address));
}

void PeerTable::want(WorkerId id, After& after) {
  const Peer& peer = peers_[id.value()];
  if (peer.lost || peer.bound || peer.own || peer.offered || peer.retrying) return;
  try_next(id, 0, after);
}

// Begins a try at the first address from `first_address` on that may be worth it; after the last
// one there is a pause, or an end.
void PeerTable::try_next(WorkerId id, std::size_t first_address, After& after) {
  Peer& peer = peers_[id.value()];
  const auto& addresses = members_[id.value()].addresses;
  for (std::size_t i = first_address; i < addresses.size(); ++i) {
    if (!has_endpoint_for(addresses[i]) || !peer.refusals[i].empty()) continue;
    peer.own = std::make_shared<Line>();
    peer.own->wanted = id;
    peer.own->address = i;
    after.dial = peer.own;
    return;
  }
  bool worth_it = false;
  std::string refused;
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    worth_it = worth_it || (has_endpoint_for(addresses[i]) && peer.refusals[i].empty());
    if (!peer.refusals[i].empty()) refused += "; " + peer.refusals[i];
  }
  if (!peer.failure && refused.empty()) {
    // Nothing was tried, and nothing says that the worker is gone.
    after.failed.swap(peer.waiting);
    after.failure = Error(ErrorCode::disconnected,
                          to_string(infos_[id.value()]) +
                              " cannot be reached: no transport here for its addresses " +
                              base::join_names(addresses))
                        .with_worker(infos_[id.value()].name);
    return;
  }
  const auto now = Clock::now();
  if (worth_it && !closing_ &&
      now < peer.first_failure + (peer.answered ? kPatienceWithTheLiving : kPatience)) {
    peer.retrying = true;
    peer.pause = std::clamp(peer.pause * 2, kShortestPause, kLongestPause);
    after.retry.emplace(id, now + peer.pause);
    return;
  }
  const Error last = peer.failure.value_or(Error(ErrorCode::disconnected, "it was refused"));
  if (addresses.size() == 1) return lose(id, last, after);
  lose(id,
       Error(last.code(), "none of its addresses " + base::join_names(addresses) +
                              " can be reached: " + last.what() + refused),
       after);
}

void PeerTable::own_try_failed(WorkerId id, const LinePtr& line, const Error& reason,
                               After& after) {
  failed_tries_.fetch_add(1);
  Peer& peer = peers_[id.value()];
  peer.own.reset();
  if (!peer.failure) peer.first_failure = Clock::now();
  peer.failure = reason;
  // A refusal is an answer, too: that of a worker whose places strangers take says `overloaded`.
  peer.answered = line->peer || reason.remote();
  // Once open, the end of a connection says nothing of the next one: one cut within a sealed record
  // ends with `protocol`.
  if (!line->peer && is_refusal(reason)) peer.refusals[line->address] = reason.what();
  if (peer.spare) {
    const LinePtr spare = std::exchange(peer.spare, nullptr);
    offer(peer, spare, after);
  } else if (!peer.offered) {
    try_next(id, line->address + 1, after);
  }
}

void PeerTable::retry(WorkerId id) {
  After after;
  {
    base::MutexLock lock(mutex_);
    peers_[id.value()].retrying = false;
    want(id, after);
  }
  perform(std::move(after));
}

void PeerTable::lose(WorkerId id, const Error& reason, After& after) {
  Peer& peer = peers_[id.value()];
  const WorkerInfo& info = infos_[id.value()];
  peer.connection.reset();
  drop(peer.bound, reason.what(), after);
  drop(peer.own, reason.what(), after);
  drop(peer.offered, reason.what(), after);
  drop(peer.spare, reason.what(), after);
  after.failed.swap(peer.waiting);
  after.failure = reason;
  if (peer.lost) return;
  peer.lost = Error(ErrorCode::disconnected, to_string(info) + " is gone: " + reason.what())
                  .with_worker(info.name);
  if (!closing_) after.lost.emplace(id, reason);
}

void PeerTable::perform(After after) {
  for (auto& [connection, why] : after.close) connection->close(why);
  if (after.say_bind) after.say_bind->send(bind_message(), nullptr);
  for (Waiting& each : after.failed) {
    each.message = {};
    each.done(after.failure);
  }
  if (after.lost) events_.on_lost(infos_[after.lost->first.value()], after.lost->second);
  if (after.retry) {
    events_.call_at(after.retry->second, [this, id = after.retry->first] { retry(id); });
  }
  if (after.dial) dial(after.dial);
}

void PeerTable::dial(const LinePtr& line) {
  const std::string& address = members_[line->wanted->value()].addresses[line->address];
  ConnectionPtr connection;
  try {
    connection = by_scheme_.find(scheme_of(address))->second->connect(address, events_for(line));
  } catch (...) {
    on_closed(line, to_error(std::current_exception()));
    return;
  }
  {
    base::MutexLock lock(mutex_);
    if (line->ended) return;
    line->connection = connection;
    const Peer& peer = peers_[line->wanted->value()];
    if (peer.own == line || peer.bound == line) return;
  }
  connection->close(Error(ErrorCode::disconnected, "the connection is not needed"));
}

void PeerTable::reach(WorkerId id) {
  After after;
  {
    base::MutexLock lock(mutex_);
    want(id, after);
  }
  perform(std::move(after));
}

void PeerTable::send(const WorkerInfo& to, ConnectionPtr connection, transport::Message message,
                     transport::SendDone done, std::uint64_t call_id) {
  if (!connection) {
    base::MutexLock lock(mutex_);
    connection = peers_[to.id.value()].connection;
  }
  if (connection) {
    connection->send(std::move(message), std::move(done));
  } else {
    send_when_bound(to.id, {std::move(message), std::move(done), call_id});
  }
}

void PeerTable::send_when_bound(WorkerId to, Waiting waiting) {
  ConnectionPtr connection;  // there is one after all
  After after;
  {
    base::MutexLock lock(mutex_);
    Peer& peer = peers_[to.value()];
    connection = peer.connection;
    if (!connection) peer.waiting.push_back(std::move(waiting));
    if (peer.lost) {
      after.failed.swap(peer.waiting);
      after.failure = peer.lost;
    } else {
      want(to, after);
    }
  }
  if (connection) connection->send(std::move(waiting.message), std::move(waiting.done));
  perform(std::move(after));
}

void PeerTable::give_up(WorkerId id, const Error& reason) {
  ConnectionPtr connection;
  After after;
  {
    base::MutexLock lock(mutex_);
    const Peer& peer = peers_[id.value()];
    if (peer.bound) {
      connection = peer.bound->connection;  // its end is what the owner hears of
    } else {
      lose(id, reason, after);
    }
  }
  if (connection) connection->close(reason);
  perform(std::move(after));
}

bool PeerTable::help(const std::atomic<bool>& done,
                     std::chrono::steady_clock::time_point deadline) {
  for (const auto& endpoint : endpoints_) {
    if (endpoint->help(done, deadline)) return true;
  }
  return done.load(std::memory_order_acquire);
}

std::optional<Error> PeerTable::lost(WorkerId id) const {
  base::MutexLock lock(mutex_);
  return peers_[id.value()].lost;
}

void PeerTable::expect_closing() {
  base::MutexLock lock(mutex_);
  closing_ = true;
}

void PeerTable::close() {
  expect_closing();
  for (const auto& endpoint : endpoints_) endpoint->close();
  for (const auto& endpoint : endpoints_) endpoint->join();
  After after;
  const Error closed(ErrorCode::shutting_down, "this worker has shut down");
  {
    base::MutexLock lock(mutex_);
    early_.clear();
    for (auto& peer : peers_) {
      std::move(peer.waiting.begin(), peer.waiting.end(), std::back_inserter(after.failed));
      auto refusals = std::move(peer.refusals);
      peer = Peer{};
      peer.refusals = std::move(refusals);
      peer.lost = closed;
    }
  }
  after.failure = closed;
  perform(std::move(after));
}

}  // namespace stitch::rpc
