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

  [[  if (kept.told.exchange(true, std::memory_order_acq_rel)) return;]]
  [[  if (kept.told.exchange(true, std::memory_order_acq_rel) && !broken(Mutation::tells_twice)) return;]]

  [[  kept.done = nullptr;]]
  [[  if (!broken(Mutation::tells_twice)) kept.done = nullptr;]]

  [[  numbers.received = received();
  told_.store(]]
  [[  numbers.received = received();
  if (broken(Mutation::acknowledges_the_next)) ++numbers.received[1];
  told_.store(]]

  [[  transport::Connection* connection = nullptr;
  transport::Message message = empty_frame(wire::kSkip);]]
  [[  if (broken(Mutation::leaves_a_gap)) return;
  transport::Connection* connection = nullptr;
  transport::Message message = empty_frame(wire::kSkip);]])

stitch_mutated_copy(rpc/agent/session_connections.cc tests/rpc/session_mutations.h mutated_session_connections
  [[      streams_[i].unsent = streams_[i].first;]]
  [[      Kept* next = streams_[i].first;
      if (broken(Mutation::does_not_send_again))
        while (next != nullptr && next->sent) next = next->next;
      streams_[i].unsent = next;]]

  [[      usable_ = batch.empty();]]
  [[      usable_ = batch.empty() || broken(Mutation::lets_others_overtake);]])
