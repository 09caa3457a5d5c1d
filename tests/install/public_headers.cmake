cmake_minimum_required(VERSION 3.25)

# Checks with the compiler what a program's unit gets of the library when it includes a public header: no table, ledger, event
# loop or agent, and no more of stitch's own headers than the limit says.
#   SOURCE_DIR, INCLUDE_ROOT, COMPILER, SYSTEM_INCLUDES ("a|b|c")
include("${SOURCE_DIR}/cmake/StitchPublicHeaders.cmake")

# Of stitch.h, itself included. A capability of its own may bring a header (files, schedules, steps, averages); all else lowers it.
set(limit 51)
set(internal
  "^base/(event_loop|event_ring|task_thread|thread_state|published_table|descriptor|forked)\\.h$"
  "^transport/[a-z_]+\\.h$"
  "^transport/(polling|stream|loopback|tensorpipe|selection|faults)/"
  "^transport/wire/(buffer|frame|session_seal|handshake|hello|record|secret_key)[a-z_]*\\.h$"
  "^rpc/message/message\\.h$"
  "^rpc/(agent|peers)/"
  "^rpc/calls/"
  "^rpc/membership/"
  "^rpc/world/"
  "^rpc/future/(thread_pool|live_runtimes)\\.h$"
  "^rref/agent/"
  "^rref/lifetime/(lifetime|holder_table|owner_table|ledger|effects|interval_set)\\.h$"
  "^dist_autograd/(engine|context_state|context_table|pass|recording)\\.h$"
  "^dist_autograd/(executor|protocol)/")
set(exceptions rref/agent/object_access.h rpc/calls/pending_call.h rpc/membership/membership_watch.h transport/error.h)

string(REPLACE "|" ";" SYSTEM_INCLUDES "${SYSTEM_INCLUDES}")
list(TRANSFORM SYSTEM_INCLUDES PREPEND "-isystem")
set(violations "")
foreach(header IN LISTS STITCH_PUBLIC_HEADERS)
  execute_process(
    COMMAND "${COMPILER}" -std=c++20 -x c++ -MM "-I${INCLUDE_ROOT}" ${SYSTEM_INCLUDES} "${INCLUDE_ROOT}/stitch/${header}"
    RESULT_VARIABLE result OUTPUT_VARIABLE rule ERROR_VARIABLE errors)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${header} cannot be included alone:\n${errors}")
  endif()
  string(REPLACE "${INCLUDE_ROOT}/stitch/" "@" rule "${rule}")
  string(REGEX MATCHALL "@[a-z_/]+\\.h" pulled "${rule}")
  list(TRANSFORM pulled REPLACE "^@" "")
  list(REMOVE_DUPLICATES pulled)
  if(NOT header IN_LIST pulled)
    message(FATAL_ERROR "${COMPILER} -MM does not name ${header} itself:\n${rule}")
  endif()
  foreach(each IN LISTS pulled)
    foreach(pattern IN LISTS internal)
      if(each MATCHES "${pattern}" AND NOT each IN_LIST exceptions)
        string(APPEND violations "${header}: pulls ${each}, which is internal\n")
      endif()
    endforeach()
  endforeach()
  list(LENGTH pulled count)
  if(header STREQUAL "stitch.h")
    message(STATUS "stitch.h pulls ${count} headers of stitch; the limit is ${limit}")
    if(count GREATER limit)
      list(JOIN pulled "\n  " names)
      string(APPEND violations "${header}: pulls ${count} headers of stitch; the limit is ${limit}:\n  ${names}\n")
    endif()
  endif()
endforeach()

if(violations)
  message(FATAL_ERROR "\n${violations}")
endif()
