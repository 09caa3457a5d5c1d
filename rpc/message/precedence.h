#pragma once

#include <cstdint>
#include <vector>

namespace stitch::rpc {

// Which requests to one peer begin before others of them, where some have to wait for room. A key
// stands for what several of them have in common, such as an object that one of them creates; the
// layer above chooses it. A plain value.
struct Precedence {
  std::vector<std::uint64_t> leads;    // those made later that follow one of these begin after it
  std::vector<std::uint64_t> follows;  // it begins after those made before that lead one of these
};

}  // namespace stitch::rpc
