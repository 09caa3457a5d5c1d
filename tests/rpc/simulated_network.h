#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/base/unique_function.h"
#include "stitch/transport/endpoint.h"

namespace stitch::rpc::test {

// A network with its clock in one thread, driven by one seed: hosts, endpoints on them and their
// connections, as transport/endpoint.h promises them and no better. Messages of a stream keep their
// order and take any time; connections end at one side, at both or silently; a host stops, dies,
// vanishes, or is cut off from another; an address refuses. Threads are played, too: whenever a
// host's code calls out (to send, to close, to connect), the next events may come first, those of
// other connections of the same host and of its timer included. Not thread-safe.
class SimulatedNetwork {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Duration = Time::duration;
  using Task = base::UniqueFunction<void()>;
  class Line;
  class LineEndpoint;
  using LinePtr = std::shared_ptr<Line>;

  // Something that happens to a host.
  struct Event {
    Time at;
    std::uint64_t number;
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
    bool dead = false;
    bool stopped = false;
    bool in_timer = false;
    std::vector<Event> held{};  // while it is stopped
  };

  explicit SimulatedNetwork(std::uint64_t seed) : random_(seed) {}
  ~SimulatedNetwork();
  SimulatedNetwork(const SimulatedNetwork&) = delete;
  SimulatedNetwork& operator=(const SimulatedNetwork&) = delete;

  // ---- time and chance
  [[nodiscard]] Time now() const noexcept { return now_; }
  [[nodiscard]] int below(int bound) {
    return static_cast<int>(random_() % static_cast<std::uint64_t>(bound));
  }
  [[nodiscard]] bool one_in(int bound) { return below(bound) == 0; }
  [[nodiscard]] Duration up_to(Duration most) {
    return Duration(
        static_cast<Duration::rep>(random_() % static_cast<std::uint64_t>(most.count() + 1)));
  }
  [[nodiscard]] std::uint64_t number() { return random_(); }
  void after(Duration delay, std::size_t host, Task task) {
    add({now_ + delay, 0, host, nullptr, false, std::move(task)});
  }
  // On the host's timer thread.
  void call_at(Time when, std::size_t host, Task task);
  // Runs what is due up to `until`, at most `most` events; false when there were more.
  bool run(Time until, int most);
  [[nodiscard]] std::uint64_t events() const noexcept { return run_; }
  // Threads go on as they are called from now on, and messages arrive soon.
  void calm() noexcept { calm_ = true; }

  // ---- hosts
  [[nodiscard]] std::size_t add_host(transport::Hello hello, std::size_t place);
  [[nodiscard]] const Host& host(std::size_t host) const { return hosts_[host]; }
  [[nodiscard]] std::shared_ptr<transport::Endpoint> endpoint(std::size_t host, char scheme);
  void stop(std::size_t host) { hosts_[host].stopped = true; }
  void resume(std::size_t host);
  // `silently`: no one is told, and what is sent to its place is not answered until `revive`.
  void kill(std::size_t host, bool silently);
  void revive(std::size_t place) { vanished_[place] = false; }
  // Nothing gets from one place to the other until then.
  void cut(std::size_t a, std::size_t b, Time until);
  [[nodiscard]] bool is_cut(std::size_t a, std::size_t b) const {
    return now_ < cut_[a][b] || vanished_[a] || vanished_[b];
  }
  // Connections to this address fail until then; `none_listens`: as if no process listened there.
  void refuse(const std::string& address, Time until, bool none_listens) {
    refused_[address] = {until, none_listens};
  }

  // Ends both.
  void heal();

  // ---- connections
  // Those whose ends are both open; one end of each.
  [[nodiscard]] std::vector<LinePtr> open_lines() const;
  // Ends that have not ended, of living hosts in two places.
  [[nodiscard]] std::size_t ends_between(std::size_t a, std::size_t b) const;
  // All that have not ended, for error texts.
  [[nodiscard]] std::string ends_text() const;
  // The connection carries nothing any more. Its ends notice after these times; nothing: not at
  // all, unless it sends.
  void lose(const LinePtr& line, std::optional<Duration> here, std::optional<Duration> there);
  [[nodiscard]] std::uint64_t attempts() const noexcept { return attempts_; }

 private:
  friend class Line;
  friend class LineEndpoint;
  void add(Event event);
  void run_event(Event event);
  // Other threads go on first.
  void others_go_on();
  [[nodiscard]] Duration delay();
  [[nodiscard]] bool runnable(const Event& event) const;
  void connect(const LinePtr& client);
  void accept(const LinePtr& client, LineEndpoint* listener);
  [[nodiscard]] LinePtr make_line(std::size_t host, std::string address,
                                  transport::ConnectionEvents events);

  std::mt19937_64 random_;
  Time now_{std::chrono::hours(1)};
  std::vector<Event> queue_;  // a heap
  std::uint64_t last_number_ = 0;
  std::uint64_t run_ = 0;
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

// One end of a connection.
class SimulatedNetwork::Line final : public transport::Connection,
                                     public std::enable_shared_from_this<Line> {
 public:
  Line(SimulatedNetwork& network, std::size_t host, std::string address,
       transport::ConnectionEvents events)
      : host(host), address(std::move(address)), network_(network), events_(std::move(events)) {}
  [[nodiscard]] const transport::Hello& peer() const override { return peer_; }
  void send(transport::Message message, transport::SendDone done) override;
  void close(const Error& reason) override;
  [[nodiscard]] bool no_process_listens() const override { return none_listens_; }
  [[nodiscard]] std::string describe() const override { return address; }
  [[nodiscard]] bool ended() const noexcept { return ended_; }
  [[nodiscard]] bool open() const noexcept { return open_ && !closed_; }
  [[nodiscard]] LinePtr other() const { return other_.lock(); }
  [[nodiscard]] bool accepted() const noexcept { return accepted_; }
  // Whether the other end would be heard if it said something.
  [[nodiscard]] bool heard() const;
  // Something that is not missed is sent.
  void use();

  const std::size_t host;
  const std::string address;

 private:
  friend class SimulatedNetwork;
  friend class LineEndpoint;
  struct Queued {
    std::uint64_t number;  // among those of this end
    transport::Message message;
    transport::SendDone done;
  };
  void pass_on(std::size_t stream);
  void arrive(std::size_t stream);
  void deliver(std::size_t stream);
  void finish(const Error& reason);
  void opens();
  void end(const Error& reason);
  [[nodiscard]] bool cut_off() const;

  SimulatedNetwork& network_;
  transport::ConnectionEvents events_;
  transport::Hello peer_;
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
  std::array<std::deque<Queued>, 2> queue_;            // not passed on yet
  std::array<std::deque<transport::Message>, 2> due_;  // on the way to this end
  std::array<Time, 2> last_{};                         // when the last one of a stream is due
};

}  // namespace stitch::rpc::test
