#pragma once

// The public header of futures: Future, Promise, coroutines, when_all, when_any.
#include "stitch/rpc/future/future.h"  // IWYU pragma: export
