# Deliberate mistakes in Peer, most of them against a rule of PROTOCOL.md, section 6.

stitch_mutated_copy(peer rpc/peers/peer.cc
  [[  } else if (offered_ || (own_ && self_ < info().id)) {]]
    [[  } else if (offered_ || (own_ && (self_ < info().id || mistake("neither_decides")) && !mistake("both_decide"))) {]]  # both_decide: rule 5: the worker with the lower id answers while it connects; neither_decides: rule 5: neither answers while it connects
  [[  const bool known = connection == offered_ && bind.generation == generation_ && bind.token != 0 &&
                     (!has_session_ || bind.token == token_);]]
    [[  const bool known =
      connection == offered_ && bind.generation == generation_ && bind.token != 0 &&
      (!has_session_ || bind.token == token_ || mistake("takes_any_token"));]]  # rule 4
  [[  token_ = bind.token;]] [[  if (!mistake("forgets_the_token")) token_ = bind.token;]]  # rule 4: that the other side has chosen
  [[  if (bound_) {]] [[  if (bound_ && !mistake("uses_two_connections")) {]]  # rule 2: does not wait for the end of the former one
  [[    effects.close.emplace_back(
        bound_->connection, Error(ErrorCode::disconnected, "the peer has replaced the connection"));]]
    [[    if (!mistake("keeps_the_former"))
      effects.close.emplace_back(bound_->connection, Error(ErrorCode::disconnected,
                                                           "the peer has replaced the connection"));]]  # rule 2: does not close what ACCEPT has shown to be of no use
  [[    ++generation_;]] [[    if (!mistake("counts_no_generations")) ++generation_;]]  # rule 4
  [[  drop(own_, "another connection is used", effects);]]
    [[  if (mistake("keeps_what_it_does_not_use")) { own_.reset(); offered_.reset(); spare_.reset(); } @]]  # connections that another one has outrun
  [[  drop(bound_, over, effects);]] [[  if (mistake("keeps_the_lost")) bound_.reset(); @]]  # the connection of a peer that is lost
  [[    if (connection == bound_ || connection == own_) return give_up(reason, effects);]]
    [[    if ((connection == bound_ || connection == own_) && !mistake("ignores_that_it_is_lost")) return give_up(reason, effects);]]  # GONE
  [[  if (successor_) return use(std::exchange(successor_, nullptr), successor_received_, effects);]]
    [[  if (mistake("forgets_the_next")) successor_.reset(); @]]  # rule 2: that was to be used once the former one had ended
  [[  if (lost_ || bound_ || own_ || offered_ || successor_ || retry_scheduled_) return;]]
    [[  if (lost_ || bound_ || own_ || (offered_ && !mistake("connects_while_it_offers")) || successor_ || retry_scheduled_) return;]]  # rule 5
  [[  if (spare_ && !offered_) {]] [[  if (spare_ && !offered_ && !mistake("forgets_the_spare")) {]]  # rule 5
  [[  if (offered_ && now >= offered_until()) {]]
    [[  if (offered_ && now >= offered_until() && !mistake("waits_for_ever_for_an_answer")) {]]  # rule 5: to its OFFER
  [[  if (own_ && own_->connection && now >= own_until()) {]]
    [[  if (own_ && own_->connection && now >= own_until() && !mistake("waits_for_ever_to_connect")) {]]  # rule 5
  [[    try_next(attempt.address + 1, effects);]]
    [[    try_next(attempt.address + (mistake("tries_one_address") ? addresses_.size() : 1), effects);]]  # rule 7
  [[  retry_at_ = now_() + delay;]] [[  retry_at_ = now_() + (mistake("makes_no_pause") ? Clock::duration() : delay);]]  # rule 7
  [[  if (broken_ && !bound_ && now - broken_->since >= grace_)]]
    [[  if (broken_ && !bound_ && now - broken_->since >= grace_ && !mistake("never_gives_up"))]]  # the grace time
  [[  if (closing_ || grace_ <= Clock::duration::zero() || is_self() ||]] [[@ mistake("gives_up_at_once") ||]]  # the same
  [[  const bool ended = std::ranges::all_of(addresses_, dead);]]
    [[  const bool ended =
      std::ranges::all_of(addresses_, dead) ||
      (mistake("takes_one_address_for_all") && std::ranges::any_of(addresses_, dead));]]  # no process listens at one, others are not asked
  [[  if (failure_) {]]
    [[  if (mistake("names_no_address")) {
    // Nothing.
  } else if (failure_) {]])

stitch_mutated_copy(peer rpc/peers/peer_table.cc
  [[  if (added->previous != nullptr) carry_out(*added->previous, std::move(effects));]]
    [[  if (added->previous != nullptr && !mistake("keeps_a_former_life")) carry_out(*added->previous, std::move(effects));]])  # when a worker has come back
