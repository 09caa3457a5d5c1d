#include "world.h"

#include <ATen/Parallel.h>

namespace stitch_bench {

stitch::Worker join_world(const Side& side) {
  at::set_num_threads(1);
  stitch::Options options;
  options.name = "worker" + std::to_string(side.rank());
  options.rank = side.rank();
  options.world_size = 2;
  options.init_method = "file://" + side.world_file();
  options.transports = side.path() == "tcp" ? std::vector<std::string>{side.settings().tcp_transport} : side.settings().transports;
  return stitch::init(options);
}

void serve(Side& side) {
  const stitch::Worker self = join_world(side);
  static_cast<void>(side.hear());
}

void finish(const Side& side) { side.tell("finished"); }

}  // namespace stitch_bench
