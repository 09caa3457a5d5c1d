#include "stitch/rpc/world/slow_blas.h"

#include <link.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <string_view>
#include <system_error>

namespace stitch::rpc {

std::optional<std::string> slow_blas_among(const std::vector<std::string>& libraries) {
  static constexpr std::array<std::string_view, 5> kQuick{"openblas", "mkl", "blis", "atlas",
                                                          "armpl"};
  for (const auto& library : libraries) {
    if (std::filesystem::path(library).filename().string().rfind("libblas.so", 0) != 0) continue;
    // Debian's libblas.so.3 is a link to the chosen implementation.
    std::error_code error;
    const auto resolved = std::filesystem::canonical(library, error);
    const std::string path = error ? library : resolved.string();
    bool quick = false;
    for (const auto name : kQuick) quick = quick || path.find(name) != std::string::npos;
    if (!quick) return path;
  }
  return std::nullopt;
}

void warn_about_slow_blas() {
  static const bool warned = [] {
    std::vector<std::string> libraries;
    dl_iterate_phdr(
        [](dl_phdr_info* info, std::size_t, void* list) {
          static_cast<std::vector<std::string>*>(list)->emplace_back(info->dlpi_name);
          return 0;
        },
        &libraries);
    const auto slow = slow_blas_among(libraries);
    if (slow) {
      std::fprintf(stderr,
                   "stitch: libtorch computes with the reference BLAS (%s), which is many times "
                   "slower than OpenBLAS; install "
                   "libopenblas0-pthread\n",
                   slow->c_str());
    }
    return slow.has_value();
  }();
  static_cast<void>(warned);
}

}  // namespace stitch::rpc
