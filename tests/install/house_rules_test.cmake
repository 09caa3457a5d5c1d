cmake_minimum_required(VERSION 3.25)

# Breaks each rule of house_rules.cmake once, in a copy of a few sources under WORK_DIR, and expects to be told of each.
file(REMOVE_RECURSE "${WORK_DIR}")
set(untouched base/bytes.h rpc/message/worker_info.h)
foreach(source IN ITEMS ${untouched} base/mutex.h base/recycler.h base/unique_function.h base/forked.cc transport/endpoint.h
                        rpc/future/execution_context.cc rpc/future/live_runtimes.h rpc/future/runtime.h rpc/calls.h)
  get_filename_component(folder "${source}" DIRECTORY)
  file(COPY "${SOURCE_DIR}/${source}" DESTINATION "${WORK_DIR}/${folder}")
endforeach()

# check(expected...): fails unless house_rules fails and says all of this.
function(check)
  execute_process(COMMAND "${CMAKE_COMMAND}" -D "SOURCE_DIR=${WORK_DIR}" -P "${CMAKE_CURRENT_LIST_DIR}/house_rules.cmake"
    RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REGEX REPLACE "[ \n]+" " " output "${output}")
  if(result EQUAL 0)
    message(FATAL_ERROR "house_rules finds nothing wrong")
  endif()
  foreach(text IN LISTS ARGN)
    string(FIND "${output}" "${text}" at)
    if(at EQUAL -1)
      message(FATAL_ERROR "house_rules does not say:\n${text}\nbut:\n${output}")
    endif()
  endforeach()
  foreach(source IN LISTS untouched)
    string(FIND "${output}" "${source}:" at)
    if(NOT at EQUAL -1)
      message(FATAL_ERROR "house_rules finds fault with ${source}, which is as it was:\n${output}")
    endif()
  endforeach()
endfunction()

function(append source text)
  file(APPEND "${WORK_DIR}/${source}" "${text}")
endfunction()

append(base/mutex.h "#include \"stitch/rpc/future/runtime.h\"\n")
append(base/unique_function.h "#include <ATen/ATen.h>\n")
append(transport/endpoint.h "#include <tensorpipe/tensorpipe.h>\n")
append(rpc/calls.h "#include \"stitch/stitch.h\"\n")
append(rpc/future/runtime.h "#include \"stitch/rpc/future/live_runtimes.h\"\n")
append(rpc/future/execution_context.cc "// Nobody waits here, and the worker gives\n// way.\n")
file(WRITE "${WORK_DIR}/base/cellar/cellar.h" "#pragma once\n")
string(REPEAT "-" 99 dashes)
append(base/forked.cc "// ${dashes}\n#if TORCH_VERSION_MAJOR\n#endif\n")
string(REPEAT "\n" 401 lines)
file(WRITE "${WORK_DIR}/base/long.cc" "// Too much.\n${lines}")
file(WRITE "${WORK_DIR}/base/long_for_a_reason.cc" "// One file, though long: the rule is tested.\n${lines}")

list(APPEND untouched base/long_for_a_reason.cc)
check(
  "base/mutex.h: #include \"stitch/rpc/future/runtime.h\": base/ may include only: base"
  "base/unique_function.h: #include <ATen/ATen.h>: base/ and transport/ know no torch"
  "transport/endpoint.h: includes TensorPipe"
  "rpc/calls.h: #include \"stitch/stitch.h\": the umbrella header is for programs"
  "rpc/future/live_runtimes.h: is in a circle of includes"
  "rpc/future/runtime.h: is in a circle of includes, with base/mutex.h, rpc/future/live_runtimes.h"
  "rpc/future/execution_context.cc: says \"Nobody\""
  "rpc/future/execution_context.cc: says \"gives way\""
  "base/cellar/cellar.h: base/cellar/ is not in the table of house_rules"
  "base/forked.cc: asks for TORCH_VERSION"
  "base/forked.cc: has a line of more than 100 columns"
  "base/long.cc: 402 lines; over 400 a comment says why")
file(REMOVE_RECURSE "${WORK_DIR}")
