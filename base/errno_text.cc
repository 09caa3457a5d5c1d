#include "stitch/base/errno_text.h"

#include <sys/resource.h>

#include <cerrno>
#include <system_error>

namespace stitch::base {

namespace {

std::string limit_text(rlim_t limit) {
  return limit == RLIM_INFINITY ? "unlimited" : std::to_string(limit);
}

// What a worker has open by itself, and for each other worker, twice that while it connects: shm
// has the memory beside the socket until it is mapped.
constexpr const char* kDescriptorsNeeded =
    "a worker takes about 30, one more for each other worker it is connected with, and another one "
    "while it connects";

}  // namespace

std::string errno_text(int error) {
  std::string text = std::generic_category().message(error);
  rlimit limit{};
  switch (error) {
    case EMFILE:
      if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return text;
      return text + ": all " + limit_text(limit.rlim_cur) +
             " descriptors that this process may have are open (RLIMIT_NOFILE; the hard limit is " +
             limit_text(limit.rlim_max) + "); " + kDescriptorsNeeded +
             ". Raise it with `ulimit -n`, or LimitNOFILE of systemd";
    case ENFILE:
      return text + ": this machine has no descriptor left for any process (fs.file-max); " +
             kDescriptorsNeeded + ". Raise it with `sysctl fs.file-max`, or end other processes";
    case EFBIG:
      if (::getrlimit(RLIMIT_FSIZE, &limit) != 0) return text;
      return text + ": files of this process may have " + limit_text(limit.rlim_cur) +
             " bytes (RLIMIT_FSIZE, `ulimit -f`)";
    case ENOMEM:
      if (::getrlimit(RLIMIT_AS, &limit) != 0) return text;
      return text + ": the machine has no memory left, or this process has reached a limit: " +
             limit_text(limit.rlim_cur) +
             " bytes of addresses (RLIMIT_AS, `ulimit -v`), its maps (`sysctl vm.max_map_count`), "
             "or that of its control group. A worker takes 2 MiB of shared memory for each other "
             "worker on its host";
    default:
      return text;
  }
}

}  // namespace stitch::base
