#pragma once

namespace stitch::base {

// Makes a process fit for a worker: descriptors 0 to 2 are open, and the soft limit of descriptors
// is the hard one. Throws Error(overloaded) where that limit is too
// low for a worker. Any thread.
void set_up_process();
// Throws Error(overloaded) where it is too low for one that is connected with all others of a world
// of so many. After set_up_process().
void expect_descriptors_for(int workers);

}  // namespace stitch::base
