// Which founders of a world live: questions in the store, and answers.
#include <algorithm>
#include <thread>

#include "stitch/base/error.h"
#include "stitch/rpc/world/rendezvous.h"

namespace stitch::rpc {

namespace {
constexpr const char* kAway = " away";  // behind the number of an answer
}  // namespace

// Asks all founders. Returns the number of the question.
std::int64_t Rendezvous::ask() { return store_.add(key("question"), 1); }

// To be called by a founder again and again while it waits.
void Rendezvous::answer() {
  last_look_ = Clock::now();
  const auto question = count(key("question"));
  if (question <= answered_) return;
  store_.set(slot_key("answer", slot_), std::to_string(question));
  answered_ = question;
}

// The same while it reads what is there, which takes long in a large world.
void Rendezvous::answer_if_due() {
  if (Clock::now() - last_look_ >= kLookInterval) answer();
}

// This worker does not answer until it comes back.
void Rendezvous::go_away() {
  store_.set(slot_key("answer", slot_), std::to_string(answered_) + kAway);
}

void Rendezvous::come_back() {
  answered_ = count(key("question"));
  store_.set(slot_key("answer", slot_), std::to_string(answered_));
  last_look_ = Clock::now();
}

bool Rendezvous::is_away(std::int64_t slot) {
  const auto text = store_.try_get(slot_key("answer", slot));
  return text && text->ends_with(kAway);
}

bool Rendezvous::has_answered(std::int64_t slot, std::int64_t question) {
  return count(slot_key("answer", slot)) >= question;
}

bool Rendezvous::all_have_answered(std::int64_t question) {
  for (std::int64_t i = 0; i < founders_; ++i) {
    if (!has_answered(i, question)) return false;
  }
  return true;
}

bool Rendezvous::is_silent(std::int64_t slot, std::int64_t question) {
  // In this order: one that comes back in between has answered.
  return !is_away(slot) && !has_answered(slot, question);
}

bool Rendezvous::any_is_silent(std::int64_t question) {
  for (std::int64_t i = 0; i < founders_; ++i) {
    if (is_silent(i, question)) return true;
  }
  return false;
}

// Whether each of these founders answers within kAnswerTime. Once the founding has failed it does
// not matter: who has said so has left. What is not known at the deadline is taken for so.
bool Rendezvous::all_live(const std::set<std::int64_t>& slots) {
  constexpr std::chrono::milliseconds kPollInterval{10};
  if (slots.empty()) return true;
  const auto question = ask();
  const auto give_up = Clock::now() + kAnswerTime;
  for (;;) {
    answer();
    const bool all = std::all_of(slots.begin(), slots.end(), [&](std::int64_t slot) {
      return slot == slot_ || has_answered(slot, question);
    });
    const auto now = Clock::now();
    if (all || has_failed() || now >= deadline_) return true;
    if (now >= give_up) return false;
    std::this_thread::sleep_for(kPollInterval);  // the store tells of no change
  }
}

// For a worker that has found all slots taken and asked, kAnswerTime ago: whether one of them is in
// its place, not away, and has not answered.
bool Rendezvous::former_life_is_silent(const MemberRecord& self, std::int64_t question) {
  for (std::int64_t i = 0; i < founders_; ++i) {
    const auto text = store_.try_get(slot_key("member", i));
    if (!text) continue;
    try {
      if (!in_one_place(decode(*text), self)) continue;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::protocol) throw;
      continue;  // those that read it as founders say it
    }
    if (is_silent(i, question)) return true;
  }
  return false;
}

}  // namespace stitch::rpc
