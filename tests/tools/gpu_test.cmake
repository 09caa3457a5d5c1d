cmake_minimum_required(VERSION 3.25)

# scripts/gpu-test on a machine that pretends to have no GPU or no torch: it ends at once, says what is missing, and leaves a
# report that is JSON. PATH has an nvidia-smi of this test's own.
set(tools "${WORK_DIR}/tools")
file(REMOVE_RECURSE "${WORK_DIR}")
file(MAKE_DIRECTORY "${tools}")

# program(name lines...): a shell script among the tools.
function(program name)
  list(JOIN ARGN "\n" text)
  file(WRITE "${tools}/${name}" "#!/bin/sh\n${text}\n")
  file(CHMOD "${tools}/${name}" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
endfunction()

# expect(exit status, text, arguments...): runs the script; its output has to have the text.
function(expect status text)
  execute_process(COMMAND "${CMAKE_COMMAND}" -E env "PATH=${tools}:$ENV{PATH}" "${SOURCE_DIR}/scripts/gpu-test" ${ARGN}
    RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output TIMEOUT 60)
  string(FIND "${output}" "${text}" at)
  if(NOT result EQUAL status OR at EQUAL -1)
    message(FATAL_ERROR "scripts/gpu-test ${ARGN}: exit status ${result}, not ${status}, or not this text: ${text}\n${output}")
  endif()
endfunction()

# expect_report(status): that of report.json.
function(expect_report status)
  file(READ "${WORK_DIR}/report/report.json" json)
  string(JSON found ERROR_VARIABLE error GET "${json}" status)
  if(NOT found STREQUAL status)
    message(FATAL_ERROR "the report has the status \"${found}\" (${error}), not \"${status}\":\n${json}")
  endif()
  string(JSON date GET "${json}" date)
  if(NOT date MATCHES "^20[0-9][0-9]-")
    message(FATAL_ERROR "the report has no date:\n${json}")
  endif()
endfunction()

expect(0 "usage: scripts/gpu-test" --help)
expect(2 "unknown option \"--fast\"" --fast)
expect(2 "--jobs is \"many\"" --jobs many)

program(nvidia-smi "echo 'NVIDIA-SMI has failed' >&2" "exit 9")
expect(77 "none: nvidia-smi finds no GPU" --report "${WORK_DIR}/report")
expect_report("no device")

program(nvidia-smi "test \"$1\" != --query-gpu=name || exec echo 'NVIDIA \"Test\" GPU'" "echo 99.1")
expect(2 "has no include/ATen/ATen.h" --report "${WORK_DIR}/report" --torch "${WORK_DIR}/elsewhere")
expect_report("no torch")

file(WRITE "${WORK_DIR}/torch/include/ATen/ATen.h" "")
file(WRITE "${WORK_DIR}/torch/version.py" "__version__ = '2.11.0'\n")
file(WRITE "${WORK_DIR}/torch/share/cmake/Torch/TorchConfig.cmake" "set(TORCH_CXX_FLAGS \"-D_GLIBCXX_USE_CXX11_ABI=0\")\n")
expect(2 "_GLIBCXX_USE_CXX11_ABI=0" --report "${WORK_DIR}/report" --torch "${WORK_DIR}/torch")
expect_report("unusable torch")

# Configuring fails: the report says so, with the error. A tool takes the place of CMake, a file that of CUDA's headers.
file(WRITE "${WORK_DIR}/torch/share/cmake/Torch/TorchConfig.cmake" "")
file(WRITE "${WORK_DIR}/cuda/include/cuda_runtime_api.h" "#define CUDART_VERSION 13000\n")
set(ENV{CUDA_HOME} "${WORK_DIR}/cuda")
program(cmake "echo 'CMake Error at planted' >&2" "exit 1")
set(arguments --report "${WORK_DIR}/report" --torch "${WORK_DIR}/torch" --build "${WORK_DIR}/build")
expect(1 "fail configure" ${arguments})
expect_report("configuring failed")

# Checks pass, fail, are skipped and run: the table's commands are programs of the build folder.
program(cmake "exit 0")
set(incomplete "incomplete: of the checks that a GPU is there for did not run: pipeline")
foreach(outcome "0 pass passed 0" "77 skip \"${incomplete}\" 3" "3 fail \"1 checks failed\" 1")
  separate_arguments(outcome UNIX_COMMAND "${outcome}")
  list(POP_FRONT outcome code result status exit_status)
  file(WRITE "${WORK_DIR}/build/tools/stitch-run" "#!/bin/sh\necho \"a \\\"quoted\\\" line\"\nexit ${code}\n")
  file(CHMOD "${WORK_DIR}/build/tools/stitch-run" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
  expect(${exit_status} "${result} pipeline" ${arguments} --only pipeline)
  expect_report("${status}")
  file(READ "${WORK_DIR}/report/report.json" json)
  string(JSON found GET "${json}" steps 2 result)
  string(JSON detail GET "${json}" steps 2 detail)
  if(NOT found STREQUAL result OR NOT detail MATCHES "a \"quoted\" line$")
    message(FATAL_ERROR "the check is reported as \"${found}\", \"${detail}\":\n${json}")
  endif()
endforeach()
# One target does not build: its check fails, the other one runs. The device is the one that nvidia-smi above pretends.
program(cmake "case \"$*\" in *gpu_calls_check*) echo 'error: planted' >&2; exit 1 ;; esac")
file(WRITE "${WORK_DIR}/build/tools/stitch-run" "#!/bin/sh\necho done\n")
file(CHMOD "${WORK_DIR}/build/tools/stitch-run" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
expect(1 "fail calls (0 s) not built: error: planted" ${arguments} --only "^(pipeline|calls)$")
expect_report("1 checks failed")
file(READ "${WORK_DIR}/report/report.json" json)
string(JSON found GET "${json}" steps 2 result)
if(NOT found STREQUAL pass)
  message(FATAL_ERROR "a check whose target was built is reported as \"${found}\":\n${json}")
endif()
program(cmake "exit 0")
expect(2 "no check matches" ${arguments} --only nothing_like_this)

# Figures of a check become part of the report.
file(WRITE "${WORK_DIR}/build/bench/stitch-bench"
  "#!/bin/sh\nfor last; do :; done\necho '{\"figures\": {\"copy\": 4300}}' > \"$last\"\necho done\n")
file(CHMOD "${WORK_DIR}/build/bench/stitch-bench" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
expect(0 "figure bench" ${arguments} --only "^bench$")
file(READ "${WORK_DIR}/report/report.json" json)
string(JSON copy GET "${json}" steps 2 figures figures copy)
if(NOT copy EQUAL 4300)
  message(FATAL_ERROR "the figures of a check are not in the report:\n${json}")
endif()
file(REMOVE_RECURSE "${WORK_DIR}")
