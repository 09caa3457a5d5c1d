#pragma once

#include <algorithm>
#include <string>

namespace stitch::base {

// `text` with '?' for what is no printable character of ASCII: it may come from a peer, also an
// unauthenticated one, and be printed on a terminal. Bytes from 0x80 on may be control characters,
// too. Any thread.
[[nodiscard]] inline std::string printable(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

}  // namespace stitch::base
