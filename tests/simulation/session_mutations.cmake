# Deliberate mistakes in Session.

stitch_mutated_copy(session rpc/peers/session.cc
  [[      return Arrival::drop;]] [[      if (mistake("takes_in_repetitions")) break; @]]
  [[stream.first->number <= number]]
    [[stream.first->number + (mistake("forgets_one_too_few") ? 1 : 0) <= number + (mistake("forgets_one_too_many") ? 1 : 0)]]  # of what the peer has received
  [[  } else if (concerns_one_message(*error)) {]] [[  } else if (mistake("fails_what_is_kept")) { complete(kept, error); @]]  # when its connection ends
  [[  if (kept.completed()) return;]] [[  if (kept.completed() && !mistake("tells_twice")) return;]]
  [[  if (kept.set_completed()) return;]]
    [[  if (kept.set_completed() && !mistake("tells_twice")) return;]]
  [[  kept.done = nullptr;]] [[  if (!mistake("tells_twice")) kept.done = nullptr;]]
  [[  numbers.received = received();
  told_.store(]]
    [[  numbers.received = received(); if (mistake("acknowledges_the_next")) ++numbers.received[1]; told_.store(]]  # before it has come
  [[  kept_bytes_ -= kept.bytes;]]
    [[  if (mistake("leaves_a_gap")) {
    transport::FrameBuilder nothing(wire::kReceived);
    nothing.end_body();
    skip = std::move(nothing).finish();
  }
@]]  # where a message was withdrawn
  [[  if (replaced) {]] [[  if (replaced || mistake("reports_what_may_arrive")) {]]  # as refused, though another connection has it
  [[      streams_[i].unsent = streams_[i].first;]]
    [[      KeptMessage* next = streams_[i].first;
      if (mistake("does_not_send_again"))
        while (next != nullptr && next->sent) next = next->next;
      streams_[i].unsent = next;]]  # what the old connection had got
  [[      usable_ = count == 0;]] [[      usable_ = count == 0 || mistake("lets_others_overtake");]]  # what is being sent again
  [[  if (!has_time_left(kept.message.frame) ||]]
    [[  if (mistake("says_the_old_time") || !has_time_left(kept.message.frame) ||]]  # in a request that is sent again
  [[  if (replaced)
]] [[  if (replaced || mistake("reports_too_early"))
]]  # that a message was withdrawn, though another connection has it
  [[  while (list != nullptr) release(*std::exchange(list, list->next));]]
    [[  while (list != nullptr) {
    KeptMessage& kept = *std::exchange(list, list->next);
    if (mistake("fails_what_may_arrive")) complete(kept, reason);
    release(kept);
  }]])  # at the end of the session, though a connection holds it
