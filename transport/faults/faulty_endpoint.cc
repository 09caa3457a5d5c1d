#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <deque>
#include <future>
#include <optional>
#include <utility>

#include "stitch/base/mutex.h"
#include "stitch/transport/faults/faults.h"

namespace stitch::transport {

namespace {

using Clock = Faults::Clock;

// The delay of a message that others are to overtake.
constexpr std::chrono::milliseconds kReorderTime{10};
constexpr std::size_t kLargeBytes = std::size_t{32} << 10;  // from here on others may overtake

enum Which : std::uint32_t { kDrop, kDuplicate, kReorder, kDelay, kLife };

std::size_t bytes_of(const Message& message) {
  std::size_t bytes = message.frame.size();
  for (const auto& buffer : message.buffers) bytes += buffer.bytes;
  return bytes;
}

// Its sender may change what it has sent.
Message copy_of(const Message& message) {
  Message copy;
  copy.frame.append(message.frame.data(), message.frame.size());
  copy.buffers = message.buffers;
  return copy;
}

// A connection whose messages meet with faults on the way to the inner connection. Delayed messages
// keep their order, in one queue for small messages and one for large ones, and one thread at a
// time passes them on. Owned by the endpoint's user and by the callbacks of the inner connection.
// Thread contract: as Connection; no lock is held while the inner connection is called.
class FaultyConnection final : public Connection,
                               public std::enable_shared_from_this<FaultyConnection> {
 public:
  FaultyConnection(std::shared_ptr<Faults> faults, std::string name)
      : faults_(std::move(faults)), name_(std::move(name)) {}

  // The callbacks for the connection behind this one.
  [[nodiscard]] ConnectionEvents wrap(ConnectionEvents events) {
    ConnectionEvents wrapped;
    wrapped.check_peer = std::move(events.check_peer);
    const auto self = shared_from_this();
    wrapped.on_open = [self, on_open = std::move(events.on_open)](const auto& inner) {
      self->open(inner);
      if (on_open) on_open(self);
      self->pass_on();
    };
    if (events.on_message) {
      wrapped.on_message = [self, on_message = std::move(events.on_message)](const auto&,
                                                                             Message message) {
        on_message(self, std::move(message));
      };
    }
    if (events.place) {
      wrapped.place = [self, place = std::move(events.place)](const auto&, const base::Bytes& frame,
                                                              std::size_t bytes) {
        return place(self, frame, bytes);
      };
    }
    wrapped.on_closed = [self, on_closed = std::move(events.on_closed)](const auto& behind,
                                                                        const Error& reason) {
      if (behind) self->no_process_listens_.store(behind->no_process_listens());
      self->end(reason);
      if (on_closed) on_closed(self, reason);
    };
    return wrapped;
  }
  // The connection behind this one, as soon as it is known.
  void set_inner(std::shared_ptr<Connection> inner) STITCH_EXCLUDES(mutex_) {
    base::MutexLock lock(mutex_);
    if (ended_ || inner_) return;
    name_ = inner->describe();
    inner_ = std::move(inner);
  }

  [[nodiscard]] const Hello& peer() const override { return peer_; }
  void send(Message message, SendDone done) override STITCH_EXCLUDES(mutex_) {
    std::optional<Fate> fate;
    if (Faults::judges_expected() && is_open())
      fate = Faults::judge(faults_->id(), peer_.id, message);
    {
      base::MutexLock lock(mutex_);
      if (!ended_) {
        delay({std::move(message), std::move(done), fate});
        message = {};
        done = nullptr;
      }
    }
    if (done) {
      done(Error(ErrorCode::disconnected, "the connection has ended"));
      return;
    }
    pass_on();
  }
  [[nodiscard]] bool defer(DeferredWork& work) override {
    const auto behind = inner();
    return behind && behind->defer(work);
  }
  void pause_reading(bool paused) override {
    if (const auto behind = inner()) behind->pause_reading(paused);
  }
  [[nodiscard]] bool holds_back() const override {
    const auto behind = inner();
    return behind && behind->holds_back();
  }
  [[nodiscard]] Clock::time_point heard() const override {
    const auto behind = inner();
    return behind ? behind->heard() : Clock::now();
  }
  [[nodiscard]] bool within_host() const override {
    const auto behind = inner();
    return behind && behind->within_host();
  }
  void trim() noexcept override {
    if (const auto behind = inner()) behind->trim();
  }
  void blocking_work_done() override {
    if (const auto behind = inner()) behind->blocking_work_done();
  }
  void close(const Error& reason) override {
    if (const auto behind = inner()) behind->close(reason);
  }
  [[nodiscard]] bool no_process_listens() const override { return no_process_listens_.load(); }
  [[nodiscard]] std::string describe() const override STITCH_EXCLUDES(mutex_) {
    base::MutexLock lock(mutex_);
    return name_;
  }

 private:
  struct Delayed {
    Message message;
    SendDone done;
    std::optional<Fate> fate{};  // once it is judged
    std::uint64_t number = 0;
    Clock::time_point due{};
  };
  struct Lane {
    std::deque<Delayed> waiting;
    Clock::time_point last_due{};
  };

  [[nodiscard]] std::shared_ptr<Connection> inner() const STITCH_EXCLUDES(mutex_) {
    base::MutexLock lock(mutex_);
    return inner_;
  }

  [[nodiscard]] bool is_open() const STITCH_EXCLUDES(mutex_) {
    base::MutexLock lock(mutex_);
    return open_;
  }

  void open(const std::shared_ptr<Connection>& behind) STITCH_EXCLUDES(mutex_) {
    set_inner(behind);
    peer_ = behind->peer();
    const Faults::Dice dice = faults_->next_connection(peer_.name);
    {
      base::MutexLock lock(mutex_);
      dice_ = dice;
      open_ = true;
      cuts_ = faults_->cuts(peer_.name);
    }
    const auto& plan = faults_->plan();
    if (plan.cut.count() == 0 || !faults_->cuts(peer_.name)) return;
    const double life = -std::log(1 - dice.roll(0, kLife)) * static_cast<double>(plan.cut.count());
    const auto when =
        Clock::now() + std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(life, 1e18)));
    faults_->thread().post_at(when, [weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->cut("cut");
    });
  }

