# What programs include. An install has these headers and those that they include in turn, and no others: the rest of the tree
# is the library's own. README.md has a guide to them.
set(STITCH_PUBLIC_HEADERS
  stitch.h
  base/error.h
  dist_autograd/context.h
  dist_optim/backward_and_step.h
  dist_optim/distributed_optimizer.h
  dist_optim/ema.h
  dist_optim/grad_scaler.h
  dist_optim/schedules.h
  dist_optim/sparse_optimizers.h
  dist_optim/steps.h
  rpc/calls.h
  rpc/function_runner.h
  rpc/future.h
  rpc/future/blocking_region.h
  rpc/options.h
  rpc/sendable.h
  rpc/target.h
  rpc/worker.h
  rref/checkpoint.h
  rref/files/tensor_file.h
  rref/remote_module.h
  rref/rref.h
  rref/serialized.h
  transport/error.h
  transport/gpu/lane_lock.h
  transport/store/hash_store.h)

# stitch_header_closure(result root headers...): these headers of the tree at `root` and all that they include by
# #include "stitch/...", directly or not, as paths below `root`.
function(stitch_header_closure result root)
  set(found "")
  set(pending ${ARGN})
  while(pending)
    list(POP_FRONT pending header)
    if(header IN_LIST found)
      continue()
    endif()
    list(APPEND found "${header}")
    file(STRINGS "${root}/${header}" includes REGEX "^[ \t]*#[ \t]*include[ \t]+\"stitch/")
    foreach(include IN LISTS includes)
      string(REGEX REPLACE ".*\"stitch/([^\"]+)\".*" "\\1" header "${include}")
      list(APPEND pending "${header}")
    endforeach()
  endwhile()
  list(SORT found)
  set(${result} ${found} PARENT_SCOPE)
endfunction()
