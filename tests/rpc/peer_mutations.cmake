# Deliberate mistakes in Peer, for peer_mutation_test.cc, which turns them on one at a time.
include("${PROJECT_SOURCE_DIR}/tests/support/mutate.cmake")

stitch_mutated_copy(rpc/agent/peer.cc tests/rpc/peer_mutations.h mutated_peer
  [[  } else if (offered_ || (own_ && self_ < info().id)) {]]
  [[  } else if (offered_ || (own_ && (self_ < info().id || rpc::broken(Mutation::neither_decides)) &&
                          !rpc::broken(Mutation::both_decide))) {]]

  [[  const bool known = connection == offered_ && bind.generation == generation_ && bind.token != 0 &&
                     (!has_session_ || bind.token == token_);]]
  [[  const bool known =
      connection == offered_ && bind.generation == generation_ && bind.token != 0 &&
      (!has_session_ || bind.token == token_ || rpc::broken(Mutation::takes_any_token));]]

  [[  token_ = bind.token;]]
  [[  if (!rpc::broken(Mutation::forgets_the_token)) token_ = bind.token;]]

  [[  if (bound_) {
    // The peer has lost it.]]
  [[  if (bound_ && !rpc::broken(Mutation::uses_two_connections)) {
    // The peer has lost it.]]

  [[    effects.close.emplace_back(
        bound_->connection, Error(ErrorCode::disconnected, "the peer has replaced the connection"));]]
  [[    if (!rpc::broken(Mutation::keeps_the_former))
      effects.close.emplace_back(bound_->connection, Error(ErrorCode::disconnected,
                                                           "the peer has replaced the connection"));]]

  [[    ++generation_;
    connection->generation = generation_;]]
  [[    if (!rpc::broken(Mutation::counts_no_generations)) ++generation_;
    connection->generation = generation_;]]

  [[  drop(own_, "another connection is used", effects);
  drop(offered_, "another connection is used", effects);
  drop(spare_, "another connection is used", effects);]]
  [[  if (rpc::broken(Mutation::keeps_what_it_does_not_use)) {
    own_.reset();
    offered_.reset();
    spare_.reset();
  }
  drop(own_, "another connection is used", effects);
  drop(offered_, "another connection is used", effects);
  drop(spare_, "another connection is used", effects);]]

  [[  drop(bound_, over, effects);]]
  [[  if (rpc::broken(Mutation::keeps_the_lost)) bound_.reset();
  drop(bound_, over, effects);]]

  [[    if (connection == bound_ || connection == own_) return give_up(reason, effects);]]
  [[    if ((connection == bound_ || connection == own_) && !rpc::broken(Mutation::ignores_that_it_is_lost))
      return give_up(reason, effects);]])

stitch_mutated_copy(rpc/agent/peer_attempts.cc tests/rpc/peer_mutations.h mutated_peer_attempts
  [[  if (successor_) return use(std::exchange(successor_, nullptr), successor_received_, effects);]]
  [[  if (rpc::broken(Mutation::forgets_the_next)) successor_.reset();
  if (successor_) return use(std::exchange(successor_, nullptr), successor_received_, effects);]]

  [[  if (lost_ || bound_ || own_ || offered_ || successor_ || retry_scheduled_) return;]]
  [[  if (lost_ || bound_ || own_ || (offered_ && !rpc::broken(Mutation::connects_while_it_offers)) ||
      successor_ || retry_scheduled_)
    return;]]

  [[  if (spare_ && !offered_) {
    offer_spare(effects);]]
  [[  if (spare_ && !offered_ && !rpc::broken(Mutation::forgets_the_spare)) {
    offer_spare(effects);]]

  [[  if (offered_ && now >= offered_until()) {]]
  [[  if (offered_ && now >= offered_until() && !rpc::broken(Mutation::waits_for_ever_for_an_answer)) {]]

  [[  if (own_ && own_->connection && now >= own_until()) {]]
  [[  if (own_ && own_->connection && now >= own_until() &&
      !rpc::broken(Mutation::waits_for_ever_to_connect)) {]]

  [[    try_next(attempt.address + 1, effects);]]
  [[    try_next(attempt.address + (rpc::broken(Mutation::tries_one_address) ? addresses_.size() : 1),
             effects);]]

  [[  retry_at_ = now_() + delay;]]
  [[  retry_at_ = now_() + (rpc::broken(Mutation::makes_no_pause) ? Clock::duration() : delay);]]

  [[  if (broken_ && !bound_ && now - broken_->since >= grace_)]]
  [[  if (broken_ && !bound_ && now - broken_->since >= grace_ && !rpc::broken(Mutation::never_gives_up))]]

  [[  if (closing_ || grace_ <= Clock::duration::zero() || is_self() ||]]
  [[  if (closing_ || grace_ <= Clock::duration::zero() || is_self() ||
      rpc::broken(Mutation::gives_up_at_once) ||]]

  [[  if (broken_ && worth_trying && std::ranges::all_of(addresses_, dead))]]
  [[  if (broken_ && worth_trying &&
      (std::ranges::all_of(addresses_, dead) ||
       (rpc::broken(Mutation::takes_one_address_for_all) && std::ranges::any_of(addresses_, dead))))]]

  [[  if (failure_) {
    text += std::string(": ") + failure_->what();]]
  [[  if (rpc::broken(Mutation::names_no_address)) {
    // Nothing.
  } else if (failure_) {
    text += std::string(": ") + failure_->what();]])

stitch_mutated_copy(rpc/agent/peer_table_lives.cc tests/rpc/peer_mutations.h mutated_peer_table_lives
  [[  if (added->previous != nullptr) perform(*added->previous, std::move(effects));]]
  [[  if (added->previous != nullptr && !rpc::broken(Mutation::keeps_a_former_life))
    perform(*added->previous, std::move(effects));]])