  void delay(Delayed delayed) STITCH_REQUIRES(mutex_) {
    const auto& plan = faults_->plan();
    delayed.number = ++sent_;
    const bool large = bytes_of(delayed.message) > kLargeBytes;
    auto wait = plan.delay_from;
    const auto spread = static_cast<double>((plan.delay_to - plan.delay_from).count());
    wait += std::chrono::nanoseconds(
        static_cast<std::int64_t>(spread * dice_.roll(delayed.number, kDelay)));
    if (large && dice_.roll(delayed.number, kReorder) < plan.reorder) wait += kReorderTime;
    Lane& lane = lanes_[large ? 1 : 0];
    // Only `reorder` lets small messages overtake; otherwise a large one holds up what follows.
    const auto last =
        plan.reorder > 0 ? lane.last_due : std::max(lanes_[0].last_due, lanes_[1].last_due);
    delayed.due = std::max(last, Clock::now() + wait);
    lane.last_due = delayed.due;
    lane.waiting.push_back(std::move(delayed));
  }

  // The message that may go now; none: `next` is when one may, max() for not before an event.
  [[nodiscard]] std::optional<Delayed> take(Clock::time_point& next) STITCH_REQUIRES(mutex_) {
    next = Clock::time_point::max();
    if (!open_ || ended_) return std::nullopt;
    const auto now = Clock::now();
    const auto deliverable = faults_->deliverable(peer_.name, now);
    Lane* first = nullptr;
    for (Lane& lane : lanes_) {
      if (lane.waiting.empty()) continue;
      const Delayed& front = lane.waiting.front();
      const bool earlier =
          first == nullptr || front.due < first->waiting.front().due ||
          (front.due == first->waiting.front().due && front.number < first->waiting.front().number);
      if (earlier) first = &lane;
    }
    if (first == nullptr) return std::nullopt;
    next = std::max(first->waiting.front().due, deliverable);
    if (next > now) return std::nullopt;
    Delayed delayed = std::move(first->waiting.front());
    first->waiting.pop_front();
    return delayed;
  }

  // Passes on what is due, unless another thread does, and has the rest passed on when it is.
  void pass_on() STITCH_EXCLUDES(mutex_) {
    for (;;) {
      std::optional<Delayed> delayed;
      std::shared_ptr<Connection> behind;
      {
        base::MutexLock lock(mutex_);
        if (passing_) return;
        Clock::time_point next;
        delayed = take(next);
        if (!delayed) {
          if (next != Clock::time_point::max() && next != timer_) {
            timer_ = next;
            faults_->thread().post_at(next, [weak = weak_from_this()] {
              if (const auto self = weak.lock()) self->pass_on();
            });
          }
          return;
        }
        passing_ = true;
        behind = inner_;
      }
      const std::unique_ptr<FaultyConnection, void (*)(FaultyConnection*)> passed(
          this, [](FaultyConnection* connection) {  // also when a callback throws
            base::MutexLock lock(connection->mutex_);
            connection->passing_ = false;
          });
      deliver(behind, std::move(*delayed));
    }
  }

  void deliver(const std::shared_ptr<Connection>& behind, Delayed delayed) {
    if (Faults::judges_expected() && !pass_judge(behind, delayed)) return;
    const auto& plan = faults_->plan();
    if (cuts_ && dice_.roll(delayed.number, kDrop) < plan.drop) {
      delayed.message = {};
      if (delayed.done) {
        delayed.done(Error(ErrorCode::disconnected,
                           "connection " + describe() + " was cut on purpose (fault drop)"));
      }
      cut("drop");
      return;
    }
    if (cuts_ && dice_.roll(delayed.number, kDuplicate) < plan.duplicate) {
      behind->send(std::move(delayed.message),
                   [done = std::move(delayed.done),
                    weak = weak_from_this()](const std::optional<Error>& error) mutable {
                     if (done) done(error);
                     if (const auto self = weak.lock()) self->cut("duplicate");
                   });
      return;
    }
    behind->send(std::move(delayed.message), std::move(delayed.done));
  }

