# What stitch stands on. Everything is looked up on this machine; nothing is downloaded. An installed stitch reads this file
# again for the programs that use it, so that both see the same targets:
#   stitch_torch            libtorch (see StitchTorch.cmake)
#   stitch_tensorpipe       TensorPipe
#   PkgConfig::LIBUV, PkgConfig::SODIUM, PkgConfig::CRYPTO (where there is one), cereal::cereal, Threads::Threads
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(LIBUV REQUIRED IMPORTED_TARGET libuv)
pkg_check_modules(SODIUM REQUIRED IMPORTED_TARGET libsodium)
# Optional: a quicker AES-256-GCM (transport/wire/aes_gcm.h).
pkg_check_modules(CRYPTO IMPORTED_TARGET libcrypto)
find_package(cereal REQUIRED)

# A torch wheel carries and exports symbols of its own copies of TensorPipe and libuv. The dynamic linker takes the first
# library that defines a symbol, so ours have to come before torch's in every program: as link options they precede all
# libraries of the line.
find_library(STITCH_TENSORPIPE_LIBRARY NAMES tensorpipe REQUIRED)
# Headers that stand beside that library: a torch wheel has headers of a TensorPipe of its own, which fit no library but its own.
get_filename_component(stitch_tensorpipe_lib_dir "${STITCH_TENSORPIPE_LIBRARY}" DIRECTORY)
find_path(STITCH_TENSORPIPE_INCLUDE_DIR NAMES tensorpipe/tensorpipe.h
  HINTS "${stitch_tensorpipe_lib_dir}/../include" "${stitch_tensorpipe_lib_dir}/../../include" NO_DEFAULT_PATH)
find_path(STITCH_TENSORPIPE_INCLUDE_DIR NAMES tensorpipe/tensorpipe.h REQUIRED)
find_library(STITCH_LIBUV_LIBRARY NAMES uv REQUIRED)
mark_as_advanced(STITCH_TENSORPIPE_LIBRARY STITCH_TENSORPIPE_INCLUDE_DIR STITCH_LIBUV_LIBRARY)
if(NOT TARGET stitch_tensorpipe)
  add_library(stitch_tensorpipe INTERFACE IMPORTED GLOBAL)
  target_include_directories(stitch_tensorpipe SYSTEM INTERFACE "${STITCH_TENSORPIPE_INCLUDE_DIR}")
  target_link_libraries(stitch_tensorpipe INTERFACE "${STITCH_TENSORPIPE_LIBRARY}")
  target_link_options(stitch_tensorpipe INTERFACE
    "SHELL:-Wl,--push-state,--no-as-needed ${STITCH_TENSORPIPE_LIBRARY} ${STITCH_LIBUV_LIBRARY} -Wl,--pop-state")
endif()

include("${CMAKE_CURRENT_LIST_DIR}/StitchTorch.cmake")
