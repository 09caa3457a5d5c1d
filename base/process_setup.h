#pragma once

namespace stitch::base {

// What a worker needs of its process, whatever has started that: descriptors 0 to 2 are open, and
// the soft limit of descriptors is the hard one. Throws Error(overloaded) where that limit is too
// low for a worker. Any thread.
void set_up_process();

}  // namespace stitch::base
