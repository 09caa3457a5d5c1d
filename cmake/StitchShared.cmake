# libstitch.so: the static parts in one shared library, for processes in which several libraries use stitch: workers and remote
# functions are known to the copy of stitch that made them. Made of the compiled parts, nothing is compiled again. With
# BUILD_SHARED_LIBS it is what is installed and what stitch::stitch names; this project's own programs are linked with the parts.
get_property(parts GLOBAL PROPERTY STITCH_LIBRARIES)
set(archives "")
foreach(part IN LISTS parts)
  get_target_property(kind ${part} TYPE)
  if(kind STREQUAL "STATIC_LIBRARY")
    list(APPEND archives "$<TARGET_FILE:${part}>")
  endif()
endforeach()
file(GENERATE OUTPUT "${PROJECT_BINARY_DIR}/stitch_shared.cc" CONTENT "// anchors libstitch.so\n")
add_library(stitch_shared SHARED "${PROJECT_BINARY_DIR}/stitch_shared.cc")
set_target_properties(stitch_shared PROPERTIES
  OUTPUT_NAME stitch
  EXPORT_NAME stitch
  VERSION "${PROJECT_VERSION}"
  SOVERSION "${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}"
  LINK_DEPENDS "${archives}"
  INSTALL_RPATH_USE_LINK_PATH ON)
target_compile_features(stitch_shared INTERFACE cxx_std_20)
target_include_directories(stitch_shared INTERFACE "$<BUILD_INTERFACE:${STITCH_INCLUDE_ROOT}>" "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
target_link_libraries(stitch_shared
  PUBLIC stitch_torch cereal::cereal Threads::Threads
  PRIVATE -Wl,--whole-archive ${archives} -Wl,--no-whole-archive -Wl,-z,defs
    stitch_tensorpipe PkgConfig::LIBUV PkgConfig::SODIUM $<TARGET_NAME_IF_EXISTS:PkgConfig::CRYPTO> ${CMAKE_DL_LIBS}
  INTERFACE $<LINK_ONLY:stitch_tensorpipe>)
