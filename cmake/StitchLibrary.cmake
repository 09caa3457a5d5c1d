# Headers are included as "stitch/<folder>/<header>": a link per folder in the build tree, copies in an install.
set(STITCH_INCLUDE_ROOT "${CMAKE_CURRENT_BINARY_DIR}/include")
file(MAKE_DIRECTORY "${STITCH_INCLUDE_ROOT}/stitch")
foreach(entry base transport rpc rref dist_autograd dist_optim stitch.h)
  file(CREATE_LINK "${CMAKE_CURRENT_SOURCE_DIR}/${entry}" "${STITCH_INCLUDE_ROOT}/stitch/${entry}" SYMBOLIC)
endforeach()

# stitch_use_torch_pch(target): compiles it with the torch headers precompiled. They are made once for all targets.
function(stitch_use_torch_pch target)
  if(NOT TARGET stitch_torch_pch)
    file(GENERATE OUTPUT "${PROJECT_BINARY_DIR}/torch_pch.cc" CONTENT "// anchors the precompiled header\n")
    add_library(stitch_torch_pch OBJECT "${PROJECT_BINARY_DIR}/torch_pch.cc")
    target_link_libraries(stitch_torch_pch PRIVATE stitch_torch Threads::Threads stitch_flags)
    target_precompile_headers(stitch_torch_pch PRIVATE <torch/torch.h>)
  endif()
  target_precompile_headers(${target} REUSE_FROM stitch_torch_pch)
endfunction()

# stitch_compile_together(target): with STITCH_UNITY, its sources are compiled several at a time. Names of their
# unnamed namespaces meet there; every header still has to include what it uses, which other builds show.
function(stitch_compile_together target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${STITCH_UNITY} UNITY_BUILD_BATCH_SIZE 8)
  if(STITCH_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # g++ takes each source for a header there, in which members of a type of the unnamed namespace would be a mistake.
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  endif()
endfunction()

# stitch_library(name SOURCES ... [PUBLIC targets...] [PRIVATE targets...] [TORCH_PCH])
function(stitch_library name)
  cmake_parse_arguments(arg "TORCH_PCH" "" "SOURCES;PUBLIC;PRIVATE" ${ARGN})
  add_library(stitch_${name} ${arg_SOURCES})
  add_library(stitch::${name} ALIAS stitch_${name})
  set_target_properties(stitch_${name} PROPERTIES EXPORT_NAME ${name})
  set_property(GLOBAL APPEND PROPERTY STITCH_LIBRARIES stitch_${name})
  stitch_compile_together(stitch_${name})
  target_compile_features(stitch_${name} PUBLIC cxx_std_20)
  target_include_directories(stitch_${name} PUBLIC "$<BUILD_INTERFACE:${STITCH_INCLUDE_ROOT}>" "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
  target_link_libraries(stitch_${name} PUBLIC ${arg_PUBLIC} PRIVATE ${arg_PRIVATE} $<BUILD_INTERFACE:stitch_flags>)
  if(arg_TORCH_PCH)
    stitch_use_torch_pch(stitch_${name})
  endif()
endfunction()

# stitch_interface_library(name targets...): those targets behind one name, with no sources of its own.
function(stitch_interface_library name)
  add_library(stitch_${name} INTERFACE)
  add_library(stitch::${name} ALIAS stitch_${name})
  set_target_properties(stitch_${name} PROPERTIES EXPORT_NAME ${name})
  set_property(GLOBAL APPEND PROPERTY STITCH_LIBRARIES stitch_${name})
  target_link_libraries(stitch_${name} INTERFACE ${ARGN})
endfunction()

# stitch_program(name SOURCES ... LIBRARIES ... [TORCH_PCH] [APART]): an example, tool or benchmark, flags and sanitizer options included. APART
# compiles its sources one by one in every build.
function(stitch_program name)
  cmake_parse_arguments(arg "TORCH_PCH;APART" "" "SOURCES;LIBRARIES" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  if(NOT arg_APART)
    stitch_compile_together(${name})
  endif()
  target_link_libraries(${name} PRIVATE ${arg_LIBRARIES} stitch_flags)
  if(arg_TORCH_PCH)
    stitch_use_torch_pch(${name})
  endif()
endfunction()
