#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"
#include "stitch/transport/deferred_work.h"
#include "stitch/transport/wire/buffer.h"
#include "stitch/transport/wire/frame.h"
#include "stitch/transport/wire/hello.h"
#include "stitch/transport/wire/secret_key.h"
#include "stitch/transport/wire/session_seal.h"

namespace stitch::transport {

class Connection;

// Called once: without an error when a message has been passed on completely, with the error when
// it never will be. An endpoint does not read its buffers any more then; a session of rpc does
// until the peer has acknowledged it. On a thread of the endpoint, inside help() or send(): no lock
// that it takes is held.
using SendDone = base::UniqueFunction<void(const std::optional<Error>& error)>;

// The callbacks of a connection's owner. Those of one connection run one at a time, on a thread of
// the endpoint or on one inside Endpoint::help(), and must not block; no lock of the endpoint is
// held.
struct ConnectionEvents {
  // Decides whether a peer that has authenticated itself is the right one: throws the Error with
  // which it is refused if not. Before on_open, and before any message is sent. Empty: every peer
  // that passes the handshake is accepted.
  std::function<void(const Hello& peer)> check_peer{};
  // The handshake has succeeded: connection.peer() is valid. Before the first on_message.
  std::function<void(const std::shared_ptr<Connection>&)> on_open;
  // A message arrived, in the order of the peer's sends, except that small messages may overtake
  // those above 32 KiB. Without its buffers where the allocator had no memory (lacks_buffers()); an
  // endpoint that cannot do that ends the connection.
  std::function<void(const std::shared_ptr<Connection>&, Message)> on_message;
  // Chooses the memory for a received buffer beside a frame, once the frame has arrived: a Buffer
  // of exactly `bytes` bytes on the CPU, or one without data for that of
  // EndpointOptions::allocator, which is used where this is empty, and by endpoints that allocate
  // before. Must not throw.
  std::function<Buffer(const std::shared_ptr<Connection>&, const base::Bytes& frame,
                       std::size_t bytes)>
      place;
  // The connection has ended, here or at the peer: exactly once, after the last on_message, also
  // when it never opened.
  std::function<void(const std::shared_ptr<Connection>&, const Error&)> on_closed;
};

// A reliable, bidirectional stream of messages to one peer. It delivers each message once or
// breaks. Messages up to 32 KiB (with their buffers) keep their order, and so do larger ones among
// themselves; small ones may overtake a large one that was sent before. Owned by the holders of the
// pointer, and by its endpoint until it is closed. Thread contract: all methods from any thread;
// send() never blocks; no lock of the connection is held when `done` is called.
class Connection {
 public:
  virtual ~Connection() = default;
  // The peer's Hello. REQUIRES: on_open has been called.
  [[nodiscard]] virtual const Hello& peer() const = 0;
  // Queues a message; before on_open it waits for the handshake. `done` runs exactly once, also
  // after close.
  virtual void send(Message message, SendDone done) = 0;
  // Called inside on_message with work that may block (a handler): the reading thread does it
  // itself after it has delivered what has arrived, and another thread polls meanwhile. False, and
  // `work` is untouched, where this is not possible.
  [[nodiscard]] virtual bool defer(DeferredWork& work) { return false; }
  // Stops or resumes reading: a peer that sends more is slowed down. What has been read by then, up
  // to about 512 KiB of small messages, is still delivered, and everything once the peer has ended
  // the connection. Endpoints that cannot pause keep reading.
  virtual void pause_reading(bool paused) {}
  // Whether nothing is read now for a reason on this side: the peer's silence proves nothing. Takes
  // no lock that is held while callbacks run.
  [[nodiscard]] virtual bool holds_back() const { return false; }
  // When something of the peer last arrived, to some milliseconds: bytes, or where the endpoint
  // does not see these, messages. Likewise.
  [[nodiscard]] virtual std::chrono::steady_clock::time_point heard() const {
    return std::chrono::steady_clock::now();
  }
  // Whether all that passes is known to stay within this kernel. REQUIRES: on_open has been called.
  [[nodiscard]] virtual bool within_host() const { return false; }
  // Called near the end of the last piece of deferred work: the rest of it will not block, so this
  // thread can resume polling without waiting for a thread switch.
  virtual void blocking_work_done() {}
  // Called now and then, as several times a second: memory of the connection's own that has not
  // been needed for some calls is given back to the system. Takes no lock that is held in
  // callbacks.
  virtual void trim() noexcept {}
  // Ends the connection: incomplete sends fail with `reason`, on_closed gets it. A second call does
  // nothing.
  virtual void close(const Error& reason) = 0;
  // Once it has ended: whether it could not be made because no process listens at the address.
  [[nodiscard]] virtual bool no_process_listens() const { return false; }
  // A name for error texts: "shm://…", "loopback:3".
  [[nodiscard]] virtual std::string describe() const = 0;
};

struct EndpointOptions {
  Hello self;                                 // sent to peers; id and epoch identify us
  std::shared_ptr<const SecretKey> secret{};  // null: no authentication
  Encryption encryption = Encryption::on;     // with a secret: of traffic over a network
  // Refuses connections from our own worker id, for endpoints that are not used to connect to
  // oneself.
  bool refuse_own_id = false;
  std::size_t max_frame_bytes = std::size_t{64}
                                << 20;  // a longer frame breaks its connection with `protocol`
  std::size_t max_buffer_bytes = std::size_t{64}
                                 << 30;  // likewise a larger buffer beside the frame
  std::size_t max_message_bytes = std::size_t{128} << 30;  // likewise frame and buffers together
  // Limit for the memory of all messages above 32 KiB that are being received. A connection whose
  // next one does not fit waits, at most about 10 s for each connection that waits before it; a
  // message larger than the limit is received alone.
  std::size_t max_receiving_bytes = std::size_t{16} << 30;
  std::chrono::milliseconds handshake_timeout{10'000};
  Allocator allocator = &allocate_buffer;  // memory for received buffers
};

// Makes and accepts connections over one kind of transport. Owned by its user.
// Thread contract: all methods from any thread. close() starts to close every connection and the
// listener and returns immediately; join() waits until every callback has returned and every thread
// has ended, and must not be called from a callback. The destructor closes and joins.
class Endpoint {
 public:
  // Returns the callbacks for an incoming connection, before its handshake.
  using Accept = std::function<ConnectionEvents()>;

