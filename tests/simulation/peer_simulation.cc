#include "tests/simulation/peer_simulation.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stitch/rpc/peers/peer_table.h"
#include "tests/simulation/peer_network.h"

namespace stitch::rpc::peer_simulation {

namespace {

constexpr std::uint16_t kNote = 0x700;
constexpr std::uint64_t kEvil = ~std::uint64_t{0};
constexpr auto kTick = 500ms;
constexpr int kSilentTicks = 3;              // then a peer is given up
constexpr auto kLate = 60ms;                 // a timer, or a thread
constexpr std::size_t kMaxEnds = 10;         // of connections between two workers at a time
constexpr std::uint64_t kMaxAttempts = 120;  // of all workers within a tick

transport::Message note_of(std::uint64_t id, bool large) {
  transport::FrameBuilder frame(kNote);
  frame.body().append(&id, sizeof(id));
  frame.end_body();
  transport::Message message = std::move(frame).finish();
  if (large) message.buffers.resize(Session::kSmallBuffers + 1);
  return message;
}

std::string life_name(const WorkerInfo& info) {
  return info.name + "." + std::to_string(info.epoch);
}

class World final : public SimulatedNetwork {
 public:
  World(std::uint64_t number, bool mild) : SimulatedNetwork(number), mild_(mild) {
    places_ = 2 + (one_in(3) ? 1 : 0);
    schemes_ = std::string("abc").substr(pick(std::size_t{2}));
    schemes_ = schemes_.substr(0, 1 + pick(std::size_t{3}));
    constexpr Duration kGraces[] = {300ms, 1000ms, 3000ms};
    grace_ = kGraces[mild_ ? 1 + pick(2) : pick(3)];
    if (!mild_ && one_in(16)) grace_ = {};
    for (std::size_t place = 0; place < places_; ++place) begin(place, 1);
    for (std::size_t place = 0; place < places_; ++place) start(present_[place]);
  }
  ~World() override {
    calm();
    for (const auto& worker : workers_) leave(*worker);
  }

 private:
  void play() override {
    const auto active = mild_ ? 6s : 4s;
    const Time end = now_ + active;
    const int messages = 10 + pick(70);
    for (int i = 0; i < messages; ++i) after(up_to(active), kNoHost, [this] { send_something(); });
    plan_faults(end);
    for (std::size_t i = 0; i < workers_.size(); ++i) tick(i);
    while (!failed() && now_ < end) advance(20ms);
    settle();
    if (!failed()) check_end();
    count("attempts", attempts());
  }
  // What a worker has seen of a life of another.
  struct View {
    bool lost = false;
    int silent = 0;  // ticks
  };
  struct Worker {
    std::size_t place;
    std::size_t host;
    WorkerInfo info;
    std::vector<std::string> addresses{};
    std::unique_ptr<PeerTable> table{};
    std::unordered_map<WorkerInfo, View> views{};
    std::map<std::pair<std::size_t, bool>, std::uint64_t> last{};  // delivered, by sender, stream
    std::vector<std::uint64_t> sending{};
    std::set<char> said{};
    bool started = false, left = false;
  };
  struct Sent {
    std::size_t from;
    WorkerInfo to;
    bool large;
    bool ordered = true;
    int told = 0;
    bool failed = false, came = false;
  };

  [[nodiscard]] bool runs(const Worker& worker) const {
    return worker.started && !worker.left && !host(worker.host).dead;
  }
  // The present life at a place, be it dead.
  [[nodiscard]] Worker& present(std::size_t place) { return *workers_[present_[place]]; }
  [[nodiscard]] std::size_t some_place() { return pick(places_); }

