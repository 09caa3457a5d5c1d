#pragma once

#include <cstdint>

#include "stitch/base/unique_function.h"

namespace stitch::transport {

// What is to be done with work that a message has brought and that may block.
enum class DoWork : std::uint8_t {
  here,          // one piece, on this thread; others take what is left
  here_watched,  // one piece, on this thread, and what is left may wait for it: when that takes
                 // long, another thread calls with `elsewhere`
  elsewhere,     // nothing on this thread, which goes on at once: other threads take what is left
};

// Does a piece of the work, and returns whether more is left. May be called with `elsewhere` while
// it runs on another thread.
using DeferredWork = base::UniqueFunction<bool(DoWork how)>;

}  // namespace stitch::transport
