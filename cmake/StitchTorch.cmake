# Finds libtorch and makes the target stitch_torch. Works alike for Debian's libtorch-dev, for a libtorch archive and for a
# torch wheel (name its torch/ folder, or its torch/share/cmake, in CMAKE_PREFIX_PATH). The package files of torch itself are
# not asked: those of a CUDA build insist on a CUDA toolkit even in programs that use the CPU only.
set(stitch_torch_roots "")
foreach(prefix IN LISTS CMAKE_PREFIX_PATH)
  if(prefix MATCHES "/share/cmake/?$")
    get_filename_component(prefix "${prefix}/../.." ABSOLUTE)
    list(APPEND stitch_torch_roots "${prefix}")
  endif()
endforeach()
find_path(STITCH_TORCH_INCLUDE_DIR NAMES ATen/ATen.h HINTS ${stitch_torch_roots} PATH_SUFFIXES include REQUIRED)
get_filename_component(stitch_torch_root "${STITCH_TORCH_INCLUDE_DIR}" DIRECTORY)
# The libraries beside the headers, never those of another torch on the machine.
find_library(STITCH_TORCH_CPU_LIBRARY NAMES torch_cpu HINTS "${stitch_torch_root}" PATH_SUFFIXES lib REQUIRED)
find_library(STITCH_C10_LIBRARY NAMES c10 HINTS "${stitch_torch_root}" PATH_SUFFIXES lib REQUIRED)
# Those of a libtorch with CUDA. Only programs that use devices link them (stitch_torch_cuda).
find_library(STITCH_C10_CUDA_LIBRARY NAMES c10_cuda HINTS "${stitch_torch_root}" PATH_SUFFIXES lib NO_DEFAULT_PATH)
find_library(STITCH_TORCH_CUDA_LIBRARY NAMES torch_cuda HINTS "${stitch_torch_root}" PATH_SUFFIXES lib NO_DEFAULT_PATH)
mark_as_advanced(STITCH_C10_CUDA_LIBRARY STITCH_TORCH_CUDA_LIBRARY)
mark_as_advanced(STITCH_TORCH_INCLUDE_DIR STITCH_TORCH_CPU_LIBRARY STITCH_C10_LIBRARY)

# Read for messages, and to refuse a stitch built for another torch; the sources look for features instead.
set(stitch_torch_version_header "${STITCH_TORCH_INCLUDE_DIR}/torch/headeronly/version.h")
if(NOT EXISTS "${stitch_torch_version_header}")
  set(stitch_torch_version_header "${STITCH_TORCH_INCLUDE_DIR}/torch/csrc/api/include/torch/version.h")
endif()
file(STRINGS "${stitch_torch_version_header}" stitch_torch_version_lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
string(REGEX MATCHALL "[0-9]+" STITCH_TORCH_VERSION "${stitch_torch_version_lines}")
list(JOIN STITCH_TORCH_VERSION "." STITCH_TORCH_VERSION)

if(NOT TARGET stitch_torch)
  add_library(stitch_torch INTERFACE IMPORTED GLOBAL)
  target_include_directories(stitch_torch SYSTEM INTERFACE
    "${STITCH_TORCH_INCLUDE_DIR}" "${STITCH_TORCH_INCLUDE_DIR}/torch/csrc/api/include")
  target_link_libraries(stitch_torch INTERFACE "${STITCH_TORCH_CPU_LIBRARY}" "${STITCH_C10_LIBRARY}" Threads::Threads)
  target_compile_options(stitch_torch INTERFACE "$<$<COMPILE_LANG_AND_ID:CXX,Clang>:SHELL:-include ${CMAKE_CURRENT_LIST_DIR}/clang_vector.h>")
  # A torch that logs through glog has its calls in its headers.
  set(stitch_torch_macros "${STITCH_TORCH_INCLUDE_DIR}/torch/headeronly/macros/cmake_macros.h")
  if(NOT EXISTS "${stitch_torch_macros}")
    set(stitch_torch_macros "${STITCH_TORCH_INCLUDE_DIR}/c10/macros/cmake_macros.h")
  endif()
  file(STRINGS "${stitch_torch_macros}" stitch_torch_glog REGEX "^#define C10_USE_GLOG")
  if(stitch_torch_glog)
    find_library(STITCH_GLOG_LIBRARY NAMES glog REQUIRED)
    mark_as_advanced(STITCH_GLOG_LIBRARY)
    target_link_libraries(stitch_torch INTERFACE "${STITCH_GLOG_LIBRARY}")
  endif()
  message(STATUS "torch ${STITCH_TORCH_VERSION}: ${STITCH_TORCH_CPU_LIBRARY}")
endif()
