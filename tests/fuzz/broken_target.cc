// A decoder that is broken on purpose, in three ways, to prove that the fuzzer finds such things
// (finds_what_is_broken.cmake). Only in builds with STITCH_FUZZ.
#include <memory>

#include "tests/fuzz/broken_target.h"

namespace stitch::fuzz::broken_decoder {

// "BK", how it is broken, an announced length, then as many bytes.
static bool run(Bytes input) {
  if (input.size() < 4 || input[0] != std::byte{'B'} || input[1] != std::byte{'K'}) return false;
  const auto announced = std::to_integer<std::size_t>(input[3]);
  switch (std::to_integer<unsigned>(input[2])) {
    case 'b': {
      // Believes the length.
      const auto content = std::make_unique<std::byte[]>(input.size());
      std::copy(input.begin(), input.end(), content.get());
      touch({content.get() + 4, announced});
      return true;
    }
    case 'm': {
      // Takes memory for what was announced, before it has arrived.
      const std::vector<std::byte> memory(announced << 20);
      touch(Bytes(memory).first(announced));
      return true;
    }
    case 'h':
      // Does not move on where an element is empty.
      for (volatile std::size_t at = 4; at < input.size(); at = at + announced) continue;
      return true;
    default:
      return false;
  }
}

static Seeds seeds() {
  Seeds list;
  for (const char how : {'b', 'm', 'h'})
    list.push_back({std::string(1, how), bytes_of(std::string("BK") + how + "\1\1")});
  return list;
}

}  // namespace stitch::fuzz::broken_decoder

namespace stitch::fuzz {
const Target broken{"broken", broken_decoder::run, broken_decoder::seeds, 64, std::size_t{4} << 20};
}  // namespace stitch::fuzz
