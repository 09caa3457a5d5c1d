# The CUDA toolkit, for what is compiled with it: kernels, and the tests that compare stitch's own declarations with CUDA's and
# NCCL's. Nothing of stitch links CUDA or NCCL: programs look them up when they run (transport/gpu/gpu_libraries.h).
#   STITCH_CUDA AUTO   what needs the toolkit is built where it is found
#               ON     it has to be there
#               OFF    not built
# Afterwards STITCH_CUDA_FOUND says whether toolkit and NCCL are there, STITCH_NVCC is the compiler, and the target
# stitch_cuda_headers has the headers. The language CUDA is not enabled.
set(STITCH_CUDA "AUTO" CACHE STRING "what needs the CUDA toolkit: AUTO, ON or OFF")
set_property(CACHE STITCH_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT STITCH_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "STITCH_CUDA is \"${STITCH_CUDA}\"; it can be AUTO, ON or OFF")
endif()
set(STITCH_CUDA_FOUND FALSE)
if(STITCH_CUDA STREQUAL "OFF")
  return()
endif()

set(stitch_cuda_hints "${CUDAToolkit_ROOT}" "$ENV{CUDAToolkit_ROOT}" "$ENV{CUDA_HOME}" "$ENV{CUDA_PATH}")
list(REMOVE_ITEM stitch_cuda_hints "")
find_program(STITCH_NVCC nvcc HINTS ${stitch_cuda_hints} PATHS /usr/local/cuda PATH_SUFFIXES bin)
set(stitch_cuda_missing "")
if(STITCH_NVCC)
  file(REAL_PATH "${STITCH_NVCC}" stitch_nvcc)
  cmake_path(GET stitch_nvcc PARENT_PATH stitch_cuda_root)
  cmake_path(GET stitch_cuda_root PARENT_PATH stitch_cuda_root)
  list(APPEND stitch_cuda_hints "${stitch_cuda_root}")
  execute_process(COMMAND "${STITCH_NVCC}" --version OUTPUT_VARIABLE stitch_nvcc_version ERROR_QUIET)
  string(REGEX REPLACE ".*release ([0-9]+\\.[0-9]+).*" "\\1" STITCH_CUDA_VERSION "${stitch_nvcc_version}")
else()
  list(APPEND stitch_cuda_missing "the compiler nvcc")
endif()
# Torch carries a header nccl.h of its own kind in torch/csrc; the suffixes do not reach it.
find_path(STITCH_CUDA_INCLUDE_DIR cuda_runtime_api.h HINTS ${stitch_cuda_hints} PATHS /usr/local/cuda PATH_SUFFIXES include)
find_path(STITCH_NCCL_INCLUDE_DIR nccl.h HINTS ${stitch_cuda_hints} "$ENV{NCCL_ROOT}" PATHS /usr/local/cuda PATH_SUFFIXES include)
mark_as_advanced(STITCH_NVCC STITCH_CUDA_INCLUDE_DIR STITCH_NCCL_INCLUDE_DIR)
if(NOT STITCH_CUDA_INCLUDE_DIR)
  list(APPEND stitch_cuda_missing "the header cuda_runtime_api.h")
endif()
if(NOT STITCH_NCCL_INCLUDE_DIR)
  list(APPEND stitch_cuda_missing "the header nccl.h")
endif()
if(stitch_cuda_missing)
  list(JOIN stitch_cuda_missing ", " stitch_cuda_missing)
  if(STITCH_CUDA STREQUAL "ON")
    message(FATAL_ERROR "STITCH_CUDA is ON, but this is missing: ${stitch_cuda_missing}. "
      "Install CUDA 13.0 and NCCL 2.28, or name their folder in CUDAToolkit_ROOT (NCCL's in NCCL_ROOT).")
  endif()
  message(STATUS "CUDA: not used to build, missing: ${stitch_cuda_missing}")
  return()
endif()

set(STITCH_CUDA_FOUND TRUE)
file(STRINGS "${STITCH_NCCL_INCLUDE_DIR}/nccl.h" stitch_nccl_version REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) ")
string(REGEX MATCHALL "[0-9]+" stitch_nccl_version "${stitch_nccl_version}")
list(JOIN stitch_nccl_version "." STITCH_NCCL_VERSION)
add_library(stitch_cuda_headers INTERFACE)
target_include_directories(stitch_cuda_headers SYSTEM INTERFACE "${STITCH_CUDA_INCLUDE_DIR}" "${STITCH_NCCL_INCLUDE_DIR}")
message(STATUS "CUDA ${STITCH_CUDA_VERSION}, NCCL ${STITCH_NCCL_VERSION}: ${STITCH_CUDA_INCLUDE_DIR}")
