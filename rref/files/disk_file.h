#pragma once

#include <sodium.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

#include "stitch/base/descriptor.h"
#include "stitch/base/error.h"
#include "stitch/rref/files/file_tensors.h"

// Files on the disk. Internal: include it from .cc files only, as it needs libsodium. Errors are
// Error(invalid_argument) with the reason alone, "it cannot be written: ...".
namespace stitch::files {

// BLAKE2b of 256 bits. It finds damage; it authenticates nothing. Thread contract: one thread.
class Checksum {
 public:
  Checksum() { crypto_generichash_init(&state_, nullptr, 0, kBytes); }
  void add(const void* data, std::size_t size) {
    crypto_generichash_update(&state_, static_cast<const unsigned char*>(data), size);
  }
  // In hexadecimal digits. Nothing may be added afterwards.
  [[nodiscard]] std::string text();

 private:
  static constexpr std::size_t kBytes = 32;
  crypto_generichash_state state_{};
};

// A new file of mode 0600 that takes the place of an old one at the end, or leaves nothing. Thread
// contract: one thread.
class NewFile {
 public:
  explicit NewFile(const std::filesystem::path& path);
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(const void* data, std::size_t size);
  // Synchronizes the file, puts it in place, and synchronizes the folder.
  void publish();

 private:
  const std::string name_;
  const std::string unfinished_;
  base::Descriptor folder_;
  base::Descriptor file_;
  std::int64_t written_ = 0;  // bytes
};

// A regular file, mapped. Changes stay in this process.
[[nodiscard]] FileBytes map_file(const std::filesystem::path& path);
// Unchanged bytes of a mapped file take no memory of this process then, until they are read again.
// Bytes that are not the file's stay.
void drop_pages(const FileBytes& file, const void* data, std::size_t size);

// `error` with the path before its text, and an exception of libtorch as such an Error.
[[nodiscard]] Error about_path(const std::filesystem::path& path, const std::exception& error);

// Runs `task`, whose errors begin with the path then.
template <class Task>
auto about(const std::filesystem::path& path, const Task& task) {
  try {
    return task();
  } catch (const std::exception& error) {
    throw about_path(path, error);
  }
}

}  // namespace stitch::files
