#include "remote_functions.h"

#include <chrono>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "call_book.h"
#include "stitch/rpc/future/execution_context.h"

namespace stitch_reliability {

namespace {

using namespace std::chrono_literals;

constexpr std::size_t kMaxKept = 64;
std::mutex kept_mutex;
std::deque<stitch::RRef<Tally>> kept;

}  // namespace

std::uint64_t answer(std::uint64_t number) {
  book().run(number);
  return number + 1;
}

std::uint64_t answer_slowly(std::uint64_t number) {
  std::this_thread::sleep_for(20ms);  // long enough to be struck while it runs
  return answer(number);
}

void hear(std::uint64_t number) { book().run(number); }

std::uint64_t ask(std::uint64_t number, int rank) {
  return stitch::rpc_sync<answer>(stitch::WorkerId(static_cast<std::uint32_t>(rank)), number);
}

at::Tensor scaled(std::uint64_t number, at::Tensor x, double factor) {
  book().run(number);
  return x * factor;
}

Tally::Tally(std::uint64_t number) { book().run(number); }

std::uint64_t Tally::add(std::uint64_t number) {
  book().run(number);
  return ++sum_;
}

std::uint64_t use(std::uint64_t number, stitch::RRef<Tally> tally) {
  return tally.rpc_sync<&Tally::add>(number);
}

void keep(std::uint64_t number, stitch::RRef<Tally> tally) {
  book().run(number);
  stitch::RRef<Tally> dropped;  // after the lock
  const std::lock_guard lock(kept_mutex);
  kept.push_back(std::move(tally));
  if (kept.size() <= kMaxKept) return;
  dropped = std::move(kept.front());
  kept.pop_front();
}

void forget_kept() {
  std::deque<stitch::RRef<Tally>> dropped;
  const std::lock_guard lock(kept_mutex);
  dropped.swap(kept);
}

Parameter::Parameter(std::uint64_t number) : value_(at::zeros({4}).set_requires_grad(true)) {
  book().run(number);
}

stitch::RRef<at::Tensor> Parameter::value(std::uint64_t number) {
  book().run(number);
  return stitch::make_rref(value_);
}

at::Tensor Parameter::times(std::uint64_t number, at::Tensor x) {
  book().run(number);
  return value_ * x;
}

at::Tensor Parameter::now(std::uint64_t number) {
  book().run(number);
  return value_.detach().clone();
}

void wait_until_stopped() {
  const auto stop = stitch::current_stop_token();
  for (int i = 0; i < 30'000 && !stop.stop_requested(); ++i) std::this_thread::sleep_for(2ms);
}

}  // namespace stitch_reliability
