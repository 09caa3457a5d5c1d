#pragma once

#include "tests/fuzz/targets.h"

namespace stitch::fuzz {
extern const Target broken;
}  // namespace stitch::fuzz
