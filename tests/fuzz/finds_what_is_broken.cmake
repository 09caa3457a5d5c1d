# Fuzzes the decoder that is broken on purpose: each of its faults has to end the fuzzer with a kept input.
#   FUZZER  the program; WORK_DIR
foreach(fault b m h)
  set(folder "${WORK_DIR}/${fault}")
  file(REMOVE_RECURSE "${folder}")
  file(MAKE_DIRECTORY "${folder}/inputs")
  # A valid input to begin with: the fault is some changes away from it.
  string(ASCII 1 one)
  file(WRITE "${folder}/inputs/start" "BK${fault}${one}${one}")
  execute_process(
    COMMAND ${FUZZER} --target=broken -seed=1 -max_total_time=60 -max_len=64 -timeout=3 -rss_limit_mb=2048
      "-artifact_prefix=${folder}/" "${folder}/inputs"
    WORKING_DIRECTORY "${folder}" RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  file(GLOB kept "${folder}/crash-*" "${folder}/timeout-*" "${folder}/oom-*")
  if(result EQUAL 0 OR NOT kept)
    message(FATAL_ERROR "the fuzzer did not find fault \"${fault}\": it ended with ${result}, and kept \"${kept}\"\n${output}")
  endif()
  string(REGEX MATCH "(ERROR: [A-Za-z]+Sanitizer: [a-z-]+|took [0-9]+ bytes of memory|ERROR: libFuzzer: [a-z ]+)" what "${output}")
  message(STATUS "fault \"${fault}\" is found: ${what}")
endforeach()
