# Deliberate mistakes in the protocol of a pass, for pass_mutation_test.cc, which turns them on one at a time.
include("${PROJECT_SOURCE_DIR}/tests/support/mutate.cmake")

stitch_mutated_copy(dist_autograd/pass_protocol.cc tests/dist_autograd/mutations.h mutated_pass_protocol
  [[  if (is_root() || parent_) {
    effects.acks]]
  [[  if (is_root() || parent_ || broken(Mutation::acknowledges_every_mark)) {
    effects.acks]]

  [[  if (deficit_ != 0 || (fast_ && !quiet_)) return;]]
  [[  if ((deficit_ != 0 && (is_root() || !broken(Mutation::ignores_its_own_deficit))) ||
      (fast_ && !quiet_ && !broken(Mutation::answers_before_it_is_quiet))) {
    return;
  }]]

  [[  participants_.insert(ack.participants.begin(), ack.participants.end());]]
  [[  if (!broken(Mutation::forgets_participants))
    participants_.insert(ack.participants.begin(), ack.participants.end());]]

  [[      if (graph_->marked(send)) continue;]]
  [[      if (graph_->marked(send) &&
          !(broken(Mutation::kills_what_has_not_come) && !delivered_[send]))
        continue;]]

  [[writing_ != 0 ||]]
  [[(writing_ != 0 && !broken(Mutation::does_not_wait_for_writes)) ||]]

  [[  if (!not_done_.empty()) return;]]
  [[  if (!not_done_.empty() && !broken(Mutation::does_not_wait_for_done)) return;]]

  [[  effects.close_marking.assign(participants_.begin(), participants_.end());]]
  [[  if (!broken(Mutation::does_not_close_the_marking))
    effects.close_marking.assign(participants_.begin(), participants_.end());]]

  [[    ++deficit_;
    ++deficits_[to];
  }
  return true;]]
  [[    if (!broken(Mutation::does_not_count_gradients)) ++deficit_;
    ++deficits_[to];
  }
  return true;]]

  [[  deficit_ -= ack.count;]]
  [[  if (!fast_ || !broken(Mutation::does_not_count_gradients)) deficit_ -= ack.count;]]

  [[    delivered_[send] = true;
    ++posted_;
    quiet_ = false;]]
  [[    delivered_[send] = true;
    if (broken(Mutation::takes_gradients_as_processed)) continue;
    ++posted_;
    quiet_ = false;]]

  [[  quiet_ = taken == posted_;]]
  [[  quiet_ = taken == posted_ || broken(Mutation::takes_gradients_as_processed);]]

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

  [[    if (begun_) close_marking(effects);]]
  [[    if (begun_ || broken(Mutation::closes_the_marking_before_it_began)) close_marking(effects);]]

  [[(peers_.contains(worker) ||]]
  [[((peers_.contains(worker) && !broken(Mutation::ignores_the_loss_of_peers)) ||
          broken(Mutation::fails_for_any_loss) ||]]

  [[|| worker == root_);]]
  [[|| (worker == root_ && !broken(Mutation::ignores_the_loss_of_the_root)));]]

  [[participants_.contains(worker) ||]]
  [[(participants_.contains(worker) && !broken(Mutation::ignores_the_loss_of_participants)) ||]]

  [[  effects.new_peer = peers_.insert(from.id).second;
  std::vector<LinkId> reached;]]
  [[  effects.new_peer =
      peers_.insert(from.id).second && !broken(Mutation::does_not_look_for_early_losses);
  std::vector<LinkId> reached;]]

  [[  if (!running()) return effects;
  effects.new_peer = peers_.insert(from.id).second;
  if (fast_) {]]
  [[  if (!running()) {
    effects.deliver = broken(Mutation::delivers_after_the_end);
    return effects;
  }
  effects.new_peer =
      peers_.insert(from.id).second && !broken(Mutation::does_not_look_for_early_losses);
  if (fast_) {]]

  [[  phase_ = Phase::failed;]]
  [[  if (!broken(Mutation::goes_on_after_a_failure)) phase_ = Phase::failed;]])
