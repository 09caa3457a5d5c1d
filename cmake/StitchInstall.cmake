# cmake --install puts libraries, headers, stitch-run and the package files in place; a program then says
#   find_package(stitch REQUIRED)
#   target_link_libraries(app PRIVATE stitch::stitch)
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
install(TARGETS stitch ${stitch_libraries} EXPORT stitchTargets ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
install(EXPORT stitchTargets NAMESPACE stitch:: DESTINATION "${stitch_package_dir}")
install(TARGETS stitch-run RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
if(TARGET stitch-bench)
  install(TARGETS stitch-bench RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
endif()

configure_package_config_file(cmake/stitchConfig.cmake.in "${CMAKE_CURRENT_BINARY_DIR}/stitchConfig.cmake" INSTALL_DESTINATION "${stitch_package_dir}")
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/stitchConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES
  "${CMAKE_CURRENT_BINARY_DIR}/stitchConfig.cmake"
  "${CMAKE_CURRENT_BINARY_DIR}/stitchConfigVersion.cmake"
  cmake/StitchDependencies.cmake
  cmake/StitchTorch.cmake
  cmake/clang_vector.h
  DESTINATION "${stitch_package_dir}")
