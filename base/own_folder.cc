#include "stitch/base/own_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "stitch/base/errno_text.h"
#include "stitch/base/error.h"
#include "stitch/base/signals.h"

namespace stitch::base {

Descriptor open_own_folder(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();  // a link would be followed
  Descriptor folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat state {};
  if (!folder || ::fstat(folder.get(), &state) != 0) {
    throw Error(ErrorCode::invalid_argument,
                errno == ENOTDIR ? "it is no folder, or a link to one" : errno_text(errno));
  }
  if (state.st_uid != ::geteuid() && state.st_uid != 0) {
    throw Error(ErrorCode::invalid_argument, "it belongs to user " + std::to_string(state.st_uid) +
                                                 "; allowed: user " + std::to_string(::geteuid()) +
                                                 " and root");
  }
  if ((state.st_mode & (S_IWGRP | S_IWOTH)) != 0)
    throw Error(ErrorCode::invalid_argument, "other users may write in it: chmod go-w");
  return folder;
}

Descriptor make_file(int folder, const std::string& name) {
  if (::unlinkat(folder, name.c_str(), 0) != 0 && errno != ENOENT) return {};
  return Descriptor(::openat(folder, name.c_str(),
                             O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                             S_IRUSR | S_IWUSR));
}

bool write_file(int folder, const std::string& name, std::string_view text) {
  const FileSizeSignalBlocked blocked;
  const std::string unfinished = name + '.' + std::to_string(::getpid()) + ".part";
  const Descriptor file = make_file(folder, unfinished);
  if (!file) return false;
  bool written = true;
  while (written && !text.empty()) {
    const ssize_t now = ::write(file.get(), text.data(), text.size());
    if (now > 0) text.remove_prefix(static_cast<std::size_t>(now));
    written = now > 0 || (now < 0 && errno == EINTR);
  }
  if (written && ::renameat(folder, unfinished.c_str(), folder, name.c_str()) == 0) return true;
  const int why = errno;
  ::unlinkat(folder, unfinished.c_str(), 0);
  errno = why;
  return false;
}

}  // namespace stitch::base
