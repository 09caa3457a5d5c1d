#include "stitch/rpc/peer_table.h"

#include <utility>

#include "stitch/rpc/registry.h"

namespace stitch {

namespace {

std::string scheme_of(const std::string& address) { return address.substr(0, address.find(':')); }

std::string quoted_list(const std::vector<std::string>& names) {
  std::string list;
  for (const auto& name : names) list += (list.empty() ? "\"" : ", \"") + name + "\"";
  return list;
}

}  // namespace

PeerTable::~PeerTable() { close(); }

std::vector<std::string> PeerTable::listen(EndpointPtr endpoint) {
  auto addresses = endpoint->listen([this] { return events_for(std::nullopt); });
  for (const auto& address : addresses) by_scheme_.emplace(scheme_of(address), endpoint);
  endpoints_.push_back(std::move(endpoint));
  return addresses;
}

void PeerTable::start(const std::vector<Member>& members, Events events) {
  members_ = members;
  for (const auto& member : members_) {
    infos_.push_back(member.info);
    by_name_.emplace(member.info.name, member.info.id);
  }
  events_ = std::move(events);
  MutexLock lock(mutex_);
  peers_.resize(members_.size());
  while (!early_.empty()) {
    auto event = std::move(early_.front());
    early_.pop_front();
    lock.unlock();
    event();
    lock.lock();
  }
  started_ = true;
  serving_.store(true, std::memory_order_release);
}

const WorkerInfo& PeerTable::find(std::string_view name) const {
  const auto found = by_name_.find(std::string(name));
  if (found != by_name_.end()) return infos_[found->second.value()];
  std::vector<std::string> names;
  for (const auto& info : infos_) names.push_back(info.name);
  auto nearest = nearest_names(std::string(name), names, 5);
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

transport::ConnectionEvents PeerTable::events_for(std::optional<WorkerId> peer) {
  transport::ConnectionEvents events;
  events.on_open = [this](const std::shared_ptr<transport::Connection>& connection) {
    handle([this, connection] { on_open(connection); });
  };
  events.on_message = [this](const std::shared_ptr<transport::Connection>& connection,
                             transport::Message message) {
    if (serving_.load(std::memory_order_acquire)) return receive(connection, std::move(message));
    handle([this, connection, message = std::move(message)]() mutable {
      receive(connection, std::move(message));
    });
  };
  events.place = [this](const std::shared_ptr<transport::Connection>& connection,
                        const transport::Bytes& frame, std::size_t bytes) {
    const std::uint32_t id = connection->peer().id;
    if (!serving_.load(std::memory_order_acquire) || id >= infos_.size())
      return transport::Buffer{};
    return events_.place(infos_[id], frame, bytes);
  };
  // An incoming connection that breaks before it opened belongs to nobody yet; after, its hello
  // says whose it is.
  auto opened = std::make_shared<std::atomic<bool>>(peer.has_value());
  if (!peer) {
    events.on_open = [this, opened](const std::shared_ptr<transport::Connection>& connection) {
      opened->store(true);
      handle([this, connection] { on_open(connection); });
    };
  }
  events.on_closed = [this, peer, opened](const std::shared_ptr<transport::Connection>& connection,
                                          const Error& reason) {
    if (!opened->load()) return;
    const WorkerId id = peer ? *peer : WorkerId(connection->peer().id);
    handle([this, id, reason] { on_closed(id, reason); });
  };
  return events;
}

void PeerTable::receive(const std::shared_ptr<transport::Connection>& connection,
                        transport::Message message) {
  const std::uint32_t id = connection->peer().id;
  if (id < infos_.size()) events_.on_message(connection, infos_[id], std::move(message));
}

void PeerTable::handle(UniqueFunction<void()> event) {
  {
    MutexLock lock(mutex_);
    if (!started_) {
      early_.push_back(std::move(event));
      return;
    }
  }
  event();
}

void PeerTable::on_open(const std::shared_ptr<transport::Connection>& connection) {
  const auto& hello = connection->peer();
  if (hello.id >= infos_.size() || infos_[hello.id].epoch != hello.epoch) {
    connection->close(Error(ErrorCode::disconnected, "worker \"" + hello.name + "\" epoch " +
                                                         std::to_string(hello.epoch) +
                                                         " is not in this world"));
    return;
  }
  MutexLock lock(mutex_);
  if (!peers_[hello.id].connection && !peers_[hello.id].lost)
    peers_[hello.id].connection = connection;
}

void PeerTable::on_closed(WorkerId id, const Error& reason) {
  if (id.value() >= infos_.size()) return;
  {
    MutexLock lock(mutex_);
    Peer& peer = peers_[id.value()];
    peer.connection.reset();
    if (peer.lost) return;
    peer.lost =
        Error(ErrorCode::disconnected, to_string(infos_[id.value()]) + " is gone: " + reason.what())
            .with_worker(infos_[id.value()].name);
    if (closing_) return;
  }
  events_.on_lost(infos_[id.value()], reason);
}

std::shared_ptr<transport::Connection> PeerTable::connect(const WorkerInfo& to) {
  {
    MutexLock lock(mutex_);
    const Peer& peer = peers_[to.id.value()];
    if (peer.lost) throw *peer.lost;
    if (peer.connection) return peer.connection;
  }
  const auto& addresses = members_[to.id.value()].addresses;
  for (const auto& address : addresses) {
    const auto endpoint = by_scheme_.find(scheme_of(address));
    if (endpoint == by_scheme_.end()) continue;
    auto connection = endpoint->second->connect(address, events_for(to.id));
    std::shared_ptr<transport::Connection> used;
    {
      MutexLock lock(mutex_);
      Peer& peer = peers_[to.id.value()];
      if (peer.lost) throw *peer.lost;
      if (!peer.connection) peer.connection = connection;
      used = peer.connection;
    }
    // Two threads, or the two workers, may open one each at once: the extra one stays, unused and
    // idle.
    return used;
  }
  std::string tried;
  for (const auto& address : addresses) tried += (tried.empty() ? "" : ", ") + address;
  throw Error(ErrorCode::disconnected,
              to_string(to) + " cannot be reached: no transport here for its addresses " + tried)
      .with_worker(to.name);
}

void PeerTable::reach(WorkerId id) {
  try {
    static_cast<void>(connect(infos_[id.value()]));
  } catch (const Error&) {
    // Lost already, or out of reach of every transport: nothing can be learned.
  }
}

void PeerTable::send(const WorkerInfo& to, std::shared_ptr<transport::Connection> connection,
                     transport::Message message, transport::SendDone done) {
  if (!connection) {
    try {
      connection = connect(to);
    } catch (const Error& error) {
      done(error);
      return;
    }
  }
  connection->send(std::move(message), std::move(done));
}

bool PeerTable::help(const std::atomic<bool>& done,
                     std::chrono::steady_clock::time_point deadline) {
  for (const auto& endpoint : endpoints_) {
    if (endpoint->help(done, deadline)) return true;
  }
  return done.load(std::memory_order_acquire);
}

std::optional<Error> PeerTable::lost(WorkerId id) const {
  MutexLock lock(mutex_);
  return peers_[id.value()].lost;
}

std::size_t PeerTable::connections() const {
  MutexLock lock(mutex_);
  std::size_t count = 0;
  for (const auto& peer : peers_) count += peer.connection ? 1 : 0;
  return count;
}

void PeerTable::debug_info(std::map<std::string, std::int64_t>& numbers) const {
  for (const auto& endpoint : endpoints_) {
    for (const auto& [name, count] : endpoint->counters()) numbers[name] += count;
  }
}

void PeerTable::expect_closing() {
  MutexLock lock(mutex_);
  closing_ = true;
}

void PeerTable::close() {
  expect_closing();
  for (const auto& endpoint : endpoints_) endpoint->close();
  for (const auto& endpoint : endpoints_) endpoint->join();
  std::vector<Peer> peers;
  {
    MutexLock lock(mutex_);
    peers.swap(peers_);
    peers_.resize(peers.size());
    for (auto& peer : peers_)
      peer.lost = Error(ErrorCode::shutting_down, "this worker has shut down");
  }
}

}  // namespace stitch
