#pragma once

// Marks functions that run on the device and, in the tests, on the host: one source for both.
#if defined(__CUDACC__)
#define STITCH_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define STITCH_HOST_DEVICE inline
#endif
