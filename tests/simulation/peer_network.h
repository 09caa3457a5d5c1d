// One file, though long: the hosts of a network and their connections, which know each other.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/peers/bind_frame.h"
#include "stitch/transport/endpoint.h"
#include "tests/simulation/kernel.h"

namespace stitch::rpc::peer_simulation {

using simulation::Duration;
using simulation::Task;
using simulation::Time;
using namespace std::chrono_literals;

inline constexpr auto kHandshakeTimeout = 10s;
// By then the system finds out that the other host is gone.
inline constexpr auto kKeptAlive = 20s;
// So soon is due what may come first while a thread is held up.
inline constexpr auto kHeldUp = 2ms;
inline constexpr int kMaxDepth = 2;
inline constexpr int kMaxEvents = 400'000;  // of a history
inline constexpr std::size_t kSmallBytes = std::size_t{32} << 10;
inline constexpr std::size_t kSmallBuffers = 8;

inline std::size_t stream_of_message(const transport::Message& message) {
  std::size_t bytes = message.frame.size();
  for (const transport::Buffer& buffer : message.buffers) bytes += buffer.bytes;
  return bytes > kSmallBytes || message.buffers.size() > kSmallBuffers ? 1 : 0;
}

inline Error gone(const std::string& what) { return Error(ErrorCode::disconnected, what); }

// Hosts, endpoints on them and their connections, as transport/endpoint.h promises them and no
// better. Messages of a stream keep their order and take any time; connections end at one side, at
// both or silently; a host stops, dies, vanishes, or is cut off from another; an address refuses.
// Threads are played, too: whenever a host's code calls out (to send, to close, to connect), the
// next events may come first, those of other connections of the same host and of its timer
// included.
class SimulatedNetwork : public simulation::History {
 public:
  class Line;
  class LineEndpoint;
  using LinePtr = std::shared_ptr<Line>;

  // Something that happens to a host.
  struct Event {
    std::size_t host;  // kNoHost: to none
    LinePtr line;      // whose callbacks it runs, if any
    bool timer;        // it runs on the timer thread
    Task task;
  };
  static constexpr std::size_t kNoHost = ~std::size_t{0};
  static constexpr std::size_t kMaxPlaces = 8;
  struct Host {
    transport::Hello hello;
    std::size_t place = 0;  // hosts of one place share their addresses and what cuts them off
    bool dead = false, stopped = false, in_timer = false;
    std::vector<Event> held{};  // while it is stopped
  };

  explicit SimulatedNetwork(std::uint64_t number) : History(number) {}

  // ---- time
  void after(Duration delay, std::size_t host, Task task) {
    add(now_ + delay, {host, nullptr, false, std::move(task)});
  }
  // On the host's timer thread.
  void call_at(Time when, std::size_t host, Task task) {
    others_go_on();
    add(std::max(when, now_) + (calm_ ? Duration{} : up_to(200us)),
        {host, nullptr, true, std::move(task)});
  }
  // Threads go on as they are called from now on, and messages arrive soon.
  void calm() noexcept { calm_ = true; }
  // Runs what is due up to `until`.
  void run_hosts(Time until) {
    while (!events_.empty() && events_.time() <= until) {
      if (run_ > kMaxEvents) return fail("there is no end of events");
      run_next();
    }
    now_ = std::max(now_, until);
  }

  // ---- hosts
  [[nodiscard]] const Host& host(std::size_t host) const { return hosts_[host]; }
  void stop(std::size_t host) { hosts_[host].stopped = true; }
  [[nodiscard]] std::uint64_t attempts() const noexcept { return attempts_; }
  void revive(std::size_t place) { vanished_[place] = false; }
  [[nodiscard]] bool is_cut(std::size_t a, std::size_t b) const {
    return now_ < cut_[a][b] || vanished_[a] || vanished_[b];
  }
  // Connections to this address fail until then; `none_listens`: as if no process listened there.
  void refuse(const std::string& address, Time until, bool none_listens) {
    refused_[address] = {until, none_listens};
  }
  void run_event(Event event) {
    Host* const host = event.host < hosts_.size() ? &hosts_[event.host] : nullptr;
    if (host != nullptr && host->dead) return;
    if (host != nullptr && host->stopped) return host->held.push_back(std::move(event));
    const bool timer = host != nullptr && event.timer;
    if (timer) host->in_timer = true;
    if (event.line) event.line->busy_ = true;
    event.task();
    if (event.line) event.line->busy_ = false;
    if (timer) host->in_timer = false;
  }
  bool runnable(const Event& event) const {
    if (event.host == kNoHost || (event.line && event.line->busy_)) return false;
    return !(event.timer && hosts_[event.host].in_timer);
  }
  // Other threads go on first.
  void others_go_on() {
    if (calm_ || depth_ >= kMaxDepth || !one_in(4)) return;
    ++depth_;
    do {
      if (events_.empty() || events_.time() > now_ + kHeldUp || !runnable(events_.next())) break;
      run_next();
    } while (!one_in(3));
    --depth_;
  }
  Duration delay() { return !calm_ && one_in(16) ? up_to(20ms) : 10us + up_to(500us); }

