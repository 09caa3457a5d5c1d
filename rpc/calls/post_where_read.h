#pragma once

#include <memory>

#include "stitch/base/unique_function.h"
#include "stitch/rpc/future/thread_pool.h"
#include "stitch/transport/endpoint.h"

namespace stitch::rpc {

// Queues `task` of a message of `connection` on `pool`, which `owner` keeps alive. The thread that
// read the message runs it once it has delivered what has arrived (Connection::defer), else a
// thread of the pool. False, and the task is untouched, when the pool is closed. Any thread.
[[nodiscard]] bool post_where_read(transport::Connection& connection, ThreadPool& pool,
                                   std::shared_ptr<void> owner, base::UniqueFunction<void()>& task);

}  // namespace stitch::rpc
