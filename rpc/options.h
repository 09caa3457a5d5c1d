#pragma once

// The public header of options: Options, and the variables of the environment that set them.
#include "stitch/rpc/options/options.h"  // IWYU pragma: export
