#pragma once

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <string>

namespace stitch_reliability {

// A folder for the logs and the store of a run; removed with its contents by the destructor unless
// keep() was called. Thread contract: one thread.
class RunFolder {
 public:
  RunFolder();
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;
  void keep() { kept_ = true; }
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  bool kept_ = false;
  pid_t maker_;
};

// Starts a process that runs `body`, in the network namespace of that name ("" for that of this
// process), with its standard error in `log`, and exits with what it returns. It dies with this
// process. Throws std::system_error. REQUIRES: this process has no other threads.
[[nodiscard]] pid_t start_process(const std::function<int()>& body,
                                  const std::filesystem::path& log,
                                  const std::string& network_namespace);

// Raises the limit of open files to what the system allows; returns it.
[[nodiscard]] std::size_t raise_file_limit();

// All of a file; "" when there is none.
[[nodiscard]] std::string read_file(const std::filesystem::path& path);

}  // namespace stitch_reliability
