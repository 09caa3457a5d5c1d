#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "stitch/base/error.h"
#include "stitch/base/unique_function.h"

namespace stitch::transport {

// The file of a FileStore: a header, then records of {u32 length, u64 checksum, payload}, all
// little-endian, appended under an exclusive flock. A writer that dies in the middle leaves a torn
// last record: readers stop before it, the next writer truncates it. Each process reads only what
// was added since its last read. A file that has become too long is written anew as another one,
// which is complete when it takes the name; its header says which file it follows, so those that
// have that one open go on with it. Only the file's owner has access to it; one that is a symbolic
// link, belongs to another user or lets others read or write is refused, as a writer decides where
// the workers connect to. Errors name the path: Error(invalid_argument) from the constructor,
// Error(disconnected) when the file is deleted, shortened or cannot be read or written later,
// Error(protocol) when it is damaged, Error(timeout) when its lock is not released. Thread
// contract: not thread-safe; its owner locks. Not to be used on both sides of a fork().
class FileLog {
 public:
  static constexpr std::size_t kMaxPayloadBytes = (std::size_t{8} << 20) + 4096;
  using Replay = base::UniqueFunction<void(std::string_view payload)>;

  // `restart`: all that was replayed so far is to be forgotten, and is replayed in its present
  // form.
  FileLog(const std::string& path, Replay replay, base::UniqueFunction<void()> restart = {});
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
    using Put = std::function<void(std::string_view payload)>;
    // Replaces all records by those that `state` puts, which stand for the same; they are not
    // replayed here. Nothing has changed when this throws, nor when the process dies in the middle:
    // then a file "<path>.stitch.new" is left, which the next one removes.
    void rewrite(const std::function<void(const Put&)>& state);

   private:
    FileLog& log_;
  };

  [[nodiscard]] const std::string& describe() const { return name_; }
  // Of the file, as far as it was replayed.
  [[nodiscard]] std::uint64_t bytes() const { return end_; }

 private:
  // Of a file that follows another one.
  struct Lineage {
    std::uint64_t first = 0;   // the inode of the file that was made first
    std::uint64_t random = 0;  // of this line: a number of an inode may be used again
    friend bool operator==(const Lineage&, const Lineage&) = default;
  };

  // Nothing: these are not the first bytes of such a file.
  [[nodiscard]] static std::optional<Lineage> lineage_in(std::string_view header);
  [[nodiscard]] int open_checked(int flags) const;
  void take(int file);
  // Locks the file that has the name, which may be another one by then.
  void lock(int operation, Deadline deadline);
  // False, without the lock: the file does not have the name any more.
  [[nodiscard]] bool lock_this(int operation, Deadline began, Deadline give_up);
  void unlock() noexcept;
  // Goes on with the file that has taken the name of this one.
  void follow();
  // REQUIRES: the file is locked.
  void open_header();
  void replay_new();
  // Nothing: the path names another file, or none.
  [[nodiscard]] std::optional<std::uint64_t> size_at_path() const;
  [[nodiscard]] std::uint64_t size_checked() const;
  [[nodiscard]] Error gone() const;
  void read_at(std::uint64_t offset, char* to, std::size_t bytes) const;
  void write_at(std::uint64_t offset, std::string_view bytes);

  const std::string path_;  // absolute
  const std::string name_;  // "file store at /tmp/x"
  Replay replay_;
  base::UniqueFunction<void()> restart_;
  int file_ = -1;
  std::uint64_t inode_ = 0;
  std::uint64_t device_ = 0;
  std::optional<Lineage> lineage_;  // of a file that was written anew
  std::uint64_t end_ = 0;           // where the next record begins
};

}  // namespace stitch::transport
