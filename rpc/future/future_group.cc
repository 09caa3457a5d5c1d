#include "stitch/rpc/future/future_group.h"

#include <string>

namespace stitch::detail {

void throw_empty_member(const char* operation, std::size_t index) {
  throw Error(ErrorCode::invalid_argument,
              std::string(operation) + " was given an empty future, at index " +
                  std::to_string(index) + ": one made by default, or one moved from");
}

std::exception_ptr GroupCountdown::failure() const noexcept {
  const std::size_t failures = failures_.load();
  if (failures < 2) return first_;
  const Error first = to_error(first_);
  const std::size_t others = failures - 1;
  return std::make_exception_ptr(
      Error(first.code(), std::string(first.what()) + " (and " + std::to_string(others) +
                              (others == 1 ? " other failed)" : " others failed)"))
          .with_worker(first.worker())
          .with_function(first.function())
          .with_remote(first.remote()));
}

}  // namespace stitch::detail
