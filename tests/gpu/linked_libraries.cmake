cmake_minimum_required(VERSION 3.25)

# No program of stitch depends on CUDA or NCCL when it starts: neither GPU_PROGRAM, which uses the GPU data path (and no torch, whose
# builds for CUDA have dependencies of their own), nor anything that PROGRAM names as needed.
set(gpu_library "lib(cuda|cudart|nccl|nvrtc|cupti)[.-]")
function(check program)
  execute_process(COMMAND ${ARGN} "${program}" RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE error)
  if(NOT result EQUAL 0 OR NOT output MATCHES "libc\\.so")
    message(FATAL_ERROR "${ARGN} ${program} failed (${result}): ${output}${error}")
  endif()
  if(output MATCHES "${gpu_library}")
    message(FATAL_ERROR "${program} depends on a library of CUDA or NCCL:\n${output}")
  endif()
endfunction()
check("${GPU_PROGRAM}" ldd)
if(PROGRAM)
  check("${PROGRAM}" objdump -p)
endif()
