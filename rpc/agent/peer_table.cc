// One file, though long: what each event of a connection does to the life that it belongs to.
#include "stitch/rpc/agent/peer_table.h"

#include <cstdio>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/message/life_text.h"

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
  Life& from = *sender->peer;  // constant once bound, as the session
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
  Life& life = *sender->peer;
  if (head && head->kind == wire::kHeartbeat) {
    base::ByteReader in(head->body, "heartbeat");
    const auto digest = in.read<std::uint64_t>();
    in.expect_end();
    if (events_.on_heartbeat) events_.on_heartbeat(life.info(), digest);
    return;
  }
  Effects effects;
  {
    base::MutexLock lock(mutex_);
    try {
      if (!head || head->kind != wire::kBind)
        throw Error(ErrorCode::protocol, "message without a number");
      peer(life).on_bind(sender, Bind::decode(head->body), effects);
    } catch (...) {
      peer(life).give_up(error_of_message(life.info()), effects);
    }
  }
  perform(life, std::move(effects));
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
    auto why = objection(*opened, hello, connection->describe());
    Life* const life = members_.life(claimed.id, claimed.epoch);
    const bool waits =
        opened->target == nullptr &&
        (why ? events_.on_stranger != nullptr && claimed.id != self_ && !members_.refusal(claimed)
             : !life->announced.load());
    const bool refuse = !(waits && !closing_) && (why || life->over.load());
    // One that is told the end of its life may have sent something by now. If the connection closed
    // before that is read, TCP would drop what it is told. Half of the places are for joiners.
    hears_first = refuse && opened->target == nullptr && !closing_ &&
                  events_.on_stranger != nullptr && strangers_.size() < kMaxStrangers / 2;
    if ((waits && !closing_) || hears_first) {
      if (strangers_.size() >= kMaxStrangers) {  // the one that has been silent longest
        effects.close.emplace_back(
            strangers_.front()->connection,
            Error(ErrorCode::overloaded, "too many workers that are no members are connected"));
        strangers_.erase(strangers_.begin());
      }
      strangers_.push_back(opened);
    }
    if (refuse) {
      if (!why) why = life->peer->lost();
      refused.emplace(claimed, why.value_or(Error(ErrorCode::disconnected, "it is over")));
    } else if (!waits || closing_) {
      opened->peer = life;
      record("connection opened", *life);
      peer(*opened->peer).on_open(opened, effects);
    }
  }
  if (refused) {
    auto message = events_.obituary ? events_.obituary(refused->first) : std::nullopt;
    if (message) {
      connection->send(std::move(*message), [connection, reason = refused->second,
                                             hears_first](const std::optional<Error>& error) {
        if (error || !hears_first) connection->close(reason);
      });
    } else {
      connection->close(refused->second);
    }
  }
  if (opened->peer != nullptr && !refused) {
    perform(*opened->peer, std::move(effects));
  } else {
    for (auto& each : effects.close) each.first->close(each.second);
  }
}

void PeerTable::on_first_message(const PeerConnectionPtr& sender, const ConnectionPtr& connection,
                                 transport::Message message) {
  const auto head = transport::peek_frame(message.frame);
  bool stranger = false;
  const Life* from = nullptr;  // of a notice
  Effects effects;
  Life* life = nullptr;
  try {
    base::MutexLock lock(mutex_);
    if (sender->ended) return;
    life = sender->peer;
    stranger = std::erase(strangers_, sender) != 0;
    const bool notice = head && head->kind == wire::kMembership;
    if (stranger) {
      // Its first message decides.
    } else if (notice && (sender->peer != nullptr || sender->target != nullptr)) {
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
  if (stranger) {
    const transport::Hello& hello = connection->peer();
    events_.on_stranger(connection, {hello.name, WorkerId(hello.id), hello.epoch},
                        std::move(message));
    return;
  }
  if (from != nullptr) {
    if (events_.on_notice) events_.on_notice(connection, from->info(), std::move(message));
    return;
  }
  if (effects.attach) record("connection bound", *life);
  perform(*life, std::move(effects));
}

void PeerTable::on_closed(const PeerConnectionPtr& closed, const Error& reason,
                          bool no_process_listens) {
  Effects effects;
  Life* life = nullptr;
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
  perform(*life, std::move(effects));
}

// ---- effects

void PeerTable::perform(Life& life, Effects effects) noexcept {
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
void PeerTable::say_passed_over(const Life& life, const std::pair<std::string, Error>& address) {
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

void PeerTable::attach(Life& life, const Effects& effects) {
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
    connection = endpoint->connect(address, events_for(attempt));
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

}  // namespace stitch::rpc
