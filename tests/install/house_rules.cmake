cmake_minimum_required(VERSION 3.25)

# Checks what no compiler does, in the sources under SOURCE_DIR:
#   1. A folder of the library includes only itself and the folders below it.
#   2. Only transport/tensorpipe_endpoint.cc includes TensorPipe.
#   3. Only dist_autograd/compat.h asks for a version of torch; all else looks for features there.
#   4. No source file is longer than 600 lines.
set(violations "")
set(folders transport rpc rref dist_autograd dist_optim)

set(allowed "")
foreach(folder IN LISTS folders)
  list(APPEND allowed ${folder})
  file(GLOB sources RELATIVE "${SOURCE_DIR}" "${SOURCE_DIR}/${folder}/*.h" "${SOURCE_DIR}/${folder}/*.cc")
  foreach(source IN LISTS sources)
    file(STRINGS "${SOURCE_DIR}/${source}" includes REGEX "^[ \t]*#[ \t]*include[ \t]+[<\"]")
    foreach(include IN LISTS includes)
      if(include MATCHES "[<\"]stitch/([a-z_]+)/")
        if(NOT CMAKE_MATCH_1 IN_LIST allowed)
          string(APPEND violations "${source}: ${include}: ${folder}/ may include only: ${allowed}\n")
        endif()
      elseif(include MATCHES "[<\"]stitch/")
        string(APPEND violations "${source}: ${include}: the umbrella header is for programs\n")
      elseif(include MATCHES "[<\"]tensorpipe/" AND NOT source STREQUAL "transport/tensorpipe_endpoint.cc")
        string(APPEND violations "${source}: ${include}: only transport/tensorpipe_endpoint.cc includes TensorPipe\n")
      elseif(include MATCHES "[<\"](torch|ATen|c10)/" AND folder STREQUAL "transport")
        string(APPEND violations "${source}: ${include}: transport/ knows no torch\n")
      endif()
    endforeach()
  endforeach()
endforeach()

foreach(folder IN LISTS folders ITEMS tools examples bench tests)
  file(GLOB_RECURSE sources RELATIVE "${SOURCE_DIR}" "${SOURCE_DIR}/${folder}/*.h" "${SOURCE_DIR}/${folder}/*.cc")
  foreach(source IN LISTS sources)
    # Brackets and semicolons mean something in CMake lists, so lines are counted and searched as text.
    file(READ "${SOURCE_DIR}/${source}" text)
    if(text MATCHES "TORCH_VERSION" AND NOT source STREQUAL "dist_autograd/compat.h")
      string(APPEND violations "${source}: asks for TORCH_VERSION; dist_autograd/compat.h is the place for differences between torches\n")
    endif()
    string(REGEX REPLACE "[^\n]" "" newlines "${text}")
    string(LENGTH "${newlines}" lines)
    if(lines GREATER 600)
      string(APPEND violations "${source}: ${lines} lines; the limit is 600\n")
    endif()
  endforeach()
endforeach()

if(violations)
  message(FATAL_ERROR "\n${violations}")
endif()
