# CUDA's headers, which the bridge to libtorch's streams and the tests that compare stitch's own declarations with CUDA's and NCCL's are
# compiled with. Nothing of stitch links CUDA or NCCL: programs look them up when they run (transport/gpu/gpu_libraries.h).
#   STITCH_CUDA AUTO   parts that need the headers are built where these are found
#               ON     CUDA's headers have to be there
#               OFF    such parts are not built
# Afterwards the target stitch_cuda_headers has CUDA's headers, and stitch_nccl_headers NCCL's: each exists where its headers are.
# Only tests use NCCL's.
set(STITCH_CUDA "AUTO" CACHE STRING "parts that need CUDA's headers: AUTO, ON or OFF")
set_property(CACHE STITCH_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT STITCH_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "STITCH_CUDA is \"${STITCH_CUDA}\"; it can be AUTO, ON or OFF")
endif()
if(STITCH_CUDA STREQUAL "OFF")
  return()
endif()

set(stitch_cuda_hints "${CUDAToolkit_ROOT}" "$ENV{CUDAToolkit_ROOT}" "$ENV{CUDA_HOME}" "$ENV{CUDA_PATH}")
list(REMOVE_ITEM stitch_cuda_hints "")
# Torch carries a header nccl.h of its own kind in torch/csrc; the suffixes do not reach it.
find_path(STITCH_CUDA_INCLUDE_DIR cuda_runtime_api.h HINTS ${stitch_cuda_hints} PATHS /usr/local/cuda PATH_SUFFIXES include)
find_path(STITCH_NCCL_INCLUDE_DIR nccl.h HINTS ${stitch_cuda_hints} "$ENV{NCCL_ROOT}" PATHS /usr/local/cuda PATH_SUFFIXES include)
mark_as_advanced(STITCH_CUDA_INCLUDE_DIR STITCH_NCCL_INCLUDE_DIR)
if(NOT STITCH_CUDA_INCLUDE_DIR)
  if(STITCH_CUDA STREQUAL "ON")
    message(FATAL_ERROR "STITCH_CUDA is ON, but the header cuda_runtime_api.h is missing. "
      "Install CUDA 13.0 and NCCL 2.28, or name their folder in CUDAToolkit_ROOT (NCCL's in NCCL_ROOT).")
  endif()
  message(STATUS "CUDA: not used to build, the header cuda_runtime_api.h is missing")
  return()
endif()
add_library(stitch_cuda_headers INTERFACE)
target_include_directories(stitch_cuda_headers SYSTEM INTERFACE "${STITCH_CUDA_INCLUDE_DIR}")
file(STRINGS "${STITCH_CUDA_INCLUDE_DIR}/cuda_runtime_api.h" stitch_cuda_version REGEX "^#define CUDART_VERSION ")
string(REGEX MATCH "[0-9]+" stitch_cuda_number "${stitch_cuda_version}")
math(EXPR stitch_cuda_major "0${stitch_cuda_number} / 1000")
math(EXPR stitch_cuda_minor "0${stitch_cuda_number} % 1000 / 10")
set(stitch_nccl_text "no header nccl.h: NCCL's declarations are not compared with stitch's")
if(STITCH_NCCL_INCLUDE_DIR)
  file(STRINGS "${STITCH_NCCL_INCLUDE_DIR}/nccl.h" stitch_nccl_version REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) ")
  string(REGEX MATCHALL "[0-9]+" stitch_nccl_version "${stitch_nccl_version}")
  list(JOIN stitch_nccl_version "." stitch_nccl_version)
  set(stitch_nccl_text "NCCL ${stitch_nccl_version}")
  add_library(stitch_nccl_headers INTERFACE)
  target_include_directories(stitch_nccl_headers SYSTEM INTERFACE "${STITCH_NCCL_INCLUDE_DIR}")
endif()
message(STATUS "CUDA ${stitch_cuda_major}.${stitch_cuda_minor}, ${stitch_nccl_text}: ${STITCH_CUDA_INCLUDE_DIR}")
