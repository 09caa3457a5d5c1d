// Libraries that stand in for CUDA's and NCCL's when the loader is tested:
//   PRETEND_RUNTIME   a runtime whose cudaGetDeviceCount() returns PRETEND_STATUS and
//                     PRETEND_DEVICES
//   PRETEND_NCCL      an NCCL whose version is in the variable PRETEND_NCCL_VERSION
#include <cstdlib>

#ifdef PRETEND_RUNTIME
extern "C" int cudaGetDeviceCount(int* count) {
  *count = PRETEND_DEVICES;
  return PRETEND_STATUS;
}
extern "C" int cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return 0;
}
extern "C" const char* cudaGetErrorString(int) { return "the driver is insufficient"; }
extern "C" const char* cudaGetErrorName(int) { return "cudaErrorInsufficientDriver"; }
#endif

#ifdef PRETEND_NCCL
extern "C" int ncclGetVersion(int* version) {
  const char* const text = std::getenv("PRETEND_NCCL_VERSION");
  *version = text == nullptr ? 22809 : std::atoi(text);
  return 0;
}
extern "C" const char* ncclGetErrorString(int) { return "internal error"; }
#endif
