#pragma once

#include <atomic>
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
#include "stitch/base/unique_function.h"
#include "stitch/transport/wire/buffer.h"
#include "stitch/transport/wire/frame.h"
#include "stitch/transport/wire/hello.h"
#include "stitch/transport/wire/secret_key.h"
#include "stitch/transport/wire/session_seal.h"

namespace stitch::transport {

class Connection;

// Called once when a message has been handed over completely (nullopt: its buffers may be changed
// again), or will never be (the error). Runs on a thread that polls for the endpoint, or inside
// send(): the caller holds no lock that it takes.
using SendDone = base::UniqueFunction<void(const std::optional<Error>& error)>;

// What the owner of a connection wants to hear. Callbacks of one connection run one at a time, on a
// reader thread of the endpoint or on a thread inside Endpoint::help(), and must not block; no lock
// of the endpoint is held.
struct ConnectionEvents {
  // Whether the peer, which has proved who it is, is the one that is wanted: throws the Error with
  // which it is refused when not. Before on_open, and before anything is sent to it. Empty: anyone
  // who passes the handshake.
  std::function<void(const Hello& peer)> check_peer{};
  // The handshake is done: connection.peer() is valid. Before the first on_message.
  std::function<void(const std::shared_ptr<Connection>&)> on_open;
  // A message arrived; order is that of the sends of the other side, but that messages above 32 KiB
  // may be passed by smaller ones.
  std::function<void(const std::shared_ptr<Connection>&, Message)> on_message;
  // Where a received buffer that comes beside a frame shall lie; asked for each in turn, when the
  // frame is there and they are not. A Buffer of exactly `bytes` bytes on the CPU, or one without
  // data for memory of EndpointOptions::allocator. Empty, or not asked by endpoints that have the
  // memory by then: always that. Must not throw.
  std::function<Buffer(const std::shared_ptr<Connection>&, const base::Bytes& frame,
                       std::size_t bytes)>
      place;
  // The connection ended: exactly once, after the last on_message, whoever ended it, also when it
  // never opened.
  std::function<void(const std::shared_ptr<Connection>&, const Error&)> on_closed;
};

// One reliable, two-way stream of messages to one peer. It delivers each message once or breaks.
// Messages up to 32 KiB (with their buffers) keep their order, and so do larger ones among
// themselves; a large one may be passed by small ones sent after it. Owned by whoever holds the
// pointer and by its endpoint until it is closed. Thread contract: all methods from any thread;
// send() never blocks; no lock of the connection is held when `done` is called.
class Connection {
 public:
  virtual ~Connection() = default;
  // Who is at the other end. REQUIRES: on_open has been called.
  [[nodiscard]] virtual const Hello& peer() const = 0;
  // Queues a message; before on_open it waits for the handshake. `done` runs exactly once, also
  // after close.
  virtual void send(Message message, SendDone done) = 0;
  // Inside on_message, for work that the message brought and that may block: asks the thread that
  // reads to do it itself when all that has come is delivered, while another thread moves messages.
  // work(true) does a piece of it there and says whether there is more; work(false) has other
  // threads do it. False, and nothing is taken, where the thread that reads cannot.
  [[nodiscard]] virtual bool defer(base::UniqueFunction<bool(bool here)>& work) { return false; }
  // Stops reading from the peer, or goes on: a peer that sends on is held up when the carrier is
  // full. What has been read by then, up to about 512 KiB of small messages, is still delivered;
  // so is everything when the peer has gone. Endpoints that cannot do it go on reading.
  virtual void pause_reading(bool paused) {}
  // At the end of the last work(true), before the answer is sent: what follows will not block.
  virtual void about_to_answer() {}
  // Ends the connection: sends that are not through fail with `reason`, on_closed gets it. A second
  // call does nothing.
  virtual void close(const Error& reason) = 0;
  // A name for messages: "shm://…", "loopback:3".
  [[nodiscard]] virtual std::string describe() const = 0;
};

struct EndpointOptions {
  Hello self;                                 // what we say to peers; id and epoch name us
  std::shared_ptr<const SecretKey> secret{};  // null: no authentication
  Encryption encryption = Encryption::on;     // with a secret: of what goes over a network
  // Refuses connections of who has our own id. For endpoints that nobody connects to himself by.
  bool refuse_own_id = false;
  std::size_t max_frame_bytes = std::size_t{64}
                                << 20;  // a longer frame breaks its connection with `protocol`
  std::size_t max_buffer_bytes = std::size_t{64}
                                 << 30;  // likewise a larger buffer beside the frame
  std::size_t max_message_bytes = std::size_t{128} << 30;  // likewise frame and buffers together
  // What messages above 32 KiB may take together that are being received. A connection whose next
  // one does not fit waits with it, at most about 10 s for each that waits before it; one that is
  // larger than this comes in alone.
  std::size_t max_receiving_bytes = std::size_t{16} << 30;
  std::chrono::milliseconds handshake_timeout{10'000};
  Allocator allocator = &allocate_buffer;  // memory for received buffers
};

// Makes and accepts connections over one kind of transport. Owned by its user.
// Thread contract: all methods from any thread. close() starts ending every connection and the
// listener and returns at once; join() waits until every callback has returned and every thread has
// ended, and must not be called from a callback. The destructor closes and joins.
class Endpoint {
 public:
  // Gives the events for each incoming connection, before its handshake.
  using Accept = std::function<ConnectionEvents()>;

  virtual ~Endpoint() = default;
  // Starts accepting. Returns the addresses that peers can connect to, best first. Throws
  // Error(disconnected) naming the address that could not be bound.
  virtual std::vector<std::string> listen(Accept accept) = 0;
  // Starts connecting and returns at once. A failure arrives as on_closed with Error(disconnected)
  // naming the address.
  virtual std::shared_ptr<Connection> connect(const std::string& address,
                                              ConnectionEvents events) = 0;
  // For a thread that waits until a message sets `done`: moves messages itself, callbacks included,
  // as long as that seems to pay off. True when `done` is set; else the caller sleeps as it would
  // have. Any thread; does nothing inside a callback.
  virtual bool help(const std::atomic<bool>& done, std::chrono::steady_clock::time_point deadline) {
    return done.load(std::memory_order_acquire);
  }
  // What went wrong and had nobody to be told, by name: for debug_info.
  [[nodiscard]] virtual std::map<std::string, std::int64_t> counters() const { return {}; }
  virtual void close() = 0;
  virtual void join() = 0;
};

}  // namespace stitch::transport
