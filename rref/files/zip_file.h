#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "stitch/rref/files/file_tensors.h"

// Zip files as torch.save writes them: not compressed, and each part aligned so that it can be used
// where it is. Internal. Thread contract: one thread.
namespace stitch::files {

// Throws Error(invalid_argument) "it is cut short: ..." unless there are `size` bytes from `at` on.
[[nodiscard]] std::span<std::byte> take(std::span<std::byte> bytes, std::uint64_t at,
                                        std::uint64_t size);

[[nodiscard]] std::string_view text_of(std::span<std::byte> bytes);

// The parts of a file by their names, as views of it. Checksums are not looked at.
[[nodiscard]] std::map<std::string_view, std::span<std::byte>> read_zip(const FileBytes& file);

class ZipWriter {
 public:
  explicit ZipWriter(const Sink& out) : out_(out) {}
  // Writes one part.
  void add(const std::string& name, const void* data, std::size_t size);
  // Writes the directory. No part may follow.
  void finish();

 private:
  void write(const void* data, std::size_t size);

  const Sink& out_;
  std::uint64_t at_ = 0;
  std::uint64_t count_ = 0;
  std::string directory_;
};

}  // namespace stitch::files
