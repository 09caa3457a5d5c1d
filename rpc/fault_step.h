#pragma once

namespace stitch {

// Counts one step of the current worker, for Options::fault: "kill=ps0@step10" ends the process of
// ps0 here when it counts its tenth. Owners that step parameters for a DistributedOptimizer count
// by themselves, once for each optimizer and step. Does nothing without such a fault, and where no
// worker is current. Any thread.
void fault_step() noexcept;

}  // namespace stitch
