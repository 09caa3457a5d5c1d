# The API reference of the public headers: cmake --build <folder> --target docs. Not part of `all`; only where doxygen is installed.

include(StitchPublicHeaders)
# Where the public headers have some of their names from.
set(STITCH_REFERENCE_HEADERS ${STITCH_PUBLIC_HEADERS}
  rpc/future/execution_context.h
  rpc/future/future.h
  rpc/future/future_group.h
  rpc/future/shield.h
  rpc/message/placed_tensor.h
  rpc/message/sendable.h
  rpc/message/worker_info.h
  rpc/options/options.h
  rref/remote_call.h
  dist_autograd/graph/gradient_map.h
  dist_autograd/graph/ids.h
  dist_optim/optimizer_traits.h
  transport/store/store.h
  transport/wire/encryption.h)

find_program(STITCH_DOXYGEN doxygen)
find_program(STITCH_DOT dot)
mark_as_advanced(STITCH_DOXYGEN STITCH_DOT)
if(NOT STITCH_DOXYGEN)
  message(STATUS "doxygen is not installed: there is no target docs and no test every_public_name_is_documented")
  return()
endif()

set(STITCH_REFERENCE_SOURCES "${CMAKE_CURRENT_SOURCE_DIR}/docs/reference")
set(STITCH_REFERENCE_DIR "${CMAKE_CURRENT_BINARY_DIR}/docs")
set(STITCH_REFERENCE_INPUT "\"${STITCH_REFERENCE_SOURCES}/main_page.dox\"")
foreach(header IN LISTS STITCH_REFERENCE_HEADERS)
  string(APPEND STITCH_REFERENCE_INPUT " \\\n                         \"${STITCH_INCLUDE_ROOT}/stitch/${header}\"")
endforeach()
set(STITCH_REFERENCE_DOT NO)
if(STITCH_DOT)
  set(STITCH_REFERENCE_DOT YES)
endif()
set(STITCH_DOXYFILE "${STITCH_REFERENCE_DIR}/Doxyfile")
configure_file(docs/reference/Doxyfile.in "${STITCH_DOXYFILE}" @ONLY)
add_custom_target(docs
  COMMAND "${STITCH_DOXYGEN}" "${STITCH_DOXYFILE}"
  COMMENT "Writing the API reference to ${STITCH_REFERENCE_DIR}/html/index.html"
  VERBATIM)
