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

#include "stitch/base/error.h"

namespace stitch::transport {

namespace {

static_assert(std::endian::native == std::endian::little, "the file is little-endian");

constexpr std::string_view kMagic{"stitch store 1\n\0", 16};  // changes with the layout of the file
constexpr std::size_t kPrefixBytes = sizeof(std::uint32_t) + sizeof(std::uint64_t);
constexpr std::chrono::seconds kLockTimeout{30};
constexpr std::chrono::milliseconds kShortestLockWait{100};

std::string reason(int error) {
  std::string text = std::generic_category().message(error);
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

}  // namespace

FileLog::FileLog(const std::string& path, Replay replay)
    : path_(std::filesystem::absolute(path)),
      name_("file store at " + path),
      replay_(std::move(replay)) {
  const auto refuse = [this](const std::string& why) {
    return Error(ErrorCode::invalid_argument, name_ + " cannot be opened: " + why);
  };
  file_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW, 0600);
  if (file_ < 0) throw refuse(errno == ELOOP ? "it is a symbolic link" : reason(errno));
  try {
    struct stat state {};
    if (::fstat(file_, &state) != 0) throw refuse(reason(errno));
    if (!S_ISREG(state.st_mode)) throw refuse("it is not a regular file");
    // A user who may write to the file decides which addresses the workers connect to.
    if (state.st_uid != ::geteuid()) {
      throw refuse("it belongs to user " + std::to_string(state.st_uid) +
                   ", this process runs as " + std::to_string(::geteuid()));
    }
    if ((state.st_mode & (S_IRWXG | S_IRWXO)) != 0)
      throw refuse("its mode is " + octal(state.st_mode & 07777) +
                   ", so others may use it; only 0600 is allowed");
    inode_ = state.st_ino;
    device_ = state.st_dev;
    lock(LOCK_EX, Deadline::max());
    open_header();
    replay_new();
    unlock();
  } catch (...) {
    ::close(file_);
    throw;
  }
}

FileLog::~FileLog() { ::close(file_); }

void FileLog::open_header() {
  const std::uint64_t size = size_checked();
  std::array<char, kMagic.size()> header{};
  const std::size_t there = std::min<std::size_t>(size, header.size());
  read_at(0, header.data(), there);
  // A process that died while it created the file may have left part of the header.
  if (std::string_view(header.data(), there) != kMagic.substr(0, there)) {
    throw Error(
        ErrorCode::invalid_argument,
        name_ + " cannot be opened: this file is not a stitch store, or one of another version");
  }
  if (there < header.size()) write_at(0, kMagic);
  end_ = kMagic.size();
}

void FileLog::catch_up(Deadline deadline) {
  // Sees every record that was complete when this began: end_ is always the end of a complete one.
  if (size_checked() == end_) return;
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
    end_ = next;
    replay_(payload);
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
  const auto length = static_cast<std::uint32_t>(payload.size());
  const std::uint64_t sum = checksum(payload);
  std::string record(kPrefixBytes, '\0');
  std::memcpy(record.data(), &length, sizeof(length));
  std::memcpy(record.data() + sizeof(length), &sum, sizeof(sum));
  record += payload;
  // Bytes after the last good record were written by a process that died: it held the lock that we
  // hold now.
  if (log_.size_checked() != log_.end_ &&
      ::ftruncate(log_.file_, static_cast<off_t>(log_.end_)) != 0) {
    throw Error(ErrorCode::disconnected, log_.name_ + " cannot be written: " + reason(errno));
  }
  log_.write_at(log_.end_, record);
  log_.end_ += record.size();
  log_.replay_(payload);
}

void FileLog::lock(int operation, Deadline deadline) {
  // The lock is held for one short operation, unless its holder is stopped: so this waits, with a
  // limit.
  const auto began = std::chrono::steady_clock::now();
  const auto give_up = std::clamp(deadline, began + kShortestLockWait, began + kLockTimeout);
  std::chrono::microseconds pause{20};
  while (::flock(file_, operation | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
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
}

void FileLog::unlock() noexcept { ::flock(file_, LOCK_UN); }

std::uint64_t FileLog::size_checked() const {
  struct stat open_file {};
  struct stat at_path {};
  if (::fstat(file_, &open_file) != 0)
    throw Error(ErrorCode::disconnected, name_ + " cannot be read: " + reason(errno));
  if (open_file.st_nlink == 0 || ::lstat(path_.c_str(), &at_path) != 0 ||
      at_path.st_ino != inode_ || at_path.st_dev != device_) {
    throw Error(ErrorCode::disconnected, name_ + " is gone: the file was deleted or replaced");
  }
  const auto size = static_cast<std::uint64_t>(open_file.st_size);
  if (size < end_) {
    throw Error(ErrorCode::disconnected, name_ + " is gone: the file was cut to " +
                                             std::to_string(size) + " bytes, it had " +
                                             std::to_string(end_));
  }
  return size;
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
