#include "stitch/rpc/future/coroutine.h"

namespace stitch::detail {

void throw_stopped() {
  throw Error(ErrorCode::cancelled,
              "this coroutine was asked to stop while it awaited a future that goes on");
}

CallbackList Awaiting::completion(const std::shared_ptr<Awaiting>& awaiting) {
  CallbackList list = FutureStateBase::one_callback([awaiting] { awaiting->complete(); });
  awaiting->completion_ = list.begin();
  return list;
}

void Awaiting::complete() {
  if ((state_.fetch_or(kGoesOn, std::memory_order_acq_rel) & kGoesOn) == 0) std::move(rest_).run();
}

void Awaiting::registered() {
  if ((state_.fetch_or(kRegistered, std::memory_order_acq_rel) & kToStop) != 0) stop_now();
}

void Awaiting::stop() {
  const unsigned before = state_.fetch_or(kToStop, std::memory_order_acq_rel);
  if ((before & kRegistered) != 0 && (before & kToStop) == 0) stop_now();
}

void Awaiting::has_value() {
  // Its work completed before it could be stopped. kToStop is set before that is tried.
  if ((state_.load(std::memory_order_acquire) & kToStop) != 0) stop_next();
}

// Once: the coroutine may await several more.
void Awaiting::stop_next() {
  if ((state_.fetch_or(kNextStops, std::memory_order_acq_rel) & kNextStops) != 0) return;
  if (const auto coroutine = coroutine_.lock()) static_cast<void>(coroutine->stop_coroutine());
}

void Awaiting::stop_now() {
  const auto awaited = awaited_.lock();
  const auto given_up =
      awaited ? awaited->give_up(own_, awaited) : FutureStateBase::GivenUp::complete;
  if (given_up == FutureStateBase::GivenUp::stopping) return;  // its end resumes the coroutine
  if (given_up == FutureStateBase::GivenUp::complete ||
      (state_.fetch_or(kGoesOn, std::memory_order_acq_rel) & kGoesOn) != 0) {
    stop_next();  // the coroutine goes on with the outcome
    return;
  }
  stopped_ = true;
  awaited->remove(completion_);
  std::move(rest_).run();
}

}  // namespace stitch::detail
