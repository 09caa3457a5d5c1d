#pragma once

#include <memory>
#include <typeinfo>

#include "stitch/rpc/message/sendable.h"

namespace stitch::rpc {

// An object of any type, kept on behalf of others: the result of a function that was asked to keep
// it. Copies share the object; the last one destroys it. Thread contract: as the object.
struct OwnedObject {
  std::shared_ptr<void> object;
  const std::type_info* type = nullptr;
  void (*encode)(OutArchive&, const void* object) = nullptr;  // null when the type cannot be sent

  template <class T>
  [[nodiscard]] static OwnedObject of(std::shared_ptr<T> object) {
    OwnedObject value{std::move(object), &typeid(T), nullptr};
    if constexpr (Sendable<T>) {
      value.encode = [](OutArchive& archive, const void* at) {
        archive(*static_cast<const T*>(at));
      };
    }
    return value;
  }
};

}  // namespace stitch::rpc
