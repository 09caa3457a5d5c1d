#include "stitch/rpc/world/receive_pool.h"

#include <chrono>

namespace stitch::rpc {

namespace {

using std::chrono::steady_clock;

constexpr std::chrono::seconds kUnused{2};

// Returns unused blocks to the system. Kept alive by its timer and by the pool, which it does not
// keep alive.
class Trimmer : public std::enable_shared_from_this<Trimmer> {
 public:
  explicit Trimmer(const std::shared_ptr<base::EventLoop>& loop) : loop_(loop) {}
  // Before the pool is used.
  void set_pool(const std::shared_ptr<transport::BlockPool>& pool) { pool_ = pool; }
  void later() {
    const auto loop = loop_.lock();
    if (!loop) return;
    loop->call_at(steady_clock::now() + kUnused / 2, [self = shared_from_this()] {
      const auto pool = self->pool_.lock();
      if (pool && pool->trim(steady_clock::now() - kUnused)) self->later();
    });
  }

 private:
  const std::weak_ptr<base::EventLoop> loop_;
  std::weak_ptr<transport::BlockPool> pool_;
};

}  // namespace

std::shared_ptr<transport::BlockPool> make_receive_pool(
    std::size_t max_kept_bytes, const std::shared_ptr<base::EventLoop>& loop) {
  const auto trimmer = std::make_shared<Trimmer>(loop);
  auto pool =
      std::make_shared<transport::BlockPool>(max_kept_bytes, [trimmer] { trimmer->later(); });
  trimmer->set_pool(pool);
  return pool;
}

}  // namespace stitch::rpc
