// One file, though long: how the file is opened, locked, read, written and followed is one
// protocol.
#include "stitch/transport/store/file_log.h"

#include <fcntl.h>
#include <sodium.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "stitch/base/descriptor.h"
#include "stitch/base/errno_text.h"
#include "stitch/base/error.h"
#include "stitch/base/random.h"
#include "stitch/base/signals.h"

namespace stitch::transport {

namespace {

static_assert(std::endian::native == std::endian::little, "the file is little-endian");

constexpr std::string_view kMagic{"stitch store 1\n\0", 16};  // changes with the layout of the file
// Of a file that was written anew: behind it is its Lineage.
constexpr std::string_view kNextMagic{"stitch store 2\n\0", 16};
constexpr std::size_t kLineageBytes = 2 * sizeof(std::uint64_t);
constexpr std::size_t kPrefixBytes = sizeof(std::uint32_t) + sizeof(std::uint64_t);
constexpr std::size_t kBufferBytes = std::size_t{1} << 20;
constexpr std::chrono::seconds kLockTimeout{30};
constexpr std::chrono::milliseconds kShortestLockWait{100};

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

// Detects damage, not forgery: the key is not secret.
std::uint64_t checksum(std::string_view payload) {
  static constexpr std::array<unsigned char, crypto_shorthash_KEYBYTES> kKey{'s', 't', 'i',
                                                                             't', 'c', 'h'};
  static_assert(crypto_shorthash_BYTES == sizeof(std::uint64_t));
  std::uint64_t sum = 0;
  crypto_shorthash(reinterpret_cast<unsigned char*>(&sum),
                   reinterpret_cast<const unsigned char*>(payload.data()), payload.size(),
                   kKey.data());
  return sum;
}

std::string record_of(std::string_view payload) {
  const auto length = static_cast<std::uint32_t>(payload.size());
  const std::uint64_t sum = checksum(payload);
  std::string record(kPrefixBytes, '\0');
  std::memcpy(record.data(), &length, sizeof(length));
  std::memcpy(record.data() + sizeof(length), &sum, sizeof(sum));
  return record.append(payload);
}

}  // namespace

FileLog::FileLog(const std::string& path, Replay replay, base::UniqueFunction<void()> restart)
    : path_(std::filesystem::absolute(path)),
      name_("file store at " + path),
      replay_(std::move(replay)),
      restart_(std::move(restart)) {
  try {
    const auto began = std::chrono::steady_clock::now();
    const auto give_up = began + kLockTimeout;
    take(open_checked(O_CREAT));
    while (!lock_this(LOCK_EX, began, give_up)) {  // another one has taken the name
      if (std::chrono::steady_clock::now() > give_up) throw gone();
      take(open_checked(O_CREAT));
    }
    open_header();
    replay_new();
    unlock();
  } catch (...) {
    if (file_ >= 0) ::close(file_);
    throw;
  }
}

FileLog::~FileLog() { ::close(file_); }

// Opens what the path names. Throws Error(invalid_argument) when that cannot be a store.
int FileLog::open_checked(int flags) const {
  const auto refuse = [this](const std::string& why) {
    return Error(ErrorCode::invalid_argument, name_ + " cannot be opened: " + why);
  };
  const int opened =
      ::open(path_.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW | flags, 0600);
  if (opened < 0) throw refuse(errno == ELOOP ? "it is a symbolic link" : reason(errno));
  base::Descriptor file(opened);
  struct stat state {};
  if (::fstat(file.get(), &state) != 0) throw refuse(reason(errno));
  if (!S_ISREG(state.st_mode)) throw refuse("it is not a regular file");
  // A user who may write to the file decides which addresses the workers connect to.
  if (state.st_uid != ::geteuid()) {
    throw refuse("it belongs to user " + std::to_string(state.st_uid) + ", this process runs as " +
                 std::to_string(::geteuid()));
  }
  if ((state.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    throw refuse("its mode is " + octal(state.st_mode & 07777) +
                 ", so others may use it; only 0600 is allowed");
  }
  return file.release();
}

// Owns `file` from now on.
void FileLog::take(int file) {
  if (file_ >= 0) ::close(file_);
  file_ = file;
  end_ = 0;
  lineage_.reset();
  struct stat state {};
  if (::fstat(file_, &state) != 0)
    throw Error(ErrorCode::disconnected, name_ + " cannot be read: " + reason(errno));
  inode_ = state.st_ino;
  device_ = state.st_dev;
}

std::optional<FileLog::Lineage> FileLog::lineage_in(std::string_view header) {
  if (header.size() != kNextMagic.size() + kLineageBytes || !header.starts_with(kNextMagic))
    return std::nullopt;
  Lineage lineage;
  header.remove_prefix(kNextMagic.size());
  std::memcpy(&lineage.first, header.data(), sizeof(lineage.first));
  std::memcpy(&lineage.random, header.data() + sizeof(lineage.first), sizeof(lineage.random));
  return lineage;
}

void FileLog::open_header() {
  const std::uint64_t size = size_checked();
  std::array<char, kMagic.size() + kLineageBytes> header{};
  const std::size_t there = std::min<std::size_t>(size, header.size());
  read_at(0, header.data(), there);
  lineage_ = lineage_in({header.data(), there});
  if (lineage_) {
    end_ = header.size();
    return;
  }
  const std::string_view magic(header.data(), std::min(there, kMagic.size()));
  // A process that died while it created the file may have left part of the header.
  if (magic != kMagic.substr(0, magic.size())) {
    throw Error(
        ErrorCode::invalid_argument,
        name_ + " cannot be opened: this file is not a stitch store, or one of another version");
  }
  if (magic.size() < kMagic.size()) write_at(0, kMagic);
  end_ = kMagic.size();
}

void FileLog::follow() {
  base::Descriptor file;
  errno = 0;
  try {
    file = base::Descriptor(open_checked(0));
  } catch (const Error& error) {
    if (errno != EMFILE && errno != ENFILE && errno != ENOMEM && errno != EINTR) throw gone();
    throw Error(ErrorCode::disconnected, error.what());  // for want of something here
  }
  // Complete since before it has had the name, so no lock is needed.
  std::array<char, kMagic.size() + kLineageBytes> header{};
  ssize_t there = 0;
  do {
    there = ::pread(file.get(), header.data(), header.size(), 0);
  } while (there < 0 && errno == EINTR);
  const auto next = lineage_in({header.data(), there > 0 ? static_cast<std::size_t>(there) : 0});
  if (!next || (lineage_ ? *lineage_ != *next : next->first != inode_)) throw gone();
  take(file.release());
  lineage_ = next;
  end_ = header.size();
  if (restart_) restart_();
}

void FileLog::catch_up(Deadline deadline) {
  // Sees every record that was complete when this began: end_ is always the end of a complete one.
  if (size_at_path() == end_) return;
  lock(LOCK_SH, deadline);
  try {
    replay_new();
  } catch (...) {
    unlock();
    throw;
  }
  unlock();
}

void FileLog::replay_new() {
  const std::uint64_t size = size_checked();
  while (size - end_ >= kPrefixBytes) {
    std::array<char, kPrefixBytes> prefix{};
    read_at(end_, prefix.data(), prefix.size());
    std::uint32_t length = 0;
    std::uint64_t sum = 0;
    std::memcpy(&length, prefix.data(), sizeof(length));
    std::memcpy(&sum, prefix.data() + sizeof(length), sizeof(sum));
    if (length > kMaxPayloadBytes) {
      throw Error(ErrorCode::protocol, name_ + " is damaged at byte " + std::to_string(end_) +
                                           ": a record claims " + std::to_string(length) +
                                           " bytes, the limit is " +
                                           std::to_string(kMaxPayloadBytes));
    }
    const std::uint64_t next = end_ + kPrefixBytes + length;
    if (next > size) return;  // torn
    std::string payload(length, '\0');
    read_at(end_ + kPrefixBytes, payload.data(), payload.size());
    if (checksum(payload) != sum) {
      if (next == size) return;  // torn as well: a crash of the host can lose bytes in the middle
      throw Error(ErrorCode::protocol, name_ + " is damaged at byte " + std::to_string(end_) +
                                           ": the checksum of a record is wrong");
    }
    replay_(payload);  // where this throws, it is read again: a file must not be rewritten without
    end_ = next;
  }
}

FileLog::Writer::Writer(FileLog& log) : log_(log) {
  log_.lock(LOCK_EX, Deadline::max());
  try {
    log_.replay_new();
  } catch (...) {
    log_.unlock();
    throw;
  }
}

FileLog::Writer::~Writer() { log_.unlock(); }

void FileLog::Writer::append(std::string_view payload) {
  const base::FileSizeSignalBlocked blocked;
  const std::string record = record_of(payload);
  // Bytes after the last good record were written by a process that died: it held the lock that we
  // hold now.
  if (log_.size_checked() != log_.end_ &&
      ::ftruncate(log_.file_, static_cast<off_t>(log_.end_)) != 0) {
    throw Error(ErrorCode::disconnected, log_.name_ + " cannot be written: " + reason(errno));
  }
  log_.write_at(log_.end_, record);
  log_.replay_(payload);  // as in replay_new()
  log_.end_ += record.size();
}

void FileLog::Writer::rewrite(const std::function<void(const Put&)>& state) {
  const base::FileSizeSignalBlocked blocked;
  const std::string path = log_.path_ + ".stitch.new";
  const auto failed = [&] {
    return Error(ErrorCode::disconnected, log_.name_ + " cannot be written anew: " + reason(errno));
  };
  const Lineage lineage = log_.lineage_.value_or(Lineage{log_.inode_, base::random_number()});
  // Only who holds the lock writes it: one that is there was left by a process that died.
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) throw failed();
  const int opened =
      ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW, 0600);
  if (opened < 0) throw failed();
  base::Descriptor file(opened);
  std::uint64_t size = 0;
  struct stat inode {};
  try {
    std::string bytes(kNextMagic);
    bytes.append(reinterpret_cast<const char*>(&lineage.first), sizeof(lineage.first));
    bytes.append(reinterpret_cast<const char*>(&lineage.random), sizeof(lineage.random));
    const auto write_out = [&] {
      for (std::string_view left = bytes; !left.empty();) {
        const ssize_t put = ::write(file.get(), left.data(), left.size());
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) throw failed();
        left.remove_prefix(static_cast<std::size_t>(put));
      }
      size += bytes.size();
      bytes.clear();
    };
    state([&](std::string_view payload) {
      bytes += record_of(payload);
      if (bytes.size() >= kBufferBytes) write_out();
    });
    write_out();
    // Its bytes before its name, also when the host fails; and none gets in before this process.
    if (::fsync(file.get()) != 0 || ::flock(file.get(), LOCK_EX | LOCK_NB) != 0 ||
        ::fstat(file.get(), &inode) != 0)
      throw failed();
    if (!log_.size_at_path()) throw log_.gone();
    if (::rename(path.c_str(), log_.path_.c_str()) != 0) throw failed();
  } catch (...) {
    ::unlink(path.c_str());
    throw;
  }
  log_.unlock();  // a forked child may have that file open, too
  ::close(log_.file_);
  log_.file_ = file.release();
  log_.inode_ = inode.st_ino;
  log_.device_ = inode.st_dev;
  log_.lineage_ = lineage;
  log_.end_ = size;
}

