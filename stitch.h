#pragma once

#include <torch/torch.h>  // IWYU pragma: export

// All of stitch. Each header can also be included alone; README.md has a guide to them.
#include "stitch/dist_autograd/context.h"             // IWYU pragma: export
#include "stitch/dist_optim/backward_and_step.h"      // IWYU pragma: export
#include "stitch/dist_optim/distributed_optimizer.h"  // IWYU pragma: export
#include "stitch/dist_optim/ema.h"                    // IWYU pragma: export
#include "stitch/dist_optim/sparse_optimizers.h"      // IWYU pragma: export
#include "stitch/dist_optim/steps.h"                  // IWYU pragma: export
#include "stitch/rpc/calls.h"                         // IWYU pragma: export
#include "stitch/rpc/future/blocking_region.h"        // IWYU pragma: export
#include "stitch/rpc/future/future.h"                 // IWYU pragma: export
#include "stitch/rpc/future/shield.h"                 // IWYU pragma: export
#include "stitch/rpc/worker.h"                        // IWYU pragma: export
#include "stitch/rref/checkpoint.h"                   // IWYU pragma: export
#include "stitch/rref/files/tensor_file.h"            // IWYU pragma: export
#include "stitch/rref/remote_module.h"                // IWYU pragma: export
#include "stitch/rref/rref.h"                         // IWYU pragma: export
#include "stitch/rref/serialized.h"                   // IWYU pragma: export
