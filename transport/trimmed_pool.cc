#include "stitch/transport/trimmed_pool.h"

#include <atomic>

namespace stitch::transport {

namespace {

// Starts a timer when the pool has unused blocks, and again until it has none. One at a time:
// trim() is called once in half of `unused_for`.
class Trimmer : public std::enable_shared_from_this<Trimmer> {
 public:
  Trimmer(std::weak_ptr<base::EventLoop> loop, std::chrono::milliseconds unused_for)
      : loop_(std::move(loop)), unused_for_(unused_for) {}

  // Before the first trim_later().
  void set_pool(std::weak_ptr<BlockPool> pool) { pool_ = std::move(pool); }
  void trim_later() noexcept {
    const auto loop = loop_.lock();
    if (!loop || timer_runs_.exchange(true)) return;
    loop->call_at(BlockPool::Clock::now() + unused_for_ / 2, [self = shared_from_this()] {
      self->timer_runs_ = false;  // first: what is given back meanwhile is seen, or asks again
      const auto pool = self->pool_.lock();
      if (pool && pool->trim(BlockPool::Clock::now() - self->unused_for_)) self->trim_later();
    });
  }

 private:
  const std::weak_ptr<base::EventLoop> loop_;
  const std::chrono::milliseconds unused_for_;
  std::atomic<bool> timer_runs_{false};
  std::weak_ptr<BlockPool> pool_;
};

}  // namespace

std::shared_ptr<BlockPool> make_trimmed_pool(std::size_t max_kept_bytes,
                                             const std::shared_ptr<base::EventLoop>& loop,
                                             std::chrono::milliseconds unused_for,
                                             std::size_t max_bytes) {
  const auto trimmer = std::make_shared<Trimmer>(loop, unused_for);
  auto pool = std::make_shared<BlockPool>(
      max_kept_bytes, [trimmer] { trimmer->trim_later(); }, max_bytes);
  trimmer->set_pool(pool);
  return pool;
}

}  // namespace stitch::transport
