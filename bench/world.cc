#include "world.h"

#include <ATen/Parallel.h>

#include "../tools/free_port.h"

namespace stitch_bench {

namespace {

// The rendezvous: rank 0 finds a port and sends it to the other.
std::string init_method(const Side& side) {
  std::string port;
  if (side.rank() == 0) {
    port = std::to_string(stitch_run::find_free_port());
    side.send_line(port);
  } else {
    port = side.receive_line();
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
  options.init_method = init_method(side);
  options.transports = side.path() == "tcp"
                           ? std::vector<std::string>{side.settings().tcp_transport}
                           : side.settings().transports;
  return stitch::init(options);
}

void serve(Side& side) {
  const stitch::Worker self = join_world(side);
  static_cast<void>(side.receive_line());
}

void finish(const Side& side) { side.send_line("finished"); }

}  // namespace stitch_bench
