// A program that loads a library which uses stitch, too: plugin_host PLUGIN. Both are linked with
// libstitch.so, so the library sees the program's worker.
#include <dlfcn.h>
#include <stitch/rpc/worker.h>

#include <cstdio>
#include <string>

namespace {

template <class Function>
Function* symbol(void* library, const char* name) {
  return reinterpret_cast<Function*>(::dlsym(library, name));
}

}  // namespace

int main(int argc, char** argv) {
  const auto self = stitch::init({.name = "host", .rank = 0, .world_size = 1, .user_data = 21});
  void* const plugin = argc < 2 ? nullptr : ::dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (plugin == nullptr) {
    std::fprintf(stderr, "%s\n", ::dlerror());
    return 1;
  }
  const int result = symbol<int(const char*)>(plugin, "call_own_function")("host");
  std::string code = "none";
  try {
    symbol<void()>(plugin, "call_unknown_worker")();
  } catch (const stitch::Error& error) {
    code = to_string(error.code());
  }
  Dl_info library{};
  ::dladdr(reinterpret_cast<const void*>(&stitch::init), &library);
  std::printf("%d %s %s\n", result, code.c_str(), library.dli_fname);
}