  std::size_t add_host(transport::Hello hello, std::size_t place) {
    Host host;
    host.hello = std::move(hello);
    host.place = place;
    hosts_.push_back(std::move(host));
    return hosts_.size() - 1;
  }
  std::shared_ptr<transport::Endpoint> endpoint(std::size_t host, char scheme) {
    return std::make_shared<LineEndpoint>(*this, host, scheme);
  }
  void resume(std::size_t host) {
    hosts_[host].stopped = false;
    for (Event& event : std::exchange(hosts_[host].held, {})) add(now_, std::move(event));
  }
  // `silently`: others are not told, and what is sent to its place is not answered until `revive`.
  void kill(std::size_t host, bool silently) {
    hosts_[host].dead = true;
    std::erase_if(listeners_, [&](const auto& each) { return each.second->host_ == host; });
    if (silently) vanished_[hosts_[host].place] = true;
    for (const LinePtr& line : lines_) {
      if (line->host != host) continue;
      line->lost_ = true;
      const LinePtr other = line->other();
      if (!other || other->ended_) continue;
      other->lost_ = true;
      for (auto& due : other->due_) due.lose_after(due.size() - pick(due.size() + 1));
      if (!silently) {
        other->finish(gone(other->address + ": the other process has ended"));
      } else {
        add(now_ + kKeptAlive, {other->host, other, false, [other] {
                                  other->end(gone(other->address + ": the other host is gone"));
                                }});
      }
    }
  }
  // Nothing gets from one place to the other until then.
  void cut(std::size_t a, std::size_t b, Time until) {
    cut_[a][b] = cut_[b][a] = std::max(cut_[a][b], until);
  }
  // Ends both.
  void heal() {
    cut_ = {};
    refused_.clear();
  }

  // ---- connections

  LinePtr make_line(std::size_t host, std::string address, transport::ConnectionEvents events) {
    if (lines_.size() >= 32 && (lines_.size() & (lines_.size() - 1)) == 0)
      std::erase_if(lines_, [](const LinePtr& each) { return each->ended_; });
    const auto line = std::make_shared<Line>(*this, host, std::move(address), std::move(events));
    lines_.push_back(line);
    add(now_ + kHandshakeTimeout,
        {host, line, false, [line] {
           if (!line->open_) line->end(gone(line->address + ": the handshake took too long"));
         }});
    return line;
  }
  void connect(const LinePtr& client) {
    if (client->ended_ || client->closed_) return;
    const auto place = static_cast<std::size_t>(client->address[2] - '0');
    const auto refuse = [&](const char* why, bool none) {
      const Error error = gone(client->address + ": " + why);
      add(now_ + delay(), {client->host, client, false, [client, error, none] {
                             client->none_listens_ = none && !client->open_;
                             client->end(error);
                           }});
    };
    const std::size_t from = hosts_[client->host].place;
    if (is_cut(from, place)) {
      // What is not answered is sent again, at growing intervals; or the host has no such place
      // yet.
      const Time again = now_ + 200ms + up_to(400ms);
      if (again < now_ + kHandshakeTimeout)
        add(again, {kNoHost - 1, nullptr, false, [this, client] { connect(client); }});
      return;
    }
    if (const auto refused = refused_.find(client->address);
        refused != refused_.end() && now_ < refused->second.until)
      return refuse("connections are refused here", refused->second.none_listens);
    const auto listener = listeners_.find(client->address);
    // Across hosts a refusal proves nothing.
    if (listener == listeners_.end())
      return refuse("no process listens", client->address.front() != 'c');
    LineEndpoint* const endpoint = listener->second;
    if (!client->whom_.is(hosts_[endpoint->host_].hello))
      return refuse("another worker answers", false);
    const std::string address = client->address;
    add(now_, {endpoint->host_, nullptr, false, [this, client, address] {
                 const auto found = listeners_.find(address);
                 if (found != listeners_.end()) accept(client, found->second);
               }});
  }

