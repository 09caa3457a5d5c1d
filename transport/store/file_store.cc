// One file, though long: how the files are opened, locked, read and written is one protocol.
#include "stitch/transport/store/file_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <set>
#include <span>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "stitch/base/byte_io.h"
#include "stitch/base/deadline.h"
#include "stitch/base/descriptor.h"
#include "stitch/base/errno_text.h"
#include "stitch/base/mutex.h"
#include "stitch/base/random.h"
#include "stitch/base/signals.h"
#include "stitch/transport/store/store_map.h"

namespace stitch::transport {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Both files begin with 16 bytes that change with their layout, and the number of the store.
constexpr std::string_view kMagic{"stitch store 3\n\0", 16};
constexpr std::string_view kValuesMagic{"stitch values 1\n", 16};
constexpr std::size_t kHeaderBytes = kMagic.size() + sizeof(std::uint64_t);
constexpr off_t kWriterByte = 0;  // locked by the process that writes
// A claim: u32 bytes after these, of which the key and the value take so many each; the key, the
// value, zeros.
constexpr std::size_t kClaimBytes = 3 * sizeof(std::uint32_t);
constexpr std::size_t kClaimUnit = 64;
// In a longer file of claims, the place of one that has ended is used again.
constexpr std::size_t kReuseAbove = std::size_t{1} << 20;
constexpr std::chrono::seconds kLockTimeout{30};
constexpr milliseconds kShortestLockWait{100};

std::string reason(int error) {
  std::string text = base::errno_text(error);
  if (!text.empty()) text[0] = static_cast<char>(std::tolower(static_cast<unsigned char>(text[0])));
  return text;
}

std::string octal(mode_t mode) {
  std::ostringstream text;
  text << '0' << std::oct << mode;
  return text.str();
}

base::Bytes header_of(std::string_view magic, std::uint64_t number) {
  base::Bytes header;
  base::ByteWriter writer(header);
  writer.write_bytes(std::as_bytes(std::span(magic)));
  writer.write(number);
  return header;
}

bool same_file(const struct stat& one, const struct stat& other) {
  return one.st_ino == other.st_ino && one.st_dev == other.st_dev;
}

// How long to wait until the next look at a file, for a process that began to wait at `since`.
Clock::time_point next_look(Clock::time_point since, Clock::time_point deadline) {
  const auto now = Clock::now();
  const auto pause =
      std::clamp<Clock::duration>((now - since) / 8, milliseconds(1),
                                  milliseconds(now - since < std::chrono::seconds(2) ? 8 : 100));
  return std::min(deadline, now + pause);
}

class FileStore final : public Store, public std::enable_shared_from_this<FileStore> {
 public:
  explicit FileStore(const std::string& path)
      : path_(std::filesystem::absolute(path)), name_("file store at " + path) {
    const base::MutexLock lock(mutex_);
    const auto give_up = Clock::now() + kLockTimeout;
    for (;;) {
      file_ = open_checked(path_, O_RDWR | O_CREAT);
      lock_writer(give_up);
      const Unlock unlock(*this);
      if (is_there()) break;  // else another process has deleted it
      if (Clock::now() > give_up) throw gone();
    }
    lock_writer(give_up);
    const Unlock unlock(*this);
    open_header();
  }

  void set(const std::string& key, const std::string& value) override {
    in_store(name_, [&] { check_entry(key, value); });
    change([&](StoreMap& values) {
      values.set(key, value);
      return true;
    });
  }

  std::string get(const std::string& key, Timeout timeout) override {
    in_store(name_, [&] { check_key(key); });
    const auto since = Clock::now();
    const auto deadline = base::deadline_after(timeout);
    const base::MutexLock lock(mutex_);
    for (;;) {
      read_values();
      if (const auto value = values_.find(key)) return *value;
      if (Clock::now() >= deadline) throw in_store(not_set_error(key, timeout), name_);
      changed_.wait_until(mutex_, next_look(since, deadline));
    }
  }

