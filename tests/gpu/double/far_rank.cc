#include "tests/gpu/double/far_rank.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>
#include <utility>

namespace stitch::transport::gpu::test {
namespace {

constexpr int kPollMilliseconds = 20;  // how soon the end of this process's rank is noticed
constexpr int kConnectTries = 500;

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) throw std::length_error("path of a socket: " + path);
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

int make_socket() { return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0); }

bool readable(int socket) {
  pollfd waits{socket, POLLIN, 0};
  return poll(&waits, 1, kPollMilliseconds) > 0;
}

}  // namespace

int FarRank::listen_at(const std::string& path) {
  const sockaddr_un address = address_of(path);
  const int made = make_socket();
  if (bind(made, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(made, 1) != 0)
    throw std::runtime_error("the double of NCCL cannot listen at " + path);
  return made;
}

FarRank::FarRank(Machine& machine, int listener, std::string path, OnMessage on_message,
                 OnGone on_gone)
    : machine_(machine),
      listener_(listener),
      path_(std::move(path)),
      on_message_(std::move(on_message)),
      on_gone_(std::move(on_gone)),
      thread_([this] { run(); }) {}

FarRank::~FarRank() {
  closing_ = true;
  thread_.join();
  if (socket_ >= 0) close(socket_);
  if (listener_ >= 0) {
    close(listener_);
    unlink(path_.c_str());
  }
}

bool FarRank::meet() {
  if (listener_ >= 0) {
    while (!closing_ && !readable(listener_)) {
    }
    if (!closing_) socket_ = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    return socket_ >= 0;
  }
  const sockaddr_un address = address_of(path_);
  const int made = make_socket();
  for (int i = 0; i < kConnectTries && !closing_; ++i) {
    if (connect(made, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
      socket_ = made;
      return true;
    }
    poll(nullptr, 0, kPollMilliseconds);
  }
  close(made);
  return false;
}

void FarRank::say(const FarMessage& message) {
  // One that is not heard is noticed by the thread that reads.
  if (socket_ >= 0) static_cast<void>(::send(socket_, &message, sizeof(message), MSG_NOSIGNAL));
}

void FarRank::hang_up() {
  if (socket_ >= 0) static_cast<void>(shutdown(socket_, SHUT_RDWR));
}

void FarRank::run() {
  bool goes_on = meet();
  if (goes_on) {
    const std::lock_guard lock(machine_.mutex_);
    if (!closing_) on_message_(FarMessage{});  // it is there: hello goes out
  }
  while (goes_on && !closing_) {
    if (!readable(socket_)) continue;
    FarMessage message;
    goes_on = recv(socket_, &message, sizeof(message), 0) == sizeof(message);
    if (!goes_on) break;
    const std::lock_guard lock(machine_.mutex_);
    if (closing_) return;
    if (message.kind == FarMessage::Kind::hello) {
      there = true;
      arena = OtherArena::open(message.arena);
    }
    on_message_(message);
  }
  const std::lock_guard lock(machine_.mutex_);
  if (!closing_) on_gone_();
}

}  // namespace stitch::transport::gpu::test
