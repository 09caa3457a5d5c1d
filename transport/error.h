#pragma once

// Error and ErrorCode under the name by which programs have included them so far.
#include "stitch/base/error.h"  // IWYU pragma: export
