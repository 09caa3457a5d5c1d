#pragma once

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstddef>

#include "stitch/base/descriptor.h"
#include "stitch/base/mutex.h"
#include "tests/support/plain_test.h"
#include "tests/transport/raw_peer.h"

namespace stitch::transport {

// A stranger between two workers: listens on a port of its own, connects to `target` for
// each connection it accepts, and passes bytes on both ways, one connection at a time. It keeps
// what it has passed, and can change it.
class Relay {
 public:
  // One byte passed on: `at` counts from 0 in each direction of each connection. False: the stream
  // is cut here.
  using Change = std::function<bool(bool from_connecting, std::size_t at, char& byte)>;

  explicit Relay(std::string target) : target_(std::move(target)) {
    const auto ip = IpAddress::parse("127.0.0.1", 0);
    listener_ = base::Descriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&ip->address), ip->bytes),
              0);
    EXPECT_EQ(::listen(listener_.get(), 16), 0);
    sockaddr_in bound{};
    socklen_t bytes = sizeof(bound);
    EXPECT_EQ(::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&bound), &bytes), 0);
    address_ = "tcp://127.0.0.1:" + std::to_string(ntohs(bound.sin_port));
    thread_ = std::thread([this] { run(); });
  }
  ~Relay() {
    stop_.store(true);
    thread_.join();
  }
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  [[nodiscard]] const std::string& address() const { return address_; }
  // For later connections.
  void change_by(Change change) {
    base::MutexLock lock(mutex_);
    change_ = std::move(change);
  }
  // From now on, what is left of a connection that is cut stays open on the side of the target,
  // which learns nothing.
  void keep_target_after_cut() { keep_target_.store(true); }
  // What the last connection carried, as it arrived.
  [[nodiscard]] std::string carried(bool from_connecting) const {
    base::MutexLock lock(mutex_);
    return carried_[from_connecting ? 0 : 1];
  }

 private:
  void run() {
    while (!stop_.load()) {
      pollfd event{listener_.get(), POLLIN, 0};
      if (::poll(&event, 1, 5) <= 0) continue;
      const base::Descriptor connecting(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      base::Descriptor accepting = connect_raw(target_);
      {
        base::MutexLock lock(mutex_);
        carried_ = {};
      }
      std::array<int, 2> sockets{connecting.get(), accepting.get()};
      bool alive = connecting && accepting;
      while (alive && !stop_.load()) {
        std::array<pollfd, 2> events{pollfd{sockets[0], POLLIN, 0}, pollfd{sockets[1], POLLIN, 0}};
        if (::poll(events.data(), events.size(), 5) <= 0) continue;
        for (std::size_t side = 0; side < 2 && alive; ++side) {
          if (events[side].revents != 0) alive = pass(sockets[side], sockets[1 - side], side);
        }
      }
      if (keep_target_.load()) kept_.push_back(std::move(accepting));
    }
  }
  // False at the end of the connection.
  bool pass(int from, int to, std::size_t side) {
    std::array<char, 65536> bytes;
    const ssize_t count = ::recv(from, bytes.data(), bytes.size(), 0);
    if (count <= 0) return false;
    std::string words(bytes.data(), static_cast<std::size_t>(count));
    bool cut = false;
    {
      base::MutexLock lock(mutex_);
      const std::size_t before = carried_[side].size();
      carried_[side] += words;
      for (std::size_t i = 0; change_ && i < words.size() && !cut; ++i) {
        cut = !change_(side == 0, before + i, words[i]);
        if (cut) words.resize(i);
      }
    }
    send_raw(to, words);
    return !cut;
  }

  const std::string target_;
  base::Descriptor listener_;
  std::string address_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> keep_target_{false};
  std::vector<base::Descriptor> kept_;  // its thread only
  mutable base::Mutex mutex_;
  Change change_ STITCH_GUARDED_BY(mutex_);
  std::array<std::string, 2> carried_ STITCH_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace stitch::transport
