#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "stitch/base/descriptor.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz {

// A file without a name that has these bytes, and lasts as long as the descriptor.
[[nodiscard]] inline base::Descriptor memory_file(Bytes bytes) {
  base::Descriptor file(::memfd_create("fuzz", MFD_CLOEXEC));
  require(::write(file.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()),
          "a file cannot be written");
  return file;
}
[[nodiscard]] inline std::string path_of(const base::Descriptor& file) {
  return "/proc/self/fd/" + std::to_string(file.get());
}

}  // namespace stitch::fuzz
