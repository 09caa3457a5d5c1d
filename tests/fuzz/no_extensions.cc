// References and owners' parts register themselves in every program that includes their headers.
// This one has only the parsers.
#include "stitch/rref/checkpoint.h"

namespace stitch::rref {
int register_rref_extension() { return 0; }
int register_owner_part() { return 0; }
}  // namespace stitch::rref
