#pragma once

#include <uv.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/base/event_loop.h"
#include "stitch/base/unique_function.h"
#include "stitch/transport/store/framed_stream.h"
#include "stitch/transport/store/store_handshake.h"
#include "stitch/transport/store/tcp_store.h"

namespace stitch::transport {

// Connects to the server of a TCP store: resolves the host, tries every address of every port in
// turn with a handshake, and starts again after a pause until the timeout. It fails early when a
// server has another secret and no other port of that round has ours, and when all ports refuse for
// another job or version. Kept alive by the callbacks that it waits for. Thread contract: the
// loop's thread only.
class TcpStoreConnector final : public FrameReceiver,
                                public std::enable_shared_from_this<TcpStoreConnector> {
 public:
  struct Connected {
    std::shared_ptr<FramedStream> stream;  // the new owner sets another receiver
    std::uint16_t port;
  };
  using Result = std::variant<Connected, Error>;
  // `done` is called exactly once.
  TcpStoreConnector(base::EventLoop& loop, const TcpStoreOptions& options,
                    base::UniqueFunction<void(Result)> done);
  ~TcpStoreConnector() override;
  void start();

  void on_frame(FramedStream& stream, std::span<const std::byte> frame) override;
  void on_closed(FramedStream& stream, const Error& why) override;

 private:
  struct Target {
    sockaddr_storage address;
    std::uint16_t port;
  };
  struct Resolving;
  struct Connecting;

  void resolve();
  void on_resolved(int status, const addrinfo* found);
  void try_next();
  void on_connected(FramedStream& stream, int status);
  void on_refused(const Error& refusal);
  void attempt_failed(const Error& why);
  // Whether a port has refused our proof, or sent a wrong one, in this round.
  [[nodiscard]] bool wrong_secret() const {
    return refusal_ && refusal_->code() == ErrorCode::unauthenticated;
  }
  void end_round();
  void finish(Result result);
  // Runs `work`; an exception, which is not the server's fault, ends the attempts.
  template <class Work>
  void guard(Work work) noexcept;
  // Calls `then` in `delay`, and drops an earlier call that is still due.
  template <class Then>
  void call_in(base::EventLoop::Clock::duration delay, Then then);

  base::EventLoop& loop_;
  const TcpStoreOptions options_;
  const std::string name_;  // "tcp store at host:port"
  base::UniqueFunction<void(Result)> done_;
  base::EventLoop::TimerId overall_timer_ = 0;
  base::EventLoop::TimerId timer_ = 0;
  std::minstd_rand random_;
  std::chrono::milliseconds pause_;
  bool finished_ = false;

  // This round.
  std::vector<Target> targets_;
  std::size_t next_ = 0;
  std::set<std::uint16_t> refusing_ports_;
  std::optional<Error> refusal_;
  // The error of the last attempt; of this round or the one before.
  Error cause_{ErrorCode::disconnected, "no answer"};

  // This attempt.
  std::shared_ptr<FramedStream> stream_;
  std::optional<StoreHandshake> handshake_;
  bool proving_ = false;  // the server's hello has arrived
};

}  // namespace stitch::transport
