#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "stitch/base/event_loop.h"
#include "stitch/transport/store/framed_stream.h"
#include "stitch/transport/store/store_handshake.h"
#include "stitch/transport/store/tcp_store.h"

namespace stitch::transport {

class StoreSession;

// The server of a session. Called on the loop's thread.
class StoreSessionOwner {
 public:
  virtual ~StoreSessionOwner() = default;
  // Throws Error(overloaded) when there are as many clients as the options allow.
  virtual void check_room() const = 0;
  // The handshake has succeeded: the session is that of a client now.
  virtual void on_open(StoreSession& session) = 0;
  // A request of a client. An exception ends the session.
  virtual void on_request(const std::shared_ptr<StoreSession>& session,
                          std::span<const std::byte> frame) = 0;
  // The last call for this session.
  virtual void on_closed(StoreSession& session) = 0;
};

// One connection to a store server: the handshake, then requests and their replies. Kept alive by
// its stream until that is closed; keeps its owner alive. Thread contract: the loop's thread only.
class StoreSession final : public FrameReceiver, public std::enable_shared_from_this<StoreSession> {
 public:
  // `options` is the owner's, `frame_budget` for frames that are incomplete or unsent.
  StoreSession(std::shared_ptr<StoreSessionOwner> owner, base::EventLoop& loop,
               const TcpStoreOptions& options, std::shared_ptr<ByteBudget> frame_budget,
               std::shared_ptr<FramedStream> stream, std::uint64_t number)
      : number_(number),
        owner_(std::move(owner)),
        loop_(loop),
        options_(options),
        frame_budget_(std::move(frame_budget)),
        stream_(std::move(stream)) {}

  // Starts to read; the session is closed when its handshake does not succeed in time.
  void start();
  // Sends the status and result of a request. May throw Error(overloaded): nothing was sent then.
  void reply(std::uint64_t request, const base::Bytes& status_and_result);
  void close(const Error& why) noexcept { stream_->close(why); }
  // A number that grows from one accepted session to the next.
  [[nodiscard]] std::uint64_t number() const noexcept { return number_; }

  std::size_t waits = 0;  // requests that wait for keys; counted by StoreRequests

  void on_frame(FramedStream& stream, std::span<const std::byte> frame) override;
  void on_error(FramedStream& stream, const Error& error) override;
  void on_closed(FramedStream& stream, const Error& why) override;

 private:
  enum class State : std::uint8_t { hello, proof, open };

  void take_hello(std::span<const std::byte> frame);
  void open();

  const std::uint64_t number_;
  const std::shared_ptr<StoreSessionOwner> owner_;
  base::EventLoop& loop_;
  const TcpStoreOptions& options_;
  const std::shared_ptr<ByteBudget> frame_budget_;
  const std::shared_ptr<FramedStream> stream_;
  State state_ = State::hello;
  std::optional<StoreHandshake> handshake_;  // until it is open
  base::EventLoop::TimerId timer_ = 0;
};

}  // namespace stitch::transport
