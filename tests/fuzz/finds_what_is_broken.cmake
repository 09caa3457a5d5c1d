# Fuzzes the decoder that is broken on purpose: each of its faults, which STITCH_BROKEN names, has to end the fuzzer with a kept
# input, and with what that fault looks like.
#   FUZZER  the program; WORK_DIR
set(sign_of_b "ERROR: AddressSanitizer: heap-buffer-overflow")
set(sign_of_m "took [0-9]+ bytes of memory, more than [0-9]+")
set(sign_of_h "ERROR: libFuzzer: timeout")
foreach(fault b m h)
  set(folder "${WORK_DIR}/${fault}")
  file(REMOVE_RECURSE "${folder}")
  file(MAKE_DIRECTORY "${folder}/inputs")
  # A valid input to begin with: the fault is some changes away from it.
  string(ASCII 1 one)
  file(WRITE "${folder}/inputs/start" "BK${one}${one}")
  execute_process(
    COMMAND "${CMAKE_COMMAND}" -E env "STITCH_BROKEN=${fault}" ${FUZZER} --target=broken -seed=1 -max_total_time=60 -max_len=64
      -timeout=3 -rss_limit_mb=2048 "-artifact_prefix=${folder}/" "${folder}/inputs"
    WORKING_DIRECTORY "${folder}" RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  file(GLOB kept "${folder}/crash-*" "${folder}/timeout-*" "${folder}/oom-*")
  if(result EQUAL 0 OR NOT kept OR NOT output MATCHES "${sign_of_${fault}}")
    message(FATAL_ERROR "the fuzzer did not find fault \"${fault}\": it ended with ${result}, kept \"${kept}\", and said no "
      "\"${sign_of_${fault}}\"\n${output}")
  endif()
  message(STATUS "fault \"${fault}\" is found: ${CMAKE_MATCH_0}")
endforeach()
