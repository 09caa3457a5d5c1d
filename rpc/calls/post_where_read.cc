#include "stitch/rpc/calls/post_where_read.h"

#include <utility>

namespace stitch::rpc {

bool post_where_read(transport::Connection& connection, ThreadPool& pool,
                     std::shared_ptr<void> owner, base::UniqueFunction<void()>& task) {
  using transport::DoWork;
  transport::DeferredWork work = [&pool, owner = std::move(owner)](DoWork how) {
    if (how != DoWork::elsewhere) return pool.run_one_here(how == DoWork::here_watched);
    pool.wake();
    return false;
  };
  if (!pool.post_quietly(task)) return false;
  if (!connection.defer(work)) pool.wake();
  return true;
}

}  // namespace stitch::rpc
