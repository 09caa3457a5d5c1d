# cmake --install puts libraries, headers, stitch-run and the package files in place; a program then says
#   find_package(stitch REQUIRED)
#   target_link_libraries(app PRIVATE stitch::stitch)
# or, where it uses devices, find_package(stitch REQUIRED COMPONENTS torch_cuda) and stitch::torch_cuda besides.
include(CMakePackageConfigHelpers)
set(stitch_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/stitch")

include(StitchPublicHeaders)
stitch_header_closure(stitch_headers "${CMAKE_CURRENT_SOURCE_DIR}" ${STITCH_PUBLIC_HEADERS})
# An edited #include changes the list: it is made anew before the next build.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${stitch_headers})
foreach(header IN LISTS stitch_headers)
  get_filename_component(folder "stitch/${header}" DIRECTORY)
  install(FILES "${header}" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/${folder}")
endforeach()
get_property(stitch_libraries GLOBAL PROPERTY STITCH_LIBRARIES)
# Static libraries, or with BUILD_SHARED_LIBS one libstitch.so. The other kind can be installed over them, by its component.
set(stitch_static_optional "")
set(stitch_shared_optional EXCLUDE_FROM_ALL)
if(BUILD_SHARED_LIBS)
  set(stitch_static_optional EXCLUDE_FROM_ALL)
  set(stitch_shared_optional "")
endif()
install(TARGETS stitch ${stitch_libraries} EXPORT stitchTargets
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT static ${stitch_static_optional})
install(EXPORT stitchTargets NAMESPACE stitch:: DESTINATION "${stitch_package_dir}" COMPONENT static ${stitch_static_optional})
if(TARGET stitch_shared)
  install(TARGETS stitch_shared EXPORT stitchSharedTargets
    LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT shared NAMELINK_COMPONENT shared ${stitch_shared_optional})
  install(EXPORT stitchSharedTargets NAMESPACE stitch:: DESTINATION "${stitch_package_dir}"
    COMPONENT shared ${stitch_shared_optional})
endif()
install(TARGETS stitch-run RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
if(TARGET stitch-bench)
  install(TARGETS stitch-bench RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
endif()

# stitchConfig.cmake makes the target stitch::torch_cuda of it, with the libraries of the torch that it finds.
set(STITCH_TORCH_CUDA_INSTALLED FALSE)
set(stitch_bridge_object "${CMAKE_INSTALL_LIBDIR}/stitch_torch_cuda_bridge.o")
if(TARGET stitch_torch_cuda_bridge AND STITCH_C10_CUDA_LIBRARY AND STITCH_TORCH_CUDA_LIBRARY)
  set(STITCH_TORCH_CUDA_INSTALLED TRUE)
  install(FILES "$<TARGET_OBJECTS:stitch_torch_cuda_bridge>" DESTINATION "${CMAKE_INSTALL_LIBDIR}" RENAME stitch_torch_cuda_bridge.o)
endif()

configure_package_config_file(cmake/stitchConfig.cmake.in "${CMAKE_CURRENT_BINARY_DIR}/stitchConfig.cmake"
  INSTALL_DESTINATION "${stitch_package_dir}" PATH_VARS stitch_bridge_object)
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/stitchConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES
  "${CMAKE_CURRENT_BINARY_DIR}/stitchConfig.cmake"
  "${CMAKE_CURRENT_BINARY_DIR}/stitchConfigVersion.cmake"
  cmake/StitchDependencies.cmake
  cmake/StitchTorch.cmake
  cmake/clang_vector.h
  DESTINATION "${stitch_package_dir}")
