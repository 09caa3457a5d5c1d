#include "stitch/base/answer_wait.h"

#include <utility>

namespace stitch::base {

namespace {
struct Wait {
  bool waits = false;
  bool request_follows = false;
  std::shared_ptr<AnswerWait::Reader> reader{};
};
thread_local Wait here;
}  // namespace

bool AnswerWait::set(bool waits) noexcept {
  give_up();
  return std::exchange(here.waits, waits);
}

void AnswerWait::request_follows() noexcept { here.request_follows = here.waits; }

bool AnswerWait::of_request() noexcept { return here.request_follows && !here.reader; }

void AnswerWait::set_reader(std::shared_ptr<Reader> reader) noexcept {
  here.reader = std::move(reader);
}

bool AnswerWait::ends_in(const Reader& reader) noexcept {
  here.request_follows = false;
  const auto expecting = std::move(here.reader);
  if (!expecting || expecting.get() == &reader) return expecting != nullptr;
  expecting->answer_not_awaited();
  return false;
}

void AnswerWait::give_up() noexcept {
  here.request_follows = false;
  if (const auto reader = std::move(here.reader)) reader->answer_not_awaited();
}

}  // namespace stitch::base
