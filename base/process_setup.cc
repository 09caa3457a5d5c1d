#include "stitch/base/process_setup.h"

#include <sys/resource.h>

#include <string>

#include "stitch/base/error.h"
#include "stitch/base/standard_descriptors.h"

namespace stitch::base {

namespace {

constexpr rlim_t kFewest = 40;

}  // namespace

void set_up_process() {
  open_standard_descriptors();
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  if (limit.rlim_cur < limit.rlim_max) {
    rlimit higher = limit;
    higher.rlim_cur = limit.rlim_max;
    if (::setrlimit(RLIMIT_NOFILE, &higher) == 0) limit = higher;
  }
  if (limit.rlim_cur >= kFewest) return;
  throw Error(ErrorCode::overloaded,
              "this process may have " + std::to_string(limit.rlim_cur) +
                  " descriptors (RLIMIT_NOFILE); a worker takes about 30, and more for each other "
                  "worker that it is connected with. Raise it with `ulimit -n`, or LimitNOFILE of "
                  "systemd");
}

void expect_descriptors_for(int workers) {
  rlimit limit{};
  const rlim_t needed = kFewest + static_cast<rlim_t>(workers);
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return;
  throw Error(
      ErrorCode::overloaded,
      "a worker of a world of " + std::to_string(workers) + " takes up to " +
          std::to_string(needed) + " descriptors, and this process may have " +
          std::to_string(limit.rlim_cur) +
          " (RLIMIT_NOFILE, its hard limit). Raise that with `ulimit -Hn`, or LimitNOFILE of "
          "systemd");
}

}  // namespace stitch::base