  std::optional<std::string> try_get(const std::string& key) override {
    in_store(name_, [&] { check_key(key); });
    const base::MutexLock lock(mutex_);
    read_values();
    const auto value = values_.find(key);
    return value ? std::optional(*value) : std::nullopt;
  }

  bool erase(const std::string& key) override {
    in_store(name_, [&] { check_key(key); });
    bool erased = false;
    change([&](StoreMap& values) { return erased = values.erase(key); });
    return erased;
  }

  Claimed claim(const std::string& key, const std::string& value) override {
    in_store(name_, [&] { check_entry(key, value); });
    const base::MutexLock lock(mutex_);
    lock_writer(Clock::time_point::max());
    const Unlock unlock(*this);
    check_there();
    std::size_t bytes = key.size() + value.size();
    bytes += kClaimUnit - bytes % kClaimUnit;
    std::size_t end = 0;
    std::optional<Record> place;
    for (const Record& each : read_records(end)) {
      const bool wanted = each.key == key;
      const bool fits = end > kReuseAbove && each.bytes >= bytes && !place;
      if (!wanted && !fits) continue;
      const bool held = is_held(each.at);
      if (wanted && held) return {nullptr, each.value};
      if (fits && !held) place = each;
    }
    const Record record{place ? place->at : static_cast<off_t>(end), place ? place->bytes : bytes,
                        key, value};
    write_record(record);
    if (!set_lock(F_WRLCK, record.at)) throw cannot("be locked", EAGAIN);
    held_.insert(record.at);
    changed_.notify_all();
    return {std::make_unique<FileClaim>(shared_from_this(), record.at), value};
  }

  std::map<std::string, std::string> claims(const std::string& prefix, std::size_t count,
                                            Timeout timeout) override {
    const auto since = Clock::now();
    const auto deadline = base::deadline_after(timeout);
    const base::MutexLock lock(mutex_);
    for (;;) {
      std::map<std::string, std::string> found = held_claims(prefix, deadline);
      if (found.size() >= count || Clock::now() >= deadline) return found;
      changed_.wait_until(mutex_, next_look(since, deadline));
    }
  }

  std::string describe() const override { return name_; }

 private:
  struct Record {
    off_t at = 0;
    std::size_t bytes = 0;  // for key and value
    std::string key;
    std::string value;
  };

  struct FileClaim final : Claim {
    FileClaim(std::shared_ptr<FileStore> of, off_t where) : store(std::move(of)), at(where) {}
    ~FileClaim() override {
      const base::MutexLock lock(store->mutex_);
      store->held_.erase(at);
      store->unlock_byte(at);
    }
    const std::shared_ptr<FileStore> store;
    const off_t at;
  };

  // Of the writer's lock.
  class Unlock {
   public:
    explicit Unlock(FileStore& store) : store_(store) {}
    ~Unlock() { store_.unlock_byte(kWriterByte); }
    Unlock(const Unlock&) = delete;
    Unlock& operator=(const Unlock&) = delete;

   private:
    FileStore& store_;
  };

  [[nodiscard]] Error cannot(const std::string& what, int error) const {
    return Error(ErrorCode::disconnected, name_ + " cannot " + what + ": " + reason(error));
  }
  [[nodiscard]] Error gone() const {
    return Error(ErrorCode::disconnected, name_ + " is gone: the file was deleted or replaced");
  }
  [[nodiscard]] Error damaged(const std::string& why) const {
    return Error(ErrorCode::protocol, name_ + " is damaged: " + why);
  }

  [[nodiscard]] base::Descriptor open_checked(const std::string& path, int flags) const;
  void open_header() STITCH_REQUIRES(mutex_);