  // ---- workers
  void begin(std::size_t place, std::uint64_t epoch) {
    transport::Hello hello;
    hello.id = static_cast<std::uint32_t>(place);
    hello.name = "worker" + std::to_string(place);
    hello.epoch = epoch;
    auto worker = std::make_unique<Worker>();
    worker->place = place;
    worker->host = add_host(hello, place);
    worker->info = {hello.name, WorkerId(hello.id), epoch};
    worker->table = std::make_unique<PeerTable>(grace_);
    for (const char scheme : schemes_) {
      for (auto& address : worker->table->listen(endpoint(worker->host, scheme)))
        worker->addresses.push_back(std::move(address));
    }
    if (present_.size() <= place) present_.resize(place + 1);
    present_[place] = workers_.size();
    workers_.push_back(std::move(worker));
    count("lives");
    note(life_name(workers_.back()->info), " begins");
  }
  void start(std::size_t index) {
    Worker& worker = *workers_[index];
    std::vector<Member> members;
    for (std::size_t place = 0; place < places_; ++place)
      members.push_back({present(place).info, present(place).addresses});
    PeerTable::Events events;
    events.on_message = [this, index](const auto&, const WorkerInfo& from,
                                      const transport::Message& message) {
      on_message(*workers_[index], from, message);
    };
    events.place = [](const auto&, const auto&, std::size_t) { return transport::Buffer{}; };
    events.on_lost = [this, index](const WorkerInfo& peer, const Error& reason) {
      on_lost(*workers_[index], peer, reason);
    };
    events.call_at = [this, host = worker.host](auto when, auto task) {
      call_at(when, host, std::move(task));
    };
    events.on_notice = [](const auto&, const auto&, bool) {};
    events.deadline = [](std::uint64_t call) {
      return call % 2 == 0 ? std::optional(PeerTable::Clock::time_point::max()) : std::nullopt;
    };
    events.now = [this] { return now_; };
    events.say = [this, index](const std::string& line) { on_said(*workers_[index], line); };
    worker.started = true;
    worker.table->start(members, worker.info.id, std::move(events));
  }
  // As the watch of the members: what is silent for long is given up.
  void tick(std::size_t index) {
    Worker& worker = *workers_[index];
    call_at(now_ + kTick, worker.host, [this, index] {
      Worker& self = *workers_[index];
      for (std::size_t place = 0; place < places_; ++place) {
        PeerLife* const life = self.table->life(WorkerId(static_cast<std::uint32_t>(place)));
        if (place == self.place || life == nullptr) continue;
        const auto& bound = life->peer->bound();
        View& view = self.views[life->info()];
        auto* const line = bound ? static_cast<Line*>(bound->connection.get()) : nullptr;
        if (line != nullptr) line->use();
        view.silent = line == nullptr || line->is_heard() ? 0 : view.silent + 1;
        if (view.silent > kSilentTicks)
          self.table->end(life->info(), Error(ErrorCode::disconnected, "it was silent"), false);
      }
      tick(index);
    });
  }
  void restart(std::size_t place) {
    begin(place, present(place).info.epoch + 1);
    revive(place);
    start(present_[place]);
    tick(present_[place]);
    const std::size_t newcomer = present_[place];
    for (std::size_t i = 0; i < workers_.size(); ++i) {
      if (i == newcomer) continue;
      after(up_to(200ms), workers_[i]->host,
            [this, i, newcomer] { introduce(*workers_[i], *workers_[newcomer]); });
    }
  }
  void introduce(Worker& to, const Worker& newcomer) {
    if (!runs(to)) return;
    const PeerLife* known = to.table->life(newcomer.info.id);
    if (known == nullptr || known->info().epoch >= newcomer.info.epoch) return;
    to.table->admit(to.table->add_life({newcomer.info, newcomer.addresses}));
  }

