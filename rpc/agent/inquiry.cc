#include "stitch/rpc/agent/inquiry.h"

#include <memory>
#include <utility>

#include "stitch/base/mutex.h"
#include "stitch/rpc/agent/peer_table.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/message/message.h"

namespace stitch::rpc {

namespace {

using ConnectionPtr = std::shared_ptr<transport::Connection>;

// Kept alive by the events of its connection and by its timer.
class RunningInquiry : public std::enable_shared_from_this<RunningInquiry> {
 public:
  using Connect =
      std::function<ConnectionPtr(const std::string& address, transport::ConnectionEvents events)>;
  RunningInquiry(Inquiry inquiry, Connect connect)
      : inquiry_(std::move(inquiry)), connect_(std::move(connect)) {}

  void try_next() STITCH_EXCLUDES(mutex_) {
    std::size_t at = 0;
    {
      base::MutexLock lock(mutex_);
      if (ended_) return;
      at = next_++;
    }
    if (at >= inquiry_.addresses.size()) return finish();
    try {
      const ConnectionPtr connection = connect_(inquiry_.addresses[at], events());
      bool ended = false;
      {
        base::MutexLock lock(mutex_);
        ended = ended_;
        if (!ended && next_ == at + 1) connection_ = connection;  // else it has failed already
      }
      if (ended) connection->close(answered());
    } catch (const Error& error) {
      failed(error);
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
    events.check_peer = [self](const transport::Hello& hello) {
      if (auto why = self->inquiry_.objection(hello)) throw std::move(*why);
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
    events.on_closed = [self](const ConnectionPtr&, const Error& reason) { self->failed(reason); };
    return events;
  }

  void failed(const Error& reason) STITCH_EXCLUDES(mutex_) {
    bool opened = false;
    {
      base::MutexLock lock(mutex_);
      connection_.reset();
      opened = outcome_.opened;
      const auto& former = outcome_.failure;
      // A sign of life, or of this worker's own resources: what the other addresses say decides
      // nothing then.
      const bool stays = former && (former->code() == ErrorCode::overloaded ||
                                    (!former->remote() && former->code() == ErrorCode::internal));
      if (!stays || opened) outcome_.failure = reason;
    }
    if (opened) {
      finish();
    } else {
      try_next();
    }
  }

  Inquiry inquiry_;
  const Connect connect_;
  base::Mutex mutex_;
  ConnectionPtr connection_ STITCH_GUARDED_BY(mutex_);
  std::size_t next_ STITCH_GUARDED_BY(mutex_) = 0;
  bool ended_ STITCH_GUARDED_BY(mutex_) = false;
  Inquiry::Outcome outcome_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace

void PeerTable::inquire(Inquiry inquiry) {
  const auto deadline = inquiry.deadline;
  const auto running = std::make_shared<RunningInquiry>(
      std::move(inquiry), [this](const std::string& address, transport::ConnectionEvents events) {
        const auto endpoint = by_scheme_.find(address.substr(0, address.find(':')));
        if (endpoint == by_scheme_.end()) {
          throw Error(ErrorCode::unimplemented,
                      "there is no transport here for address " + address);
        }
        return endpoint->second->connect(address, std::move(events));
      });
  events_.call_at(deadline, [running] { running->finish(); });
  running->try_next();
}

}  // namespace stitch::rpc