  // Locks of open file descriptions: they belong to this store, not to the process.
  [[nodiscard]] bool set_lock(short type, off_t at) STITCH_REQUIRES(mutex_);
  void unlock_byte(off_t at) noexcept STITCH_NO_THREAD_SAFETY_ANALYSIS;
  void lock_writer(Clock::time_point deadline) STITCH_REQUIRES(mutex_);
  [[nodiscard]] bool is_held(off_t at) STITCH_REQUIRES(mutex_);

  [[nodiscard]] bool is_there() const STITCH_REQUIRES(mutex_);
  void check_there() const STITCH_REQUIRES(mutex_) {
    if (!is_there()) throw gone();
  }
  [[nodiscard]] std::string read_all(const base::Descriptor& file) const;
  void write_all(const base::Descriptor& file, off_t at, std::span<const std::byte> bytes) const;

  // Makes values_ what the file has.
  void read_values() STITCH_REQUIRES(mutex_);
  void write_values() STITCH_REQUIRES(mutex_);
  // Calls change() with values_, which it may change: it returns whether they are to be written.
  template <class Change>
  void change(Change change) {
    const base::MutexLock lock(mutex_);
    lock_writer(Clock::time_point::max());
    const Unlock unlock(*this);
    read_values();
    if (!change(values_)) return;
    write_values();
    changed_.notify_all();
  }

  // The complete ones; `end` is behind the last.
  [[nodiscard]] std::vector<Record> read_records(std::size_t& end) STITCH_REQUIRES(mutex_);
  void write_record(const Record& record) STITCH_REQUIRES(mutex_);
  [[nodiscard]] std::map<std::string, std::string> held_claims(const std::string& prefix,
                                                               Clock::time_point deadline)
      STITCH_REQUIRES(mutex_);

  const std::string path_;
  const std::string values_path_ = path_ + ".values";
  const std::string name_;