  // ---- messages
  void send_something() {
    Worker& from = present(some_place());
    const std::size_t place = some_place();
    if (!runs(from) || place == from.place) return;
    after({}, from.host, [this, &from, place] { send(from, place); });
  }
  void send(Worker& from, std::size_t place) {
    const WorkerInfo to = from.table->find(WorkerId(static_cast<std::uint32_t>(place)));
    const std::uint64_t id = sent_.size();
    sent_.push_back({present_[from.place], to, one_in(3)});
    for (const std::uint64_t other : from.sending) sent_[id].ordered = sent_[other].ordered = false;
    from.sending.push_back(id);
    note(life_name(from.info), " sends message ", id, " to ", life_name(to));
    // Calls with an odd number are not wanted any more when their turn comes.
    const std::uint64_t call = one_in(8) ? id + 1 : 0;
    from.table->send(
        to, nullptr, note_of(id, sent_[id].large),
        [this, id](const std::optional<Error>& error) { on_told(id, error); }, call);
    std::erase(from.sending, id);
  }
  void on_told(std::uint64_t id, const std::optional<Error>& error) {
    Sent& sent = sent_[id];
    if (!runs(*workers_[sent.from])) return;
    if (++sent.told > 1) fail("the end of message ", id, " was told twice");
    sent.failed = error.has_value();
    note("message ", id, error ? " fails" : " is sent");
    count("failed", sent.failed ? 1 : 0);
    if (sent.failed && sent.came) fail("message ", id, " came, and failed: ", error->what());
  }
  void on_message(Worker& at, const WorkerInfo& from, const transport::Message& message) {
    const auto head = transport::peek_frame(message.frame);
    std::uint64_t id = kEvil;
    if (head && head->kind == kNote) std::memcpy(&id, head->body.data(), sizeof(id));
    if (id >= sent_.size()) return fail("a stranger's message was taken for one of a worker");
    Sent& sent = sent_[id];
    const std::string name = "message " + std::to_string(id);
    if (!(sent.to == at.info)) return fail(name, " came to another life");
    if (!(workers_[sent.from]->info == from)) return fail(name, " came from another life");
    if (std::exchange(sent.came, true)) return fail(name, " came twice");
    if (sent.failed) return fail(name, " failed, and came");
    count("delivered");
    note(name, " comes");
    std::uint64_t& last = at.last[{sent.from, sent.large}];
    if (sent.ordered && last > id + 1) fail(name, " came out of order");
    if (sent.ordered) last = id + 1;
  }
  void on_lost(Worker& worker, const WorkerInfo& peer, const Error& reason) {
    if (!runs(worker)) return;
    count("lost");
    View& view = worker.views[peer];
    const std::string name = life_name(peer) + " is lost to " + life_name(worker.info);
    note(name, ": ", reason.what());
    if (std::exchange(view.lost, true)) return fail(name, " twice");
    if (mild_) return fail(name, " too soon: ", reason.what());
    const std::string text = reason.what();
    const auto other = text.find("no other");
    if (other != std::string::npos && text.find(" is gone: ") == std::string::npos &&
        text.find("which it has opened") == std::string::npos &&
        text.find(":" + std::to_string(peer.id.value()) + "/", other) == std::string::npos)
      return fail(name, ", and no address is named: ", text);
    if (!touched_[worker.place][peer.id.value()])
      return fail(name, " though nothing has happened between them: ", reason.what());
  }
  // An address that another one is used instead of: once each transport, and why.
  void on_said(Worker& worker, const std::string& line) {
    const auto at = line.find(":", line.find(": ") + 1);
    if (at == std::string::npos || schemes_.find(line[at - 1]) == std::string::npos)
      return fail("no address is named: ", line);
    if (!worker.said.insert(line[at - 1]).second) fail("this is said again: ", line);
  }

