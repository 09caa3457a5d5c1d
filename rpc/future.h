#pragma once

// The public header of futures: Future, Promise, coroutines, when_all, when_any, shield, detached,
// with_timeout.
#include "stitch/rpc/future/future.h"  // IWYU pragma: export
#include "stitch/rpc/future/shield.h"  // IWYU pragma: export
