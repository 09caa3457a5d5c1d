#include "stitch/rpc/message/worker_info.h"

#include "stitch/base/hash.h"

#include <algorithm>
#include <cctype>

namespace stitch {

std::string to_string(const WorkerInfo& info) {
  return "worker \"" + info.name + "\" (id " + std::to_string(info.id.value()) + ")";
}

bool is_worker_name(const std::string& name) {
  constexpr std::size_t kMaxCharacters = 127;
  return !name.empty() && name.size() <= kMaxCharacters &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_' ||
                  c == ':' || c == '.';
         });
}

}  // namespace stitch

std::size_t std::hash<stitch::WorkerInfo>::operator()(
    const stitch::WorkerInfo& info) const noexcept {
  return stitch::base::hash_of(std::hash<std::string>{}(info.name), info.epoch, info.id.value());
}