  // False: the judge has decided otherwise, and the message has met its fate.
  [[nodiscard]] bool pass_judge(const std::shared_ptr<Connection>& behind, Delayed& delayed) {
    const Fate fate =
        delayed.fate ? *delayed.fate : Faults::judge(faults_->id(), peer_.id, delayed.message);
    if (fate.fail) {
      const Error why(ErrorCode::disconnected,
                      "connection " + describe() + " was broken by an injected fault");
      if (delayed.done) delayed.done(why);
      close(why);
      return false;
    }
    for (int i = 1; i < fate.copies && !fate.drop; ++i)
      behind->send(copy_of(delayed.message), nullptr);
    if (!fate.drop && fate.delay.count() == 0) return true;
    if (!fate.drop) {
      faults_->thread().post_at(Clock::now() + fate.delay,
                                [behind, late = copy_of(delayed.message)]() mutable {
                                  behind->send(std::move(late), nullptr);
                                });
    }
    if (delayed.done) delayed.done(std::nullopt);
    return false;
  }

  void cut(const char* fault) {
    close(Error(ErrorCode::disconnected,
                "connection " + describe() + " was cut on purpose (fault " + fault + ")"));
  }

  void end(const Error& reason) STITCH_EXCLUDES(mutex_) {
    std::array<Lane, 2> left;
    std::shared_ptr<Connection> behind;
    {
      base::MutexLock lock(mutex_);
      ended_ = true;
      left = std::move(lanes_);
      lanes_ = {};
      behind = std::move(inner_);
    }
    for (Lane& lane : left) {
      for (Delayed& delayed : lane.waiting) {
        delayed.message = {};
        if (delayed.done) delayed.done(reason);
      }
    }
  }

  const std::shared_ptr<Faults> faults_;
  Hello peer_;         // constant once open
  Faults::Dice dice_;  // likewise
  bool cuts_ = false;  // likewise
  std::atomic<bool> no_process_listens_{false};
  mutable base::Mutex mutex_;
  std::string name_ STITCH_GUARDED_BY(mutex_);
  std::shared_ptr<Connection> inner_ STITCH_GUARDED_BY(mutex_);  // until it ends
  std::array<Lane, 2> lanes_ STITCH_GUARDED_BY(mutex_);          // small, large
  std::uint64_t sent_ STITCH_GUARDED_BY(mutex_) = 0;
  Clock::time_point timer_ STITCH_GUARDED_BY(mutex_){};
  bool open_ STITCH_GUARDED_BY(mutex_) = false;
  bool ended_ STITCH_GUARDED_BY(mutex_) = false;
  bool passing_ STITCH_GUARDED_BY(mutex_) = false;
};

class FaultyEndpoint final : public Endpoint {
 public:
  FaultyEndpoint(std::unique_ptr<Endpoint> endpoint, std::shared_ptr<Faults> faults)
      : endpoint_(std::move(endpoint)), faults_(std::move(faults)) {}
  ~FaultyEndpoint() override {
    endpoint_->close();
    wait_until_joined();
  }

  std::vector<std::string> listen(Accept accept) override {
    return endpoint_->listen([faults = faults_, accept = std::move(accept)] {
      return std::make_shared<FaultyConnection>(faults, "of a peer")->wrap(accept());
    });
  }
  std::shared_ptr<Connection> connect(const std::string& address, Wanted whom,
                                      ConnectionEvents events) override {
    auto connection = std::make_shared<FaultyConnection>(faults_, "to " + address);
    connection->set_inner(endpoint_->connect(address, whom, connection->wrap(std::move(events))));
    return connection;
  }
  bool help(base::AwaitedFlag& done, std::chrono::steady_clock::time_point deadline) override {
    return endpoint_->help(done, deadline);
  }
  [[nodiscard]] std::map<std::string, std::int64_t> counters() const override {
    return endpoint_->counters();
  }
  void close() override { endpoint_->close(); }
  void join() override { wait_until_joined(); }

 private:
  // What the thread of the faults was passing on when its connection ended calls back as well.
  void wait_until_joined() {
    endpoint_->join();
    std::promise<void> passed;
    faults_->thread().post([&passed] { passed.set_value(); });
    passed.get_future().wait();
  }

  const std::unique_ptr<Endpoint> endpoint_;
  const std::shared_ptr<Faults> faults_;
};

}  // namespace

std::unique_ptr<Endpoint> with_faults(std::unique_ptr<Endpoint> endpoint,
                                      std::shared_ptr<Faults> faults) {
  if (!faults) return endpoint;
  if (!faults->plan().touches_connections() && !Faults::judges_expected()) return endpoint;
  return std::make_unique<FaultyEndpoint>(std::move(endpoint), std::move(faults));
}

}  // namespace stitch::transport
