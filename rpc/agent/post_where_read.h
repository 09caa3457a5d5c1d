#pragma once

#include <memory>

#include "stitch/base/unique_function.h"
#include "stitch/rpc/future/thread_pool.h"
#include "stitch/transport/endpoint.h"

namespace stitch::rpc {

// Queues `task`, which a message that came over `connection` has brought, on `pool`. The thread
// that read the message runs it itself once it has delivered all messages that have arrived
// (Connection::defer); a thread of the pool is woken only where that is not possible. `owner` keeps
// the pool alive. False, and the task is left untouched, when the pool has been closed. Any thread.
[[nodiscard]] bool post_where_read(transport::Connection& connection, ThreadPool& pool,
                                   std::shared_ptr<void> owner, base::UniqueFunction<void()>& task);

}  // namespace stitch::rpc
