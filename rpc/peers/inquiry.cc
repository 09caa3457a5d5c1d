#include "stitch/rpc/peers/inquiry.h"

#include <memory>
#include <utility>

#include "stitch/base/mutex.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/message/message.h"
#include "stitch/rpc/peers/peer_table.h"

namespace stitch::rpc {

namespace {

using ConnectionPtr = std::shared_ptr<transport::Connection>;

// Between two rounds over the addresses.
constexpr std::chrono::milliseconds kPause{100};

// Kept alive by the events of its connection and by its timers.
class RunningInquiry : public std::enable_shared_from_this<RunningInquiry> {
 public:
  using Connect = std::function<ConnectionPtr(const std::string& address, transport::Wanted whom,
                                              transport::ConnectionEvents events)>;
  using Later = std::function<void(base::UniqueFunction<void()> task)>;
  RunningInquiry(Inquiry inquiry, Connect connect, Later after_pause)
      : inquiry_(std::move(inquiry)),
        connect_(std::move(connect)),
        after_pause_(std::move(after_pause)) {}

  void try_next() STITCH_EXCLUDES(mutex_) {
    std::string address;
    std::uint64_t attempt = 0;
    {
      base::MutexLock lock(mutex_);
      if (ended_) return;
      if (!inquiry_.addresses.empty()) {
        next_ %= inquiry_.addresses.size();
        address = inquiry_.addresses[next_];
      }
      attempt = failed_;
    }
    if (address.empty()) return finish();
    try {
      const ConnectionPtr connection = connect_(address, inquiry_.whom, events());
      bool ended = false;
      {
        base::MutexLock lock(mutex_);
        ended = ended_;
        if (!ended && failed_ == attempt) connection_ = connection;
      }
      if (ended) connection->close(answered());
    } catch (const Error& error) {
      failed(error, error.code() == ErrorCode::unimplemented);
    }
  }

  void finish() STITCH_EXCLUDES(mutex_) {
    Inquiry::Outcome outcome;
    ConnectionPtr connection;
    {
      base::MutexLock lock(mutex_);
      if (std::exchange(ended_, true)) return;
      outcome = std::move(outcome_);
      connection = std::move(connection_);
    }
    if (connection) connection->close(answered());
    inquiry_.done(std::move(outcome));
  }

 private:
  static Error answered() { return Error(ErrorCode::disconnected, "the answer is known"); }

  transport::ConnectionEvents events() {
    transport::ConnectionEvents events;
    const auto self = shared_from_this();
    events.check_peer = [self](const transport::Hello&) {
      if (self->inquiry_.answered) self->inquiry_.answered();
    };
    events.on_open = [self](const ConnectionPtr& connection) {
      {
        base::MutexLock lock(self->mutex_);
        self->outcome_.opened = true;
      }
      if (self->inquiry_.question)
        connection->send(self->inquiry_.question(), [](const std::optional<Error>&) {});
    };
    events.on_message = [self](const ConnectionPtr&, transport::Message message) {
      const auto head = transport::peek_frame(message.frame);
      if (head && head->kind != wire::kBind) {
        base::MutexLock lock(self->mutex_);
        self->outcome_.answer = std::move(message);
      } else if (self->inquiry_.question) {
        return;
      }
      self->finish();
    };
    events.place = [](const ConnectionPtr&, const base::Bytes&, std::size_t) {
      return transport::Buffer{};
    };
    events.on_closed = [self](const ConnectionPtr& connection, const Error& reason) {
      self->failed(reason, connection->no_process_listens());
    };
    return events;
  }

  // `final`: the same attempt would fail again. Else a stranger may have answered, or ended it.
  void failed(const Error& reason, bool final) STITCH_EXCLUDES(mutex_) {
    bool opened = false, round_ended = false;
    {
      base::MutexLock lock(mutex_);
      if (ended_) return;
      ++failed_;
      connection_.reset();
      opened = outcome_.opened;
      // Where something is short here, failures at other addresses decide nothing.
      const auto& former = outcome_.failure;
      const bool stays =
          former && !former->remote() &&
          (former->code() == ErrorCode::overloaded || former->code() == ErrorCode::internal);
      if (!stays || opened) outcome_.failure = reason;
      auto& addresses = inquiry_.addresses;
      if (final && next_ < addresses.size()) {
        addresses.erase(addresses.begin() + static_cast<std::ptrdiff_t>(next_));
      } else {
        ++next_;
      }
      round_ended = !addresses.empty() && next_ >= addresses.size();
    }
    if (opened) return finish();
    if (!round_ended) return try_next();
    after_pause_([self = shared_from_this()] { self->try_next(); });
  }

  Inquiry inquiry_;  // of it, the addresses are guarded by mutex_
  const Connect connect_;
  const Later after_pause_;
  base::Mutex mutex_;
  ConnectionPtr connection_ STITCH_GUARDED_BY(mutex_);
  std::size_t next_ STITCH_GUARDED_BY(mutex_) = 0;
  std::uint64_t failed_ STITCH_GUARDED_BY(mutex_) = 0;  // attempts
  bool ended_ STITCH_GUARDED_BY(mutex_) = false;
  Inquiry::Outcome outcome_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace

void PeerTable::inquire(Inquiry inquiry) {
  const auto deadline = inquiry.deadline;
  const auto running = std::make_shared<RunningInquiry>(
      std::move(inquiry),
      [this](const std::string& address, transport::Wanted whom,
             transport::ConnectionEvents events) {
        const auto endpoint = by_scheme_.find(address.substr(0, address.find(':')));
        if (endpoint == by_scheme_.end()) {
          throw Error(ErrorCode::unimplemented,
                      "there is no transport here for address " + address);
        }
        return endpoint->second->connect(address, whom, std::move(events));
      },
      [this](base::UniqueFunction<void()> task) {
        events_.call_at(events_.now() + kPause, std::move(task));
      });
  events_.call_at(deadline, [running] { running->finish(); });
  running->try_next();
}

}  // namespace stitch::rpc