  // ---- faults
  void touch(std::size_t a, std::size_t b) { touched_[a][b] = touched_[b][a] = true; }
  void may_break(std::size_t a, std::size_t b) { breaks_[std::min(a, b)][std::max(a, b)] += 2; }
  void touch_all(std::size_t place) {
    for (std::size_t other = 0; other < places_; ++other) touch(place, other);
  }
  // Outages that are over in time: the rest of the grace is for the attempts that they have held
  // up.
  [[nodiscard]] Duration short_time() {
    const auto attempt = std::clamp<Duration>(grace_ / 3, 300ms, 10s);
    return up_to(std::max<Duration>(grace_ - 2 * attempt - 100ms, 0ms));
  }
  [[nodiscard]] Duration some_time() {
    return mild_ ? short_time() : up_to(one_in(2) ? 400ms : 3000ms);
  }
  void plan_faults(Time end) {
    const int count = 1 + pick(8);
    Duration at{};
    for (int i = 0; i < count; ++i) {
      at += up_to(mild_ ? 1500ms : 800ms);
      if (mild_) at += grace_;
      if (now_ + at >= end) return;
      after(at, kNoHost, [this] { fault(); });
    }
  }
  void fault() {
    const int what = pick(mild_ ? 12 : 22);
    const std::size_t place = some_place();
    const std::size_t other =
        (place + 1 + static_cast<std::size_t>(pick(static_cast<int>(places_) - 1))) % places_;
    if (what < 6) {
      lose_line();
    } else if (what < 8) {
      cut(place, other);
    } else if (what < 10) {
      refuse(present(place));
    } else if (what < 12) {
      stop(present(place));
    } else if (what < 15) {
      end(place);
    } else if (what < 17) {
      lose_all(40 + pick(100));
    } else if (what < 20) {
      intrude(place, other);
    } else {
      Worker& worker = present(place);
      if (!runs(worker) || host(worker.host).stopped) return;
      touch(place, other);
      worker.table->give_up(worker.table->find(WorkerId(static_cast<std::uint32_t>(other))),
                            Error(ErrorCode::overloaded, "it was given up"));
    }
  }
  [[nodiscard]] bool all_bound() {
    for (std::size_t place = 0; place < places_; ++place) {
      for (std::size_t other = 0; other < places_; ++other) {
        const PeerLife* const life =
            present(place).table->life(WorkerId(static_cast<std::uint32_t>(other)));
        if (other != place && !life->peer->bound()) return false;
      }
    }
    return true;
  }
  void lose_line() {
    const auto lines = open_lines();
    if (lines.empty()) return;
    lose_line(lines[pick(lines.size())]);
  }
  void lose_line(const LinePtr& line) {
    const std::size_t a = host(line->host).place;
    const std::size_t b = host(line->other()->host).place;
    touch(a, b);
    ++breaks_[std::min(a, b)][std::max(a, b)];
    note("a connection of ", a, " and ", b, " breaks");
    std::optional<Duration> here = up_to(30ms);
    std::optional<Duration> there = up_to(30ms);
    if (now_ >= both_notice_until_ && one_in(4)) (one_in(2) ? here : there).reset();
    if (!mild_ && one_in(16)) here = there = std::nullopt;
    lose(line, here, there);
  }
  void lose_all(int times) {
    if (times == 0) return;
    lose_line();
    after(up_to(10ms), kNoHost, [this, times] { lose_all(times - 1); });
  }
  void cut(std::size_t a, std::size_t b) {
    touch(a, b);
    may_break(a, b);
    const auto time = some_time();
    SimulatedNetwork::cut(a, b, now_ + time);
    note(a, " and ", b, " are cut off");
    for (const auto& line : open_lines()) {
      const std::size_t here = host(line->host).place;
      const std::size_t there = host(line->other()->host).place;
      if (std::minmax(here, there) != std::minmax(a, b) || one_in(2)) continue;
      lose(line, up_to(time), up_to(time));
    }
  }

