#include "cores.h"

#include <sched.h>

#include <stdexcept>
#include <string>

namespace stitch_bench {

namespace {

cpu_set_t allowed_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  ::sched_getaffinity(0, sizeof(cores), &cores);
  return cores;
}

}  // namespace

void pin_to_core(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<std::size_t>(core), &cores);
  if (::sched_setaffinity(0, sizeof(cores), &cores) != 0) {
    throw std::runtime_error("cannot run on core " + std::to_string(core) + " alone");
  }
}

bool has_two_cores() {
  const cpu_set_t cores = allowed_cores();
  return CPU_ISSET(0, &cores) && CPU_ISSET(1, &cores);
}

}  // namespace stitch_bench