  void accept(const LinePtr& client, LineEndpoint* listener) {
    if (client->ended_ || client->closed_) return;
    const LinePtr server = make_line(listener->host_, client->address, listener->accept_());
    server->accepted_ = true;
    server->other_ = client;
    client->other_ = server;
    server->peer_ = hosts_[client->host].hello;
    client->peer_ = hosts_[listener->host_].hello;
    for (const LinePtr& line : {client, server}) {
      const auto opens = [line] { line->opens(); };
      add(now_ + delay(), {line->host, line, false, opens});
    }
  }
  // Those whose ends are both open; one end of each.
  [[nodiscard]] std::vector<LinePtr> open_lines() const {
    std::vector<LinePtr> open;
    for (const LinePtr& line : lines_) {
      const LinePtr other = line->other();
      if (!line->accepted_ && line->open() && other && other->open() && !line->lost_)
        open.push_back(line);
    }
    return open;
  }
  // Ends that have not ended, of living hosts in two places.
  [[nodiscard]] std::size_t ends_between(std::size_t a, std::size_t b) const {
    std::size_t count = 0;
    for (const LinePtr& line : lines_) {
      const LinePtr other = line->other();
      if (line->ended_ || hosts_[line->host].dead || !other) continue;
      const std::size_t here = hosts_[line->host].place;
      const std::size_t there = hosts_[other->host].place;
      count += (here == a && there == b) || (here == b && there == a) ? 1 : 0;
    }
    return count;
  }
  // All that have not ended, for error texts.
  [[nodiscard]] std::string ends_text() const {
    std::string text;
    for (const LinePtr& line : lines_) {
      if (line->ended_ || hosts_[line->host].dead) continue;
      text += "; " + line->address + " at " + hosts_[line->host].hello.name;
      if (line->accepted_) text += " accepted";
      if (line->open_) text += " open";
      if (line->closed_) text += " closed";
      if (line->lost_) text += " lost";
    }
    return text;
  }
  // The connection carries nothing any more. Its ends notice after these times; nothing: not at
  // all, unless it sends.
  void lose(const LinePtr& line, std::optional<Duration> here, std::optional<Duration> there) {
    const auto lose_end = [this](const LinePtr& end, std::optional<Duration> noticed) {
      if (!end || end->ended_) return;
      end->lost_ = true;
      end->tells_when_used_ = one_in(2);
      // What was on the way arrives up to some message of each stream.
      for (auto& due : end->due_) due.lose_after(due.size() - pick(due.size() + 1));
      if (!noticed) return;
      add(now_ + *noticed, {end->host, end, false,
                            [end] { end->end(gone(end->address + ": the connection is reset")); }});
    };
    lose_end(line, here);
    lose_end(line->other(), there);
  }
  // One end of a connection.
  class Line final : public transport::Connection, public std::enable_shared_from_this<Line> {
   public:
    Line(SimulatedNetwork& network, std::size_t host, std::string address,
         transport::ConnectionEvents events)
        : host(host), address(std::move(address)), network_(network), events_(std::move(events)) {}
    [[nodiscard]] const transport::Hello& peer() const override { return peer_; }
    [[nodiscard]] bool no_process_listens() const override { return none_listens_; }
    [[nodiscard]] std::string describe() const override { return address; }
    [[nodiscard]] bool ended() const noexcept { return ended_; }
    [[nodiscard]] bool open() const noexcept { return open_ && !closed_; }
    [[nodiscard]] LinePtr other() const { return other_.lock(); }
    [[nodiscard]] bool accepted() const noexcept { return accepted_; }

    const std::size_t host;
    const std::string address;

