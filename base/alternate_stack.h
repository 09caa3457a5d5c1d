#pragma once

namespace stitch::base {

// Gives this thread, until it ends, a stack of its own for signal handlers with SA_ONSTACK, so that
// one can run when the thread's stack has overflowed; the main thread keeps it until the process
// ends. Does nothing where the thread has one (the program's, or a sanitizer's), or where memory is
// missing. A handler of the program may call exit() on it. Thread contract: any thread, of stitch
// or of the program.
void use_alternate_stack() noexcept;

}  // namespace stitch::base
