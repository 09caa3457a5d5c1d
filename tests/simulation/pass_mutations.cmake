# Deliberate mistakes in the protocol of a pass.

stitch_mutated_copy(pass dist_autograd/protocol/pass_protocol.cc
  [[  if (is_root() || parent_) {
    effects.acks]]
    [[  if (is_root() || parent_ || mistake("acknowledges_every_mark")) { effects.acks]]  # immediately, so that no worker has a parent
  [[  if (deficit_ != 0 || (phase_ == Phase::gradients && !quiet_)) return;]]
    [[  if ((deficit_ != 0 && (is_root() || !mistake("ignores_its_own_deficit"))) ||
      (phase_ == Phase::gradients && !quiet_ && !mistake("answers_before_it_is_quiet"))) {
    return;
  }]]  # ignores_its_own_deficit: when it answers its parent; answers_before_it_is_quiet: its parent, while gradients flow
  [[    const bool added = participants_.insert(worker).second;]] [[    if (mistake("forgets_participants")) break; @]]  # named in ACKs
  [[    if (added && is_root() &&]]
    [[    if (mistake("forgets_participants_of_the_marking") && phase_ == Phase::marking) break; @]]
  [[    if (!delivered_[send] && !graph_->marked(send)) effects]]
    [[    if (!delivered_[send] && (!graph_->marked(send) || mistake("kills_what_has_not_come"))) effects]]  # marked or not
  [[ || writing_ != 0) return;]] [[ || (writing_ != 0 && !mistake("does_not_wait_for_writes"))) return;]]  # before DONE
  [[    if (!not_done_.empty()) return;]] [[    if (!not_done_.empty() && !mistake("does_not_wait_for_done")) return;]]  # at the root
  [[  if (is_root()) effects.close_marking]] [[  if (is_root() && !mistake("does_not_close_the_marking")) effects.close_marking]]  # on workers other than the root
  [[  effects.quiet.assign(participants_.begin(), participants_.end());]] [[  if (!mistake("does_not_send_quiet")) @]]
  [[  if (missing_ == 0) {]]
    [[  if (missing_ == 0 || mistake("needs_no_marks")) {]]  # when QUIET comes, though SendNodes wait
  [[  graph_->mark_used(delivered_, reached);]]
    [[  if (!mistake("marks_nothing_when_quiet")) graph_->mark_used(delivered_, reached);]]
  [[    mark_used(effects);]] [[@ if (mistake("kills_before_marking_has_ended")) close_marking(effects);]]
  [[  below_missing_ += ack.missing;]] [[  if (!mistake("forgets_what_others_miss")) below_missing_ += ack.missing;]]  # of their gradients, so that all seems settled
  [[  parent_.reset();]] [[  if (mistake("tells_twice_what_it_misses")) told_missing_ = 0; @]]
  [[    --deficit_;]] [[    if (!mistake("does_not_take_done_as_an_answer")) --deficit_;]]  # to QUIET
  [[  ++deficit_;
  ++deficits_[to];]]
    [[  if (!mistake("does_not_count_gradients")) ++deficit_; ++deficits_[to];]]  # in the deficit
  [[  deficit_ -= ack.count;]]
    [[  if (phase_ != Phase::gradients || !mistake("does_not_count_gradients")) deficit_ -= ack.count;]]
  [[parent_ == to && deficit_ == 0 && last == posted_)]]
    [[parent_ == to && (deficit_ == 0 || mistake("answers_with_gradients_unacknowledged")) &&
      (last == posted_ || mistake("answers_with_gradients_before_it_is_quiet")))]]  # its parent, while others owe it an ACK
  [[  if (phase_ == Phase::gradients && !ends_engagement) {]]
    [[  if (phase_ == Phase::gradients && (!ends_engagement || mistake("acknowledges_gradients_that_answer"))) {]]
  [[  return wire::Ack{owed ? owed.mapped() : 0, {}};]]
    [[  return wire::Ack{owed && !mistake("forgets_acks_that_ride") ? owed.mapped() : 0, {}};]]  # on GRADIENTS
  [[  wire::Ack ack{1 + (owed ? owed.mapped() : 0),]]
    [[  wire::Ack ack{1 + (owed && !mistake("forgets_what_it_owes_its_parent") ? owed.mapped() : 0),]]  # besides the answer
  [[    ++posted_;]] [[    if (mistake("takes_gradients_as_processed")) continue; @]]  # when they arrive, instead of when the strand has run
  [[  quiet_ = taken == posted_;]] [[  quiet_ = taken == posted_ || mistake("takes_gradients_as_processed");]]
  [[    peers_.insert(to);]] [[    if (!mistake("aborts_without_telling_marked_peers")) peers_.insert(to);]]
  [[  workers.insert(participants_.begin(), participants_.end());]] [[  if (!mistake("aborts_without_telling_participants")) @]]
  [[  workers.insert(root_);]] [[  if (!mistake("aborts_without_telling_the_root")) workers.insert(root_);]]
  [[(peers_.contains(worker) ||]]
    [[((peers_.contains(worker) && !mistake("ignores_the_loss_of_peers")) || mistake("fails_for_any_loss") ||]]  # also of workers that take no part
  [[|| worker == root_);]] [[|| (worker == root_ && !mistake("ignores_the_loss_of_the_root")));]]
  [[participants_.contains(worker) ||]] [[(participants_.contains(worker) && !mistake("ignores_the_loss_of_participants")) ||]]
  [[  effects.new_peer = peers_.insert(from.id).second;
  phase_ = Phase::marking;]]
    [[  effects.new_peer = peers_.insert(from.id).second && !mistake("does_not_look_for_early_losses"); phase_ = Phase::marking;]]
  [[  if (!running()) return effects;
  effects.new_peer = peers_.insert(from.id).second;]]
    [[  if (!running()) {
    effects.deliver = mistake("delivers_after_the_end");
    return effects;
  }
  effects.new_peer =
      peers_.insert(from.id).second && !mistake("does_not_look_for_early_losses");]]
  [[  phase_ = Phase::failed;]] [[  if (!mistake("goes_on_after_a_failure")) phase_ = Phase::failed;]])
