# Deliberate mistakes in the protocol of a pass, for pass_mutation_test.cc, which turns them on one at a time.
include("${PROJECT_SOURCE_DIR}/tests/support/mutate.cmake")

stitch_mutated_copy(dist_autograd/pass_protocol.cc tests/dist_autograd/mutations.h mutated_pass_protocol
  [[  if (is_root() || parent_) {
    effects.acks]]
  [[  if (is_root() || parent_ || broken(Mutation::acknowledges_every_mark)) {
    effects.acks]]

  [[  if (deficit_ != 0 || (phase_ == Phase::gradients && !quiet_)) return;]]
  [[  if ((deficit_ != 0 && (is_root() || !broken(Mutation::ignores_its_own_deficit))) ||
      (phase_ == Phase::gradients && !quiet_ && !broken(Mutation::answers_before_it_is_quiet))) {
    return;
  }]]

  [[    const bool added = participants_.insert(worker).second;]]
  [[    if (broken(Mutation::forgets_participants)) break;
    const bool added = participants_.insert(worker).second;]]

  [[    if (added && is_root() &&]]
  [[    if (broken(Mutation::forgets_participants_of_the_marking) && phase_ == Phase::marking) break;
    if (added && is_root() &&]]

  [[    if (graph_->marked(send) || (mode_]]
  [[    if ((graph_->marked(send) && (!broken(Mutation::kills_what_has_not_come) || delivered_[send])) ||
        (mode_]]

  [[ || writing_ != 0) return;]]
  [[ || (writing_ != 0 && !broken(Mutation::does_not_wait_for_writes))) return;]]

  [[  if (!not_done_.empty()) return;]]
  [[  if (!not_done_.empty() && !broken(Mutation::does_not_wait_for_done)) return;]]

  [[  effects.close_marking.assign(not_done_.begin(), not_done_.end());]]
  [[  if (!broken(Mutation::does_not_close_the_marking))
    effects.close_marking.assign(not_done_.begin(), not_done_.end());]]

  [[  effects.quiet.assign(participants_.begin(), participants_.end());]]
  [[  if (!broken(Mutation::does_not_send_quiet))
    effects.quiet.assign(participants_.begin(), participants_.end());]]

  [[  if (mode_ == PassMode::fast || missing_ == 0) {]]
  [[  if (mode_ == PassMode::fast || missing_ == 0 || broken(Mutation::needs_no_marks)) {]]

  [[  graph_->mark_used(delivered_, reached);]]
  [[  if (!broken(Mutation::marks_nothing_when_quiet)) graph_->mark_used(delivered_, reached);]]

  [[    engage(from.id, effects);
    mark_used(effects);]]
  [[    engage(from.id, effects);
    mark_used(effects);
    if (broken(Mutation::kills_before_marking_has_ended)) close_marking(effects);]]

  [[  below_missing_ += ack.missing;]]
  [[  if (!broken(Mutation::forgets_what_others_miss)) below_missing_ += ack.missing;]]

  [[  parent_.reset();
  return ack;]]
  [[  if (broken(Mutation::tells_twice_what_it_misses)) told_missing_ = 0;
  parent_.reset();
  return ack;]]

  [[    --owed_by;
    --deficit_;]]
  [[    --owed_by;
    if (!broken(Mutation::does_not_take_done_as_an_answer)) --deficit_;]]

  [[  ++deficit_;
  ++deficits_[to];
  const auto owed]]
  [[  if (!broken(Mutation::does_not_count_gradients)) ++deficit_;
  ++deficits_[to];
  const auto owed]]

  [[  deficit_ -= ack.count;]]
  [[  if (phase_ != Phase::gradients || !broken(Mutation::does_not_count_gradients)) deficit_ -= ack.count;]]

  [[parent_ == to && deficit_ == 0 && last == posted_)]]
  [[parent_ == to && (deficit_ == 0 || broken(Mutation::answers_with_gradients_unacknowledged)) &&
      (last == posted_ || broken(Mutation::answers_with_gradients_before_it_is_quiet)))]]

  [[  if (phase_ == Phase::gradients && !ends_engagement) {]]
  [[  if (phase_ == Phase::gradients &&
      (!ends_engagement || broken(Mutation::acknowledges_gradients_that_answer))) {]]

  [[  return wire::Ack{owed ? owed.mapped() : 0, {}};]]
  [[  return wire::Ack{owed && !broken(Mutation::forgets_acks_that_ride) ? owed.mapped() : 0, {}};]]

  [[  wire::Ack ack{1 + (owed ? owed.mapped() : 0),]]
  [[  wire::Ack ack{1 + (owed && !broken(Mutation::forgets_what_it_owes_its_parent) ? owed.mapped() : 0),]]

  [[    delivered_[send] = true;
    --missing_;
    ++posted_;
    quiet_ = false;]]
  [[    delivered_[send] = true;
    --missing_;
    if (broken(Mutation::takes_gradients_as_processed)) continue;
    ++posted_;
    quiet_ = false;]]

  [[  quiet_ = taken == posted_;]]
  [[  quiet_ = taken == posted_ || broken(Mutation::takes_gradients_as_processed);]]

  [[    if (mode_ == PassMode::fast && effects.done->unused_links != 0)]]
  [[    if (mode_ == PassMode::fast && effects.done->unused_links != 0 &&
        !broken(Mutation::leaves_partial_sums_readable))]]

  [[    if (delivered_[send]) continue;]]
  [[    if (delivered_[send] || broken(Mutation::reports_no_unused_links)) continue;]]

  [[  for (auto& [to, mark] : marks) {
    peers_.insert(to);]]
  [[  for (auto& [to, mark] : marks) {
    if (!broken(Mutation::aborts_without_telling_marked_peers)) peers_.insert(to);]]

  [[  workers.insert(participants_.begin(), participants_.end());]]
  [[  if (!broken(Mutation::aborts_without_telling_participants))
    workers.insert(participants_.begin(), participants_.end());]]

  [[  workers.insert(root_);]]
  [[  if (!broken(Mutation::aborts_without_telling_the_root)) workers.insert(root_);]]

  [[  if (!is_root() || !begun_) return;]]
  [[  if (!is_root() || (!begun_ && !broken(Mutation::closes_the_marking_before_it_began))) return;]]

  [[(peers_.contains(worker) ||]]
  [[((peers_.contains(worker) && !broken(Mutation::ignores_the_loss_of_peers)) ||
          broken(Mutation::fails_for_any_loss) ||]]

  [[|| worker == root_);]]
  [[|| (worker == root_ && !broken(Mutation::ignores_the_loss_of_the_root)));]]

  [[participants_.contains(worker) ||]]
  [[(participants_.contains(worker) && !broken(Mutation::ignores_the_loss_of_participants)) ||]]

  [[  effects.new_peer = peers_.insert(from.id).second;
  phase_ = Phase::marking;]]
  [[  effects.new_peer =
      peers_.insert(from.id).second && !broken(Mutation::does_not_look_for_early_losses);
  phase_ = Phase::marking;]]

  [[  if (!running()) return effects;
  effects.new_peer = peers_.insert(from.id).second;
  const bool ends_engagement]]
  [[  if (!running()) {
    effects.deliver = broken(Mutation::delivers_after_the_end);
    return effects;
  }
  effects.new_peer =
      peers_.insert(from.id).second && !broken(Mutation::does_not_look_for_early_losses);
  const bool ends_engagement]]

  [[  phase_ = Phase::failed;]]
  [[  if (!broken(Mutation::goes_on_after_a_failure)) phase_ = Phase::failed;]])