    // Whether the other end would be heard if it said something.
    [[nodiscard]] bool is_heard() const {
      const LinePtr peer = other();
      if (ended_ || lost_ || !peer || peer->ended_ || cut_off()) return false;
      const Host& there = network_.hosts_[peer->host];
      return !there.stopped && !there.dead;
    }
    // Something that is not missed is sent.
    void use() {
      if (lost_ && std::exchange(tells_when_used_, false))
        finish(gone(address + ": the connection is reset"));
    }
    void at(Time when, Task task) {
      network_.add(when, {host, shared_from_this(), false, std::move(task)});
    }
    bool cut_off() const {
      const LinePtr peer = other();
      return peer &&
             network_.is_cut(network_.hosts_[host].place, network_.hosts_[peer->host].place);
    }
    void opens() {
      if (ended_ || closed_) return;
      const LinePtr peer = other();
      if (cut_off() || lost_) {
        at(network_.now_ + 100ms, [self = shared_from_this()] { self->opens(); });
        return;
      }
      if (events_.check_peer) {
        try {
          events_.check_peer(peer_);
        } catch (const Error& error) {
          if (peer) peer->finish(Error(error.code(), error.what()).with_remote(true));
          return end(error);
        }
      }
      open_ = true;
      if (events_.on_open) events_.on_open(shared_from_this());
      for (std::size_t stream = 0; stream < 2; ++stream) {
        for (std::size_t i = 0; i < due_[stream].size(); ++i) arrive(stream);
      }
    }
    void send(transport::Message message, transport::SendDone done) override {
      network_.others_go_on();
      if (closed_ || network_.hosts_[host].dead) {
        if (done) done(gone("the connection has ended"));
        return;
      }
      const std::size_t stream = stream_of_message(message);
      Queued queued;
      queued.number = ++last_number_;
      queued.message.frame.append(message.frame.data(), message.frame.size());
      queued.message.buffers = message.buffers;
      queued.done = std::move(done);
      queue_[stream].push_back(std::move(queued));
      if (queue_[stream].size() == 1 && network_.one_in(2)) return pass_on(stream);
      network_.after(network_.delay() / 2, host,
                     [self = shared_from_this(), stream] { self->pass_on(stream); });
    }
    void pass_on(std::size_t stream) {
      // A large message overtakes nothing.
      while (stream == 1 && !queue_[0].empty() && !queue_[1].empty() &&
             queue_[0].front().number < queue_[1].front().number)
        pass_on(0);
      if (ended_ || queue_[stream].empty()) return;
      Queued queued = queue_[stream].take(0);
      const LinePtr peer = other();
      if (peer && !lost_ && !peer->ended_) {
        peer->due_[stream].push_back(std::move(queued.message));
        peer->due_[stream].in_order(std::max(network_.now_ + network_.delay(),
                                             stream == 1 ? peer->due_[0].last() : Time{}));
        peer->arrive(stream);
      } else {
        use();
      }
      if (queued.done) queued.done(std::nullopt);
    }
    // A message is due at this end.
    void arrive(std::size_t stream) {
      at(due_[stream].in_order(network_.now_),
         [self = shared_from_this(), stream] { self->deliver(stream); });
    }
    void deliver(std::size_t stream) {
      if (!open_ || ended_ || due_[stream].empty()) return;  // opens() looks again
      if (cut_off()) {
        due_[stream].in_order(network_.now_ + 50ms);
        return arrive(stream);
      }
      transport::Message message = due_[stream].take(0);
      if (events_.on_message) events_.on_message(shared_from_this(), std::move(message));
    }
    // The other end has closed the connection, or is gone: noticed after what is on the way.
    void finish(const Error& reason) {
      const Time when =
          std::max({due_[0].last(), due_[1].last(), network_.now_ + network_.delay()});
      at(when, [self = shared_from_this(), reason] {
        if (self->ended_) return;
        if (self->cut_off()) return self->finish(reason);
        self->end(reason);
      });
      if (cut_off()) due_[0].in_order(network_.now_ + 50ms);
    }
    void close(const Error& reason) override {
      network_.others_go_on();
      if (std::exchange(closed_, true) || network_.hosts_[host].dead) return;
      at(network_.now_ + (network_.one_in(2) ? Duration{} : network_.up_to(2ms)),
         [self = shared_from_this(), reason] { self->end(reason); });
    }
    void end(const Error& reason) {
      if (std::exchange(ended_, true)) return;
      closed_ = true;
      const LinePtr peer = other();
      if (peer && !peer->ended_ && !lost_)
        peer->finish(gone(peer->address + ": the peer has closed the connection"));
      for (auto& queue : queue_) {
        for (Queued& each : std::exchange(queue, {})) {
          if (each.done) each.done(reason);
        }
      }
      const transport::ConnectionEvents events = std::exchange(events_, {});
      if (events.on_closed) events.on_closed(shared_from_this(), reason);
    }

   private:
    friend class SimulatedNetwork;
    friend class LineEndpoint;
    struct Queued {
      std::uint64_t number;  // among those of this end
      transport::Message message;
      transport::SendDone done;
    };

