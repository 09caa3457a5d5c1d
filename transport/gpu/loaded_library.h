#pragma once

#include <string>
#include <vector>

namespace stitch::transport::gpu {

// A shared library that was found at run time, and stays loaded until the process ends: CUDA's and
// NCCL's may not be unloaded. Copies name the same library. Any thread may use one.
class LoadedLibrary {
 public:
  // The first of these file names that the process has already loaded (a torch wheel brings
  // libraries of its own), else the first that can be loaded. Not loaded: why_not() says so.
  static LoadedLibrary find(const std::vector<std::string>& names);

  [[nodiscard]] bool loaded() const { return handle_ != nullptr; }
  // The one of the names that it was found by, and the file it came from.
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const std::string& path() const { return path_; }
  // "the library libnccl.so.2 is not there: <what the linker said>"; empty when it is loaded.
  [[nodiscard]] const std::string& why_not() const { return why_not_; }
  // Null when the library has no function of that name.
  [[nodiscard]] void* function(const char* name) const;

 private:
  void* handle_ = nullptr;
  std::string name_, path_;
  std::string why_not_ = "it was not looked for";
};

// Fills a table's functions by name, and notes the first name that the library lacks.
class TableFiller {
 public:
  explicit TableFiller(const LoadedLibrary& library) : library_(library) {}

  template <typename Function>
  void fill(Function*& entry, const char* name) {
    entry = reinterpret_cast<Function*>(library_.function(name));
    if (entry == nullptr && missing_.empty()) missing_ = name;
  }
  // Empty when all were there, else "<path> has no function <name>".
  [[nodiscard]] std::string why_not() const {
    return missing_.empty() ? "" : library_.path() + " has no function " + missing_;
  }

 private:
  const LoadedLibrary& library_;
  std::string missing_;
};

}  // namespace stitch::transport::gpu
