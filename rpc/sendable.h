#pragma once

// The public header of what can be sent.
#include "stitch/rpc/message/sendable.h"  // IWYU pragma: export
