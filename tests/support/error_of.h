#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <utility>

#include "stitch/base/error.h"

namespace stitch::testing {

// What nearly every test names, for `using namespace stitch::testing`.
using namespace std::chrono_literals;  // NOLINT(google-build-using-namespace)
using stitch::Error;
using stitch::ErrorCode;

// The Error that `call` throws. The test fails when it throws none.
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

// Whether an error has this code and contains this text.
[[nodiscard]] inline ::testing::AssertionResult has_text(const Error& error, ErrorCode code,
                                                         const std::string& text) {
  if (error.code() == code && std::string(error.what()).find(text) != std::string::npos)
    return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << to_string(error.code()) << ": " << error.what()
                                       << "\nexpected " << to_string(code) << ": " << text;
}

}  // namespace stitch::testing
