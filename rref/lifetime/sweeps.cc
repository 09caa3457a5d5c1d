#include "stitch/rref/lifetime/sweeps.h"

#include <algorithm>
#include <iterator>

namespace stitch::rref {

bool Sweeps::want(const WorkerLife& over, const WorkerLife& by) {
  const auto found = over_.find(over);
  if (found != over_.end() && found->second.state == State::swept) return true;
  wanted_[over].insert(by);
  return false;
}

void Sweeps::forget(const WorkerLife& by) {
  for (auto at = wanted_.begin(); at != wanted_.end();) {
    at->second.erase(by);
    at = at->second.empty() ? wanted_.erase(at) : std::next(at);
  }
}

bool Sweeps::later_over(const WorkerLife& life) const {
  const auto later = over_.upper_bound(life);
  return later != over_.end() && later->first.id == life.id;
}

bool Sweeps::wanted() const {
  return std::any_of(wanted_.begin(), wanted_.end(),
                     [&](const auto& each) { return over_.contains(each.first); });
}

bool Sweeps::running() const {
  return std::any_of(over_.begin(), over_.end(),
                     [](const auto& each) { return each.second.state == State::running; });
}

std::vector<Sweeps::Question> Sweeps::start(const std::vector<WorkerLife>& live) {
  std::vector<Question> questions;
  for (auto& [life, sweep] : over_) {
    if (sweep.state != State::waiting) continue;
    sweep.state = State::running;
    for (const WorkerLife& worker : live) {
      if (over_.contains(worker)) continue;
      sweep.asked.insert(worker);
      questions.push_back({worker, life});
    }
  }
  return questions;
}

std::vector<Sweeps::Question> Sweeps::joined(const WorkerLife& life) {
  std::vector<Question> questions;
  if (over_.contains(life)) return questions;
  for (auto& [over, sweep] : over_) {
    if (sweep.state != State::running || !sweep.asked.insert(life).second) continue;
    questions.push_back({life, over});
  }
  return questions;
}

void Sweeps::clean(const WorkerLife& over, const WorkerLife& by) {
  const auto found = over_.find(over);
  if (found != over_.end()) found->second.asked.erase(by);
}

// Those that are over themselves need not answer: their own sweeps run, and end together with this.
bool Sweeps::answered(const Life& life) const {
  return std::all_of(life.asked.begin(), life.asked.end(),
                     [&](const WorkerLife& each) { return over_.contains(each); });
}

std::vector<Sweeps::Swept> Sweeps::finish() {
  std::vector<Swept> swept;
  for (const auto& [life, sweep] : over_) {
    if (sweep.state == State::running && !answered(sweep)) return {};
  }
  for (auto& [life, sweep] : over_) {
    if (sweep.state != State::running) continue;
    sweep.state = State::swept;
    sweep.asked.clear();
    swept.push_back({life, {}});
    if (const auto wanting = wanted_.find(life); wanting != wanted_.end()) {
      swept.back().wanted_by = std::move(wanting->second);
      wanted_.erase(wanting);
    }
  }
  return swept;
}

std::vector<WorkerLife> Sweeps::unswept() const {
  std::vector<WorkerLife> lives;
  for (const auto& [life, sweep] : over_) {
    if (sweep.state != State::swept) lives.push_back(life);
  }
  return lives;
}

}  // namespace stitch::rref
