#pragma once

#include <gtest/gtest.h>

#include <utility>

#include "stitch/base/error.h"

namespace stitch::testing {

// What `call` throws. When it throws nothing, the test fails and the error says so.
template <class Call>
[[nodiscard]] Error error_of(Call&& call) {
  try {
    std::forward<Call>(call)();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(ErrorCode::internal, "nothing was thrown");
}

}  // namespace stitch::testing
