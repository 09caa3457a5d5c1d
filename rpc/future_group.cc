#include "stitch/rpc/future_group.h"

namespace stitch::detail {

std::exception_ptr GroupCountdown::failure() const {
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