void FileLog::lock(int operation, Deadline deadline) {
  // The lock is held for one short operation, unless its holder is stopped: so this waits, with a
  // limit.
  const auto began = std::chrono::steady_clock::now();
  const auto give_up = std::clamp(deadline, began + kShortestLockWait, began + kLockTimeout);
  while (!lock_this(operation, began, give_up)) {
    if (std::chrono::steady_clock::now() > give_up) throw gone();
    follow();
  }
}

bool FileLog::lock_this(int operation, Deadline began, Deadline give_up) {
  std::chrono::microseconds pause{20};
  while (::flock(file_, operation | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno == ESTALE) return false;  // of a shared file system: it is there no more
    if (errno != EWOULDBLOCK)
      throw Error(ErrorCode::disconnected, name_ + " cannot be locked: " + reason(errno));
    const auto now = std::chrono::steady_clock::now();
    if (now > give_up) {
      const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(now - began);
      throw Error(ErrorCode::timeout, name_ + " has been locked by another process for " +
                                          std::to_string(waited.count()) + " ms");
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::microseconds(250));
  }
  try {
    if (size_at_path()) return true;
  } catch (...) {
    unlock();
    throw;
  }
  unlock();
  return false;
}

void FileLog::unlock() noexcept { ::flock(file_, LOCK_UN); }

