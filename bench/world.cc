#include "world.h"

#include <ATen/Parallel.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace stitch_bench {

namespace {

// A TCP port of 127.0.0.1 that nobody uses just now.
int free_port() {
  const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  if (listener < 0 || ::bind(listener, reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      ::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot find a free port of 127.0.0.1");
  }
  ::close(listener);
  return ntohs(address.sin_port);
}

// Where the workers meet: worker 0 finds a port and tells the other.
std::string meeting_place(const Side& side) {
  std::string port;
  if (side.rank() == 0) {
    port = std::to_string(free_port());
    side.tell(port);
  } else {
    port = side.hear();
  }
  return "tcp://127.0.0.1:" + port;
}

}  // namespace

stitch::Worker join_world(const Side& side) {
  at::set_num_threads(1);
  stitch::Options options;
  options.name = "worker" + std::to_string(side.rank());
  options.rank = side.rank();
  options.world_size = 2;
  options.init_method = meeting_place(side);
  options.transports = side.path() == "tcp"
                           ? std::vector<std::string>{side.settings().tcp_transport}
                           : side.settings().transports;
  return stitch::init(options);
}

void serve(Side& side) {
  const stitch::Worker self = join_world(side);
  static_cast<void>(side.hear());
}

void finish(const Side& side) { side.tell("finished"); }

}  // namespace stitch_bench
