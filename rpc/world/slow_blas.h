#pragma once

#include <optional>
#include <string>
#include <vector>

namespace stitch::rpc {

// Of the paths of a program's libraries: that of the BLAS it computes with, links resolved, if that
// is the reference implementation, which is many times slower than OpenBLAS. Nothing for any other,
// and when there is none.
[[nodiscard]] std::optional<std::string> slow_blas_among(const std::vector<std::string>& libraries);

// Says so on stderr, once in the life of the process, when this one computes with a slow BLAS. Any
// thread.
void warn_about_slow_blas();

}  // namespace stitch::rpc