  virtual ~Endpoint() = default;
  // Starts accepting. Returns the addresses that peers can connect to, best first. Throws
  // Error(disconnected) naming the address that could not be bound.
  virtual std::vector<std::string> listen(Accept accept) = 0;
  // For an endpoint that does not know yet who it is, before listen(): binds its addresses and
  // returns them. A peer that connects to one waits until listen(). May be left out.
  virtual std::vector<std::string> bind() {
    throw Error(ErrorCode::unimplemented, "this endpoint binds its addresses when it listens");
  }
  // Between the two: it is `self`, not EndpointOptions::self, and needs `addresses` only; closes
  // the others, where it can close one without the rest.
  virtual void become(const Hello& self, const std::vector<std::string>& addresses) {
    throw Error(ErrorCode::unimplemented, "this endpoint knows who it is");
  }
  // Starts to connect to `whom` and returns immediately. A failure is reported by on_closed with
  // Error(disconnected) naming the address; another worker that answers there ends the attempt.
  virtual std::shared_ptr<Connection> connect(const std::string& address, Wanted whom,
                                              ConnectionEvents events) = 0;
  // For a thread that waits until a message sets `done`: polls the endpoint, callbacks included,
  // and sleeps in it, until then or shortly before `deadline`, unless another thread does or
  // messages bring work. Returns whether `done` is set. Any thread; does nothing inside a callback.
  virtual bool help(base::AwaitedFlag& done, std::chrono::steady_clock::time_point deadline) {
    return done.is_set();
  }
  // Failures that no callback reports, by name: for debug_info.
  [[nodiscard]] virtual std::map<std::string, std::int64_t> counters() const { return {}; }
  virtual void close() = 0;
  virtual void join() = 0;
};

}  // namespace stitch::transport
