#include "stitch/dist_optim/files/tensor_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <utility>

#include "stitch/base/descriptor.h"
#include "stitch/base/errno_text.h"
#include "stitch/base/error.h"
#include "stitch/base/own_folder.h"
#include "stitch/base/printable.h"
#include "stitch/base/random.h"
#include "stitch/base/signals.h"
#include "stitch/dist_optim/files/file_tensors.h"

namespace stitch {

namespace fs = std::filesystem;

namespace {

[[noreturn]] void refuse_errno(const char* what) {
  files::refuse(std::string("it cannot be ") + what + ": " + base::errno_text(errno));
}

// Runs `task`, whose errors begin with the path then.
template <class Task>
auto about(const fs::path& path, const Task& task) {
  try {
    return task();
  } catch (const Error& error) {
    throw error.with_prefix(base::printable(path.string()));
  } catch (const std::exception& error) {  // of libtorch, or of a container, for want of memory
    const std::string why = error.what();
    throw Error(ErrorCode::invalid_argument,
                base::printable(path.string()) + ": its tensors cannot be made: " +
                    base::printable(why.substr(0, std::min<std::size_t>(why.find('\n'), 200))));
  }
}

bool is_pt(const fs::path& path) {
  // The system would take what stands before it for the name.
  if (path.native().find('\0') != std::string::npos) files::refuse("its path has a NUL");
  const auto ending = path.extension();
  if (ending != ".pt" && ending != ".safetensors")
    files::refuse("its ending is neither .safetensors nor .pt");
  return ending == ".pt";
}

// A new file that takes the place of an old one at the end, or leaves nothing.
class NewFile {
 public:
  explicit NewFile(const fs::path& path)
      : name_(path.filename()),
        unfinished_(name_ + '.' + std::to_string(base::random_number()) + ".part") {
    const fs::path folder = path.has_parent_path() ? path.parent_path() : ".";
    folder_ = base::Descriptor(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!folder_) refuse_errno("written, as its folder cannot be opened");
    file_ = base::make_file(folder_.get(), unfinished_);
    if (!file_) refuse_errno("written");
  }
  ~NewFile() {
    if (file_) ::unlinkat(folder_.get(), unfinished_.c_str(), 0);
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(const void* data, std::size_t size) {
    const base::FileSizeSignalBlocked blocked;
    const auto* at = static_cast<const std::byte*>(data);
    while (size > 0) {
      const ::ssize_t written = ::write(file_.get(), at, size);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) refuse_errno("written completely");
      at += written;
      size -= static_cast<std::size_t>(written);
    }
  }
  void publish() {
    if (::fsync(file_.get()) != 0) refuse_errno("written to the disk");
    if (::renameat(folder_.get(), unfinished_.c_str(), folder_.get(), name_.c_str()) != 0)
      refuse_errno("put in place");
    file_ = base::Descriptor();
    if (::fsync(folder_.get()) != 0) refuse_errno("put in place on the disk");
  }

 private:
  const std::string name_;
  const std::string unfinished_;
  base::Descriptor folder_;
  base::Descriptor file_;
};

files::FileBytes map_file(const fs::path& path) {
  const base::Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat state {};
  if (!file || ::fstat(file.get(), &state) != 0) refuse_errno("read");
  if (!S_ISREG(state.st_mode)) files::refuse("it is not a regular file");
  const auto size = static_cast<std::size_t>(state.st_size);
  if (size == 0) files::refuse("it is empty");
  // Pages that are written to are copies; memory for all of them is not reserved.
  void* const at =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file.get(), 0);
  if (at == MAP_FAILED) refuse_errno("mapped");
  return {{static_cast<std::byte*>(at), size},
          std::shared_ptr<void>(at, [size](void* mapped) { ::munmap(mapped, size); })};
}

}  // namespace

void save(const fs::path& path, const std::map<std::string, at::Tensor>& tensors) {
  about(path, [&] {
    const bool pt = is_pt(path);
    files::expect_writable(tensors);
    NewFile file(path);
    const files::Sink out = [&](const void* data, std::size_t size) { file.write(data, size); };
    pt ? files::write_pt(tensors, out) : files::write_safetensors(tensors, out);
    file.publish();
  });
}

std::map<std::string, at::Tensor> load(const fs::path& path) {
  return about(path, [&] {
    const bool pt = is_pt(path);
    const files::FileBytes file = map_file(path);
    return pt ? files::read_pt(file) : files::read_safetensors(file);
  });
}

}  // namespace stitch
