#include "stitch/rpc/peers/duration_text.h"

#include <cstdio>

namespace stitch::rpc {

std::string duration_text(std::chrono::nanoseconds duration) {
  char text[32];
  const double seconds = std::chrono::duration<double>(duration).count();
  if (seconds >= 1) {
    std::snprintf(text, sizeof(text), "%.1f s", seconds);
  } else {
    std::snprintf(text, sizeof(text), "%.0f ms", seconds * 1000);
  }
  return text;
}

}  // namespace stitch::rpc
