#pragma once

#include <string>

#include "stitch/rpc/message/worker_info.h"

namespace stitch::dist_autograd {

// The colours of a worker in pictures, as "#rrggbb": of lines and leaves (which have white text),
// of its nodes towards it on other workers, of its background.
struct WorkerColours {
  std::string strong;
  std::string middle;
  std::string light;
};

// Eight workers have chosen ones, the others computed ones. The strong ones of the first 256 all
// differ, those of the first 48 clearly. Thread contract: any thread.
[[nodiscard]] WorkerColours colours_of(WorkerId worker);

}  // namespace stitch::dist_autograd
