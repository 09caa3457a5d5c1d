#pragma once

#include <exception>
#include <new>

#include "stitch/base/error.h"

namespace stitch::transport {

// Runs `work` in a callback of a C library, which exceptions must not leave. An exception of `work`
// is passed to `on_error` as an Error; one of `on_error` is dropped.
template <class Work, class OnError>
void guard_callback(Work work, OnError on_error) noexcept {
  try {
    try {
      work();
    } catch (const Error& error) {
      on_error(error);
    } catch (const std::bad_alloc&) {
      on_error(Error(ErrorCode::overloaded, "there is not enough memory"));
    } catch (...) {
      on_error(to_error(std::current_exception()));
    }
  } catch (...) {
  }
}

}  // namespace stitch::transport
