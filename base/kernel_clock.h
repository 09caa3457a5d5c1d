#pragma once

namespace stitch::base {

// Whether the monotonic clock of this process is that of its kernel: it is not in a time namespace
// of its own. So two processes under one kernel for which that holds read one clock. Any thread.
[[nodiscard]] bool has_kernel_clock() noexcept;

}  // namespace stitch::base
