#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "stitch/base/unique_function.h"

namespace stitch::transport {

// The file of a FileStore: a header, then records of {u32 length, u64 checksum, payload}, all
// little-endian, appended under an exclusive flock. A writer that dies in the middle leaves a torn
// last record: readers stop before it, the next writer truncates it. Each process reads only what
// was added since its last read. Only the file's owner has access to it; one that is a symbolic
// link, belongs to another user or lets others read or write is refused, as a writer decides where
// the workers connect to. Errors name the path: Error(invalid_argument) from the constructor,
// Error(disconnected) when the file is deleted, shortened or cannot be read or written later,
// Error(protocol) when it is damaged, Error(timeout) when its lock is not released. Thread
// contract: not thread-safe; its owner locks. Not to be used on both sides of a fork().
class FileLog {
 public:
  static constexpr std::size_t kMaxPayloadBytes = (std::size_t{8} << 20) + 4096;
  using Replay = base::UniqueFunction<void(std::string_view payload)>;

  FileLog(const std::string& path, Replay replay);
  ~FileLog();
  FileLog(const FileLog&) = delete;
  FileLog& operator=(const FileLog&) = delete;

  using Deadline = std::chrono::steady_clock::time_point;
  // Replays the new records. Waits for the lock until about `deadline`.
  void catch_up(Deadline deadline);
  // Locks the file against all other processes, replays what is new, and lets one record be
  // appended, until it is destroyed.
  class Writer {
   public:
    explicit Writer(FileLog& log);
    ~Writer();
    Writer(const Writer&) = delete;
    Writer& operator=(const Writer&) = delete;
    // Appends one record, which is replayed at once. Nothing has changed when this throws.
    void append(std::string_view payload);

   private:
    FileLog& log_;
  };

  [[nodiscard]] const std::string& describe() const { return name_; }

 private:
  void lock(int operation, Deadline deadline);
  void unlock() noexcept;
  // REQUIRES: the file is locked.
  void open_header();
  void replay_new();
  [[nodiscard]] std::uint64_t size_checked() const;
  void read_at(std::uint64_t offset, char* to, std::size_t bytes) const;
  void write_at(std::uint64_t offset, std::string_view bytes);

  const std::string path_;  // absolute
  const std::string name_;  // "file store at /tmp/x"
  Replay replay_;
  int file_ = -1;
  std::uint64_t inode_ = 0;
  std::uint64_t device_ = 0;
  std::uint64_t end_ = 0;  // where the next record begins
};

}  // namespace stitch::transport
