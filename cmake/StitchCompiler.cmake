# How everything of this project is compiled.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)

# One precompiled torch header serves libraries and programs alike only if both are compiled with the same flags, so
# -fPIC is named here for all instead of CMake's choice of -fPIC for libraries and -fPIE for programs.
set(CMAKE_POSITION_INDEPENDENT_CODE OFF)
add_compile_options(-fPIC -fno-semantic-interposition)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "Debug, RelWithDebInfo or Release" FORCE)
endif()
# Line tables are what a backtrace needs; full debug information of torch templates makes each program 100 MB larger.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1 -DNDEBUG")
# The library is optimized in every build. Programs of the preset dev, tests among them, are not: compiling them takes half of a build.
set(STITCH_PROGRAM_OPTIONS "")
if(STITCH_SANITIZE)
  set(CMAKE_CXX_FLAGS_DEBUG "-O1 -g1")
else()
  set(CMAKE_CXX_FLAGS_DEBUG "-O2 -g1")
  set(STITCH_PROGRAM_OPTIONS "$<$<CONFIG:Debug>:-O0>")
endif()

# lld links a program that loads libtorch in a tenth of the time of ld.bfd.
find_program(STITCH_LLD ld.lld)
mark_as_advanced(STITCH_LLD)
if(STITCH_LLD AND NOT CMAKE_INTERPROCEDURAL_OPTIMIZATION)
  include(CheckLinkerFlag)
  check_linker_flag(CXX -fuse-ld=lld STITCH_LINKS_BY_LLD)
  if(STITCH_LINKS_BY_LLD)
    add_link_options(-fuse-ld=lld)
  endif()
endif()

# ccache keeps objects that use precompiled headers only when told that the header's macros and times may be trusted.
if(NOT CMAKE_CXX_COMPILER_LAUNCHER AND STITCH_CCACHE)
  find_program(STITCH_CCACHE_PROGRAM ccache)
  if(STITCH_CCACHE_PROGRAM)
    set(CMAKE_CXX_COMPILER_LAUNCHER "${STITCH_CCACHE_PROGRAM}")
  endif()
endif()
if(CMAKE_CXX_COMPILER_LAUNCHER MATCHES "ccache$")
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env CCACHE_SLOPPINESS=pch_defines,time_macros "${CMAKE_CXX_COMPILER_LAUNCHER}")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options(-fpch-preprocess)
  else()
    add_compile_options("SHELL:-Xclang -fno-pch-timestamp")
  endif()
endif()

# The flags of every target of this project; never exported.
add_library(stitch_flags INTERFACE)
target_compile_options(stitch_flags INTERFACE -Wall -Wextra -Wpedantic -Wno-unused-parameter $<$<CXX_COMPILER_ID:Clang>:-Wthread-safety>)
if(STITCH_WERROR)
  target_compile_options(stitch_flags INTERFACE -Werror)
endif()

if(NOT STITCH_SANITIZE MATCHES "^(|address|thread)$")
  message(FATAL_ERROR "STITCH_SANITIZE is \"${STITCH_SANITIZE}\"; it can be address, thread or empty")
endif()
if(STITCH_FUZZ AND NOT (STITCH_SANITIZE STREQUAL "address" AND CMAKE_CXX_COMPILER_ID STREQUAL "Clang"))
  message(FATAL_ERROR "STITCH_FUZZ needs clang++ and STITCH_SANITIZE=address, as the preset fuzz has them")
endif()
if(STITCH_SANITIZE)
  if(STITCH_SANITIZE STREQUAL "address")
    # vptr would need type information that uninstrumented libraries keep to themselves.
    set(sanitizer_flags -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined)
  else()
    set(sanitizer_flags -fsanitize=thread)
  endif()
  if(STITCH_FUZZ)
    add_compile_options(-fsanitize=fuzzer-no-link)
  endif()
  add_compile_options(${sanitizer_flags} -fno-omit-frame-pointer)
  add_link_options(${sanitizer_flags})
  # Each program carries the sanitizer's options and suppressions, so that it behaves alike under ctest, stitch-run and a debugger.
  add_library(stitch_sanitizer_options OBJECT "${CMAKE_CURRENT_SOURCE_DIR}/tests/sanitizer_options.cc")
  target_compile_definitions(stitch_sanitizer_options PRIVATE "STITCH_SUPPRESSIONS=\"${CMAKE_CURRENT_SOURCE_DIR}/tests\"")
  target_sources(stitch_flags INTERFACE
    $<$<STREQUAL:$<TARGET_PROPERTY:TYPE>,EXECUTABLE>:$<TARGET_OBJECTS:stitch_sanitizer_options>>)
endif()
