#pragma once

#include <memory>
#include <optional>

#include "stitch/base/error.h"
#include "stitch/base/unique_function.h"

namespace stitch::rref {

// Called once when the creation of an object has ended: with the object, which lives at least as
// long as the copy it keeps, or with the error of the creation. User code may run in it: no lock is
// held.
using Waiter = base::UniqueFunction<void(const std::shared_ptr<void>& object,
                                         const std::optional<Error>& failure)>;

}  // namespace stitch::rref
