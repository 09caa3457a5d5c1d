#include "stitch/rpc/agent/post_where_read.h"

#include <utility>

namespace stitch::rpc {

bool post_where_read(transport::Connection& connection, ThreadPool& pool,
                     std::shared_ptr<void> owner, base::UniqueFunction<void()>& task) {
  if (!pool.post_quietly(task)) return false;
  base::UniqueFunction<bool(bool)> work = [&pool, owner = std::move(owner)](bool here) {
    if (here) return pool.run_one_here();
    pool.wake();
    return false;
  };
  if (!connection.defer(work)) pool.wake();
  return true;
}

}  // namespace stitch::rpc
