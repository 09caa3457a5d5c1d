#pragma once

namespace stitch::base {

// Makes a process fit for a worker: descriptors 0 to 2 are open, and the soft limit of descriptors
// is the hard one. Throws Error(overloaded) where that limit is too
// low for a worker. Any thread.
void set_up_process();

}  // namespace stitch::base