  void refuse(const Worker& worker) {
    touch_all(worker.place);
    if (mild_ && now_ < refused_until_) return;
    const auto time = some_time();
    refused_until_ = now_ + 4s;
    // One of them shows that it may still be there; or it connects itself.
    const auto count = static_cast<int>(worker.addresses.size());
    const auto spared = static_cast<std::size_t>(pick(count));
    const bool connects = mild_ && one_in(2) && all_bound();
    const bool all = connects || one_in(3);
    // Who cannot be reached has to know that it must connect.
    if (connects) both_notice_until_ = refused_until_;
    const Time until = now_ + (!all || connects ? 4s : time);
    for (std::size_t i = 0; i < worker.addresses.size(); ++i) {
      if (i == spared && !all) continue;
      SimulatedNetwork::refuse(worker.addresses[i], until, i != spared && one_in(2));
    }
    if (connects || one_in(2)) {
      for (const auto& line : open_lines()) lose_line(line);
    }
  }
  void stop(const Worker& worker) {
    if (!runs(worker) || host(worker.host).stopped) return;
    touch_all(worker.place);
    for (std::size_t other = 0; other < places_; ++other) may_break(worker.place, other);
    SimulatedNetwork::stop(worker.host);
    note(life_name(worker.info), " stops");
    after(some_time(), kNoHost, [this, host = worker.host] { resume(host); });
    if (one_in(2)) lose_line();
  }
  // What it does not send any more is told now, and not checked.
  void leave(Worker& worker) {
    worker.left = true;
    worker.table->close();
  }
  void end(std::size_t place) {
    Worker& worker = present(place);
    if (!runs(worker) || host(worker.host).stopped) return;
    touch_all(place);
    const bool leaves = one_in(4);
    note(life_name(worker.info), leaves ? " leaves" : " dies");
    if (leaves) leave(worker);
    kill(worker.host, !leaves && one_in(3));
    if (one_in(3)) return;
    after(up_to(1500ms), kNoHost, [this, place] {
      if (!runs(present(place))) restart(place);
    });
  }
  void intrude(std::size_t victim, std::size_t claimed) {
    Worker& worker = present(victim);
    if (!runs(worker)) return;
    const PeerLife* life = worker.table->life(WorkerId(static_cast<std::uint32_t>(claimed)));
    // Who has not read its beginning cannot take over a session; it may begin one.
    if (life == nullptr || !life->peer->bound()) return;
    touch(victim, claimed);
    count("strangers");
    const WorkerInfo& info = life->info();
    transport::Hello hello;
    hello.id = info.id.value();
    hello.name = info.name;
    hello.epoch = info.epoch;
    const std::size_t host = add_host(hello, kMaxPlaces - 1);
    intruders_.push_back(endpoint(host, worker.addresses.front().front()));
    auto events = stranger_events(pick(4), random_() | 1, note_of(kEvil, false));
    try {
      static_cast<void>(intruders_.back()->connect(worker.addresses.front(),
                                                   {worker.info.id.value(), worker.info.epoch},
                                                   std::move(events)));
    } catch (const Error&) {
      // It has no descriptor left.
    }
  }

