#pragma once

#include <csignal>

namespace stitch::transport {

// Blocks SIGPIPE on this thread for a block; threads that are started meanwhile inherit it and keep
// it. For libraries whose threads write to sockets without MSG_NOSIGNAL: they get EPIPE, and the
// process keeps its own handling of the signal.
class SigpipeBlocked {
 public:
  SigpipeBlocked() {
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe, &before_);
  }
  ~SigpipeBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SigpipeBlocked(const SigpipeBlocked&) = delete;
  SigpipeBlocked& operator=(const SigpipeBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace stitch::transport
