// All functions of the tables, so that the loader finds them; they do nothing. Those that the tests
// ask are defined in pretend_library.cc and win over these.
#include "stitch/transport/gpu/nccl_api.h"

#define STITCH_PRETEND(member, symbol) \
  extern "C" __attribute__((weak, visibility("default"))) int symbol() { return 0; }
#if defined(PRETEND_RUNTIME)
STITCH_CUDA_RUNTIME_FUNCTIONS(STITCH_PRETEND)
#elif defined(PRETEND_DRIVER)
STITCH_CUDA_DRIVER_FUNCTIONS(STITCH_PRETEND)
#elif defined(PRETEND_NCCL)
STITCH_NCCL_FUNCTIONS(STITCH_PRETEND)
#endif
