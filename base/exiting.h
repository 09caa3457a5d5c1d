#pragma once

namespace stitch::base {

// The end of a process by exit(), or by a return from main(), while its threads still run: the
// destructors of libtorch's static objects take a quarter of a second of a processor. Peers that
// still got answers meanwhile would take the process for alive. So the sockets that are registered
// in base/forked.h are shut down after the program's static objects are destroyed, and before
// those of the libraries that stitch is linked with: peers see the connections end.

// Whether that has begun. No connection is made then. Thread contract: any thread.
[[nodiscard]] bool process_is_exiting() noexcept;

}  // namespace stitch::base