Error FileLog::gone() const {
  return Error(ErrorCode::disconnected, name_ + " is gone: the file was deleted or replaced");
}

std::optional<std::uint64_t> FileLog::size_at_path() const {
  struct stat open_file {};
  struct stat at_path {};
  if (::fstat(file_, &open_file) != 0) {
    if (errno == ESTALE) return std::nullopt;
    throw Error(ErrorCode::disconnected, name_ + " cannot be read: " + reason(errno));
  }
  if (open_file.st_nlink == 0 || ::lstat(path_.c_str(), &at_path) != 0 ||
      at_path.st_ino != inode_ || at_path.st_dev != device_)
    return std::nullopt;
  const auto size = static_cast<std::uint64_t>(open_file.st_size);
  if (size < end_) {
    throw Error(ErrorCode::disconnected, name_ + " is gone: the file was cut to " +
                                             std::to_string(size) + " bytes, it had " +
                                             std::to_string(end_));
  }
  return size;
}

std::uint64_t FileLog::size_checked() const {
  if (const auto size = size_at_path()) return *size;
  throw gone();
}

void FileLog::read_at(std::uint64_t offset, char* to, std::size_t bytes) const {
  while (bytes > 0) {
    const ssize_t got = ::pread(file_, to, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      throw Error(ErrorCode::disconnected,
                  name_ + " cannot be read: " +
                      (got < 0 ? reason(errno) : std::string("it ends too soon")));
    }
    to += got;
    offset += static_cast<std::uint64_t>(got);
    bytes -= static_cast<std::size_t>(got);
  }
}

void FileLog::write_at(std::uint64_t offset, std::string_view bytes) {
  const base::FileSizeSignalBlocked blocked;
  std::uint64_t at = offset;
  while (!bytes.empty()) {
    const ssize_t put = ::pwrite(file_, bytes.data(), bytes.size(), static_cast<off_t>(at));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) {
      const std::string why = reason(errno);
      // Readers skip a part of a record; this only saves the next writer from cutting it off.
      if (::ftruncate(file_, static_cast<off_t>(offset)) != 0) at = offset;
      throw Error(ErrorCode::disconnected, name_ + " cannot be written: " + why);
    }
    at += static_cast<std::uint64_t>(put);
    bytes.remove_prefix(static_cast<std::size_t>(put));
  }
}

}  // namespace stitch::transport
