#pragma once

#include <memory>

#include "stitch/transport/store/store.h"

namespace stitch::transport {

// A store inside one process, for clusters within one program.
[[nodiscard]] std::shared_ptr<Store> make_hash_store();

}  // namespace stitch::transport
