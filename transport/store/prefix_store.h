#pragma once

#include <memory>
#include <string>

#include "stitch/transport/store/store.h"

namespace stitch::transport {

// A view of another store in which every key starts with "prefix/". Keeps the other store alive.
[[nodiscard]] std::shared_ptr<Store> make_prefix_store(std::string prefix,
                                                       std::shared_ptr<Store> store);

}  // namespace stitch::transport
