#include "stitch/rref/files/disk_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <exception>
#include <utility>

#include "stitch/base/errno_text.h"
#include "stitch/base/own_folder.h"
#include "stitch/base/printable.h"
#include "stitch/base/random.h"
#include "stitch/base/signals.h"

namespace stitch::files {

namespace fs = std::filesystem;

namespace {

[[noreturn]] void refuse_errno(const char* what) {
  refuse(std::string("it cannot be ") + what + ": " + base::errno_text(errno));
}

}  // namespace

std::string Checksum::text() {
  std::array<unsigned char, kBytes> sum{};
  crypto_generichash_final(&state_, sum.data(), sum.size());
  std::string text(2 * kBytes + 1, '\0');
  sodium_bin2hex(text.data(), text.size(), sum.data(), sum.size());
  text.pop_back();
  return text;
}

NewFile::NewFile(const fs::path& path)
    : name_(path.filename()),
      unfinished_(name_.substr(0, NAME_MAX - 26) + '.' + std::to_string(base::random_number()) +
                  ".part") {
  const fs::path folder = path.has_parent_path() ? path.parent_path() : ".";
  folder_ = base::Descriptor(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder_) refuse_errno("written, as its folder cannot be opened");
  file_ = base::make_file(folder_.get(), unfinished_);
  if (!file_) refuse_errno("written");
}
NewFile::~NewFile() {
  if (file_) ::unlinkat(folder_.get(), unfinished_.c_str(), 0);
}

void NewFile::write(const void* data, std::size_t size) {
  const base::FileSizeSignalBlocked blocked;
  const auto* at = static_cast<const std::byte*>(data);
  while (size > 0) {
    const ::ssize_t written = ::write(file_.get(), at, size);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) refuse_errno("written completely");
    // The disk begins now, before fsync; publish() notices a failure.
    ::sync_file_range(file_.get(), written_, written, SYNC_FILE_RANGE_WRITE);
    written_ += written;
    at += written;
    size -= static_cast<std::size_t>(written);
  }
}

void NewFile::publish() {
  if (::fsync(file_.get()) != 0) refuse_errno("written to the disk");
  if (::renameat(folder_.get(), unfinished_.c_str(), folder_.get(), name_.c_str()) != 0)
    refuse_errno("put in place");
  file_ = base::Descriptor();
  if (::fsync(folder_.get()) != 0) refuse_errno("put in place on the disk");
}

FileBytes map_file(const fs::path& path) {
  const base::Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat state {};
  if (!file || ::fstat(file.get(), &state) != 0) refuse_errno("read");
  if (!S_ISREG(state.st_mode)) refuse("it is not a regular file");
  const auto size = static_cast<std::size_t>(state.st_size);
  if (size == 0) refuse("it is empty");
  // Pages that are written to are copies; memory for all of them is not reserved.
  void* const at =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file.get(), 0);
  if (at == MAP_FAILED) refuse_errno("mapped");
  return {{static_cast<std::byte*>(at), size},
          std::shared_ptr<void>(at, [size](void* mapped) { ::munmap(mapped, size); })};
}

void drop_pages(const FileBytes& file, const void* data, std::size_t size) {
  const auto at = static_cast<std::size_t>(static_cast<const std::byte*>(data) - file.bytes.data());
  if (at >= file.bytes.size()) return;
  const std::size_t in_page = at % static_cast<std::size_t>(::getpagesize());
  ::madvise(file.bytes.data() + (at - in_page), in_page + size, MADV_DONTNEED);
}

Error about_path(const fs::path& path, const std::exception& error) {
  const std::string begin = base::printable(path.string());
  if (const auto* const known = dynamic_cast<const Error*>(&error))
    return known->with_prefix(begin);
  const std::string why = error.what();  // of libtorch, or of a container, for want of memory
  return Error(ErrorCode::invalid_argument,
               begin + ": its tensors cannot be made: " +
                   base::printable(why.substr(0, std::min<std::size_t>(why.find('\n'), 200))));
}

}  // namespace stitch::files
