# Deliberate errors in the Session, for session_mutation_test.cc, which turns them on one at a time.
include("${PROJECT_SOURCE_DIR}/tests/support/mutate.cmake")

stitch_mutated_copy(rpc/agent/session.cc tests/rpc/session_mutations.h mutated_session
  [[      return Arrival::drop;
    case ReceivedNumbers::Taken::too_scattered:]]
  [[      if (broken(Mutation::takes_in_repetitions)) break;
      return Arrival::drop;
    case ReceivedNumbers::Taken::too_scattered:]]

  [[stream.first->number <= number]]
  [[stream.first->number + (broken(Mutation::forgets_one_too_few) ? 1 : 0) <=
               number + (broken(Mutation::forgets_one_too_many) ? 1 : 0)]]

  [[  } else if (concerns_one_message(*error)) {]]
  [[  } else if (broken(Mutation::fails_what_is_kept)) {
    tell(kept, error);
  } else if (concerns_one_message(*error)) {]]

  [[  if (kept.told()) return;]]
  [[  if (kept.told() && !broken(Mutation::tells_twice)) return;]]

  [[  if ((kept.state.fetch_or(Kept::kTold, std::memory_order_acq_rel) & Kept::kTold) != 0) return;]]
  [[  if ((kept.state.fetch_or(Kept::kTold, std::memory_order_acq_rel) & Kept::kTold) != 0 &&
      !broken(Mutation::tells_twice))
    return;]]

  [[  kept.done = nullptr;]]
  [[  if (!broken(Mutation::tells_twice)) kept.done = nullptr;]]

  [[  numbers.received = received();
  told_.store(]]
  [[  numbers.received = received();
  if (broken(Mutation::acknowledges_the_next)) ++numbers.received[1];
  told_.store(]]

  [[  kept_bytes_ -= kept.bytes;
  kept.bytes = skip.frame.size();]]
  [[  if (broken(Mutation::leaves_a_gap)) {
    transport::FrameBuilder nothing(wire::kReceived);
    nothing.end_body();
    skip = std::move(nothing).finish();
  }
  kept_bytes_ -= kept.bytes;
  kept.bytes = skip.frame.size();]]

  [[    if (!replaced) throw Error(why);]]
  [[    if (!replaced && !broken(Mutation::reports_what_may_arrive)) throw Error(why);]])

stitch_mutated_copy(rpc/agent/session_connections.cc tests/rpc/session_mutations.h mutated_session_connections
  [[      streams_[i].unsent = streams_[i].first;]]
  [[      Kept* next = streams_[i].first;
      if (broken(Mutation::does_not_send_again))
        while (next != nullptr && next->sent) next = next->next;
      streams_[i].unsent = next;]]

  [[      usable_ = count == 0;]]
  [[      usable_ = count == 0 || broken(Mutation::lets_others_overtake);]]

  [[  if (!has_time_left(kept.message.frame) ||]]
  [[  if (broken(Mutation::says_the_old_time) || !has_time_left(kept.message.frame) ||]]

  [[    if (replaced) tell(kept, why);]]
  [[    if (replaced || broken(Mutation::reports_too_early)) tell(kept, why);]]

  [[  while (list != nullptr) release(*std::exchange(list, list->next));]]
  [[  while (list != nullptr) {
    Kept& kept = *std::exchange(list, list->next);
    if (broken(Mutation::fails_what_may_arrive)) tell(kept, reason);
    release(kept);
  }]])
