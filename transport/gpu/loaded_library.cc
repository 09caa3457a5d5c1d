#include "stitch/transport/gpu/loaded_library.h"

#include <dlfcn.h>
#include <link.h>

namespace stitch::transport::gpu {

LoadedLibrary LoadedLibrary::find(const std::vector<std::string>& names) {
  LoadedLibrary found;
  for (const int already : {RTLD_NOLOAD, 0}) {
    for (const std::string& name : names) {
      found.handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | already);
      if (found.handle_ != nullptr) {
        found.name_ = name;
        const link_map* map = nullptr;
        const bool known = dlinfo(found.handle_, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr;
        found.path_ = known && *map->l_name != '\0' ? map->l_name : name;
        found.why_not_.clear();
        return found;
      }
    }
  }
  found.why_not_.clear();
  for (const std::string& name : names) {
    dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);  // for its error, which names what is missing
    const char* const error = dlerror();
    if (!found.why_not_.empty()) found.why_not_ += "; ";
    found.why_not_ +=
        "the library " + name + " is not there: " + (error == nullptr ? "unknown error" : error);
  }
  return found;
}

void* LoadedLibrary::function(const char* name) const {
  return handle_ == nullptr ? nullptr : dlsym(handle_, name);
}

}  // namespace stitch::transport::gpu
