cmake_minimum_required(VERSION 3.25)

# Installs BUILD_DIR to a fresh prefix under WORK_DIR, builds examples/consumer against it and runs it on two workers.
function(step)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\nfailed (${result}):\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE "${WORK_DIR}")
set(prefix "${WORK_DIR}/prefix")
step("${CMAKE_COMMAND}" --install "${BUILD_DIR}" --prefix "${prefix}")
# Public headers and what they include, nothing else.
include("${SOURCE_DIR}/cmake/StitchPublicHeaders.cmake")
stitch_header_closure(expected "${SOURCE_DIR}" ${STITCH_PUBLIC_HEADERS})
set(headers "${prefix}/${INCLUDEDIR}/stitch")
file(GLOB_RECURSE installed RELATIVE "${headers}" "${headers}/*.h")
list(SORT installed)
if(NOT installed STREQUAL expected)
  message(FATAL_ERROR "installed headers:\n${installed}\nexpected:\n${expected}")
endif()
foreach(internal transport/stream/poller.h transport/tensorpipe/tensorpipe_endpoint.h rpc/world/join_world.h)
  if(NOT EXISTS "${SOURCE_DIR}/${internal}" OR EXISTS "${headers}/${internal}")
    message(FATAL_ERROR "${internal}: is installed, or is no header of the tree any more")
  endif()
endforeach()

step("${CMAKE_COMMAND}" -S "${SOURCE_DIR}/examples/consumer" -B "${WORK_DIR}/build" -G Ninja
  "-DCMAKE_CXX_COMPILER=${CXX_COMPILER}" "-DCMAKE_PREFIX_PATH=${prefix}")
step("${CMAKE_COMMAND}" --build "${WORK_DIR}/build")

step("${prefix}/${BINDIR}/stitch-run" -n 2 --timeout 60 "${WORK_DIR}/build/consumer")
if(NOT output MATCHES "\\[worker0\\]  2\n\\[worker0\\]  2\n")
  message(FATAL_ERROR "the sum of two tensors of ones is missing in the output:\n${output}")
endif()
file(REMOVE_RECURSE "${WORK_DIR}")
