#include "stitch/rpc/message/life_text.h"

#include <exception>

namespace stitch::rpc {

std::string life_text(const WorkerInfo& life, LifeName name) {
  const std::string who =
      name == LifeName::with_id ? to_string(life) : "worker \"" + life.name + "\"";
  return who + " epoch " + std::to_string(life.epoch);
}

Error life_gone(const WorkerInfo& life, const std::string& why, LifeName name) {
  return Error(ErrorCode::disconnected, life_text(life, name) + " is gone" + why)
      .with_worker(life.name);
}

Error error_of_message(const WorkerInfo& from) noexcept {
  return to_error(std::current_exception()).with_prefix("message from " + to_string(from));
}

}  // namespace stitch::rpc