    SimulatedNetwork& network_;
    transport::ConnectionEvents events_;
    transport::Hello peer_;
    transport::Wanted whom_;  // of the side that connects
    std::weak_ptr<Line> other_;
    bool accepted_ = false;
    bool open_ = false;
    bool closed_ = false;  // by its owner
    bool ended_ = false;   // its owner has been told
    bool lost_ = false;    // carries nothing
    bool busy_ = false;    // a callback runs
    bool none_listens_ = false;
    bool tells_when_used_ = false;  // what is sent over it shows that it is lost
    std::uint64_t last_number_ = 0;
    std::array<simulation::Channel<Queued>, 2> queue_;            // not passed on yet
    std::array<simulation::Channel<transport::Message>, 2> due_;  // on the way to this end
  };

  class LineEndpoint final : public transport::Endpoint {
   public:
    LineEndpoint(SimulatedNetwork& network, std::size_t host, char scheme)
        : network_(network), host_(host), scheme_(scheme) {}
    ~LineEndpoint() override {
      close();
      join();
    }
    std::vector<std::string> listen(Accept accept) override {
      accept_ = std::move(accept);
      address_ = std::string(1, scheme_) + ":" + std::to_string(network_.host(host_).place) + "/" +
                 std::to_string(++network_.last_port_);
      network_.listeners_[address_] = this;
      return {address_};
    }
    std::shared_ptr<transport::Connection> connect(const std::string& address,
                                                   transport::Wanted whom,
                                                   transport::ConnectionEvents events) override {
      ++network_.attempts_;
      network_.others_go_on();
      if (!network_.calm_ && network_.one_in(200)) throw gone(address + ": no descriptor is left");
      const LinePtr line = network_.make_line(host_, address, std::move(events));
      line->whom_ = whom;
      network_.add(
          network_.now_ + network_.delay(),
          {kNoHost - 1, nullptr, false, [&network = network_, line] { network.connect(line); }});
      return line;
    }
    void close() override { network_.listeners_.erase(address_); }
    void join() override {
      for (std::size_t i = 0; i < network_.lines_.size(); ++i) {
        const LinePtr line = network_.lines_[i];
        if (line->host == host_ && line->address.front() == scheme_)
          line->end(Error(ErrorCode::shutting_down, "the endpoint is closed"));
      }
    }
    SimulatedNetwork& network_;
    const std::size_t host_;
    const char scheme_;
    std::string address_;
    Accept accept_;
  };

 private:
  void add(Time when, Event event) { events_.add(when, std::move(event)); }
  void run_next() {
    now_ = std::max(now_, events_.time());
    ++run_;
    run_event(events_.take());
  }
  simulation::Agenda<Event> events_;
  int run_ = 0;
  std::uint64_t attempts_ = 0;
  int depth_ = 0;
  bool calm_ = false;
  std::deque<Host> hosts_;
  std::array<std::array<Time, kMaxPlaces>, kMaxPlaces> cut_{};
  std::array<bool, kMaxPlaces> vanished_{};
  struct Refused {
    Time until;
    bool none_listens;
  };
  std::map<std::string, Refused> refused_;
  std::map<std::string, LineEndpoint*> listeners_;
  std::vector<LinePtr> lines_;
  int last_port_ = 0;
};

// What a stranger does over a connection that it has opened under a worker's name, by `manner`: 0
// sends `evil` at once, 1 is silent, 2 answers an OFFER by CONFIRM and 3 by ACCEPT, each with
// `token` and followed by `evil` as if the connection were bound.
inline transport::ConnectionEvents stranger_events(int manner, std::uint64_t token,
                                                   transport::Message evil) {
  const auto shared = std::make_shared<const transport::Message>(std::move(evil));
  const auto send = [shared](transport::Connection& to, std::uint64_t number) {
    transport::Message copy;
    copy.frame.append(shared->frame.data(), shared->frame.size());
    transport::put_numbers(copy.frame, {.number = number, .received = {}});
    to.send(std::move(copy), nullptr);
  };
  transport::ConnectionEvents events;
  events.on_open = [manner, send](const auto& connection) {
    if (manner == 0) send(*connection, 0);
  };
  events.on_message = [=](const auto& connection, const transport::Message& message) {
    const auto head = transport::peek_frame(message.frame);
    if (!head || head->kind != wire::kBind || manner == 1) return;
    Bind bind = Bind::decode(head->body);
    if (bind.step == Bind::Step::offer) {
      bind.step = manner == 2 ? Bind::Step::confirm : Bind::Step::accept;
      bind.token = token;
      connection->send(bind.encode(), nullptr);
    }
    send(*connection, 1);
  };
  events.on_closed = [](const auto&, const Error&) {};
  return events;
}

}  // namespace stitch::rpc::peer_simulation
