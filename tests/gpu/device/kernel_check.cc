#include "tests/gpu/device/kernel_check.h"

#include <cstdlib>
#include <cstring>
#include <exception>

#include "stitch/transport/gpu/kernel_table.h"
#include "tests/gpu/device/device_memory.h"

// stitch_gpu_kernel_check: runs the kernels on a device, compares them with references on the host,
// and measures them beside a copy within the device. Needs no torch.
namespace stitch::transport::gpu {
namespace {

constexpr int kSkipped = 77;  // as ctest and scripts/gpu-test have it

constexpr const char* kUsage =
    "usage: stitch_gpu_kernel_check [options]\n"
    "  --kernels FILE  libstitch_kernels.so (default: STITCH_KERNELS, else that of the build)\n"
    "  --device N      the CUDA device (default: 0)\n"
    "  --rounds N      random shapes of each check, and runs of each figure (default: 15)\n"
    "  --megabytes N   size of what is measured (default: 1024); 0: no figures\n"
    "  --json FILE     also writes the result there\n"
    "exit status: 0 all passed, 1 a check failed, 2 an option or a file is wrong, 77 no device\n";

struct Options {
  std::string kernels;
  std::string json;
  int device = 0;
  int rounds = 15;
  std::uint64_t megabytes = 1024;
};

Options parse(int argc, char** argv) {
  Options options;
  if (const char* const chosen = std::getenv("STITCH_KERNELS")) options.kernels = chosen;
#ifdef STITCH_KERNELS_LIBRARY
  if (options.kernels.empty()) options.kernels = STITCH_KERNELS_LIBRARY;
#endif
  const auto number = [](const std::string& option, const char* text, long low, long high) {
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    if (end == text || *end != '\0' || value < low || value > high)
      throw std::invalid_argument(option + " is \"" + text + "\": it takes " + std::to_string(low) +
                                  " to " + std::to_string(high));
    return value;
  };
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--help") {
      std::fputs(kUsage, stdout);
      std::exit(0);
    }
    if (i + 1 == argc)
      throw std::invalid_argument("\"" + option + "\" is unknown or lacks a value");
    const char* const value = argv[++i];
    if (option == "--kernels") {
      options.kernels = value;
    } else if (option == "--json") {
      options.json = value;
    } else if (option == "--device") {
      options.device = static_cast<int>(number(option, value, 0, 1023));
    } else if (option == "--rounds") {
      options.rounds = static_cast<int>(number(option, value, 1, 100000));
    } else if (option == "--megabytes") {
      options.megabytes = static_cast<std::uint64_t>(number(option, value, 0, 1 << 20));
    } else {
      throw std::invalid_argument("option \"" + option + "\" is unknown");
    }
  }
  return options;
}

int run(const Options& options) {
  int devices = 0;
  const cudaError_t found = cudaGetDeviceCount(&devices);
  if (found != cudaSuccess || devices == 0) {
    std::printf("no CUDA device: %s\n",
                found != cudaSuccess ? cudaGetErrorString(found) : "the count is 0");
    return kSkipped;
  }
  if (options.device >= devices)
    throw std::invalid_argument("--device is " + std::to_string(options.device) + ": there are " +
                                std::to_string(devices));
  const KernelLibrary library = load_kernels_from(options.kernels);
  if (library.table == nullptr) throw std::invalid_argument(library.why_not);
  check_cuda(cudaSetDevice(options.device), "cudaSetDevice");

  KernelReport report;
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, options.device), "cudaGetDeviceProperties");
  int driver = 0;
  int runtime = 0;
  check_cuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  check_cuda(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  report.set("device", properties.name);
  report.set("compute_capability",
             std::to_string(properties.major) + "." + std::to_string(properties.minor));
  report.set("cuda_driver", std::to_string(driver));
  report.set("cuda_runtime", std::to_string(runtime));
  report.set("kernels", library.path);
  if (!options.json.empty()) report.keep_in(options.json);

  const KernelCheck check{*library.table, options.device, options.rounds, options.megabytes << 20U,
                          report};
  const int loaded = library.table->load(options.device);
  report.check("load", loaded == 0 ? "" : library.table->describe(loaded));
  if (loaded == 0) {
    check_pack(check);
    check_sparse(check);
    if (options.megabytes > 0) {
      measure_pack(check);
      measure_sparse(check);
    }
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  return report.failures() == 0 ? 0 : 1;
}

}  // namespace
}  // namespace stitch::transport::gpu

int main(int argc, char** argv) {
  try {
    return stitch::transport::gpu::run(stitch::transport::gpu::parse(argc, argv));
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "stitch_gpu_kernel_check: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "stitch_gpu_kernel_check: %s\n", error.what());
    return 1;
  }
}
