// A decoder that is broken on purpose, in the way that STITCH_BROKEN names, to prove that the
// fuzzer finds such things (finds_what_is_broken.cmake). Only in builds with STITCH_FUZZ.
#include <memory>

#include "tests/fuzz/broken_target.h"

namespace stitch::fuzz::broken_decoder {

static char how_broken() {
  const char* const name = std::getenv("STITCH_BROKEN");
  return name == nullptr ? '\0' : *name;
}

// "BK", an announced length, then as many bytes.
static bool run(Bytes input) {
  static const char how = how_broken();
  if (input.size() < 3 || input[0] != std::byte{'B'} || input[1] != std::byte{'K'}) return false;
  const auto announced = std::to_integer<std::size_t>(input[2]);
  switch (how) {
    case 'b': {
      // Believes the length.
      const auto content = std::make_unique<std::byte[]>(input.size());
      std::copy(input.begin(), input.end(), content.get());
      touch({content.get() + 3, announced});
      return true;
    }
    case 'm': {
      // Takes memory for what was announced, before it has arrived: not so much that filling it
      // takes as long as an input may on a busy machine.
      const std::vector<std::byte> memory(announced << 17);
      touch(Bytes(memory).first(announced));
      return true;
    }
    case 'h':
      // Does not move on where an element is empty.
      for (volatile std::size_t at = 3; at < input.size(); at = at + announced) continue;
      return true;
    default:
      return false;
  }
}

static Seeds seeds() {
  Seeds list;
  list.push_back({"one", bytes_of("BK\1\1")});
  return list;
}

}  // namespace stitch::fuzz::broken_decoder

namespace stitch::fuzz {
const Target broken{"broken", broken_decoder::run, broken_decoder::seeds, 64, std::size_t{4} << 20};
}  // namespace stitch::fuzz
