#include "tests/rpc/simulated_network.h"

#include <algorithm>

namespace stitch::rpc::test {

namespace {

using namespace std::chrono_literals;

constexpr auto kHandshakeTimeout = 10s;
// By then the system finds out that the other host is gone.
constexpr auto kKeptAlive = 20s;
// So soon is due what may come first while a thread is held up.
constexpr auto kHeldUp = 2ms;
constexpr int kMaxDepth = 2;
constexpr std::size_t kSmallBytes = std::size_t{32} << 10;
constexpr std::size_t kSmallBuffers = 8;

// The earliest is the first of the heap.
bool later(const SimulatedNetwork::Event& a, const SimulatedNetwork::Event& b) {
  return a.at != b.at ? a.at > b.at : a.number > b.number;
}

std::size_t stream_of_message(const transport::Message& message) {
  std::size_t bytes = message.frame.size();
  for (const transport::Buffer& buffer : message.buffers) bytes += buffer.bytes;
  return bytes > kSmallBytes || message.buffers.size() > kSmallBuffers ? 1 : 0;
}

Error gone(const std::string& what) { return Error(ErrorCode::disconnected, what); }

}  // namespace

class SimulatedNetwork::LineEndpoint final : public transport::Endpoint {
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
                                                 transport::ConnectionEvents events) override {
    ++network_.attempts_;
    network_.others_go_on();
    if (!network_.calm_ && network_.one_in(200)) throw gone(address + ": no descriptor is left");
    const LinePtr line = network_.make_line(host_, address, std::move(events));
    network_.add({network_.now_ + network_.delay(), 0, kNoHost - 1, nullptr, false,
                  [&network = network_, line] { network.connect(line); }});
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

SimulatedNetwork::~SimulatedNetwork() = default;

// ---- time

void SimulatedNetwork::add(Event event) {
  event.number = ++last_number_;
  queue_.push_back(std::move(event));
  std::push_heap(queue_.begin(), queue_.end(), &later);
}

void SimulatedNetwork::call_at(Time when, std::size_t host, Task task) {
  others_go_on();
  add({std::max(when, now_) + (calm_ ? Duration{} : up_to(200us)), 0, host, nullptr, true,
       std::move(task)});
}

bool SimulatedNetwork::run(Time until, int most) {
  while (!queue_.empty() && queue_.front().at <= until) {
    if (most-- <= 0) return false;
    std::pop_heap(queue_.begin(), queue_.end(), &later);
    Event event = std::move(queue_.back());
    queue_.pop_back();
    run_event(std::move(event));
  }
  now_ = std::max(now_, until);
  return true;
}

void SimulatedNetwork::run_event(Event event) {
  now_ = std::max(now_, event.at);
  ++run_;
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

bool SimulatedNetwork::runnable(const Event& event) const {
  if (event.host == kNoHost || (event.line && event.line->busy_)) return false;
  return !(event.timer && hosts_[event.host].in_timer);
}

void SimulatedNetwork::others_go_on() {
  if (calm_ || depth_ >= kMaxDepth || !one_in(4)) return;
  ++depth_;
  do {
    if (queue_.empty() || queue_.front().at > now_ + kHeldUp || !runnable(queue_.front())) break;
    std::pop_heap(queue_.begin(), queue_.end(), &later);
    Event event = std::move(queue_.back());
    queue_.pop_back();
    run_event(std::move(event));
  } while (!one_in(3));
  --depth_;
}

SimulatedNetwork::Duration SimulatedNetwork::delay() {
  return !calm_ && one_in(16) ? up_to(20ms) : 10us + up_to(500us);
}

// ---- hosts

std::size_t SimulatedNetwork::add_host(transport::Hello hello, std::size_t place) {
  Host host;
  host.hello = std::move(hello);
  host.place = place;
  hosts_.push_back(std::move(host));
  return hosts_.size() - 1;
}

std::shared_ptr<transport::Endpoint> SimulatedNetwork::endpoint(std::size_t host, char scheme) {
  return std::make_shared<LineEndpoint>(*this, host, scheme);
}

void SimulatedNetwork::resume(std::size_t host) {
  hosts_[host].stopped = false;
  for (Event& event : std::exchange(hosts_[host].held, {})) {
    event.at = now_;
    add(std::move(event));
  }
}

void SimulatedNetwork::kill(std::size_t host, bool silently) {
  hosts_[host].dead = true;
  std::erase_if(listeners_, [&](const auto& each) { return each.second->host_ == host; });
  if (silently) vanished_[hosts_[host].place] = true;
  for (const LinePtr& line : lines_) {
    if (line->host != host) continue;
    line->lost_ = true;
    const LinePtr other = line->other();
    if (!other || other->ended_) continue;
    other->lost_ = true;
    for (auto& due : other->due_)
      due.resize(due.size() - static_cast<std::size_t>(below(static_cast<int>(due.size()) + 1)));
    if (!silently) {
      other->finish(gone(other->address + ": the other process has ended"));
    } else {
      add({now_ + kKeptAlive, 0, other->host, other, false,
           [other] { other->end(gone(other->address + ": the other host is gone")); }});
    }
  }
}

void SimulatedNetwork::cut(std::size_t a, std::size_t b, Time until) {
  cut_[a][b] = cut_[b][a] = std::max(cut_[a][b], until);
}

void SimulatedNetwork::heal() {
  cut_ = {};
  refused_.clear();
}

// ---- connections

SimulatedNetwork::LinePtr SimulatedNetwork::make_line(std::size_t host, std::string address,
                                                      transport::ConnectionEvents events) {
  if (lines_.size() >= 32 && (lines_.size() & (lines_.size() - 1)) == 0)
    std::erase_if(lines_, [](const LinePtr& each) { return each->ended_; });
  const auto line = std::make_shared<Line>(*this, host, std::move(address), std::move(events));
  lines_.push_back(line);
  add({now_ + kHandshakeTimeout, 0, host, line, false, [line] {
         if (!line->open_) line->end(gone(line->address + ": the handshake took too long"));
       }});
  return line;
}

void SimulatedNetwork::connect(const LinePtr& client) {
  if (client->ended_ || client->closed_) return;
  const auto place = static_cast<std::size_t>(client->address[2] - '0');
  const auto fail = [&](const char* why, bool none) {
    const Error error = gone(client->address + ": " + why);
    add({now_ + delay(), 0, client->host, client, false, [client, error, none] {
           client->none_listens_ = none && !client->open_;
           client->end(error);
         }});
  };
  const std::size_t from = hosts_[client->host].place;
  if (is_cut(from, place)) {
    // What is not answered is sent again, at growing intervals; or the host has no such place yet.
    const Time again = now_ + 200ms + up_to(400ms);
    if (again < now_ + kHandshakeTimeout)
      add({again, 0, kNoHost - 1, nullptr, false, [this, client] { connect(client); }});
    return;
  }
  if (const auto refused = refused_.find(client->address);
      refused != refused_.end() && now_ < refused->second.until)
    return fail("connections are refused here", refused->second.none_listens);
  const auto listener = listeners_.find(client->address);
  // Across hosts a refusal proves nothing.
  if (listener == listeners_.end())
    return fail("no process listens", client->address.front() != 'c');
  LineEndpoint* const endpoint = listener->second;
  const std::string address = client->address;
  add({now_, 0, endpoint->host_, nullptr, false, [this, client, address] {
         const auto found = listeners_.find(address);
         if (found != listeners_.end()) accept(client, found->second);
       }});
}

void SimulatedNetwork::accept(const LinePtr& client, LineEndpoint* listener) {
  if (client->ended_ || client->closed_) return;
  const LinePtr server = make_line(listener->host_, client->address, listener->accept_());
  server->accepted_ = true;
  server->other_ = client;
  client->other_ = server;
  server->peer_ = hosts_[client->host].hello;
  client->peer_ = hosts_[listener->host_].hello;
  for (const LinePtr& line : {client, server}) {
    const auto opens = [line] { line->opens(); };
    add({now_ + delay(), 0, line->host, line, false, opens});
  }
}

std::vector<SimulatedNetwork::LinePtr> SimulatedNetwork::open_lines() const {
  std::vector<LinePtr> open;
  for (const LinePtr& line : lines_) {
    const LinePtr other = line->other();
    if (!line->accepted_ && line->open() && other && other->open() && !line->lost_)
      open.push_back(line);
  }
  return open;
}

std::size_t SimulatedNetwork::ends_between(std::size_t a, std::size_t b) const {
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

std::string SimulatedNetwork::ends_text() const {
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

void SimulatedNetwork::lose(const LinePtr& line, std::optional<Duration> here,
                            std::optional<Duration> there) {
  const auto lose_end = [this](const LinePtr& end, std::optional<Duration> noticed) {
    if (!end || end->ended_) return;
    end->lost_ = true;
    end->tells_when_used_ = one_in(2);
    // What was on the way arrives up to some message of each stream.
    for (auto& due : end->due_)
      due.resize(due.size() - static_cast<std::size_t>(below(static_cast<int>(due.size()) + 1)));
    if (!noticed) return;
    add({now_ + *noticed, 0, end->host, end, false,
         [end] { end->end(gone(end->address + ": the connection is reset")); }});
  };
  lose_end(line, here);
  lose_end(line->other(), there);
}

bool SimulatedNetwork::Line::heard() const {
  const LinePtr peer = other();
  if (ended_ || lost_ || !peer || peer->ended_ || cut_off()) return false;
  const Host& there = network_.hosts_[peer->host];
  return !there.stopped && !there.dead;
}

void SimulatedNetwork::Line::use() {
  if (lost_ && std::exchange(tells_when_used_, false))
    finish(gone(address + ": the connection is reset"));
}

bool SimulatedNetwork::Line::cut_off() const {
  const LinePtr peer = other();
  return peer && network_.is_cut(network_.hosts_[host].place, network_.hosts_[peer->host].place);
}

void SimulatedNetwork::Line::opens() {
  if (ended_ || closed_) return;
  const LinePtr peer = other();
  if (cut_off() || lost_) {
    network_.add({network_.now_ + 100ms, 0, host, shared_from_this(), false,
                  [self = shared_from_this()] { self->opens(); }});
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

void SimulatedNetwork::Line::send(transport::Message message, transport::SendDone done) {
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

void SimulatedNetwork::Line::pass_on(std::size_t stream) {
  // A large message overtakes nothing.
  while (stream == 1 && !queue_[0].empty() && !queue_[1].empty() &&
         queue_[0].front().number < queue_[1].front().number)
    pass_on(0);
  if (ended_ || queue_[stream].empty()) return;
  Queued queued = std::move(queue_[stream].front());
  queue_[stream].pop_front();
  const LinePtr peer = other();
  if (peer && !lost_ && !peer->ended_) {
    peer->due_[stream].push_back(std::move(queued.message));
    peer->last_[stream] = std::max({peer->last_[stream], network_.now_ + network_.delay(),
                                    stream == 1 ? peer->last_[0] : Time{}});
    peer->arrive(stream);
  } else {
    use();
  }
  if (queued.done) queued.done(std::nullopt);
}

// A message is due at this end.
void SimulatedNetwork::Line::arrive(std::size_t stream) {
  network_.add({std::max(last_[stream], network_.now_), 0, host, shared_from_this(), false,
                [self = shared_from_this(), stream] { self->deliver(stream); }});
}

void SimulatedNetwork::Line::deliver(std::size_t stream) {
  if (!open_ || ended_ || due_[stream].empty()) return;  // opens() looks again
  if (cut_off()) {
    last_[stream] = std::max(last_[stream], network_.now_ + 50ms);
    return arrive(stream);
  }
  transport::Message message = std::move(due_[stream].front());
  due_[stream].pop_front();
  if (events_.on_message) events_.on_message(shared_from_this(), std::move(message));
}

// The other end has closed the connection, or is gone: noticed after what is on the way.
void SimulatedNetwork::Line::finish(const Error& reason) {
  const Time at = std::max({last_[0], last_[1], network_.now_ + network_.delay()});
  network_.add({at, 0, host, shared_from_this(), false, [self = shared_from_this(), reason] {
                  if (self->ended_) return;
                  if (self->cut_off()) return self->finish(reason);
                  self->end(reason);
                }});
  if (cut_off()) last_[0] = std::max(last_[0], network_.now_ + 50ms);
}

void SimulatedNetwork::Line::close(const Error& reason) {
  network_.others_go_on();
  if (std::exchange(closed_, true) || network_.hosts_[host].dead) return;
  network_.add({network_.now_ + (network_.one_in(2) ? Duration{} : network_.up_to(2ms)), 0, host,
                shared_from_this(), false,
                [self = shared_from_this(), reason] { self->end(reason); }});
}

void SimulatedNetwork::Line::end(const Error& reason) {
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

}  // namespace stitch::rpc::test
