#include "world.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>

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

// at::set_num_threads() does not reach the threads of OpenBLAS. Those of one process wait for work
// by yielding, some 30 ms long, on the processor on which the other process is to compute.
void compute_on_one_thread() {
  at::set_num_threads(1);
  using SetThreads = void (*)(int);
  const auto set = reinterpret_cast<SetThreads>(::dlsym(RTLD_DEFAULT, "openblas_set_num_threads"));
  if (set != nullptr) set(1);
}

}  // namespace

stitch::Worker join_world(const Side& side) {
  compute_on_one_thread();
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