  // ---- checks
  void advance(Duration time) {
    run_hosts(now_ + time);
    const Time now = now_;
    for (const auto& each : workers_) {
      const Worker& worker = *each;
      if (!runs(worker) || host(worker.host).stopped) continue;
      worker.table->for_each([&](const PeerLife& life) {
        const auto& broken = life.peer->broken();
        if (broken && now - broken->since > grace_ + kLate) {
          fail(life_name(life.info()), " is not lost to ", life_name(worker.info),
               " though its connection has not been replaced in time");
        }
      });
    }
    if (now < next_count_) return;
    next_count_ = now + kTick;
    if (attempts() - std::exchange(counted_attempts_, attempts()) > kMaxAttempts)
      fail("attempts to connect have no pause");
    for (std::size_t a = 0; a < places_; ++a) {
      for (std::size_t b = 0; b < a; ++b) {
        if (ends_between(a, b) > kMaxEnds) fail("connections are kept for nothing");
      }
    }
  }
  void settle() {
    calm();
    heal();
    for (const auto& each : workers_) {
      if (host(each->host).stopped) resume(each->host);
    }
    for (int round = 0; round < 3 && !failed(); ++round) {
      for (const auto& each : workers_) {
        if (!runs(*each)) continue;
        for (std::size_t place = 0; place < places_; ++place) {
          introduce(*each, present(place));
          if (place != each->place) each->table->reach(WorkerId(static_cast<std::uint32_t>(place)));
        }
      }
      for (int i = 0; i < 10 && !failed(); ++i) advance(round == 0 ? 1s : 2s);
    }
  }
  void check_end() {
    for (std::size_t a = 0; a < places_; ++a) {
      for (std::size_t b = 0; b < a; ++b) {
        if (!failed()) check_pair(present(a), present(b));
      }
    }
    for (std::uint64_t id = 0; id < sent_.size() && !failed(); ++id) check_message(id);
  }
  void check_pair(Worker& one, Worker& two) {
    const std::string names = life_name(one.info) + " and " + life_name(two.info);
    const auto ends = ends_between(one.place, two.place);
    if (!runs(one) || !runs(two)) {
      if (ends != 0) fail(names, " have connections though one is dead");
      return;
    }
    const PeerLife* const at_one = one.table->life(two.info);
    const PeerLife* const at_two = two.table->life(one.info);
    if (at_one == nullptr || at_two == nullptr) return fail(names, " do not know each other");
    const Peer& first = *at_one->peer;
    const Peer& second = *at_two->peer;
    if (first.lost().has_value() != second.lost().has_value()) {
      return fail(names, ": lost to one side only: ",
                  (first.lost() ? first.lost() : second.lost())->what());
    }
    if (first.lost()) {
      if (ends != 0) fail(names, " have connections though they are lost to each other");
      return;
    }
    if (!first.bound() || !second.bound()) return fail(names, " have no connection");
    auto* const line = static_cast<Line*>(first.bound()->connection.get());
    if (line->other().get() != second.bound()->connection.get())
      return fail(names, " use two connections");
    const std::uint64_t ahead = line->accepted() ? 1 : 0;
    if (first.bound()->generation + 1 - ahead != second.bound()->generation + ahead)
      return fail(names, " do not agree about the generation");
    if (ends != 2) return fail(names, " have ", ends, " ends", ends_text());
    for (const PeerLife* life : {at_one, at_two}) {
      const auto statistics = life->session->statistics();
      count("reconnects", statistics.reconnects);
      count("resent", statistics.resent);
      if (statistics.kept_messages != 0) return fail(names, " still keep messages");
      // An attempt of one side never ends a connection that the other one is using.
      if (mild_ && statistics.reconnects > breaks_[two.place][one.place])
        return fail(names, " have replaced connections that were not broken");
    }
  }
  void check_message(std::uint64_t id) {
    const Sent& sent = sent_[id];
    const Worker& from = *workers_[sent.from];
    if (!runs(from)) return;
    const std::string name = "message " + std::to_string(id);
    const PeerLife* const life = from.table->life(sent.to);
    if (sent.told != 1) return fail(name, " was told ", sent.told, " times");
    if (life == nullptr) return fail(name, " was sent to no life");
    if (!sent.failed && !sent.came && !life->peer->lost()) fail(name, " is lost");
  }
  std::vector<Sent> sent_;
  const bool mild_;
  std::size_t places_ = 2;
  std::string schemes_;
  Duration grace_{};
  std::vector<std::unique_ptr<Worker>> workers_;  // all lives
  std::vector<std::size_t> present_;              // by place
  std::vector<std::shared_ptr<transport::Endpoint>> intruders_;
  std::array<std::array<bool, kMaxPlaces>, kMaxPlaces> touched_{};
  std::array<std::array<std::uint64_t, kMaxPlaces>, kMaxPlaces> breaks_{};
  Time refused_until_{};
  Time both_notice_until_{};
  Time next_count_{};
  std::uint64_t counted_attempts_ = 0;
};

}  // namespace

simulation::Outcome run(std::uint64_t number, bool mild) { return World(number, mild).run(); }

}  // namespace stitch::rpc::peer_simulation