  base::Mutex mutex_;
  base::CondVar changed_;
  base::Descriptor file_ STITCH_GUARDED_BY(mutex_);
  std::uint64_t number_ STITCH_GUARDED_BY(mutex_) = 0;  // random: values of another are not ours
  std::set<off_t> held_ STITCH_GUARDED_BY(mutex_);      // claims of this store's
  StoreMap values_ STITCH_GUARDED_BY(mutex_);
  // What values_ was read from. It is kept open, so that no other file gets its number.
  base::Descriptor values_file_ STITCH_GUARDED_BY(mutex_);
};

// Opens what the path names. Throws Error(invalid_argument) when that cannot be of a store.
base::Descriptor FileStore::open_checked(const std::string& path, int flags) const {
  const auto refuse = [&](const std::string& why) {
    const std::string& file = path == path_ ? name_ : name_ + ".values";
    return Error(ErrorCode::invalid_argument, file + " cannot be opened: " + why);
  };
  base::Descriptor file(::open(path.c_str(), O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW | flags, 0600));
  if (!file) throw refuse(errno == ELOOP ? "it is a symbolic link" : reason(errno));
  struct stat state {};
  if (::fstat(file.get(), &state) != 0) throw refuse(reason(errno));
  if (!S_ISREG(state.st_mode)) throw refuse("it is not a regular file");
  if (state.st_nlink > 1) throw refuse("it has another name, too (a hard link)");
  // A user who may write to the file decides which addresses the workers connect to.
  if (state.st_uid != ::geteuid()) {
    throw refuse("it belongs to user " + std::to_string(state.st_uid) + ", this process runs as " +
                 std::to_string(::geteuid()));
  }
  if ((state.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    throw refuse("its mode is " + octal(state.st_mode & 07777) +
                 ", so others may use it; only 0600 is allowed");
  }
  return file;
}

void FileStore::open_header() {
  const std::string bytes = read_all(file_);
  // A process that died while it made the file may have left a part of the header.
  const std::string_view magic = std::string_view(bytes).substr(0, kMagic.size());
  if (magic != kMagic.substr(0, magic.size())) {
    throw Error(
        ErrorCode::invalid_argument,
        name_ + " cannot be opened: this file is not a stitch store, or one of another version");
  }
  if (bytes.size() < kHeaderBytes) {
    number_ = base::random_number();
    return write_all(file_, 0, header_of(kMagic, number_).span());
  }
  base::ByteReader reader(std::as_bytes(std::span(bytes)), "header");
  static_cast<void>(reader.take(kMagic.size()));
  number_ = reader.read<std::uint64_t>();
}

bool FileStore::set_lock(short type, off_t at) {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = at;
  lock.l_len = 1;
  while (::fcntl(file_.get(), F_OFD_SETLK, &lock) != 0) {
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EACCES) return false;
    throw cannot("be locked", errno);
  }
  return true;
}

void FileStore::unlock_byte(off_t at) noexcept {
  struct flock lock {};
  lock.l_type = F_UNLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = at;
  lock.l_len = 1;
  while (::fcntl(file_.get(), F_OFD_SETLK, &lock) != 0 && errno == EINTR) {
  }
}

// The lock is held for one short operation, unless its holder is stopped: so this has a limit.
void FileStore::lock_writer(Clock::time_point deadline) {
  const auto began = Clock::now();
  const auto give_up = std::clamp(deadline, began + kShortestLockWait, began + kLockTimeout);
  std::chrono::microseconds pause{20};
  while (!set_lock(F_WRLCK, kWriterByte)) {
    const auto now = Clock::now();
    if (now > give_up) {
      const auto waited = std::chrono::duration_cast<milliseconds>(now - began);
      throw Error(ErrorCode::timeout, name_ + " has been locked by another process for " +
                                          std::to_string(waited.count()) + " ms");
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::microseconds(250));
  }
}

bool FileStore::is_held(off_t at) {
  if (held_.contains(at)) return true;
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = at;
  lock.l_len = 1;
  if (::fcntl(file_.get(), F_OFD_GETLK, &lock) != 0) throw cannot("be locked", errno);
  return lock.l_type != F_UNLCK;
}

bool FileStore::is_there() const {
  struct stat open_file {};
  struct stat at_path {};
  if (::fstat(file_.get(), &open_file) != 0) {
    if (errno == ESTALE) return false;  // of a shared file system
    throw cannot("be read", errno);
  }
  return open_file.st_nlink > 0 && ::lstat(path_.c_str(), &at_path) == 0 &&
         same_file(open_file, at_path) &&
         (number_ == 0 || open_file.st_size >= static_cast<off_t>(kHeaderBytes));
}

std::string FileStore::read_all(const base::Descriptor& file) const {
  struct stat state {};
  if (::fstat(file.get(), &state) != 0) throw cannot("be read", errno);
  std::string bytes(static_cast<std::size_t>(state.st_size), '\0');
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got =
        ::pread(file.get(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw cannot("be read", errno);
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  bytes.resize(done);
  return bytes;
}

void FileStore::write_all(const base::Descriptor& file, off_t at,
                          std::span<const std::byte> bytes) const {
  const base::FileSizeSignalBlocked blocked;
  while (!bytes.empty()) {
    const ssize_t put = ::pwrite(file.get(), bytes.data(), bytes.size(), at);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) throw cannot("be written", errno);
    at += put;
    bytes = bytes.subspan(static_cast<std::size_t>(put));
  }
}

void FileStore::read_values() {
  check_there();
  struct stat known {};
  struct stat there {};
  if (::lstat(values_path_.c_str(), &there) != 0) {
    if (errno != ENOENT) throw cannot("be read", errno);
    values_ = {};  // nothing was set yet
    values_file_ = {};
    return;
  }
  if (values_file_ && ::fstat(values_file_.get(), &known) == 0 && same_file(known, there)) return;
  base::Descriptor file = open_checked(values_path_, O_RDONLY);
  const std::string bytes = read_all(file);
  StoreMap values;
  try {
    base::ByteReader reader(std::as_bytes(std::span(bytes)), "the file of its values");
    const auto magic = reader.take(kValuesMagic.size());
    if (!std::ranges::equal(magic, std::as_bytes(std::span(kValuesMagic))))
      throw Error(ErrorCode::protocol, "the file of its values is not one, or of another version");
    const bool ours = reader.read<std::uint64_t>() == number_;
    for (auto left = reader.read_count(2 * sizeof(std::uint32_t)); left > 0; --left) {
      const std::string key = reader.read_string();
      std::string value = reader.read_string();
      check_entry(key, value);
      if (ours) values.set(key, std::move(value));
    }
    reader.expect_end();
  } catch (const Error& error) {
    throw damaged(error.what());
  }
  values_ = std::move(values);
  values_file_ = std::move(file);
}

void FileStore::write_values() {
  const std::string path = values_path_ + ".new";
  // Until it is written, what the file has is not known here.
  values_file_ = {};
  base::Bytes bytes = header_of(kValuesMagic, number_);
  base::ByteWriter writer(bytes);
  writer.write(static_cast<std::uint32_t>(values_.values().size()));
  for (const auto& [key, value] : values_.values()) {
    writer.write_string(key);
    writer.write_string(*value);
  }
  // One that is there was left by a process that died.
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) throw cannot("be written", errno);
  base::Descriptor file(
      ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file) throw cannot("be written", errno);
  write_all(file, 0, bytes.span());
  if (::rename(path.c_str(), values_path_.c_str()) != 0) throw cannot("be written", errno);
  values_file_ = std::move(file);
}

std::vector<FileStore::Record> FileStore::read_records(std::size_t& end) {
  const std::string bytes = read_all(file_);
  std::vector<Record> records;
  for (end = kHeaderBytes; bytes.size() >= end + kClaimBytes;) {
    base::ByteReader reader(std::as_bytes(std::span(bytes)).subspan(end), "claim");
    const std::size_t room = reader.read<std::uint32_t>();
    const std::size_t key = reader.read<std::uint32_t>();
    const std::size_t value = reader.read<std::uint32_t>();
    if (room > reader.remaining()) break;  // its writer died
    Record record{static_cast<off_t>(end), room, {}, {}};
    if (key <= room && value <= room - key) {
      const std::size_t at = end + kClaimBytes;
      record.key = bytes.substr(at, key);
      record.value = bytes.substr(at + key, value);
    }
    records.push_back(std::move(record));
    end += kClaimBytes + room;
  }
  return records;
}

void FileStore::write_record(const Record& record) {
  base::Bytes bytes;
  base::ByteWriter writer(bytes);
  writer.write(static_cast<std::uint32_t>(record.bytes));
  writer.write(static_cast<std::uint32_t>(record.key.size()));
  writer.write(static_cast<std::uint32_t>(record.value.size()));
  writer.write_bytes(std::as_bytes(std::span(record.key)));
  writer.write_bytes(std::as_bytes(std::span(record.value)));
  const std::size_t used = bytes.size();
  bytes.resize(kClaimBytes + record.bytes);
  std::fill(bytes.data() + used, bytes.data() + bytes.size(), std::byte{0});
  write_all(file_, record.at, bytes.span());
}

std::map<std::string, std::string> FileStore::held_claims(const std::string& prefix,
                                                          Clock::time_point deadline) {
  lock_writer(deadline);
  const Unlock unlock(*this);
  check_there();
  std::map<std::string, std::string> found;
  std::size_t end = 0;
  for (Record& each : read_records(end)) {
    if (each.key.starts_with(prefix) && is_held(each.at))
      found.insert_or_assign(std::move(each.key), std::move(each.value));
  }
  return found;
}

}  // namespace

std::shared_ptr<Store> make_file_store(const std::string& path) {
  return std::make_shared<FileStore>(path);
}

}  // namespace stitch::transport
